"""A session that one server saved goes on in another: same answer, nothing but the new turn computed."""

import json
import urllib.request

from conftest import KEY, serve

STORY = "There was a house by the river, and in it lived a man who counted boats. " * 40


def post(address, path, body):
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(address + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def ask(address, messages):
    body = {"messages": messages, "temperature": 0, "max_tokens": 80, "logprobs": True}
    answer = post(address, "/v1/chat/completions", body)
    choice = answer["choices"][0]
    return choice["message"], choice["logprobs"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_session_goes_on_in_another_server(tmp_path):
    more = ["--slot-save-path", str(tmp_path), "--cache", "0"]
    messages = [{"role": "user", "content": STORY + "What is 12 + 30?"}]
    with serve(*more) as address:
        message, _, cached = ask(address, messages)
        assert cached == 0
        messages += [message, {"role": "user", "content": "What is 5 + 6?"}]
        saved = post(address, "/slots/0?action=save", {"filename": "story"})
        want = ask(address, messages)
    assert want[2] == saved["n_saved"] > 500
    with serve(*more) as address:
        restored = post(address, "/slots/2?action=restore", {"filename": "story"})
        assert restored["n_restored"] == saved["n_saved"]
        assert ask(address, messages) == want
