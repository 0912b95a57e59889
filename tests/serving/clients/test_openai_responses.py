"""Tests of the Responses API with OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.serving.openai_clients import async_client_of, client_of
from tests.support.serving.serve_process import Served

pytestmark = pytest.mark.clients

STORY = "Tell me a story about a fox."
NAME = "get_weather"


class Animal(BaseModel):
    name: str
    legs: int


class GetWeather(BaseModel):
    city: str
    days: int


TOOL = openai.pydantic_function_tool(GetWeather, name=NAME)["function"]
FLAT: dict[str, Any] = {"type": "function", **TOOL}


@pytest.fixture(scope="module")
def client(real: Served) -> Any:
    return client_of(real)


@pytest.fixture(scope="module")
def tool_client(tools: Served) -> Any:
    return client_of(tools)


def asking(question: str) -> dict[str, Any]:
    return {"model": "script", "input": [{"role": "user", "content": question}], "tools": [FLAT]}


def test_a_text_is_answered(client: Any, real: Served) -> None:
    done = client.responses.create(
        model=real.model, input="Say hello in French.", temperature=0, max_output_tokens=12, store=False
    )
    assert done.output_text.startswith("Bonjour")
    assert (done.object, done.store) == ("response", False)
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens


def test_the_answer_is_that_of_a_chat(client: Any, real: Served) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": STORY}]
    chat = client.chat.completions.create(model=real.model, messages=messages, seed=5, max_tokens=40)
    done = client.responses.create(
        model=real.model,
        instructions="Be brief.",
        input=STORY,
        max_output_tokens=40,
        extra_body={"seed": 5},
    )
    assert done.output_text == chat.choices[0].message.content
    assert done.usage.input_tokens == chat.usage.prompt_tokens


def test_a_stream_has_the_text_of_the_whole_answer(client: Any, real: Served) -> None:
    fields = {"model": real.model, "input": STORY, "max_output_tokens": 40, "extra_body": {"seed": 5}}
    whole = client.responses.create(**fields)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    events = [*client.responses.create(**fields, stream=True)]
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text
    assert len(pieces) > 10
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == whole.output_text


def test_asynchronous_streams_work(real: Served) -> None:
    async def run() -> tuple[str, str]:
        async with async_client_of(real) as client:
            fields = {"model": real.model, "input": STORY, "max_output_tokens": 8}
            whole = await client.responses.create(**fields, extra_body={"seed": 1})
            stream = await client.responses.create(**fields, extra_body={"seed": 1}, stream=True)
            texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            return whole.output_text, "".join(texts)

    whole, streamed = asyncio.run(run())
    assert whole == streamed != ""


def test_parsed_answers_are_objects(client: Any, real: Served) -> None:
    done = client.responses.parse(model=real.model, input=STORY, text_format=Animal, extra_body={"seed": 1})
    assert isinstance(done.output_parsed, Animal)


def test_schemas_hold_in_streams(client: Any, real: Served) -> None:
    with client.responses.stream(model=real.model, input=STORY, text_format=Animal, extra_body={"seed": 2}) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_response().output_parsed, Animal)
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds


def test_logprobs_are_probabilities(client: Any, real: Served) -> None:
    done = client.responses.create(
        model=real.model,
        input=STORY,
        temperature=0,
        max_output_tokens=6,
        include=["message.output_text.logprobs"],
        top_logprobs=3,
    )
    tokens = done.output[0].content[0].logprobs
    assert "".join(token.token for token in tokens) == done.output_text
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert 0 < sum(math.exp(each.logprob) for each in token.top_logprobs) <= 1.0001


def test_a_tool_is_called_and_its_result_used(tool_client: Any) -> None:
    fields = asking("Weather?")
    done = tool_client.responses.create(**fields)
    (call,) = done.output
    assert (call.type, call.name) == ("function_call", NAME)
    assert json.loads(call.arguments) == {"city": "Paris", "days": 2}
    fields["input"] += [
        call,
        {"type": "function_call_output", "call_id": call.call_id, "output": '{"sky": "clear"}'},
    ]
    assert tool_client.responses.create(**fields).output_text == "It is sunny."


def test_streamed_calls_are_assembled_and_parsed(tool_client: Any) -> None:
    with tool_client.responses.stream(**asking("Both?")) as stream:
        kinds = [event.type for event in stream]
        calls = [item for item in stream.get_final_response().output if item.type == "function_call"]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Paris", "Rome"]
    assert kinds.count("response.function_call_arguments.done") == 2
    parsed = tool_client.responses.parse(**asking("Weather?"))
    assert parsed.output[0].parsed_arguments == {"city": "Paris", "days": 2}


def test_one_tool_can_be_required(tool_client: Any) -> None:
    choice = {"type": "function", "name": NAME}
    done = tool_client.responses.create(**asking("Weather?"), tool_choice=choice, max_output_tokens=200)
    assert done.output[0].name == NAME


def test_thinking_is_an_item_of_its_own(tool_client: Any) -> None:
    fields = {**asking("Think?"), "tools": openai.omit}
    done = tool_client.responses.create(**fields)
    thought, message = done.output
    assert (thought.type, thought.content[0].text.strip()) == ("reasoning", "It is easy.")
    assert message.content[0].text.strip() == "Yes."
    events = [*tool_client.responses.create(**fields, stream=True)]
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == thought.content[0].text
    fields["input"] += [*done.output, {"role": "user", "content": "Hello?"}]
    raw = tool_client.responses.with_raw_response.create(**fields)
    assert "x-llmrun-ignored" not in raw.headers
    assert raw.parse().output_text == "Hello!"


def test_stored_responses_are_refused(client: Any, real: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=real.model, input=STORY, previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="stores no responses"):
        client.responses.retrieve("resp_1")
