"""An agent's long transcript with a real model, with drafts and without: only what is new is computed."""

import json
import random

import openai
import pytest
from conftest import KEY, MODEL, serve, weather_tool

TURNS = 20
WORDS = "the city has rain and sun with light wind from north east west south over hills rivers old new stone bridge".split()


def transcript(address, stream):
    """Every turn's message and its counts: prompt, cached, generated."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
    words = random.Random(5)
    cities = ["Paris", "Oslo", "Rome", "Lima", "Cairo"]
    messages = [{"role": "user", "content": "What is the weather in Madrid?"}]
    turns = []
    for turn in range(TURNS):
        request = dict(
            model=MODEL,
            messages=messages,
            tools=[{"type": "function", "function": weather_tool()}],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=300,
        )
        if stream:
            with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as events:
                completion = events.get_final_completion()
        else:
            completion = client.chat.completions.create(**request)
        message, usage = completion.choices[0].message, completion.usage
        counts = (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)
        call = message.tool_calls[0]
        arguments = json.loads(call.function.arguments)
        assert call.function.name == "get_weather" and isinstance(arguments["city"], str)
        said = {"content": message.content or "", "reasoning_content": getattr(message, "reasoning_content", None) or ""}
        turns.append((said, call.function.name, arguments, counts))
        function = {"name": call.function.name, "arguments": call.function.arguments}
        report = " ".join(words.choice(WORDS) for _ in range(120))
        messages += [
            {"role": "assistant", **said, "tool_calls": [{"id": call.id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.id, "content": report},
            {"role": "user", "content": f"What is the weather in {cities[turn % 5]}?"},
        ]
    return turns


@pytest.mark.parametrize(("draft", "again"), [("auto", True), ("off", False)])
def test_only_new_tokens_are_computed(draft, again):
    with serve("--draft", draft) as address:
        whole = transcript(address, False)
    assert whole[0][3][1] == 0 and whole[-1][3][0] > 3500, whole
    for (*_, before), (*_, now) in zip(whole, whole[1:]):
        assert before[0] <= now[1] <= before[0] + before[2], (before, now)
    if again:
        with serve("--draft", draft) as address:
            assert transcript(address, True) == whole
