"""Tests that the OpenAPI document says what the parsers accept and what the bodies contain."""

from __future__ import annotations

import importlib
import pkgutil
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, is_typeddict

import jsonschema
import pytest
from msgspec import structs

from llmrun.base.types import FinishReason
from llmrun.engine.child.messages import Embedded
from llmrun.engine.requests import Event, ToolCallDelta
from llmrun.serving import protocol
from llmrun.serving.protocol.anthropic.answers import ANTHROPIC, anthropic_models
from llmrun.serving.protocol.anthropic.objects import AnthropicMessage, AnthropicModels, MessageEvent
from llmrun.serving.protocol.anthropic.requests import parse_count
from llmrun.serving.protocol.embeddings import (
    Embeddings,
    OllamaEmbedding,
    OllamaEmbeddings,
    Ranking,
    embeddings_body,
    ollama_embed_body,
    ollama_embeddings_body,
    parse_embeddings,
    parse_ollama_embed,
    parse_ollama_embeddings,
    parse_rerank,
    rerank_body,
)
from llmrun.serving.protocol.errors import InvalidField, api_error, openai_body
from llmrun.serving.protocol.llama_facts import Props, RenderedPrompt, Slot, props_body, slots_body
from llmrun.serving.protocol.llama_server import LlamaCompletion, LlamaCompletionChunk
from llmrun.serving.protocol.openai.objects import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Error,
    Model,
    Models,
)
from llmrun.serving.protocol.openai.options import BUDGETS
from llmrun.serving.protocol.openai.responses import model_body, models_body, unloaded_model_body
from llmrun.serving.protocol.openai_responses.objects import Response, ResponseEvent
from llmrun.serving.protocol.tokens import (
    Text,
    TokenizerInfo,
    Tokens,
    detokenize_body,
    parse_detokenize,
    parse_tokenize,
    tokenize_body,
    tokenizer_info_body,
)
from tests.support.protocol.answers import (
    FACTS,
    TOOL,
    called,
    chat,
    chat_answer,
    chosen,
    completion,
    completion_answer,
    ended,
    infill,
    infill_answer,
    llama_completion,
    run,
    said,
)
from tests.support.protocol.anthropic_answers import TOOL as ANTHROPIC_TOOL
from tests.support.protocol.anthropic_answers import USER, answer, message, streamed
from tests.support.protocol.ollama import OLLAMA_ROUTES
from tests.support.protocol.openapi import DOCUMENT, SCHEMAS, forgotten_fields, validate
from tests.support.protocol.response_answers import (
    FLAT_TOOL,
    LOGPROBS,
    response,
    response_answer,
    said_and_called,
)
from tests.support.protocol.response_answers import streamed as response_events

ROUTES = {
    "/v1/chat/completions": "post",
    "/v1/completions": "post",
    "/v1/responses": "post",
    "/completion": "post",
    "/infill": "post",
    "/apply-template": "post",
    "/props": "get",
    "/slots": "get",
    "/v1/messages": "post",
    "/v1/messages/count_tokens": "post",
    "/v1/models": "get",
    "/v1/models/{id}": "get",
    "/v1/embeddings": "post",
    "/v1/rerank": "post",
    "/tokenize": "post",
    "/detokenize": "post",
    "/": "get",
    "/health": "get",
    "/lora-adapters": "get",
    "/tokenizer_info": "get",
    "/metrics": "get",
    "/openapi.json": "get",
    **OLLAMA_ROUTES,
}
PARSERS: dict[str, Callable[..., Any]] = {
    "ChatRequest": chat,
    "CompletionRequest": completion,
    "ResponseRequest": response,
    "InfillRequest": infill,
    "LlamaCompletionRequest": llama_completion,
    "TokenizeRequest": lambda **fields: parse_tokenize({"content": "a", **fields}),
    "DetokenizeRequest": lambda **fields: parse_detokenize({"tokens": [1], **fields}, FACTS),
    "EmbeddingRequest": lambda **fields: parse_embeddings({"input": "a", **fields}, FACTS, ""),
    "RerankRequest": lambda **fields: parse_rerank({"query": "a", "documents": ["b"], **fields}, FACTS, ""),
    "OllamaEmbedRequest": lambda **fields: parse_ollama_embed({"input": "a", **fields}, FACTS, ""),
    "OllamaEmbeddingsRequest": lambda **fields: parse_ollama_embeddings({"prompt": "a", **fields}, FACTS, ""),
    "MessageRequest": message,
    "MessageCountRequest": lambda **fields: parse_count({"model": "tiny", "messages": [USER], **fields}, FACTS),
}
# Fields of which only these values have an effect. Others are named as ignored.
USUAL = {"store": False, "service_tier": "auto", "speed": "standard", "verbosity": "medium"}
PROPERTIES = [(name, field, schema) for name in PARSERS for field, schema in SCHEMAS[name]["properties"].items()]


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_every_route_is_described() -> None:
    assert {path: next(iter({*each} - {"parameters"})) for path, each in DOCUMENT["paths"].items()} == ROUTES
    assert (DOCUMENT["openapi"], DOCUMENT["info"]["version"]) == ("3.1.0", "1.2.3")


