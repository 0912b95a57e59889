"""The OpenAPI document of the server, which describes every route."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from llmrun.serving.protocol import embeddings, infill
from llmrun.serving.protocol.anthropic import answers as anthropic_answers
from llmrun.serving.protocol.anthropic import requests as anthropic_requests
from llmrun.serving.protocol.anthropic.schemas import ANTHROPIC_SCHEMAS
from llmrun.serving.protocol.embeddings import EMBEDDING_SCHEMAS
from llmrun.serving.protocol.ollama import requests as ollama_requests
from llmrun.serving.protocol.ollama.answers import MEDIA_TYPE, PREFIX
from llmrun.serving.protocol.ollama.schemas import OLLAMA_SCHEMAS
from llmrun.serving.protocol.openai import messages, options
from llmrun.serving.protocol.openai.schemas import OPENAI_SCHEMAS, sampling_parameters
from llmrun.serving.protocol.openai_responses import requests as responses_requests
from llmrun.serving.protocol.openai_responses.schemas import RESPONSES_SCHEMAS
from llmrun.serving.protocol.schema_notation import Schema, read_schemas

# The errors of routes that use a model
_ERRORS: Final = {
    "400": "The request is invalid. `param` names the field.",
    "401": "The API key is missing or wrong.",
    "403": "The host name or the origin of the web page is not allowed.",
    "404": "The server has no model with this name.",
    "408": "The body did not arrive in time.",
    "409": "The event ID belongs to another request or model.",
    "413": "The body is too large.",
    "415": "The body is not JSON, or is compressed.",
    "422": "The answer cannot have the requested format.",
    "429": "The queue is full, or the predicted wait is too long. Try again after the time in `retry-after`.",
    "500": "The server failed.",
    "502": "No upstream sent a valid answer.",
    "503": "The model is loading or restarting, the server is shutting down, or the upstreams are down.",
    "508": "Servers forward the request to each other in a loop.",
}
_RETRY: Final = {
    "retry-after": {"schema": {"type": "integer"}, "description": "Seconds until the server expects to have room."},
    "retry-after-ms": {"schema": {"type": "integer"}, "description": "The wait in milliseconds."},
}
_LAST_EVENT: Final = {
    "name": "Last-Event-ID",
    "in": "header",
    "schema": {"type": "string"},
    "description": "Resume a stream after the event with this ID. Send the same body again.",
}
_ANSWERED: Final = {
    "x-llmrun-ignored": {"schema": {"type": "string"}, "description": "The fields of the request that have no effect."},
    "x-llmrun-wait": {"schema": {"type": "number"}, "description": "The predicted seconds in the queue."},
}
_OLLAMA_ERROR: Final = (
    "An error. Status 501 means that this server does not support the route. The message suggests an alternative."
)
_PULL: Final = "run `llmrun pull NAME` on the server's machine"
# Maps unsupported routes of Ollama's API to the error message, which suggests an alternative
MISSING: Final[Mapping[str, str]] = {
    "/api/pull": f"models cannot be downloaded over HTTP: {_PULL}",
    "/api/create": "models cannot be created over HTTP: add a preset to models.toml on the server's machine",
    "/api/delete": "models cannot be deleted over HTTP: run `llmrun rm NAME` on the server's machine",
    "/api/copy": "models cannot be copied over HTTP: add a preset to models.toml on the server's machine",
    "/api/push": "models cannot be published",
    "/api/blobs/{digest}": f"files cannot be uploaded: {_PULL}",
}


def document(version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. `version` is llmrun's version."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "llmrun",
            "version": version,
            "summary": "A server for local models, with the APIs of OpenAI, Anthropic and Ollama",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "security": [{"key": []}, {}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(),
        },
    }


def _schemas() -> dict[str, Schema]:
    """Return the schemas by name. Each schema text can use the types of earlier texts, and the parsers' constants."""
    known: dict[str, Any] = {
        "parameters": {"properties": sampling_parameters()},
        "limit": {"type": "integer", "minimum": -1, "not": {"const": 0}},
        "num_predict": {"type": "integer", "minimum": -2, "not": {"const": 0}},
        "time": {"type": "string", "format": "date-time"},
        "duration": r"-?([0-9]+(\.[0-9]+)?(ms|s|m|h|d|))+",
    }
    found: dict[str, Schema] = {}
    for text, modules in (
        (OPENAI_SCHEMAS, (infill, messages, options)),
        (RESPONSES_SCHEMAS, (responses_requests,)),
        (ANTHROPIC_SCHEMAS, (anthropic_requests, anthropic_answers)),
        (OLLAMA_SCHEMAS, (ollama_requests,)),
        (EMBEDDING_SCHEMAS, (embeddings,)),
    ):
        for module in modules:
            known |= {name: value for name, value in vars(module).items() if name.isupper()}
        found |= read_schemas(text, known)
    return found


