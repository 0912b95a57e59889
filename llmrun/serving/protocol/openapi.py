"""The OpenAPI document of the server, which describes every route."""

from __future__ import annotations

from typing import Any, Final

from llmrun.serving.protocol.anthropic.schemas import anthropic_schemas
from llmrun.serving.protocol.embeddings import embedding_schemas
from llmrun.serving.protocol.ollama.openapi import ollama_paths, ollama_schemas
from llmrun.serving.protocol.openai.messages import NAME
from llmrun.serving.protocol.openai.schemas import (
    answer_schemas,
    chat_request,
    completion_request,
    detokenize_request,
    infill_request,
    message,
    tokenize_request,
)
from llmrun.serving.protocol.openai_responses.schemas import response_schemas

_PUBLIC: Final[dict[str, Any]] = {"security": []}
# The errors of routes that use the model
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
    "retry-after-ms": {"schema": {"type": "integer"}, "description": "The same in milliseconds."},
}
_LAST_EVENT: Final = {
    "name": "Last-Event-ID",
    "in": "header",
    "schema": {"type": "string"},
    "description": "Continue a stream after the event with this ID. The body must be the same.",
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
            "summary": "A server for local models, with the APIs of OpenAI, Anthropic and Ollama",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "security": [{"key": []}, {}],
        "paths": {**_paths(), **ollama_paths()},
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "ChatRequest": chat_request(),
                "CompletionRequest": completion_request(),
                "InfillRequest": infill_request(),
                "Message": message(),
                "Tool": _tool(),
                "TokenizeRequest": tokenize_request(),
                "DetokenizeRequest": detokenize_request(),
                **answer_schemas(),
                **ollama_schemas(),
                **anthropic_schemas(),
                **response_schemas(),
                **embedding_schemas(),
            },
        },
    }


def _paths() -> dict[str, Any]:
    model_id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    model = _get("Get a model", _json("Model", "AnthropicModel"), {"404": _ERRORS["404"]})
    return {
        "/v1/chat/completions": _post(
            "Answer a conversation", "ChatRequest", _streamed("ChatCompletion", "ChatCompletionChunk")
        ),
        "/v1/completions": _post("Continue a text", "CompletionRequest", _streamed("Completion", "CompletionChunk")),
        "/v1/responses": _post(
            "Answer a conversation, as items", "ResponseRequest", _streamed("Response", "ResponseEvent")
        ),
        "/infill": _post("Fill in the middle of a text", "InfillRequest", _streamed("Infill", "InfillChunk")),
        "/v1/messages": _post(
            "Answer a conversation, as in Anthropic's API",
            "MessageRequest",
            _streamed("AnthropicMessage", "MessageEvent"),
            "AnthropicError",
        ),
        "/v1/messages/count_tokens": _post(
            "Count the tokens of a conversation", "MessageCountRequest", _json("MessageCount"), "AnthropicError"
        ),
        "/v1/embeddings": _post("Compute embeddings of texts", "EmbeddingRequest", _json("Embeddings")),
        "/v1/rerank": _post("Rank documents for a query", "RerankRequest", _json("Ranking")),
        "/v1/models": _get("List the models that requests may name", _json("Models", "AnthropicModels")),
        "/v1/models/{id}": {**model, "parameters": [model_id]},
        "/tokenize": _post("Turn a text into tokens", "TokenizeRequest", _json("Tokens")),
        "/detokenize": _post("Turn tokens into a text", "DetokenizeRequest", _json("Text")),
        "/lora-adapters": _get("List the LoRA adapters that requests may use", _json("Adapters")),
        "/": _get("Show the chat page", {"text/html": {"schema": {"type": "string"}}}, **_PUBLIC),
        "/health": _get(
            "Report whether the server is ready",
            {"application/json": {"schema": {"type": "object"}}},
            {"503": _ERRORS["503"]},
            **_PUBLIC,
        ),
        "/metrics": _get("Report counters for Prometheus", {"text/plain": {"schema": {"type": "string"}}}),
        "/openapi.json": _get("Return this document", {"application/json": {"schema": {"type": "object"}}}),
    }


def _post(summary: str, body: str, content: dict[str, Any], error: str = "Error") -> dict[str, Any]:
    return {
        "post": {
            "summary": summary,
            **({"parameters": [_LAST_EVENT]} if "text/event-stream" in content else {}),
            "requestBody": {"required": True, "content": _json(body)},
            "responses": {
                "200": {"description": "The answer", "headers": _ANSWERED, "content": content},
                **{status: _error(status, words, error) for status, words in _ERRORS.items()},
            },
        }
    }


def _get(summary: str, content: dict[str, Any], errors: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    failed = {status: _error(status, words) for status, words in (errors or {}).items()}
    answer = {"description": summary, "content": content}
    return {"get": {"summary": summary, **more, "responses": {"200": answer, **failed}}}


def _error(status: str, words: str, body: str = "Error") -> dict[str, Any]:
    headers = {"headers": _RETRY} if status in ("429", "503") else {}
    return {"description": words, **headers, "content": _json(body)}


def _json(name: str, anthropic: str = "") -> dict[str, Any]:
    """Return the content of JSON with this schema, or with the second one if the client asks for Anthropic's form."""
    schema: dict[str, Any] = {"$ref": f"#/components/schemas/{name}"}
    if anthropic:
        other = {"$ref": f"#/components/schemas/{anthropic}"}
        schema = {
            "anyOf": [schema, other],
            "description": "Requests with a header anthropic-version get the second form.",
        }
    return {"application/json": {"schema": schema}}


def _streamed(whole: str, chunk: str) -> dict[str, Any]:
    """Return the content of an answer that is one body, or a stream of chunks."""
    reference = f"#/components/schemas/{chunk}"
    return {**_json(whole), "text/event-stream": {"schema": {"type": "string", "contentSchema": {"$ref": reference}}}}


def _tool() -> dict[str, Any]:
    function = {
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "pattern": f"^{NAME}$"},
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
