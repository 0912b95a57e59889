"""The part of the OpenAPI document about Ollama's API, and the routes of this API that the server does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from llmrun.serving.protocol.ollama.answers import MEDIA_TYPE
from llmrun.serving.protocol.ollama.requests import LEVELS
from llmrun.serving.protocol.openai.options import MOST_LOGPROBS
from llmrun.serving.protocol.openai.schemas import sampling_fields, stop_strings, token_logprobs, tool_fields
from llmrun.serving.protocol.wire import BOOLEAN, COUNT, TEXT, Schema, fixed_object, ref

_PULL: Final = "run `llmrun pull NAME` on the server's machine"
# Missing routes -> the error, and what to do instead
MISSING: Final[Mapping[str, str]] = {
    "/api/pull": f"models cannot be downloaded over HTTP: {_PULL}",
    "/api/create": "models cannot be created over HTTP: add a preset to models.toml on the server's machine",
    "/api/delete": "models cannot be deleted over HTTP: run `llmrun rm NAME` on the server's machine",
    "/api/copy": "models cannot be copied over HTTP: add a preset to models.toml on the server's machine",
    "/api/push": "models cannot be published",
    "/api/blobs/{digest}": f"files cannot be uploaded: {_PULL}",
}


_TIME: Final[Schema] = {"type": "string", "format": "date-time"}
_NANOSECONDS: Final[Schema] = {**COUNT, "description": "In nanoseconds."}
_NONE: Final = "Only an empty list is supported."
_ERRORS: Final = "An error. 501 means that this server does not have the route, and the text says what to do instead."


def ollama_paths() -> dict[str, Any]:
    """Return the routes."""
    found = {
        "/api/chat": _post("Answer a conversation, as in Ollama's API", "OllamaChatRequest", _lines("OllamaChat")),
        "/api/generate": _post("Continue a prompt, as in Ollama's API", "OllamaGenerateRequest", _lines("OllamaText")),
        "/api/embed": _post("Compute embeddings, as in Ollama's API", "OllamaEmbedRequest", _json("OllamaEmbeddings")),
        "/api/embeddings": _post(
            "Compute an embedding that is not normalized", "OllamaEmbeddingsRequest", _json("OllamaEmbedding")
        ),
        "/api/tags": _get("List the models that requests may name", "OllamaModels"),
        "/api/ps": _get("List the models in memory", "OllamaLoadedModels"),
        "/api/show": _post("Describe a model", "OllamaShowRequest", _json("OllamaModelFacts")),
        "/api/version": _get("Return the version of Ollama whose API this is", "OllamaVersion"),
    }
    digest = {"name": "digest", "in": "path", "required": True, "schema": TEXT}
    for path, words in MISSING.items():
        method = "delete" if path == "/api/delete" else "post"
        parameters = {"parameters": [digest]} if "{digest}" in path else {}
        answer = {"501": {"description": words, "content": _json("OllamaError")}}
        found[path] = {method: {"summary": f"Not supported: {words}", **parameters, "responses": answer}}
    return found


def ollama_schemas() -> dict[str, Schema]:
    """Return the schemas of requests and answers by name."""
    message = fixed_object(role={"const": "assistant"}, content=TEXT)
    message["properties"] |= {"thinking": TEXT, "tool_calls": _list(ref("OllamaToolCall"))}
    return {
        "OllamaChatRequest": _chat_request(),
        "OllamaGenerateRequest": _generate_request(),
        "OllamaOptions": _options(),
        "OllamaMessage": _message(),
        "OllamaToolCall": _tool_call(),
        "OllamaChat": _answer({"message": message}, {}),
        "OllamaText": _answer({"response": TEXT}, {"thinking": TEXT}),
        "OllamaShowRequest": _show_request(),
        "OllamaModelFacts": _model_facts(),
        "OllamaModels": fixed_object(models=_list(_listed(modified_at=_TIME))),
        "OllamaLoadedModels": fixed_object(
            models=_list(_listed(size_vram=COUNT, expires_at=_TIME, context_length=COUNT))
        ),
        "OllamaVersion": fixed_object(version=TEXT, llmrun=TEXT),
        "OllamaError": fixed_object(error=TEXT),
    }


def _chat_request() -> Schema:
    messages = _list(ref("OllamaMessage"))
    messages["description"] = "Without messages, the model is only loaded, or unloaded if `keep_alive` is 0."
    return {"type": "object", "properties": {"messages": messages, **tool_fields(), **_common()}}


def _generate_request() -> Schema:
    properties = {
        "prompt": {
            **TEXT,
            "description": "The text of a user's message. Without it, the model is only loaded, or unloaded if "
            "`keep_alive` is 0.",
        },
        "suffix": {
            **TEXT,
            "description": "The text after the answer, which then fills the gap after the prompt. Not with `system` or "
            "`raw`, and only if the model can fill in the middle.",
        },
        "system": {**TEXT, "description": "The text of the system message."},
        "raw": {**BOOLEAN, "description": "Continue the prompt itself, without the chat template."},
        "images": {"type": "array", "maxItems": 0, "description": _NONE},
        "context": {"type": "array", "maxItems": 0, "description": f"{_NONE} Use /api/chat."},
        "template": {"const": "", "description": "The model's own template is used."},
        **_common(),
    }
    return {"type": "object", "properties": properties}


def _common() -> dict[str, Schema]:
    """Return the schemas of the fields that both routes share."""
    return {
        "model": {**TEXT, "description": "A model's name. If it is missing, the server's first model answers."},
        "stream": {**BOOLEAN, "description": "Send the answer in lines of JSON. On by default."},
        "think": {
            "anyOf": [BOOLEAN, {"enum": [*LEVELS]}],
            "description": "Turn thinking on or off. An error if it is on and the model does not think.",
        },
        "format": {"anyOf": [{"enum": ["json", ""]}, {"type": "object"}], "description": "JSON, or a JSON schema."},
        "options": ref("OllamaOptions"),
        "keep_alive": {
            "anyOf": [{"type": "number"}, {"type": "string", "pattern": "^-?([0-9]+(\\.[0-9]+)?(ms|s|m|h|d|))+$"}],
            "description": "How long the model stays loaded: seconds, a duration such as 5m, or -1 for forever.",
        },
        "logprobs": {**BOOLEAN, "description": "Return the log-probability of every token."},
        "top_logprobs": {
            **COUNT,
            "maximum": MOST_LOGPROBS,
            "description": "The number of likeliest tokens to return at each position. Needs `logprobs`.",
        },
        "truncate": {"const": False, "description": "Prompts are never truncated."},
        "shift": {"const": False, "description": "The context is never shifted."},
        "_debug_render_only": {"const": False, "description": "Not supported."},
    }


def _options() -> Schema:
    properties = {
        **sampling_fields(),
        "stop": stop_strings(),
        "num_predict": {
            "type": "integer",
            "minimum": -2,
            "not": {"const": 0},
            "description": "The maximum number of generated tokens, including thinking; -1 or -2 for no limit.",
        },
        "num_ctx": {
            "type": "integer",
            "minimum": 1,
            "description": "An error if it is larger than the server's context. Other values have no effect.",
        },
    }
    words = "Options that a server sets when it starts, such as num_gpu, have no effect."
    return {"type": "object", "properties": properties, "description": words}


def _message() -> Schema:
    return {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": ["system", "user", "assistant", "tool"]},
            "content": TEXT,
            "thinking": {**TEXT, "description": "The thinking before a past answer."},
            "tool_calls": _list(ref("OllamaToolCall")),
            "tool_name": {**TEXT, "description": "The tool that returned this result."},
            "tool_call_id": {
                **TEXT,
                "description": "The call with this result. Without it, a result belongs to the first call of its tool "
                "that has none.",
            },
            "images": {"type": "array", "maxItems": 0, "description": _NONE},
        },
    }


def _tool_call() -> Schema:
    function = fixed_object(name=TEXT, arguments={"type": "object"})
    function["properties"]["index"] = COUNT
    call = fixed_object(function=function)
    call["properties"]["id"] = TEXT
    return call


def _answer(text: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    """Return the schema of an answer and of the lines of a stream. Only the last line has the counts."""
    found = fixed_object(model=TEXT, created_at=_TIME, **text, done=BOOLEAN)
    found["properties"] |= {
        **optional,
        "logprobs": _list(token_logprobs()),
        "done_reason": {
            "enum": ["stop", "length", "load", "unload"],
            "description": "Tool calls that were cut off by the limit of tokens are left out.",
        },
        "total_duration": _NANOSECONDS,
        "load_duration": {"const": 0, "description": "The times begin when the model is loaded."},
        "prompt_eval_count": COUNT,
        "prompt_eval_duration": _NANOSECONDS,
        "eval_count": COUNT,
        "eval_duration": _NANOSECONDS,
        "seed": {**COUNT, "description": "llmrun's own. Send it in `options` to get the same answer."},
        "system_fingerprint": {**TEXT, "description": "llmrun's own. See ChatCompletion."},
        "timings": ref("Timings"),
    }
    return found


def _show_request() -> Schema:
    properties = {
        "model": TEXT,
        "name": {**TEXT, "description": "The old name of `model`."},
        "verbose": {"const": False},
    }
    return {"type": "object", "required": ["model"], "properties": properties}


def _model_facts() -> Schema:
    found = fixed_object(
        modified_at=_TIME,
        details=_details(),
        model_info={
            "type": "object",
            "description": "The keys of the file whose values are not lists. If the model is loaded, its context "
            "length is that of the server.",
        },
        capabilities={
            **_list({"enum": ["completion", "embedding", "tools", "thinking", "insert"]}),
            "description": "If the model is not loaded, they are guessed from the text of the template.",
        },
        template={**TEXT, "description": "The chat template in the file."},
        parameters={**TEXT, "description": "The defaults of some options, one in each line, if the model is loaded."},
    )
    found["properties"] |= {"license": TEXT, "system": {**TEXT, "description": "The system prompt of a preset."}}
    return found


def _listed(**more: Schema) -> Schema:
    digest = {**TEXT, "description": "Changes when the file changes. It is the sha256 of the file if that is known."}
    return fixed_object(name=TEXT, model=TEXT, size=COUNT, digest=digest, details=_details(), **more)


def _details() -> Schema:
    return fixed_object(
        parent_model=TEXT,
        format=TEXT,
        family=TEXT,
        families=_list(TEXT),
        parameter_size=TEXT,
        quantization_level=TEXT,
        context_length=COUNT,
    )


def _post(summary: str, body: str, content: dict[str, Any]) -> dict[str, Any]:
    request = {"required": True, "content": _json(body)}
    return {"post": {"summary": summary, "requestBody": request, "responses": _responses(summary, content)}}


def _get(summary: str, answer: str) -> dict[str, Any]:
    return {"get": {"summary": summary, "responses": _responses(summary, _json(answer))}}


def _responses(summary: str, content: dict[str, Any]) -> dict[str, Any]:
    errors = {"description": _ERRORS, "content": _json("OllamaError")}
    return {"200": {"description": summary, "content": content}, "default": errors}


def _lines(name: str) -> dict[str, Any]:
    reference = ref(name)
    return {**_json(name), MEDIA_TYPE: {"schema": {"type": "string", "contentSchema": reference}}}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": ref(name)}}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}
