"""The OpenAPI document of the server, which describes every route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, NotRequired, TypedDict

from llmrun.serving.protocol import embeddings, llama_facts, llama_server, tokens
from llmrun.serving.protocol.anthropic import objects as anthropic
from llmrun.serving.protocol.declarations import Schema, kind_of, schemas
from llmrun.serving.protocol.ollama import objects as ollama
from llmrun.serving.protocol.ollama.answers import MEDIA_TYPE, PREFIX
from llmrun.serving.protocol.openai import objects as openai
from llmrun.serving.protocol.openai_responses import objects as responses

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
    "x-llmrun-context": {
        "schema": {"type": "integer"},
        "description": "The size of the context in tokens. Sent if the request's `num_ctx` is larger.",
    },
    "x-llmrun-ignored": {"schema": {"type": "string"}, "description": "The fields of the request that have no effect."},
    "x-llmrun-wait": {"schema": {"type": "number"}, "description": "The predicted seconds in the queue."},
    "x-llmrun-first-token": {
        "schema": {"type": "number"},
        "description": "The predicted seconds until the first token. Missing if unknown.",
    },
    "x-llmrun-prefix": {
        "schema": {"type": "string"},
        "description": "How many tokens of the prompt were reused, and why not more.",
    },
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


class Health(TypedDict):
    """The state of the server, which is "ok" if the server is ready. Otherwise, `error` has llama-server's form."""

    status: str
    error: NotRequired[llama_server.Problem]


class Route(NamedTuple):
    """A route with JSON answers, and the declared types of its request, its answer and the chunks of its streams.

    The method is POST if there is a request type, and otherwise GET.
    """

    path: str
    summary: str
    request: Any
    answer: Any
    chunk: Any = None


ROUTES: Final = (
    Route(
        "/v1/chat/completions",
        "Answer a conversation",
        openai.ChatRequest,
        openai.ChatCompletion,
        openai.ChatCompletionChunk | openai.Error,
    ),
    Route(
        "/v1/completions",
        "Continue a text",
        openai.CompletionRequest,
        openai.Completion,
        openai.CompletionChunk | openai.Error,
    ),
    Route(
        "/v1/responses",
        "Answer a conversation, as in OpenAI's Responses API",
        responses.ResponseRequest,
        responses.Response,
        responses.ResponseEvent,
    ),
    Route(
        "/completion",
        "Continue a text, as in llama-server",
        llama_server.LlamaCompletionRequest,
        llama_server.LlamaCompletion | list[llama_server.LlamaCompletion],
        llama_server.LlamaCompletionChunk | llama_server.LlamaCompletion | llama_server.LlamaServerError,
    ),
    Route(
        "/infill",
        "Fill in the middle of a text",
        llama_server.InfillRequest,
        llama_server.LlamaCompletion | list[llama_server.LlamaCompletion],
        llama_server.LlamaCompletionChunk | llama_server.LlamaCompletion | llama_server.LlamaServerError,
    ),
    Route(
        "/apply-template",
        "Return the text of a conversation's prompt",
        openai.ChatRequest,
        llama_facts.RenderedPrompt,
    ),
    Route("/props", "Describe a model, as in llama-server", None, llama_facts.Props),
    Route("/slots", "List the slots for running requests, as in llama-server", None, list[llama_facts.Slot]),
    Route(
        "/v1/messages",
        "Answer a conversation, as in Anthropic's API",
        anthropic.MessageRequest,
        anthropic.AnthropicMessage,
        anthropic.MessageEvent,
    ),
    Route(
        "/v1/messages/count_tokens",
        "Count the tokens of a conversation",
        anthropic.MessageCountRequest,
        anthropic.MessageCount,
    ),
    Route("/v1/embeddings", "Compute embeddings of texts", embeddings.EmbeddingRequest, embeddings.Embeddings),
    Route("/v1/rerank", "Rank documents for a query", embeddings.RerankRequest, embeddings.Ranking),
    Route("/tokenize", "Turn a text into tokens", tokens.TokenizeRequest, tokens.Tokens),
    Route("/detokenize", "Turn tokens into a text", tokens.DetokenizeRequest, tokens.Text),
    Route("/tokenizer_info", "Describe the tokenizer, as in vLLM", None, tokens.TokenizerInfo),
    Route("/lora-adapters", "List the LoRA adapters that requests may use", None, list[openai.Adapter]),
    Route(
        "/api/chat",
        "Answer a conversation, as in Ollama's API",
        ollama.OllamaChatRequest,
        ollama.OllamaChat,
        ollama.OllamaChat | ollama.OllamaError,
    ),
    Route(
        "/api/generate",
        "Continue a prompt, as in Ollama's API",
        ollama.OllamaGenerateRequest,
        ollama.OllamaText,
        ollama.OllamaText | ollama.OllamaError,
    ),
    Route(
        "/api/embed",
        "Compute embeddings, as in Ollama's API",
        embeddings.OllamaEmbedRequest,
        embeddings.OllamaEmbeddings,
    ),
    Route(
        "/api/embeddings",
        "Compute an embedding that is not normalized",
        embeddings.OllamaEmbeddingsRequest,
        embeddings.OllamaEmbedding,
    ),
    Route("/api/tags", "List the models that requests may name", None, ollama.OllamaModels),
    Route("/api/ps", "List the models in memory", None, ollama.OllamaLoadedModels),
    Route("/api/show", "Describe a model", ollama.OllamaShowRequest, ollama.OllamaModelFacts),
    Route("/api/version", "Return the supported version of Ollama's API", None, ollama.OllamaVersion),
)
_OTHERS: Final = (
    Health,
    openai.Models,
    anthropic.AnthropicModels,
    openai.Model,
    anthropic.AnthropicModel,
    openai.Error,
    anthropic.AnthropicError,
    llama_server.LlamaServerError,
    ollama.OllamaError,
)


