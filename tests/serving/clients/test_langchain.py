"""Tests with LangChain's chat models."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

from tests.support.serving.pictures import PHOTO, SEEN, base64_of
from tests.support.serving.serve_process import Served

pytestmark = pytest.mark.clients


class Animal(BaseModel):
    """An animal."""

    name: str
    legs: int


@tool
def get_weather(city: str, days: int) -> str:
    """Return the weather in a city."""
    return f"{city}: clear for {days} days"


def chat_model(server: Served, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=server.url, api_key="none", model=server.model, max_retries=0, **options)


def test_a_chat_is_answered(real: Served) -> None:
    model = chat_model(real, temperature=0, max_tokens=12)
    answer = model.invoke([SystemMessage("You are helpful."), HumanMessage("Say hello in French.")])
    assert "Bonjour" in answer.content
    assert answer.usage_metadata["output_tokens"] <= 12
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


def test_a_stream_has_the_text_of_the_whole_answer(real: Served) -> None:
    model = chat_model(real, seed=3, max_tokens=20, stream_usage=True)
    chunks = [*model.stream("Tell me a story.")]
    assert "".join(chunk.content for chunk in chunks) == model.invoke("Tell me a story.").content
    usage = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert [each["output_tokens"] for each in usage] == [20]


def test_batches_are_answered_at_the_same_time(real: Served) -> None:
    model = chat_model(real, seed=3, max_tokens=10)
    questions = [f"What is {number}?" for number in range(6)]
    batch = [answer.content for answer in model.batch(questions)]
    assert batch == [model.invoke(question).content for question in questions]


def test_asynchronous_calls_work(real: Served) -> None:
    async def run() -> tuple[str, str]:
        model = chat_model(real, seed=4, max_tokens=10)
        streamed = [chunk.content async for chunk in model.astream("Hello")]
        return (await model.ainvoke("Hello")).content, "".join(streamed)

    whole, streamed = asyncio.run(run())
    assert whole == streamed != ""


def test_the_responses_api_gives_the_same_answer(real: Served) -> None:
    chat = chat_model(real, temperature=0, max_tokens=20)
    responses = chat_model(real, temperature=0, max_tokens=20, use_responses_api=True)
    text = chat.invoke("Tell me a story.").text
    assert responses.invoke("Tell me a story.").text == text
    assert "".join(chunk.text for chunk in responses.stream("Tell me a story.")) == text


def test_logprobs_are_passed_on(real: Served) -> None:
    answer = chat_model(real, max_tokens=3).bind(logprobs=True, top_logprobs=2).invoke("Hello")
    assert len(answer.response_metadata["logprobs"]["content"]) == 3


def test_completions_are_answered(real: Served) -> None:
    model = OpenAI(base_url=real.url, api_key="none", model=real.model, max_tokens=6, temperature=0)
    assert model.invoke("One, two, three,").strip().startswith("four")


def test_structured_output_is_an_object(real: Served) -> None:
    model = chat_model(real, seed=2, max_tokens=200).with_structured_output(Animal, method="json_schema")
    assert isinstance(model.invoke("Describe a fox."), Animal)


def test_structured_output_may_be_a_tool(tools: Served) -> None:
    class Forecast(BaseModel):
        """A forecast."""

        city: str
        days: int

    model = chat_model(tools).with_structured_output(Forecast, method="function_calling")
    # The tool is required, so the scripted call of another one becomes a call of this one.
    assert isinstance(model.invoke("Weather?"), Forecast)


@pytest.mark.parametrize("uses_responses", [False, True])
def test_messages_have_images(seeing: Served, uses_responses: bool) -> None:
    image = {"type": "image", "base64": base64_of(PHOTO), "mime_type": "image/png"}
    question = HumanMessage([image, {"type": "text", "text": "Which color?"}])
    assert chat_model(seeing, use_responses_api=uses_responses).invoke([question]).text == SEEN


@pytest.mark.parametrize("uses_responses", [False, True])
def test_a_tool_is_called_and_its_result_used(tools: Served, uses_responses: bool) -> None:
    model = chat_model(tools, use_responses_api=uses_responses).bind_tools([get_weather])
    question = HumanMessage("Weather?")
    answer = model.invoke([question])
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris", "days": 2})
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert model.invoke([question, answer, result]).text == "It is sunny."


def test_streamed_calls_are_assembled(tools: Served) -> None:
    chunks = [*chat_model(tools).bind_tools([get_weather]).stream("Both?")]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [call["args"]["city"] for call in whole.tool_calls] == ["Paris", "Rome"]
