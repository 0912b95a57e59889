"""Tests with the official client of Ollama."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import ollama
import pytest
from pydantic import BaseModel

from tests.support.serving.pictures import PHOTO, SEEN, base64_of
from tests.support.serving.serve_process import Served

pytestmark = pytest.mark.clients

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


class Animal(BaseModel):
    name: str
    legs: int


def get_weather(city: str, days: int) -> str:
    """Get the weather.

    Args:
        city: The name of the city
        days: The number of days
    """
    return f"{city}: sunny for {days} days"


def host(server: Served) -> str:
    return server.url.removesuffix("/v1")


@pytest.fixture(scope="module")
def client(real: Served) -> ollama.Client:
    return ollama.Client(host(real))


@pytest.fixture(scope="module")
def caller(tools: Served) -> ollama.Client:
    return ollama.Client(host(tools))


def test_models_are_listed_and_shown(client: ollama.Client, real: Served) -> None:
    (model,) = [model for model in client.list().models if model.model == real.model]
    assert model.size is not None
    assert 9e7 < model.size < 1e8
    assert model.modified_at is not None
    assert model.details is not None
    assert (model.details.family, model.details.quantization_level) == ("llama", "Q4_1")
    assert (model.details.parameter_size, model.details.format) == ("135M", "gguf")
    shown = client.show(real.model)
    assert shown.capabilities == ["completion"]
    assert shown.license == "apache-2.0"
    assert shown.template is not None
    assert "<|im_start|>" in shown.template
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.block_count"] == 30
    assert shown.details == model.details
    assert shown.modified_at == model.modified_at


def test_running_models_are_listed(client: ollama.Client, real: Served) -> None:
    (running,) = client.ps().models
    assert (running.name, running.context_length) == (real.model, 8192)
    assert running.size is not None
    assert running.size > 10**8
    assert running.size_vram == 0
    assert running.expires_at is not None
    assert running.expires_at.year == 9999


def test_a_chat_is_answered(client: ollama.Client, real: Served) -> None:
    question = [{"role": "user", "content": "Say hello in French."}]
    done = client.chat(real.model, question, options={"temperature": 0, "num_predict": 12})
    assert done.message.content is not None
    assert done.message.content.startswith("Bonjour")
    assert (done.done, done.done_reason) == (True, "length")
    assert done.eval_count == 12
    assert done.total_duration is not None
    assert done.eval_duration is not None
    assert done.total_duration > done.eval_duration > 0


def test_streams_have_the_text_of_the_whole_answer(client: ollama.Client, real: Served) -> None:
    fields: dict[str, Any] = {"model": real.model, "options": {"seed": 5, "num_predict": 30}}
    pieces = [chunk.message.content or "" for chunk in client.chat(**fields, messages=STORY, stream=True)]
    assert "".join(pieces) == client.chat(**fields, messages=STORY).message.content
    assert len(pieces) > 10
    parts = [chunk.response or "" for chunk in client.generate(**fields, prompt="Once upon", raw=True, stream=True)]
    assert "".join(parts) == client.generate(**fields, prompt="Once upon", raw=True).response


def test_asynchronous_clients_work(real: Served) -> None:
    async def run() -> tuple[str, list[str | None]]:
        client = ollama.AsyncClient(host(real))
        options = {"seed": 1, "num_predict": 8}
        stream = await client.chat(real.model, STORY, stream=True, options=options)
        text = "".join([chunk.message.content or "" async for chunk in stream])
        several = await asyncio.gather(*(client.chat(real.model, STORY, options=options) for _ in range(4)))
        return text, [done.message.content for done in several]

    text, answers = asyncio.run(run())
    assert text
    assert answers == [text] * 4


def test_prompts_use_the_template_and_the_system_message(client: ollama.Client, real: Served) -> None:
    options = {"temperature": 0, "num_predict": 8}
    messages = [{"role": "system", "content": "You are a pirate."}, *STORY]
    done = client.generate(real.model, STORY[0]["content"], system="You are a pirate.", options=options)
    assert done.response == client.chat(real.model, messages, options=options).message.content


def test_schemas_and_json_hold(client: ollama.Client, real: Served) -> None:
    options = {"seed": 1, "num_predict": 300}
    done = client.chat(real.model, STORY, format=Animal.model_json_schema(), options=options)
    assert Animal.model_validate_json(done.message.content or "")
    found = client.generate(real.model, "Describe a fox in JSON.", format="json", options={"seed": 4}).response
    assert isinstance(json.loads(found or ""), dict)


def test_logprobs_are_those_of_the_text(client: ollama.Client, real: Served) -> None:
    options = {"temperature": 0, "num_predict": 5}
    done = client.chat(real.model, STORY, logprobs=True, top_logprobs=2, options=options)
    assert done.logprobs is not None
    assert "".join(token.token for token in done.logprobs) == done.message.content
    for token in done.logprobs:
        assert token.top_logprobs is not None
        assert token.top_logprobs[0].token == token.token
        assert len(token.top_logprobs) == 2


def test_functions_are_tools(caller: ollama.Client) -> None:
    messages: list[Any] = [{"role": "user", "content": "Both?"}]
    done = caller.chat("script", messages, tools=[get_weather])
    assert done.message.tool_calls is not None
    results = [get_weather(**call.function.arguments) for call in done.message.tool_calls]
    assert results == ["Paris: sunny for 1 days", "Rome: sunny for 1 days"]
    messages.append(done.message)
    messages += [{"role": "tool", "tool_name": "get_weather", "content": result} for result in results]
    assert caller.chat("script", messages, tools=[get_weather]).message.content == "It is sunny."


def test_streamed_tool_calls_are_complete(caller: ollama.Client) -> None:
    stream = caller.chat("script", [{"role": "user", "content": "Weather?"}], tools=[get_weather], stream=True)
    calls = [call for chunk in stream for call in chunk.message.tool_calls or ()]
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("get_weather", {"city": "Paris", "days": 2})
    ]


def test_thinking_is_a_field_of_its_own(caller: ollama.Client) -> None:
    question = [{"role": "user", "content": "Think?"}]
    message = caller.chat("script", question, think=True).message
    assert ((message.thinking or "").strip(), (message.content or "").strip()) == ("It is easy.", "Yes.")
    stream = [chunk.message for chunk in caller.chat("script", question, think="high", stream=True)]
    assert "".join(each.thinking or "" for each in stream) == message.thinking
    done = caller.generate("script", "Think?", think=True)
    assert (done.thinking or "").strip() == "It is easy."


def test_chats_and_prompts_have_images(seeing: Served) -> None:
    client = ollama.Client(host(seeing))
    assert "vision" in (client.show("scripted").capabilities or ())
    message = {"role": "user", "content": "Which color?", "images": [PHOTO]}
    assert client.chat("scripted", [message]).message.content == SEEN
    assert client.generate("scripted", "Which color?", images=[base64_of(PHOTO)]).response == SEEN


def test_errors_are_response_errors(client: ollama.Client, real: Served) -> None:
    with pytest.raises(ollama.ResponseError, match="no such model: 'invented'") as missing:
        client.chat("invented", STORY)
    assert missing.value.status_code == 404
    assert [*client.chat(real.model, STORY, options={"num_ctx": 999_999, "num_predict": 1}, stream=True)]
    with pytest.raises(ollama.ResponseError, match="does not think") as refused:
        client.chat(real.model, STORY, think=True)
    assert refused.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="llmrun pull NAME") as pulled:
        client.pull("qwen3:4b")
    assert pulled.value.status_code == 501
    with pytest.raises(ollama.ResponseError, match="llmrun rm NAME"):
        client.delete(real.model)


def test_models_are_loaded_and_unloaded(caller: ollama.Client) -> None:
    assert caller.generate("script", keep_alive=0).done_reason == "unload"
    assert caller.generate("script").done_reason == "load"
    assert [model.name for model in caller.ps().models] == ["script"]
