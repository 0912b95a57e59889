"""The JSON schemas of answers, for the OpenAPI document. Tests compare them with the bodies."""

from __future__ import annotations

from llmrun.serving.protocol.schemas import (
    BOOLEAN,
    COUNT,
    FINGERPRINT,
    NUMBER,
    OPTIONAL_TEXT,
    TEXT,
    Schema,
    fixed_object,
    ref,
)


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
        "Infill": {"anyOf": [_infill(), {"type": "array", "items": _infill(), "description": "Several choices."}]},
        "InfillChunk": {"anyOf": [_infill_chunk(), _infill()]},
        "Model": _model(),
        "Models": fixed_object(object={"const": "list"}, data={"type": "array", "items": ref("Model")}),
        "Tokens": _tokens(),
        "Text": fixed_object(content=TEXT, prompt=TEXT),
        "Adapters": {"type": "array", "items": _adapter()},
        "Error": fixed_object(error=fixed_object(message=TEXT, type=TEXT, param=OPTIONAL_TEXT, code=OPTIONAL_TEXT)),
    }


def _adapter() -> Schema:
    always = fixed_object(id=COUNT, name=TEXT, scale={"type": "number"})
    tokens = {"type": "array", "items": COUNT, "description": "The tokens that activate the adapter, if it has any."}
    return {**always, "properties": {**always["properties"], "alora_invocation_tokens": tokens}}


def _model() -> Schema:
    always = fixed_object(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT)
    others = {
        "parent": {**TEXT, "description": "The name of the model, if this is the name of a LoRA adapter."},
        "max_model_len": COUNT,
        "system_fingerprint": {**TEXT, "description": FINGERPRINT},
        "default_sampling": {"type": "object", "description": "The sampling of requests that do not set their own."},
        "batch_invariant": {"type": "boolean", "description": "Whether an answer is the same in any company."},
    }
    return {**always, "properties": {**always["properties"], **others}}


def _answer(kind: str, choice: Schema) -> Schema:
    choices = {"type": "array", "items": choice}
    counts = {"usage": ref("Usage"), "timings": ref("Timings")}
    return fixed_object(object={"const": kind}, **_head(), choices=choices, **counts)


def _chunk(kind: str, choice: Schema) -> Schema:
    schema = fixed_object(object={"const": kind}, **_head(), choices={"type": "array", "items": choice})
    usage = {
        "anyOf": [ref("Usage"), {"type": "null"}],
        "description": "Present only with stream_options.include_usage. Set only in the last chunk.",
    }
    timings = {**ref("Timings"), "description": "Those of one choice, in the chunk with its finish reason."}
    return {**schema, "properties": {**schema["properties"], "usage": usage, "timings": timings}}


def _head() -> dict[str, Schema]:
    return {
        "id": TEXT,
        "created": COUNT,
        "model": TEXT,
        "system_fingerprint": {**TEXT, "description": FINGERPRINT},
        "seed": {**COUNT, "description": "The seed of choice 0. Send it again to get the same answer."},
    }


def _chat_choice() -> Schema:
    message = fixed_object(role={"const": "assistant"}, content=OPTIONAL_TEXT, refusal={"type": "null"})
    message["properties"] |= {
        "reasoning_content": {**TEXT, "description": "The thinking before the answer, if there is any."},
        "tool_calls": {"type": "array", "items": ref("ToolCall")},
    }
    return fixed_object(index=COUNT, message=message, logprobs=_chat_logprobs(), finish_reason=_reason(["string"]))


def _chat_chunk_choice() -> Schema:
    piece = {
        "type": "object",
        "required": ["index", "function"],
        "properties": {
            "index": COUNT,
            "id": TEXT,
            "type": {"const": "function"},
            "function": {"type": "object", "properties": {"name": TEXT, "arguments": TEXT}},
        },
    }
    delta = {
        "type": "object",
        "properties": {
            "role": {"const": "assistant"},
            "content": TEXT,
            "reasoning_content": TEXT,
            "tool_calls": {"type": "array", "items": piece},
        },
    }
    return fixed_object(index=COUNT, delta=delta, logprobs=_chat_logprobs(), finish_reason=_reason(["string", "null"]))


