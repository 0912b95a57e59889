"""Tests with Anthropic's client: a real model, and a scripted one that thinks and calls tools."""

from __future__ import annotations

import asyncio
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from tests.support.serving.serve_process import Served, served

pytestmark = pytest.mark.clients

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
THINKS = {"thinking": {"type": "adaptive"}}
TOOL = {
    "name": "get_weather",
    "description": "Get the weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city", "days"],
    },
}


class Animal(BaseModel):
    name: str
    legs: int


def client_of(server: Served, **options: Any) -> Any:
    url = server.url.removesuffix("/v1")
    return anthropic.Anthropic(base_url=url, **{"api_key": "none", "max_retries": 0, **options})


@pytest.fixture(scope="module")
def client(real: Served) -> Any:
    return client_of(real)


def story(server: Served, **fields: Any) -> dict[str, Any]:
    """Return a request to the real model. The client's types have no field for the sampling."""
    sampling = {"seed": 5, **fields.pop("extra_body", {})}
    return {"model": server.model, "max_tokens": 40, "messages": STORY, "extra_body": sampling, **fields}


def asking(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "script", "max_tokens": 200, "messages": messages, "extra_body": {"seed": 1}, **THINKS, **fields}


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_a_message_is_answered(client: Any, real: Served) -> None:
    question = [{"role": "user", "content": "Say hello in French."}]
    done = client.messages.create(**story(real, messages=question, max_tokens=12, extra_body={"temperature": 0}))
    assert text_of(done).startswith("Bonjour")
    assert (done.role, done.type, done.model) == ("assistant", "message", real.model)
    assert done.id == f"msg_{done._request_id}"


def test_a_stream_has_the_text_of_the_message(client: Any, real: Served) -> None:
    whole = client.messages.create(**story(real))
    with client.messages.stream(**story(real)) as stream:
        pieces = [*stream.text_stream]
        streamed = stream.get_final_message()
    assert "".join(pieces) == text_of(streamed) == text_of(whole)
    assert len(pieces) > 10
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, 40) == ("max_tokens", 40)


def test_messages_at_the_same_time_are_those_of_one_at_a_time(client: Any, real: Served) -> None:
    async def all_at_once() -> list[str]:
        url = real.url.removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as many:
            create: Any = many.messages.create
            done = await asyncio.gather(*(create(**story(real, extra_body={"seed": seed})) for seed in range(6)))
        return [text_of(each) for each in done]

    alone = [text_of(client.messages.create(**story(real, extra_body={"seed": seed}))) for seed in range(6)]
    assert asyncio.run(all_at_once()) == alone
    assert len(set(alone)) > 1


def test_an_answer_is_continued(client: Any, real: Served) -> None:
    messages = [*STORY, {"role": "assistant", "content": "Once upon a time, there was a clever"}]
    done = client.messages.create(**story(real, messages=messages, extra_body={"temperature": 0}))
    assert text_of(done).lstrip().startswith("fox")


def test_stop_sequences_end_the_answer(client: Any, real: Served) -> None:
    text = text_of(client.messages.create(**story(real)))
    done = client.messages.create(**story(real, stop_sequences=[" the"]))
    assert (done.stop_reason, done.stop_sequence) == ("stop_sequence", " the")
    assert text_of(done) == text.partition(" the")[0]


def test_tokens_are_counted_before_and_after(client: Any, real: Served) -> None:
    fields = {"model": real.model, "messages": STORY, "system": "Be brief."}
    counted = client.messages.count_tokens(**fields).input_tokens
    usage = client.messages.create(**fields, max_tokens=1).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted > 10


def test_parsed_answers_are_objects(client: Any, real: Served) -> None:
    done = client.messages.parse(**story(real, max_tokens=200, output_format=Animal))
    assert isinstance(done.parsed_output, Animal)


def test_models_are_listed(client: Any, real: Served) -> None:
    assert [model.id for model in client.models.list()] == [real.model]
    assert client.models.retrieve(real.model).max_input_tokens > 1000