def document(version: str) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. `version` is llmrun's version."""
    declared = [each for route in ROUTES for each in (route.request, route.answer, route.chunk) if each is not None]
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
            "schemas": schemas(*declared, *_OTHERS),
        },
    }


def _paths() -> dict[str, Any]:
    found = {route.path: _described(route) for route in ROUTES}
    found |= {
        "/v1/models": _get("List the models that requests may name", _either(openai.Models, anthropic.AnthropicModels)),
        "/v1/models/{id}": {
            **_get("Get a model", _either(openai.Model, anthropic.AnthropicModel), "404"),
            "parameters": [_in_path("id")],
        },
        "/": _get("Show the chat page", {"text/html": {"schema": {"type": "string"}}}, security=[]),
        "/health": _get("Report whether the server is ready", _json(Health), security=[]),
        "/metrics": _get("Report counters for Prometheus", {"text/plain": {"schema": {"type": "string"}}}),
        "/openapi.json": _get("Return this document", {"application/json": {"schema": {"type": "object"}}}),
    }
    found["/health"]["get"]["responses"]["503"] = {"description": _ERRORS["503"], "content": _json(Health)}
    for path, words in MISSING.items():
        method = "delete" if path == "/api/delete" else "post"
        parameters = {"parameters": [_in_path("digest")]} if "{digest}" in path else {}
        answer = {"501": {"description": words, "content": _json(ollama.OllamaError)}}
        found[path] = {method: {"summary": f"Not supported: {words}", **parameters, "responses": answer}}
    return found


def _described(route: Route) -> dict[str, Any]:
    """Return a mapping from the route's method to the description."""
    is_ollama, content = route.path.startswith(PREFIX), _json(route.answer)
    if route.chunk is not None:
        media_type = MEDIA_TYPE if is_ollama else "text/event-stream"
        content[media_type] = {"schema": {"type": "string", "contentSchema": _schema(route.chunk)}}
    answers: dict[str, Any] = {"200": {"description": "The answer", "content": content}}
    found: dict[str, Any] = {"summary": route.summary, "responses": answers}
    if is_ollama:
        answers["default"] = {"description": _OLLAMA_ERROR, "content": _json(ollama.OllamaError)}
    else:
        answers |= {status: _error(status, _error_of(route)) for status in _ERRORS}
    if route.request is None:
        return {"get": found}
    answers["200"]["headers"] = _ANSWERED
    if route.chunk is not None and not is_ollama:
        found["parameters"] = [_LAST_EVENT]
    return {"post": {**found, "requestBody": {"required": True, "content": _json(route.request)}}}


_LLAMA_SERVER: Final = ("/completion", "/infill", "/apply-template", "/props", "/slots")


def _error_of(route: Route) -> Any:
    if route.path.startswith("/v1/messages"):
        return anthropic.AnthropicError
    return llama_server.LlamaServerError if route.path in _LLAMA_SERVER else openai.Error


def _get(summary: str, content: dict[str, Any], *errors: str, **more: Any) -> dict[str, Any]:
    refusals = ("403",) if "security" in more else ("401", "403")
    answers = {"200": {"description": "The answer", "content": content}}
    answers |= {status: _error(status) for status in (*refusals, *errors)}
    return {"get": {"summary": summary, **more, "responses": answers}}


def _error(status: str, body: Any = openai.Error) -> dict[str, Any]:
    headers = {"headers": _RETRY} if status in ("429", "503") else {}
    return {"description": _ERRORS[status], **headers, "content": _json(body)}


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _json(declared: Any) -> dict[str, Any]:
    """Return the content of a JSON body of a declared type."""
    return {"application/json": {"schema": _schema(declared)}}


def _either(openai: Any, anthropic: Any) -> dict[str, Any]:
    """Return the content of a JSON body whose type depends on the client's API."""
    words = "Requests with the header anthropic-version receive the second type."
    return {"application/json": {"schema": {**_schema(openai | anthropic), "description": words}}}


def _schema(declared: Any) -> Schema:
    return kind_of(declared).schema({})
