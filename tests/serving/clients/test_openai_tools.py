"""Tests with OpenAI's client, tools, and a model that thinks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.serving.openai_clients import async_client_of, client_of
from tests.support.serving.serve_process import Served

pytestmark = pytest.mark.clients

NAME = "get_weather"


class GetWeather(BaseModel):
    city: str
    days: int


TOOL = openai.pydantic_function_tool(GetWeather, name=NAME)


def asking(question: str) -> dict[str, Any]:
    return {"model": "script", "messages": [{"role": "user", "content": question}], "tools": [TOOL], "seed": 1}


@pytest.fixture(scope="module")
def client(tools: Served) -> Any:
    return client_of(tools)


def test_a_tool_is_called_and_its_result_used(client: Any) -> None:
    fields = asking("Weather?")
    done = client.chat.completions.create(**fields)
    assert done.choices[0].finish_reason == "tool_calls"
    (call,) = done.choices[0].message.tool_calls
    assert call.function.name == NAME
    assert json.loads(call.function.arguments) == {"city": "Paris", "days": 2}
    fields["messages"] += [
        done.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'},
    ]
    assert client.chat.completions.create(**fields).choices[0].message.content == "It is sunny."


def test_streamed_calls_are_assembled(client: Any) -> None:
    with client.chat.completions.stream(**asking("Both?")) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert [call.function.parsed_arguments.city for call in message.tool_calls] == ["Paris", "Rome"]
    assert len({call.id for call in message.tool_calls}) == 2
    assert "tool_calls.function.arguments.delta" in events
    assert events.count("tool_calls.function.arguments.done") == 2


def test_streamed_calls_are_assembled_asynchronously(tools: Served) -> None:
    async def run() -> list[Any]:
        async with async_client_of(tools) as client:
            stream = await client.chat.completions.create(**asking("Weather?"), stream=True)
            return [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]

    calls = asyncio.run(run())
    assert {call.index for call in calls} == {0}
    assert [call.function.name for call in calls if call.function.name] == [NAME]
    assert json.loads("".join(call.function.arguments for call in calls)) == {"city": "Paris", "days": 2}


def test_calls_are_parsed(client: Any) -> None:
    message = client.chat.completions.parse(**asking("Weather?")).choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == GetWeather(city="Paris", days=2)


def test_one_tool_can_be_required(client: Any) -> None:
    choice = {"type": "function", "function": {"name": NAME}}
    done = client.chat.completions.create(**asking("Weather?"), tool_choice=choice, max_tokens=200)
    assert done.choices[0].message.tool_calls[0].function.name == NAME


def test_without_need_no_tool_is_called(client: Any) -> None:
    done = client.chat.completions.create(**asking("Hello?"))
    assert done.choices[0].message.content == "Hello!"
    assert done.choices[0].message.tool_calls is None


def test_thinking_is_a_field_of_its_own(client: Any) -> None:
    fields = {**asking("Think?"), "tools": openai.omit}
    message = client.chat.completions.create(**fields).choices[0].message
    assert (message.reasoning_content.strip(), message.content.strip()) == ("It is easy.", "Yes.")
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**fields, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
