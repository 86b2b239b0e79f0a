"""The official Ollama client."""

import json

import ollama
import pytest
from conftest import KEY, MODEL, weather_tool

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY = {"temperature": 0}


@pytest.fixture(scope="session")
def client(server):
    return ollama.Client(host=server, headers={"Authorization": f"Bearer {KEY}"})


def test_list_show_ps(client):
    assert [m.model for m in client.list().models] == [MODEL]
    assert "tools" in client.show(MODEL).capabilities
    assert [m.model for m in client.ps().models] == [MODEL]


def test_chat(client):
    whole = client.chat(MODEL, messages=SUM, options=GREEDY)
    assert "42" in whole.message.content and whole.message.thinking and whole.done_reason == "stop"
    parts = list(client.chat(MODEL, messages=SUM, options=GREEDY, stream=True))
    assert "".join(p.message.content or "" for p in parts) == whole.message.content
    assert "".join(p.message.thinking or "" for p in parts) == whole.message.thinking
    assert parts[-1].done and parts[-1].eval_count == whole.eval_count
    assert not client.chat(MODEL, messages=SUM, options=GREEDY, think=False).message.thinking


def test_tools(client):
    tool = {"type": "function", "function": weather_tool()}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    for stream in (False, True):
        answer = client.chat(MODEL, messages=messages, tools=[tool], options=GREEDY, stream=stream)
        parts = list(answer) if stream else [answer]
        calls = [c for p in parts for c in p.message.tool_calls or []]
        assert calls[0].function.name == "get_weather" and "Paris" in calls[0].function.arguments["city"]
    follow = messages + [
        {"role": "assistant", "tool_calls": [calls[0].model_dump()]},
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
    ]
    assert client.chat(MODEL, messages=follow, tools=[tool], options=GREEDY).message.content


def test_format(client):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    answer = client.chat(MODEL, messages=SUM, format=schema, options=GREEDY)
    assert isinstance(json.loads(answer.message.content)["ok"], bool)


def test_generate(client):
    whole = client.generate(MODEL, prompt="What is 12 + 30?", system="You are brief.", options=GREEDY)
    assert "42" in whole.response
    raw = client.generate(MODEL, prompt="The capital of France is", raw=True, options={"num_predict": 6, **GREEDY})
    assert raw.done_reason == "length" and raw.eval_count == 6
    assert client.generate(MODEL).done_reason == "load"


def test_errors(client):
    with pytest.raises(ollama.ResponseError) as error:
        client.embed(MODEL, input="x")
    assert error.value.status_code == 501