# The routes with JSON answers: each line lists a request schema, an answer schema, and a schema for stream chunks
_ROUTES: Final = """
POST /v1/chat/completions (ChatRequest): ChatCompletion, ChatCompletionChunk // Answer a conversation
POST /v1/completions (CompletionRequest): Completion, CompletionChunk // Continue a text
POST /v1/responses (ResponseRequest): Response, ResponseEvent // Answer a conversation, as items
POST /infill (InfillRequest): Infill, InfillChunk // Fill in the middle of a text
POST /v1/messages (MessageRequest): AnthropicMessage, MessageEvent // Answer a conversation, as in Anthropic's API
POST /v1/messages/count_tokens (MessageCountRequest): MessageCount // Count the tokens of a conversation
POST /v1/embeddings (EmbeddingRequest): Embeddings // Compute embeddings of texts
POST /v1/rerank (RerankRequest): Ranking // Rank documents for a query
POST /tokenize (TokenizeRequest): Tokens // Turn a text into tokens
POST /detokenize (DetokenizeRequest): Text // Turn tokens into a text
GET /lora-adapters: Adapters // List the LoRA adapters that requests may use
POST /api/chat (OllamaChatRequest): OllamaChat, OllamaChat // Answer a conversation, as in Ollama's API
POST /api/generate (OllamaGenerateRequest): OllamaText, OllamaText // Continue a prompt, as in Ollama's API
POST /api/embed (OllamaEmbedRequest): OllamaEmbeddings // Compute embeddings, as in Ollama's API
POST /api/embeddings (OllamaEmbeddingsRequest): OllamaEmbedding // Compute an embedding that is not normalized
GET /api/tags: OllamaModels // List the models that requests may name
GET /api/ps: OllamaLoadedModels // List the models in memory
POST /api/show (OllamaShowRequest): OllamaModelFacts // Describe a model
GET /api/version: OllamaVersion // Return the supported version of Ollama's API
"""
_ROUTE: Final = re.compile(r"(\w+) (\S+?)(?: \((\w+)\))?: (\w+)(?:, (\w+))? // (.*)")


def _paths() -> dict[str, Any]:
    anything = {"application/json": {"schema": {"type": "object"}}}
    found = {path: _route(path, *rest) for _, path, *rest in _ROUTE.findall(_ROUTES)}
    found |= {
        "/v1/models": _get("List the models that requests may name", _json("Models", "AnthropicModels")),
        "/v1/models/{id}": {
            **_get("Get a model", _json("Model", "AnthropicModel"), "404"),
            "parameters": [_in_path("id")],
        },
        "/": _get("Show the chat page", {"text/html": {"schema": {"type": "string"}}}, security=[]),
        "/health": _get("Report whether the server is ready", anything, "503", security=[]),
        "/metrics": _get("Report counters for Prometheus", {"text/plain": {"schema": {"type": "string"}}}),
        "/openapi.json": _get("Return this document", anything),
    }
    for path, words in MISSING.items():
        method = "delete" if path == "/api/delete" else "post"
        parameters = {"parameters": [_in_path("digest")]} if "{digest}" in path else {}
        answer = {"501": {"description": words, "content": _json("OllamaError")}}
        found[path] = {method: {"summary": f"Not supported: {words}", **parameters, "responses": answer}}
    return found


def _route(path: str, body: str, answer: str, chunk: str, summary: str) -> dict[str, Any]:
    """Return the description of a route in _ROUTES. `body` and `chunk` may be empty."""
    is_ollama, content = path.startswith(PREFIX), _json(answer)
    if chunk:
        media_type = MEDIA_TYPE if is_ollama else "text/event-stream"
        content[media_type] = {"schema": {"type": "string", "contentSchema": _ref(chunk)}}
    route = _get(summary, content)["get"]
    if is_ollama:
        route["responses"]["default"] = {"description": _OLLAMA_ERROR, "content": _json("OllamaError")}
    elif body:
        error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
        route["responses"]["200"] |= {"description": "The answer", "headers": _ANSWERED}
        route["responses"] |= {status: _error(status, error) for status in _ERRORS}
        if chunk:
            route["parameters"] = [_LAST_EVENT]
    if not body:
        return {"get": route}
    return {"post": {**route, "requestBody": {"required": True, "content": _json(body)}}}


def _get(summary: str, content: dict[str, Any], *errors: str, **more: Any) -> dict[str, Any]:
    answers = {"200": {"description": summary, "content": content}, **{status: _error(status) for status in errors}}
    return {"get": {"summary": summary, **more, "responses": answers}}


def _error(status: str, body: str = "Error") -> dict[str, Any]:
    headers = {"headers": _RETRY} if status in ("429", "503") else {}
    return {"description": _ERRORS[status], **headers, "content": _json(body)}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _json(name: str, anthropic: str = "") -> dict[str, Any]:
    """Return the JSON content with the schema `name`, or with schema `anthropic` for clients of Anthropic's API."""
    schema: dict[str, Any] = _ref(name)
    if anthropic:
        words = "Requests with the header anthropic-version receive the second form."
        schema = {"anyOf": [schema, _ref(anthropic)], "description": words}
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
