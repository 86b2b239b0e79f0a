"""The official Anthropic client."""

import anthropic
import pytest
from conftest import KEY, MODEL, weather_tool

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
# The client has no parameter for it any more; servers take it.
GREEDY = {"extra_body": {"temperature": 0}}
TOOL = {"name": "get_weather", "description": "The weather of a city", "input_schema": weather_tool()["parameters"]}


@pytest.fixture(scope="session")
def client(server):
    return anthropic.Anthropic(base_url=server, api_key=KEY, max_retries=0)


def test_message(client):
    message = client.messages.create(model=MODEL, max_tokens=300, messages=SUM, **GREEDY)
    assert [b.type for b in message.content] == ["thinking", "text"]
    assert "42" in message.content[1].text and message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 0
    cut = client.messages.create(model=MODEL, max_tokens=5, messages=SUM, **GREEDY)
    assert cut.stop_reason == "max_tokens"


def test_stream_is_the_same_message(client):
    whole = client.messages.create(model=MODEL, max_tokens=300, messages=SUM, **GREEDY)
    with client.messages.stream(model=MODEL, max_tokens=300, messages=SUM, **GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[1].text
    assert [b.model_dump() for b in final.content] == [b.model_dump() for b in whole.content]
    assert final.usage.cache_read_input_tokens > 0


def test_tools(client):
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}):
        messages = [{"role": "user", "content": "What is the weather in Paris?"}]
        with client.messages.stream(
            model=MODEL, max_tokens=300, messages=messages, tools=[TOOL], tool_choice=choice, **GREEDY
        ) as stream:
            message = stream.get_final_message()
        assert message.stop_reason == "tool_use"
        call = next(b for b in message.content if b.type == "tool_use")
        assert call.name == "get_weather" and "Paris" in call.input["city"]
        messages += [
            {"role": "assistant", "content": [b.model_dump() for b in message.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]},
        ]
        answer = client.messages.create(model=MODEL, max_tokens=300, messages=messages, tools=[TOOL], **GREEDY)
        assert answer.content[-1].type in ("text", "tool_use")


def test_thinking(client):
    off = client.messages.create(
        model=MODEL, max_tokens=300, messages=SUM, **GREEDY, thinking={"type": "disabled"}
    )
    assert [b.type for b in off.content] == ["text"]
    capped = client.messages.create(
        model=MODEL, max_tokens=300, messages=SUM, **GREEDY, thinking={"type": "enabled", "budget_tokens": 6}
    )
    assert capped.content[0].type == "thinking" and len(capped.content[0].thinking.split()) <= 6
    assert capped.content[-1].type == "text"


def test_system_stop_and_count(client):
    message = client.messages.create(
        model=MODEL,
        max_tokens=300,
        system=[{"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}}],
        messages=SUM,
        **GREEDY,
        stop_sequences=["42"],
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "42")
    counted = client.messages.count_tokens(model=MODEL, messages=SUM)
    assert counted.input_tokens > 10


def test_errors(client):
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(model=MODEL, max_tokens=0, messages=SUM)
    assert error.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError):
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
        client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": [image]}])
