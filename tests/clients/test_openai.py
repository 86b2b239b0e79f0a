"""The official OpenAI client."""

import json

import openai
import pytest
from conftest import KEY, MODEL, weather_tool

SUM = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="session")
def client(server):
    return openai.OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0)


def test_models(client):
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=SUM, temperature=0)
    choice = answer.choices[0]
    assert "42" in choice.message.content and choice.finish_reason == "stop"
    assert choice.message.reasoning_content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens_details.reasoning_tokens < answer.usage.completion_tokens


def test_stream_is_the_same_message(client):
    whole = client.chat.completions.create(model=MODEL, messages=SUM, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=SUM, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(d.content or "" for d in deltas) == whole.choices[0].message.content
    reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert reasoning == whole.choices[0].message.reasoning_content
    assert len([d for d in deltas if d.content]) > 1
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_drafts_are_accepted_and_runs_repeat(client):
    """Other servers never fed the drafter the prompt, or answered differently each time at temperature 0."""
    answers = [
        client.chat.completions.create(
            model=MODEL, messages=SUM, temperature=0, seed=1, extra_body={"cache_prompt": cached}
        )
        for cached in (False, True, False, True)
    ]
    for answer in answers:
        details = answer.usage.completion_tokens_details
        accepted, rejected = details.accepted_prediction_tokens, details.rejected_prediction_tokens
        assert accepted / (accepted + rejected) > 0.3, details
    assert len({(a.choices[0].message.reasoning_content, a.choices[0].message.content) for a in answers}) == 1


def test_reasoning_off_and_budget(client):
    off = client.chat.completions.create(model=MODEL, messages=SUM, temperature=0, reasoning_effort="none")
    assert not getattr(off.choices[0].message, "reasoning_content", None)
    assert off.usage.completion_tokens_details.reasoning_tokens == 0
    capped = client.chat.completions.create(
        model=MODEL, messages=SUM, temperature=0, extra_body={"reasoning_budget": 5}
    )
    assert capped.usage.completion_tokens_details.reasoning_tokens <= 8
    assert capped.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_tools(client, stream, choice):
    request = dict(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[{"type": "function", "function": weather_tool()}],
        tool_choice=choice,
        temperature=0,
        parallel_tool_calls=False,
    )
    if stream:
        with client.chat.completions.stream(**request) as events:
            completion = events.get_final_completion()
    else:
        completion = client.chat.completions.create(**request)
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls"
    call = choice.message.tool_calls[0]
    assert call.function.name == "get_weather" and "Paris" in json.loads(call.function.arguments)["city"]
    follow = request["messages"] + [
        {"role": "assistant", "tool_calls": [call.model_dump(include={"id": True, "type": True, "function": {"name", "arguments"}})]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=follow, tools=request["tools"], temperature=0)
    assert answer.choices[0].message.content


def test_parse_a_schema(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for extra in ({}, {"tools": [{"type": "function", "function": weather_tool()}], "tool_choice": "none"}):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me about a person."}],
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
            **extra,
        )
        person = json.loads(answer.choices[0].message.content)
        assert set(person) == {"name", "age"} and isinstance(person["age"], int)


def test_logprobs_n_seed_and_bias(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=SUM, n=2, seed=7, logprobs=True, top_logprobs=3, max_tokens=200
    )
    assert [c.index for c in answer.choices] == [0, 1]
    content = answer.choices[0].logprobs.content
    assert "".join(t.token for t in content) == answer.choices[0].message.content
    assert all(len(t.top_logprobs) == 3 for t in content)
    again = client.chat.completions.create(model=MODEL, messages=SUM, seed=7, max_tokens=200)
    assert again.choices[0].message.content == answer.choices[0].message.content


def test_completions(client):
    whole = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 8
    parts = client.completions.create(
        model=MODEL, prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(p.choices[0].text for p in parts if p.choices) == whole.choices[0].text
    both = client.completions.create(model=MODEL, prompt=["One", "Two"], max_tokens=3, echo=True, logprobs=1)
    assert [c.text[:3] for c in both.choices] == ["One", "Two"]
    assert len(both.choices[1].logprobs.tokens) == 3


def test_responses(client):
    whole = client.responses.create(model=MODEL, input="What is 12 + 30?", temperature=0)
    assert "42" in whole.output_text and whole.status == "completed"
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    with client.responses.stream(model=MODEL, input="What is 12 + 30?", temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_text == whole.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") > 1
    tool = {"type": "function", **weather_tool(), "strict": False}
    called = client.responses.create(
        model=MODEL, input="What is the weather in Rome?", tools=[tool], tool_choice="required", temperature=0
    )
    call = next(item for item in called.output if item.type == "function_call")
    conversation = [
        {"role": "user", "content": "What is the weather in Rome?"},
        *[item.model_dump(exclude_none=True) for item in called.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    answer = client.responses.create(model=MODEL, input=conversation, tools=[tool], temperature=0)
    assert answer.output_text


def test_errors(client, server):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model=MODEL, messages=SUM, temperature="hot")
    assert error.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model=MODEL, prompt=[1] * 10000)
    assert error.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server}/v1", api_key="wrong").models.list()
    with pytest.raises(openai.APIStatusError) as error:
        client.embeddings.create(model=MODEL, input="x")
    assert error.value.status_code == 501
