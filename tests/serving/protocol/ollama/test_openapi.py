"""Tests that the OpenAPI document describes what Ollama's API accepts and returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llmrun.base.types import FinishReason
from llmrun.engine.requests import Event, ToolCallDelta
from llmrun.serving.protocol.errors import InvalidField, api_error
from llmrun.serving.protocol.ollama.answers import (
    OLLAMA,
    OllamaModel,
    abilities_of,
    loaded_body,
    show_body,
    tags_body,
    version_body,
)
from llmrun.serving.protocol.ollama.objects import (
    OllamaChat,
    OllamaError,
    OllamaLoadedModels,
    OllamaModelFacts,
    OllamaModels,
    OllamaText,
    OllamaVersion,
)
from llmrun.serving.protocol.ollama.requests import parse_show
from tests.serving.protocol.test_openapi import invalid
from tests.support.protocol.answers import FACTS, TOOL, called, chosen, ended, said
from tests.support.protocol.ollama import chat, chat_answer, generate, generate_answer, streamed, whole
from tests.support.protocol.openapi import DOCUMENT, SCHEMAS, forgotten_fields, validate

PARSERS: dict[str, Callable[..., Any]] = {
    "OllamaChatRequest": chat,
    "OllamaGenerateRequest": generate,
    "OllamaShowRequest": lambda **fields: parse_show({"model": "tiny", **fields}),
    "OllamaOptions": lambda **options: chat(options=options),
}
# Fields of which only these values have an effect. Others are named as ignored.
USUAL = {"truncate": False, "shift": False, "verbose": False}
PROPERTIES = [(name, field, schema) for name in PARSERS for field, schema in SCHEMAS[name]["properties"].items()]
MODEL = OllamaModel("tiny", 5, 1_700_000_000.5, "0" * 64, "llama", "1B", "Q4_K_M", 4096)


@pytest.mark.parametrize("name", ["OllamaChatRequest", "OllamaGenerateRequest", "OllamaShowRequest"])
def test_no_declared_field_is_forgotten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert forgotten_fields(name, PARSERS[name], monkeypatch) == set()


@pytest.mark.push
@pytest.mark.parametrize(("name", "field", "schema"), PROPERTIES, ids=[f"{each[0]}.{each[1]}" for each in PROPERTIES])
def test_values_against_the_schema_are_refused(name: str, field: str, schema: dict[str, Any]) -> None:
    """Fields without effect are the exception: they are named as ignored."""
    if field in USUAL:
        parsed = PARSERS[name](**{field: True})
        assert (parsed[1] if name == "OllamaShowRequest" else parsed.ignored) == (field,)
        return
    wrong = [*invalid(schema)]
    assert wrong
    for value in wrong:
        with pytest.raises(InvalidField):
            PARSERS[name](**{field: value})


@pytest.mark.parametrize(("name", "field", "schema"), PROPERTIES, ids=[f"{each[0]}.{each[1]}" for each in PROPERTIES])
def test_the_bounds_are_accepted(name: str, field: str, schema: dict[str, Any]) -> None:
    more = {"logprobs": True} if field == "top_logprobs" else {}
    for bound in ("minimum", "maximum"):
        if bound in schema:
            PARSERS[name](**{field: schema[bound]}, **more)
    for value in schema.get("enum", [schema["const"]] if "const" in schema else []):
        PARSERS[name](**{field: value})


def test_answers_match_their_schemas() -> None:
    events: list[Event] = [
        said("a", reasoning="b", logprobs=(chosen(b"a", -1.0, (b"a", -1.0)),)),
        called(ToolCallDelta(0, "call_a", "look", "{}")),
        ended(FinishReason.TOOL_CALLS, drafted_tokens=2),
    ]
    fields = {"logprobs": True, "top_logprobs": 1}
    for chunk in streamed(chat_answer(**fields, tools=[TOOL]), events):
        validate(chunk, OllamaChat)
    validate(whole(chat_answer(**fields, stream=False, tools=[TOOL]), events), OllamaChat)
    for chunk in streamed(generate_answer(**fields), events[:1] + events[2:]):
        validate(chunk, OllamaText)
    validate(whole(generate_answer(prompt=""), []), OllamaText)


def test_models_whose_file_names_a_pooling_only_embed() -> None:
    for pooling, ability in ((0, "completion"), (1, "embedding"), (4, "embedding")):
        header = {"general.architecture": "bert", "bert.pooling_type": pooling}
        assert abilities_of(header, sees_images=False, takes_tools=False, thinks=False, fills=False) == [ability]


def test_facts_about_models_match_their_schemas() -> None:
    validate(tags_body([MODEL]), OllamaModels)
    validate({"models": [loaded_body(MODEL, FACTS, 100, 1_700_000_003.5)]}, OllamaLoadedModels)
    header = {"general.license": "mit", "llama.rope.freq_base": float("inf")}
    for facts in (None, FACTS):
        abilities = abilities_of(header, sees_images=True, takes_tools=True, thinks=True, fills=True)
        assert abilities == ["completion", "vision", "tools", "thinking", "insert"]
        body = show_body(MODEL, header, "{{ messages }}", abilities, facts)
        assert "llama.rope.freq_base" not in body["model_info"]
        validate(body, OllamaModelFacts)
    validate(version_body("1.2.3"), OllamaVersion)
    validate(OLLAMA.error(api_error(RuntimeError())), OllamaError)


def test_missing_routes_are_described_as_such() -> None:
    assert [*DOCUMENT["paths"]["/api/pull"]["post"]["responses"]] == ["501"]
