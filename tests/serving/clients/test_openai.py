"""Tests with OpenAI's client and a real model."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest
from pydantic import BaseModel

from tests.support.serving.openai_clients import async_client_of, client_of
from tests.support.serving.serve_process import Served

pytestmark = pytest.mark.clients

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


class Animal(BaseModel):
    name: str
    legs: int


@pytest.fixture(scope="module")
def client(real: Served) -> Any:
    return client_of(real)


def test_models_are_listed(client: Any, real: Served) -> None:
    assert [model.id for model in client.models.list()] == [real.model]
    assert client.models.retrieve(real.model).owned_by == "llmrun"


def test_a_chat_is_answered(client: Any, real: Served) -> None:
    question = [{"role": "user", "content": "Say hello in French."}]
    done = client.chat.completions.create(model=real.model, messages=question, temperature=0, max_tokens=12)
    assert done.choices[0].message.content.startswith("Bonjour")
    assert done.choices[0].message.role == "assistant"
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.system_fingerprint.startswith("fp_")


def test_a_stream_has_the_text_of_the_whole_answer(client: Any, real: Served) -> None:
    fields = {"model": real.model, "messages": STORY, "seed": 5, "max_completion_tokens": 40}
    whole = client.chat.completions.create(**fields)
    chunks = [*client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len(pieces) > 10
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 40
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_answers_at_the_same_time_are_those_of_one_at_a_time(client: Any, real: Served) -> None:
    def fields(seed: int) -> dict[str, Any]:
        return {"model": real.model, "messages": STORY, "seed": seed, "max_tokens": 20, "top_p": 0.9}

    async def all_at_once() -> list[str]:
        async with async_client_of(real) as many:
            done = await asyncio.gather(*(many.chat.completions.create(**fields(seed)) for seed in range(8)))
        return [each.choices[0].message.content for each in done]

    alone = [client.chat.completions.create(**fields(seed)).choices[0].message.content for seed in range(8)]
    assert asyncio.run(all_at_once()) == alone
    assert len(set(alone)) > 1


def test_asynchronous_streams_work(real: Served) -> None:
    async def run() -> tuple[str, str]:
        async with async_client_of(real) as client:
            stream = await client.chat.completions.create(model=real.model, messages=STORY, max_tokens=8, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return text, (await client.models.list()).data[0].id

    text, name = asyncio.run(run())
    assert text
    assert name == real.model


def test_headers_name_the_request_and_ignored_fields(client: Any, real: Served) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=real.model, messages=STORY, max_tokens=1, extra_body={"num_ctx": 4096}
    )
    assert raw.headers["x-llmrun-ignored"] == "num_ctx"
    assert raw.parse().id == f"chatcmpl-{raw.headers['x-request-id']}"


def test_completions_are_answered(client: Any, real: Served) -> None:
    fields = {"model": real.model, "prompt": "Once upon a time", "seed": 3, "max_tokens": 16}
    whole = client.completions.create(**fields)
    chunks = [*client.completions.create(**fields, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert client.completions.create(**fields, echo=True).choices[0].text == "Once upon a time" + whole.choices[0].text
    several = client.completions.create(**{**fields, "prompt": ["One,", "Two,"]}, n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]


def test_logprobs_of_chats_are_probabilities(client: Any, real: Served) -> None:
    fields = {"model": real.model, "messages": STORY, "temperature": 0, "max_tokens": 6}
    done = client.chat.completions.create(**fields, logprobs=True, top_logprobs=3)
    tokens = done.choices[0].logprobs.content
    assert len(tokens) == 6
    for token in tokens:
        likeliest = token.top_logprobs
        assert token.token == likeliest[0].token
        assert len(likeliest) == 3
        assert 0 < sum(math.exp(each.logprob) for each in likeliest) <= 1.0001
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == done.choices[0].message.content


def test_logprobs_of_completions_are_lists(client: Any, real: Served) -> None:
    done = client.completions.create(model=real.model, prompt="One, two,", temperature=0, max_tokens=4, logprobs=2)
    logprobs = done.choices[0].logprobs
    assert "".join(logprobs.tokens) == done.choices[0].text
    assert [len(each) for each in logprobs.top_logprobs] == [2, 2, 2, 2]


def test_choices_differ_and_the_first_is_that_of_the_seed(client: Any, real: Served) -> None:
    fields = {"model": real.model, "messages": STORY, "seed": 11, "max_tokens": 16}
    one, three = client.chat.completions.create(**fields), client.chat.completions.create(**fields, n=3)
    texts = [choice.message.content for choice in three.choices]
    assert texts[0] == one.choices[0].message.content
    assert len(set(texts)) == 3
    assert three.usage.prompt_tokens == one.usage.prompt_tokens


def test_stop_strings_end_the_answer(client: Any, real: Served) -> None:
    fields = {"model": real.model, "messages": STORY, "temperature": 0, "max_tokens": 60}
    text = client.chat.completions.create(**fields).choices[0].message.content
    stopped = client.chat.completions.create(**fields, stop=[" the", "\n\n"])
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].message.content == min(text.partition(stop)[0] for stop in (" the", "\n\n"))


def test_parsed_answers_are_objects(client: Any, real: Served) -> None:
    done = client.chat.completions.parse(
        model=real.model, messages=STORY, response_format=Animal, seed=1, max_tokens=200
    )
    assert isinstance(done.choices[0].message.parsed, Animal)


def test_schemas_hold_in_streams(client: Any, real: Served) -> None:
    fields = {"model": real.model, "messages": STORY, "response_format": Animal, "seed": 2, "max_tokens": 200}
    with client.chat.completions.stream(**fields) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Animal)
    assert {"content.delta", "content.done", "chunk"} <= kinds


def test_json_mode_gives_json(client: Any, real: Served) -> None:
    question = [{"role": "user", "content": "Describe a fox in JSON."}]
    done = client.chat.completions.create(
        model=real.model, messages=question, response_format={"type": "json_object"}, seed=4, max_tokens=400
    )
    assert isinstance(json.loads(done.choices[0].message.content), dict)
