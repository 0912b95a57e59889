"""Tests with LiteLLM, whose proxy many programs use."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise, importing it downloads a price list
import litellm

from tests.support.serving.serve_process import Served

pytestmark = pytest.mark.clients

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}


def asking(server: Served, question: str, **options: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    place = {"api_base": server.url, "api_key": "none", "num_retries": 0}
    return {"model": f"openai/{server.model}", "messages": messages, **place, **options}


def test_a_chat_is_answered(real: Served) -> None:
    done = litellm.completion(**asking(real, "Say hello in French.", temperature=0, max_tokens=12))
    assert done.choices[0].message.content.startswith("Bonjour")
    assert done.usage.completion_tokens <= 12


def test_a_stream_has_the_text_of_the_whole_answer(real: Served) -> None:
    fields = asking(real, "Tell me a story.", seed=6, max_tokens=20)
    chunks = [*litellm.completion(**fields, stream=True, stream_options={"include_usage": True})]
    whole = litellm.completion(**fields)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]  # usage comes without choices
    assert "".join(texts) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 20
    assert litellm.stream_chunk_builder(chunks).choices[0].finish_reason == "length"


def test_asynchronous_calls_work(real: Served) -> None:
    async def run() -> list[str]:
        fields = asking(real, "Tell me a story.", seed=6, max_tokens=10)
        done = await asyncio.gather(*(litellm.acompletion(**fields) for _ in range(4)))
        stream = await litellm.acompletion(**fields, stream=True)
        streamed = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return [*(each.choices[0].message.content for each in done), "".join(streamed)]

    assert len(set(asyncio.run(run()))) == 1


def test_texts_are_completed(real: Served) -> None:
    done = litellm.text_completion(
        model=f"text-completion-openai/{real.model}",
        prompt="One, two, three,",
        api_base=real.url,
        api_key="none",
        temperature=0,
        max_tokens=4,
    )
    assert done.choices[0].text.strip().startswith("four")


def test_schemas_hold(real: Served) -> None:
    schema = {"type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema, "strict": True}}
    done = litellm.completion(**asking(real, "Describe a fox.", response_format=wanted, seed=1, max_tokens=200))
    assert isinstance(json.loads(done.choices[0].message.content)["legs"], int)


def test_a_tool_is_called_and_its_result_used(tools: Served) -> None:
    fields = asking(tools, "Weather?", tools=[WEATHER])
    message = litellm.completion(**fields).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris", "days": 2}
    fields["messages"] += [message, {"role": "tool", "tool_call_id": call.id, "content": "clear"}]
    assert litellm.completion(**fields).choices[0].message.content == "It is sunny."


def test_streamed_calls_are_assembled(tools: Served) -> None:
    chunks = [*litellm.completion(**asking(tools, "Both?", tools=[WEATHER]), stream=True)]
    calls = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Paris", "Rome"]


def test_thinking_is_a_field_of_its_own(tools: Served) -> None:
    message = litellm.completion(**asking(tools, "Think?")).choices[0].message
    assert (message.reasoning_content.strip(), message.content.strip()) == ("It is easy.", "Yes.")


def test_errors_have_their_classes(tools: Served) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**asking(tools, "Hello?"), "model": "openai/gpt-5"})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asking(tools, "Hello?", temperature=-1))
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**asking(tools, "x" * 10_000))
