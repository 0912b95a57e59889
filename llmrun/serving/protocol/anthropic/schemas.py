"""The JSON schemas of Anthropic's API, for the OpenAPI document. Tests compare them with the parsers and the bodies."""

from __future__ import annotations

from typing import Final

from llmrun.serving.protocol.anthropic.answers import SIGNATURE
from llmrun.serving.protocol.anthropic.requests import CHOICES, DISPLAYS, EFFORTS, KINDS, KNOWN_EDIT, ROLES
from llmrun.serving.protocol.openai.messages import MOST_TOOLS, NAME
from llmrun.serving.protocol.openai.schemas import sampling_fields, stop_strings
from llmrun.serving.protocol.wire import BOOLEAN, COUNT, NO_EFFECT, OPTIONAL_TEXT, TEXT, Schema, fixed_object, ref

_OBJECT: Final[Schema] = {"type": "object"}
_STOP_REASONS: Final = ("end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded")


def anthropic_schemas() -> dict[str, Schema]:
    """Return the schemas by name."""
    return {
        "MessageRequest": _message_request(),
        "MessageCountRequest": {"type": "object", "required": ["model", "messages"], "properties": _question()},
        "AnthropicMessage": _message(_STOP_REASONS),
        "MessageEvent": {"oneOf": _events(), "description": "The type of the server-sent event is that in `type`."},
        "ContentBlock": {"oneOf": _blocks()},
        "MessageUsage": _usage(),
        "MessageCount": fixed_object(input_tokens=COUNT),
        "AnthropicModel": _model(),
        "AnthropicModels": fixed_object(
            data={"type": "array", "items": ref("AnthropicModel")},
            has_more={"const": False},
            first_id=OPTIONAL_TEXT,
            last_id=OPTIONAL_TEXT,
        ),
        "AnthropicError": fixed_object(type={"const": "error"}, error=_error()),
    }


def _message_request() -> Schema:
    properties = {
        **_question(),
        "max_tokens": {
            "type": "integer",
            "minimum": 1,
            "description": "The maximum number of tokens, including thinking.",
        },
        "stream": {**BOOLEAN, "description": "Send the answer as server-sent events while it is generated."},
        "stop_sequences": stop_strings(),
        **sampling_fields(),
    }
    return {"type": "object", "required": ["model", "max_tokens", "messages"], "properties": properties}


def _question() -> dict[str, Schema]:
    """Return the schemas of the fields that messages and the counting of their tokens share."""
    texts: Schema = {"anyOf": [TEXT, {"type": "array", "items": _block("text", text=TEXT)}]}
    output_format = _object(["type", "schema"], type={"const": "json_schema"}, schema=_OBJECT)
    edit = _object(["type"], type={"const": KNOWN_EDIT}, keep={"description": "Only the value all has no effect."})
    return {
        "model": {"type": "string", "minLength": 1, "description": "The name of a model or preset."},
        "messages": {"type": "array", "minItems": 1, "items": _input_message(texts)},
        "system": {**texts, "description": "The system prompt."},
        "tools": {"type": "array", "maxItems": MOST_TOOLS, "items": _tool()},
        "tool_choice": _object(["type"], type={"enum": [*CHOICES]}, name=TEXT, disable_parallel_tool_use=BOOLEAN),
        "thinking": {
            **_object(
                ["type"],
                type={"enum": [*KINDS]},
                budget_tokens={"type": "integer", "minimum": 1},
                display={"enum": [*DISPLAYS]},
            ),
            "description": "Without it, the model does not think, if its thinking can be turned off.",
        },
        "output_config": {
            **_object([], format=output_format, effort={"enum": [*EFFORTS]}),
            "description": "The format of the answer, which cannot be combined with tools, and how much to think.",
        },
        "output_format": {**output_format, "description": "An older name for output_config.format."},
        "context_management": _object([], edits={"type": "array", "items": edit}),
        "metadata": {**_object([], user_id=TEXT), "description": NO_EFFECT},
        "cache_control": {"type": "object", "description": f"{NO_EFFECT} Prefixes are always cached."},
        "service_tier": {"enum": ["auto", "standard_only"], "description": NO_EFFECT},
        "speed": {"enum": ["standard"], "description": NO_EFFECT},
    }