@pytest.mark.push
def test_every_reference_leads_somewhere() -> None:
    found = {*references(DOCUMENT)}
    assert found == {f"#/components/schemas/{name}" for name in SCHEMAS}
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_each_schema_belongs_to_one_declaration() -> None:
    modules = [
        importlib.import_module(each.name)
        for each in pkgutil.walk_packages(protocol.__path__, f"{protocol.__name__}.")
        if not each.ispkg
    ]
    declared = Counter(
        name
        for module in modules
        for name, each in vars(module).items()
        if is_typeddict(each) and each.__module__ == module.__name__ and name in SCHEMAS
    )
    assert {name: count for name, count in declared.items() if count > 1} == {}
    assert {*declared} == {*SCHEMAS}


@pytest.mark.parametrize("name", PARSERS)
def test_no_declared_field_is_forgotten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A declared field that no code uses would have no effect, and x-llmrun-ignored would not say so."""
    known = {*BUDGETS, "context_management"}  # a loop looks up the budgets, and supported edits have no effect
    if name == "ResponseRequest":
        known.add("stream_options")
    assert forgotten_fields(name, PARSERS[name], monkeypatch) - known == set()


@pytest.mark.push
@pytest.mark.parametrize(("name", "field", "schema"), PROPERTIES, ids=[f"{each[0]}.{each[1]}" for each in PROPERTIES])
def test_values_against_the_schema_are_refused(name: str, field: str, schema: dict[str, Any]) -> None:
    """Fields without effect are the exception: they are named as ignored."""
    wrong = [*invalid(schema)]
    assert wrong
    for value in wrong:
        if field in USUAL:
            assert PARSERS[name](**{field: value}).ignored == (field,)
            continue
        with pytest.raises(InvalidField) as caught:
            PARSERS[name](**{field: value})
        assert re.split(r"[.\[]", caught.value.param or "")[0] == field


def invalid(schema: dict[str, Any]) -> Iterator[Any]:
    """Yield values that a schema forbids: of another type, or next to a bound."""
    validator = jsonschema.Draft202012Validator({**schema, "components": {"schemas": SCHEMAS}})
    candidates = [True, "no_such_value", 5, 5.5, [], {}, [None], [{}], {"type": "no_such_type"}, ["x"] * 1000]
    if "minimum" in schema:
        candidates += [schema["minimum"] - 1, schema["maximum"] + 1 if "maximum" in schema else schema["minimum"] - 2]
    yield from (value for value in candidates if not validator.is_valid(value))


@pytest.mark.push
@pytest.mark.parametrize(("name", "field", "schema"), PROPERTIES, ids=[f"{each[0]}.{each[1]}" for each in PROPERTIES])
def test_the_bounds_are_accepted(name: str, field: str, schema: dict[str, Any]) -> None:
    for bound in ("minimum", "maximum"):
        if bound in schema and field not in ("best_of", "n", "top_logprobs"):
            PARSERS[name](**{field: schema[bound]})


def test_n_and_logprobs_have_their_bounds() -> None:
    assert len(chat(n=SCHEMAS["ChatRequest"]["properties"]["n"]["maximum"]).requests) == 128
    assert chat(logprobs=True, top_logprobs=SCHEMAS["ChatRequest"]["properties"]["top_logprobs"]["maximum"])


def test_chats_match_their_schemas() -> None:
    answer = chat_answer(
        stream=True, stream_options={"include_usage": True}, n=2, tools=[TOOL], logprobs=True, top_logprobs=1
    )
    events: list[tuple[int, Event]] = [
        (0, said("a", reasoning="b", logprobs=(chosen(b"a", -1.0, (b"a", -1.0)),))),
        (1, called(ToolCallDelta(0, "call_a", "look"), ToolCallDelta(0, arguments="{}"))),
        (0, ended(drafted_tokens=2)),
        (1, ended(FinishReason.TOOL_CALLS)),
    ]
    for chunk in run(answer, events):
        validate(chunk, ChatCompletionChunk)
    validate(answer.whole(), ChatCompletion)


def test_completions_match_their_schemas() -> None:
    answer = completion_answer(stream=True, logprobs=1)
    for chunk in run(answer, [(0, said("a", logprobs=(chosen(b"a", -1.0, (b"a", -1.0)),))), (0, ended())]):
        validate(chunk, CompletionChunk)
    validate(answer.whole(), Completion)


def test_embeddings_and_rankings_match_their_schemas() -> None:
    call = parse_embeddings({"input": "a"}, FACTS, "")
    found = Embedded(1, struct.pack("=2f", 1.0, 0.5), [3])
    validate(embeddings_body(call, found, "tiny", 0.0), Embeddings)
    validate(embeddings_body(replace(call, encoding="base64"), found, "tiny", 0.0), Embeddings)
    validate(ollama_embed_body(call, found, "tiny", 0.5), OllamaEmbeddings)
    validate(ollama_embeddings_body(call, found, "tiny", 0.5), OllamaEmbedding)
    ranking = parse_rerank({"query": "a", "documents": ["b", "c"], "return_documents": True}, FACTS, "")
    validate(rerank_body(ranking, structs.replace(found, tokens=[1, 2]), "tiny", 0.0), Ranking)


@pytest.mark.push
def test_responses_match_their_schemas() -> None:
    fields = {"tools": [FLAT_TOOL], "include": [LOGPROBS], "top_logprobs": 1, "text": {"format": {"type": "text"}}}
    likely = chosen(b"a", -1.0, (b"a", -1.0))
    for given in (
        [said("a", reasoning="b", logprobs=(likely,)), *said_and_called()],
        [said("a", logprobs=(likely,)), ended(FinishReason.LENGTH, drafted_tokens=2)],
    ):
        answer = response_answer(**fields)
        for event in response_events(answer, *given):
            validate(event, ResponseEvent)
        validate(answer.whole(), Response)
    for failure in response_answer(**fields).failed(api_error(InvalidField("n", "wrong"))):
        validate(failure, ResponseEvent)


@pytest.mark.parametrize(
    "fields", [{}, {"n_cmpl": 2}, {"stream": True}, {"stream": True, "timings_per_token": True}], ids=str
)
def test_answers_to_infill_match_their_schemas(fields: dict[str, Any]) -> None:
    answer = infill_answer(n_probs=1, **fields)
    piece = said("a", logprobs=(chosen(b"a", -1.0, (b"a", -1.0)),))
    choices = range(len(infill(**fields).requests))
    for chunk in run(answer, [(index, event) for index in choices for event in (piece, ended())]):
        validate(chunk, LlamaCompletionChunk | LlamaCompletion)
    validate(answer.whole(), LlamaCompletion | list[LlamaCompletion])


def test_messages_match_their_schemas() -> None:
    answering = answer(stream=True, tools=[ANTHROPIC_TOOL])
    call = called(ToolCallDelta(0, "call_a", "look"), ToolCallDelta(0, arguments="{}"))
    chunks = streamed(answering, [said(reasoning="b"), said("a"), call, ended(FinishReason.TOOL_CALLS)])
    for chunk in [*chunks, ANTHROPIC.error_chunk(api_error(RuntimeError()))]:
        validate(chunk, MessageEvent)
    validate(answering.whole(), AnthropicMessage)
    models = [model_body(FACTS, 1), unloaded_model_body("other", 1)]
    validate(anthropic_models(models_body(models)), AnthropicModels)


def test_other_answers_match_their_schemas() -> None:
    validate(models_body([model_body(FACTS, 1), unloaded_model_body("other", 1)]), Models)
    validate(model_body(FACTS, 1_700_000_000), Model)
    validate(tokenize_body([1, 2], FACTS), Tokens)
    validate(tokenize_body([1, 2], FACTS, [b"a", b"\xff"]), Tokens)
    validate(detokenize_body(b"a"), Text)
    validate(tokenizer_info_body(FACTS), TokenizerInfo)
    validate(props_body(FACTS, "1"), Props)
    validate(slots_body(FACTS, 1), list[Slot])
    validate({"prompt": "a"}, RenderedPrompt)
    validate(openai_body(api_error(InvalidField("n", "wrong"))), Error)
    validate(openai_body(api_error(RuntimeError())), Error)
