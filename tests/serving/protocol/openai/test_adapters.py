"""Tests of the field `lora`, as in llama-server, and of the list of adapters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from llmrun.base.types import Adapter
from llmrun.serving.protocol.openai.options import adapters_body
from tests.support.protocol.answers import FACTS, chat, completion, infill
from tests.support.protocol.refusals import refused
from tests.support.protocol.response_answers import response

ADAPTERS = (Adapter("one", "/secret/one.gguf", 1.0, (), "1"), Adapter("two", "/secret/two.gguf", 0.5, (5, 6), "2"))
ADAPTED = structs.replace(FACTS, info=replace(FACTS.info, adapters=ADAPTERS))


@pytest.mark.parametrize(
    ("lora", "adapters"),
    [
        ({}, None),
        ({"lora": None}, None),
        ({"lora": []}, {}),
        ({"lora": [{"id": 1, "scale": 0.25}]}, {"two": 0.25}),
        ({"lora": [{"name": "two", "scale": 1}, {"id": 0, "scale": -2.5}]}, {"two": 1.0, "one": -2.5}),
    ],
)
def test_requests_choose_adapters_by_number_or_name(lora: dict[str, Any], adapters: dict[str, float] | None) -> None:
    for parsed in (
        chat(ADAPTED, n=2, **lora),
        completion(ADAPTED, **lora),
        infill(structs.replace(ADAPTED, fills=True), **lora),
        response(ADAPTED, **lora),
    ):
        assert [each.adapters for each in parsed.requests] == [adapters] * len(parsed.requests)
        assert parsed.ignored == ()


@pytest.mark.parametrize(
    ("lora", "param"),
    [
        ("one", "lora"),
        ([5], "lora[0]"),
        ([{"scale": 1}], "lora[0].id"),
        ([{"id": 0, "name": "one", "scale": 1}], "lora[0].id"),
        ([{"id": 2, "scale": 1}], "lora[0].id"),
        ([{"id": -1, "scale": 1}], "lora[0].id"),
        ([{"id": "0", "scale": 1}], "lora[0].id"),
        ([{"name": "three", "scale": 1}], "lora[0].name"),
        ([{"id": 0}], "lora[0].scale"),
        ([{"id": 0, "scale": "1"}], "lora[0].scale"),
        ([{"id": 0, "scale": 1e9}], "lora[0].scale"),
        ([{"id": 0, "scale": 1}, {"name": "one", "scale": 1}], "lora[1]"),
    ],
)
def test_wrong_adapters_are_refused(lora: Any, param: str) -> None:
    refused(lambda **fields: chat(ADAPTED, **fields), param, lora=lora)


def test_the_list_has_no_paths() -> None:
    assert adapters_body(ADAPTED) == [
        {"id": 0, "name": "one", "scale": 1.0},
        {"id": 1, "name": "two", "scale": 0.5, "alora_invocation_tokens": [5, 6]},
    ]