def _input_message(texts: Schema) -> Schema:
    blocks = [
        _block("text", text=TEXT),
        _block("thinking", thinking=TEXT, signature=TEXT),
        _block("redacted_thinking", data=TEXT),
        _block("tool_use", id=TEXT, name=TEXT, input=_OBJECT),
        _block("tool_result", ["tool_use_id"], tool_use_id=TEXT, content=texts, is_error=BOOLEAN),
    ]
    content = {"anyOf": [TEXT, {"type": "array", "items": {"oneOf": blocks}}]}
    return _object(["role", "content"], role={"enum": [*ROLES]}, content=content)


def _tool() -> Schema:
    return _object(
        ["name", "input_schema"],
        type={"const": "custom"},
        name={"type": "string", "pattern": f"^{NAME}$"},
        description=TEXT,
        input_schema={"type": "object", "description": "The JSON schema of the arguments."},
        strict={"type": "boolean", "description": "Refuse the tool if its schema cannot be enforced."},
    )


def _message(reasons: tuple[str | None, ...]) -> Schema:
    return fixed_object(
        id=TEXT,
        type={"const": "message"},
        role={"const": "assistant"},
        model=TEXT,
        content={"type": "array", "items": ref("ContentBlock")},
        stop_reason={"enum": [*reasons]},
        stop_sequence=OPTIONAL_TEXT,
        usage=ref("MessageUsage"),
        seed={**COUNT, "description": "Send it again to get the same answer."},
        system_fingerprint={**TEXT, "description": "Identifies everything that can change the bytes of an answer."},
    )


def _events() -> list[Schema]:
    def event(kind: str, **properties: Schema) -> Schema:
        return fixed_object(type={"const": kind}, **properties)

    ending = fixed_object(stop_reason={"enum": [*_STOP_REASONS]}, stop_sequence=OPTIONAL_TEXT)
    deltas = [
        event("text_delta", text=TEXT),
        event("thinking_delta", thinking=TEXT),
        event("signature_delta", signature={"const": SIGNATURE}),
        event("input_json_delta", partial_json=TEXT),
    ]
    return [
        event("message_start", message=_message((None,))),
        event("content_block_start", index=COUNT, content_block=ref("ContentBlock")),
        event("content_block_delta", index=COUNT, delta={"oneOf": deltas}),
        event("content_block_stop", index=COUNT),
        event("message_delta", delta=ending, usage=ref("MessageUsage")),
        event("message_stop"),
        event("ping"),
        ref("AnthropicError"),
    ]


def _blocks() -> list[Schema]:
    return [
        fixed_object(type={"const": "text"}, text=TEXT),
        fixed_object(type={"const": "thinking"}, thinking=TEXT, signature={"enum": ["", SIGNATURE]}),
        fixed_object(type={"const": "tool_use"}, id=TEXT, name=TEXT, input=_OBJECT),
    ]


def _usage() -> Schema:
    return fixed_object(
        input_tokens={**COUNT, "description": "The tokens of the prompt that were not cached."},
        cache_creation_input_tokens=COUNT,
        cache_read_input_tokens=COUNT,
        output_tokens=COUNT,
        output_tokens_details=fixed_object(thinking_tokens=COUNT),
    )


def _model() -> Schema:
    return fixed_object(
        type={"const": "model"},
        id=TEXT,
        display_name=TEXT,
        created_at={"type": "string", "format": "date-time"},
        lifecycle={"const": "active"},
        max_input_tokens={"type": ["integer", "null"], "description": "Null if the model is not loaded."},
        max_tokens={"type": ["integer", "null"]},
    )


def _error() -> Schema:
    schema = fixed_object(type=TEXT, message=TEXT)
    details = {**fixed_object(error_code=TEXT), "description": "Present only for `thread`."}
    return {**schema, "properties": {**schema["properties"], "details": details}}


def _block(kind: str, required: list[str] | None = None, **properties: Schema) -> Schema:
    """Return the schema of a block in a request. By default, all its fields are required."""
    needed = [*properties] if required is None else required
    quiet = {"cache_control": {"description": NO_EFFECT}}
    return _object(["type", *needed], type={"const": kind}, **properties, **quiet)


def _object(required: list[str], **properties: Schema) -> Schema:
    return {"type": "object", "required": required, "properties": properties}