def test_a_tool_is_called_and_its_result_used(tools: Served) -> None:
    fields = asking("Weather?", tools=[TOOL])
    done = client_of(tools).messages.create(**fields)
    assert done.stop_reason == "tool_use"
    (call,) = [block for block in done.content if block.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris", "days": 2})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "clear"}]}
    fields["messages"] += [{"role": "assistant", "content": done.content}, {"role": "user", "content": [result]}]
    assert text_of(client_of(tools).messages.create(**fields)) == "It is sunny."


def test_streamed_calls_are_assembled(tools: Served) -> None:
    with client_of(tools).messages.stream(**asking("Both?", tools=[TOOL])) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_message()
    assert [block.input["city"] for block in message.content if block.type == "tool_use"] == ["Paris", "Rome"]
    assert kinds.count("content_block_stop") == len(message.content)
    assert "input_json" in kinds


def test_the_runner_of_the_client_calls_tools(tools: Served) -> None:
    asked: list[tuple[str, int]] = []

    @anthropic.beta_tool
    def get_weather(city: str, days: int) -> str:
        """Get the weather."""
        asked.append((city, days))
        return "clear"

    runner = client_of(tools).beta.messages.tool_runner(**asking("Weather?", tools=[get_weather]))
    assert text_of(runner.until_done()) == "It is sunny."
    assert asked == [("Paris", 2)]


def test_thinking_is_a_block_of_its_own(tools: Served) -> None:
    message = client_of(tools).messages.create(**asking("Think?"))
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert (message.content[0].thinking.strip(), text_of(message).strip()) == ("It is easy.", "Yes.")
    assert message.usage.output_tokens_details.thinking_tokens > 0
    with client_of(tools).messages.stream(**asking("Think?")) as stream:
        thoughts = [event.thinking for event in stream if event.type == "thinking"]
        assert text_of(stream.get_final_message()) == text_of(message)
    assert "".join(thoughts) == message.content[0].thinking


def test_errors_have_the_types_of_the_client(tools: Served) -> None:
    create = client_of(tools).messages.create
    with pytest.raises(anthropic.NotFoundError):
        create(**{**asking("Hello?"), "model": "claude-opus-4-8"})
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: [0-9]+ tokens > 8192 maximum"):
        create(**asking("x" * 10_000))
    with pytest.raises(anthropic.BadRequestError, match="is not supported; define a tool"):
        create(**asking("Hello?", tools=[{"type": "function", "name": "web_search"}]))


def test_tools_of_anthropics_servers_are_left_out(tools: Served) -> None:
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    answer = client_of(tools).messages.with_raw_response.create(**asking("Hello?", tools=[search]))
    assert "tools.web_search_20250305" in answer.headers["x-llmrun-ignored"]


def test_overload_is_a_rate_limit_with_a_time(slow: Served) -> None:
    fields: dict[str, Any] = {"model": slow.model, "max_tokens": 500}
    streams = []
    for number in range(2):
        question = [{"role": "user", "content": f"{number} " + "x" * 300}]
        streams.append(client_of(slow).messages.create(**fields, messages=question, stream=True))
        next(streams[0])  # wait until the first one runs, so that it does not count as waiting
    with pytest.raises(anthropic.RateLimitError) as caught:
        client_of(slow).messages.create(**fields, messages=STORY)
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 120
    for stream in streams:
        stream.close()
    slow.wait_for(slow.is_idle)


def test_a_key_is_needed(tmp_path: Any) -> None:
    keys, key = tmp_path / "keys.txt", "a-long-key-for-tests"
    keys.write_text(key + "\n")
    keys.chmod(0o600)
    with served("scripted", "--backend", "scripted", "--api-key-file", str(keys), key=key) as locked:
        with pytest.raises(anthropic.AuthenticationError):
            client_of(locked).models.list()
        assert client_of(locked, api_key=key).models.list().data[0].id == locked.model
        assert client_of(locked, api_key=None, auth_token=key).models.list().data[0].id == locked.model
