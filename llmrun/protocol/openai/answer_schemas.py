"""The JSON schemas of answers, for the OpenAPI document. Tests compare them with the bodies."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_NUMBER: Final[Schema] = {"type": "number"}
_FINGERPRINT: Final = "Identifies everything that can change the bytes of an answer."
_OPTIONAL_TEXT: Final[Schema] = {"type": ["string", "null"]}


def answer_schemas() -> dict[str, Schema]:
    """Return the schemas of everything that the server answers, by name."""
    return {
        "ToolCall": _tool_call(),
        "Usage": _usage(),
        "Timings": _timings(),
        "ChatCompletion": _answer("chat.completion", _chat_choice()),
        "ChatCompletionChunk": _chunk("chat.completion.chunk", _chat_chunk_choice()),
        "Completion": _answer("text_completion", _completion_choice(["string"])),
        "CompletionChunk": _chunk("text_completion", _completion_choice(["string", "null"])),
        "Model": _model(),
        "Models": _object(object={"const": "list"}, data={"type": "array", "items": _ref("Model")}),
        "Tokens": _tokens(),
        "Text": _object(content=_TEXT, prompt=_TEXT),
        "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_OPTIONAL_TEXT, code=_OPTIONAL_TEXT)),
    }


def _model() -> Schema:
    return _object(
        id=_TEXT,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_TEXT,
        max_model_len=_COUNT,
        system_fingerprint={**_TEXT, "description": _FINGERPRINT},
        default_sampling={"type": "object", "description": "The sampling of requests that do not set their own."},
        batch_invariant={"type": "boolean", "description": "Whether an answer is the same in any company."},
    )


def _answer(kind: str, choice: Schema) -> Schema:
    choices = {"type": "array", "items": choice}
    counts = {"usage": _ref("Usage"), "timings": _ref("Timings")}
    return _object(object={"const": kind}, **_head(), choices=choices, **counts)


def _chunk(kind: str, choice: Schema) -> Schema:
    schema = _object(object={"const": kind}, **_head(), choices={"type": "array", "items": choice})
    usage = {
        "anyOf": [_ref("Usage"), {"type": "null"}],
        "description": "Present only with stream_options.include_usage. Set only in the last chunk.",
    }
    timings = {**_ref("Timings"), "description": "Those of one choice, in the chunk with its finish reason."}
    return {**schema, "properties": {**schema["properties"], "usage": usage, "timings": timings}}


def _head() -> dict[str, Schema]:
    return {
        "id": _TEXT,
        "created": _COUNT,
        "model": _TEXT,
        "system_fingerprint": {**_TEXT, "description": _FINGERPRINT},
        "seed": {**_COUNT, "description": "The seed of choice 0. Send it again to get the same answer."},
    }


def _chat_choice() -> Schema:
    message = _object(role={"const": "assistant"}, content=_OPTIONAL_TEXT, refusal={"type": "null"})
    message["properties"] |= {
        "reasoning_content": {**_TEXT, "description": "The thinking before the answer, if there is any."},
        "tool_calls": {"type": "array", "items": _ref("ToolCall")},
    }
    return _object(index=_COUNT, message=message, logprobs=_chat_logprobs(), finish_reason=_reason(["string"]))


def _chat_chunk_choice() -> Schema:
    piece = {
        "type": "object",
        "required": ["index", "function"],
        "properties": {
            "index": _COUNT,
            "id": _TEXT,
            "type": {"const": "function"},
            "function": {"type": "object", "properties": {"name": _TEXT, "arguments": _TEXT}},
        },
    }
    delta = {
        "type": "object",
        "properties": {
            "role": {"const": "assistant"},
            "content": _TEXT,
            "reasoning_content": _TEXT,
            "tool_calls": {"type": "array", "items": piece},
        },
    }
    return _object(index=_COUNT, delta=delta, logprobs=_chat_logprobs(), finish_reason=_reason(["string", "null"]))


def _completion_choice(kinds: list[str]) -> Schema:
    logprobs = _object(
        tokens={"type": "array", "items": _TEXT},
        token_logprobs={"type": "array", "items": _NUMBER},
        top_logprobs={"type": ["array", "null"], "items": {"type": "object", "additionalProperties": _NUMBER}},
        text_offset={"type": "array", "items": _COUNT},
    )
    optional = {"anyOf": [logprobs, {"type": "null"}]}
    return _object(index=_COUNT, text=_TEXT, logprobs=optional, finish_reason=_reason(kinds))


def _chat_logprobs() -> Schema:
    one = {"token": _TEXT, "logprob": _NUMBER, "bytes": {"type": "array", "items": _COUNT}}
    token = _object(**one, top_logprobs={"type": "array", "items": _object(**one)})
    logprobs = _object(content={"type": "array", "items": token}, refusal={"type": "null"})
    return {"anyOf": [logprobs, {"type": "null"}]}


def _reason(kinds: list[str]) -> Schema:
    return {"type": kinds, "enum": ["stop", "length", "tool_calls", *([None] if "null" in kinds else [])]}


def _tool_call() -> Schema:
    return {
        "type": "object",
        "required": ["function"],
        "properties": {
            "id": _TEXT,
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": _TEXT, "arguments": {**_TEXT, "description": "A JSON object."}},
            },
        },
    }


def _usage() -> Schema:
    return _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
        completion_tokens_details=_object(reasoning_tokens=_COUNT),
    )


def _timings() -> Schema:
    schema = _object(
        cache_n=_COUNT,
        prompt_n=_COUNT,
        prompt_ms=_NUMBER,
        prompt_per_token_ms=_NUMBER,
        prompt_per_second=_NUMBER,
        predicted_n=_COUNT,
        predicted_ms=_NUMBER,
        predicted_per_token_ms=_NUMBER,
        predicted_per_second=_NUMBER,
    )
    schema["properties"] |= {"draft_n": _COUNT, "draft_n_accepted": _COUNT}
    return schema


def _tokens() -> Schema:
    piece = _object(id=_COUNT, piece={"anyOf": [_TEXT, {"type": "array", "items": _COUNT}]})
    tokens = {"type": "array", "items": {"anyOf": [_COUNT, piece]}}
    return _object(tokens=tokens, count=_COUNT, max_model_len=_COUNT)


def _object(**properties: Schema) -> Schema:
    """Return the schema of an object that always has these properties."""
    return {"type": "object", "required": [*properties], "properties": properties}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