def _completion_choice(kinds: list[str]) -> Schema:
    logprobs = fixed_object(
        tokens={"type": "array", "items": TEXT},
        token_logprobs={"type": "array", "items": NUMBER},
        top_logprobs={"type": ["array", "null"], "items": {"type": "object", "additionalProperties": NUMBER}},
        text_offset={"type": "array", "items": COUNT},
    )
    optional = {"anyOf": [logprobs, {"type": "null"}]}
    return fixed_object(index=COUNT, text=TEXT, logprobs=optional, finish_reason=_reason(kinds))


def _infill() -> Schema:
    schema = fixed_object(
        **_infill_head(stop=True),
        model=TEXT,
        system_fingerprint={**TEXT, "description": FINGERPRINT},
        generation_settings={"type": "object", "description": "The settings that decided the answer, with its seed."},
        has_new_line=BOOLEAN,
        truncated={**BOOLEAN, "description": "Whether a part of the texts was left out because they are too long."},
        stop_type={"enum": ["eos", "word", "limit"]},
        stopping_word=TEXT,
        tokens_cached=COUNT,
        timings=ref("Timings"),
    )
    schema["properties"] |= {"completion_probabilities": _probabilities()}
    return schema


def _infill_chunk() -> Schema:
    schema = fixed_object(**_infill_head(stop=False))
    schema["properties"] |= {"completion_probabilities": _probabilities()}
    return schema


def _infill_head(*, stop: bool) -> dict[str, Schema]:
    return {
        "index": COUNT,
        "content": TEXT,
        "tokens": {"type": "array", "items": COUNT},
        "stop": {"const": stop},
        "tokens_predicted": COUNT,
        "tokens_evaluated": COUNT,
    }


def _probabilities() -> Schema:
    return {"type": "array", "items": token_logprobs(id=COUNT)}


def _chat_logprobs() -> Schema:
    logprobs = fixed_object(content={"type": "array", "items": token_logprobs()}, refusal={"type": "null"})
    return {"anyOf": [logprobs, {"type": "null"}]}


def token_logprobs(**more: Schema) -> Schema:
    """Return the schema of the log-probabilities at one position. Each token also has the fields in `more`."""
    one = {**more, "token": TEXT, "logprob": NUMBER, "bytes": {"type": "array", "items": COUNT}}
    return fixed_object(**one, top_logprobs={"type": "array", "items": fixed_object(**one)})


def _reason(kinds: list[str]) -> Schema:
    return {"type": kinds, "enum": ["stop", "length", "tool_calls", *([None] if "null" in kinds else [])]}


def _tool_call() -> Schema:
    return {
        "type": "object",
        "required": ["function"],
        "properties": {
            "id": TEXT,
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {"name": TEXT, "arguments": {**TEXT, "description": "A JSON object."}},
            },
        },
    }


def _usage() -> Schema:
    return fixed_object(
        prompt_tokens=COUNT,
        completion_tokens=COUNT,
        total_tokens=COUNT,
        prompt_tokens_details=fixed_object(cached_tokens=COUNT),
        completion_tokens_details=fixed_object(reasoning_tokens=COUNT),
    )


def _timings() -> Schema:
    schema = fixed_object(
        cache_n=COUNT,
        prompt_n=COUNT,
        prompt_ms=NUMBER,
        prompt_per_token_ms=NUMBER,
        prompt_per_second=NUMBER,
        predicted_n=COUNT,
        predicted_ms=NUMBER,
        predicted_per_token_ms=NUMBER,
        predicted_per_second=NUMBER,
    )
    schema["properties"] |= {"draft_n": COUNT, "draft_n_accepted": COUNT}
    return schema


def _tokens() -> Schema:
    piece = fixed_object(id=COUNT, piece={"anyOf": [TEXT, {"type": "array", "items": COUNT}]})
    tokens = {"type": "array", "items": {"anyOf": [COUNT, piece]}}
    return fixed_object(tokens=tokens, count=COUNT, max_model_len=COUNT)
