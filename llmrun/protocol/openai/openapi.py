"""The OpenAPI document of the server, which describes every route."""

from __future__ import annotations

from typing import Any, Final

from llmrun.protocol.openai.answer_schemas import answer_schemas
from llmrun.protocol.openai.request_schemas import (
    chat_request,
    completion_request,
    detokenize_request,
    message,
    tokenize_request,
)

_PUBLIC: Final[dict[str, Any]] = {"security": []}
# The errors of routes that use the model
_ERRORS: Final = {
    "400": "The request is invalid. `param` names the field.",
    "401": "The API key is missing or wrong.",
    "403": "The host name or the origin of the web page is not allowed.",
    "404": "The server has no model with this name.",
    "408": "The body did not arrive in time.",
    "413": "The body is too large.",
    "415": "The body is not JSON, or is compressed.",
    "422": "The answer cannot have the requested format.",
    "429": "The queue is full, or the predicted wait is too long. Try again after the time in `retry-after`.",
    "500": "The server failed.",
    "503": "The model is loading or restarting, or the server is shutting down.",
}
_RETRY: Final = {
    "retry-after": {"schema": {"type": "integer"}, "description": "Seconds until the server expects to have room."},
    "retry-after-ms": {"schema": {"type": "integer"}, "description": "The same in milliseconds."},
}
_ANSWERED: Final = {
    "x-llmrun-ignored": {"schema": {"type": "string"}, "description": "The fields of the request that have no effect."},
    "x-llmrun-wait": {"schema": {"type": "number"}, "description": "The predicted seconds in the queue."},
}


def document(version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. `version` is llmrun's version."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "llmrun",
            "version": version,
            "summary": "An OpenAI-compatible server for a local model",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "security": [{"key": []}, {}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "ChatRequest": chat_request(),
                "CompletionRequest": completion_request(),
                "Message": message(),
                "Tool": _tool(),
                "TokenizeRequest": tokenize_request(),
                "DetokenizeRequest": detokenize_request(),
                **answer_schemas(),
            },
        },
    }


def _paths() -> dict[str, Any]:
    model_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    model = _get("Get the served model", _json("Model"), {"404": _ERRORS["404"]})
    return {
        "/v1/chat/completions": _post(
            "Answer a conversation", "ChatRequest", _streamed("ChatCompletion", "ChatCompletionChunk")
        ),
        "/v1/completions": _post("Continue a text", "CompletionRequest", _streamed("Completion", "CompletionChunk")),
        "/v1/models": _get("List the served model", _json("Models")),
        "/v1/models/{id}": {**model, "parameters": [model_id]},
        "/tokenize": _post("Turn a text into tokens", "TokenizeRequest", _json("Tokens")),
        "/detokenize": _post("Turn tokens into a text", "DetokenizeRequest", _json("Text")),
        "/health": _get(
            "Report whether the model is ready",
            {"application/json": {"schema": {"type": "object"}}},
            {"503": _ERRORS["503"]},
            **_PUBLIC,
        ),
        "/metrics": _get("Report counters for Prometheus", {"text/plain": {"schema": {"type": "string"}}}),
        "/openapi.json": _get("Return this document", {"application/json": {"schema": {"type": "object"}}}),
    }


def _post(summary: str, body: str, content: dict[str, Any]) -> dict[str, Any]:
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _json(body)},
            "responses": {
                "200": {"description": "The answer", "headers": _ANSWERED, "content": content},
                **{status: _error(status, words) for status, words in _ERRORS.items()},
            },
        }
    }


def _get(summary: str, content: dict[str, Any], errors: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    failed = {status: _error(status, words) for status, words in (errors or {}).items()}
    answer = {"description": summary, "content": content}
    return {"get": {"summary": summary, **more, "responses": {"200": answer, **failed}}}


def _error(status: str, words: str) -> dict[str, Any]:
    headers = {"headers": _RETRY} if status in ("429", "503") else {}
    return {"description": words, **headers, "content": _json("Error")}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _streamed(whole: str, chunk: str) -> dict[str, Any]:
    """Return the content of an answer that is one body, or a stream of chunks that ends with [DONE]."""
    reference = f"#/components/schemas/{chunk}"
    return {**_json(whole), "text/event-stream": {"schema": {"type": "string", "contentSchema": {"$ref": reference}}}}


def _tool() -> dict[str, Any]:
    function = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
            "description": {"type": "string"},
            "parameters": {"type": "object", "description": "The JSON schema of the arguments."},
            "strict": {"type": "boolean", "description": "Refuse the tool if its schema cannot be enforced."},
        },
    }
    return {
        "type": "object",
        "required": ["function"],
        "properties": {"type": {"const": "function"}, "function": function},
    }
