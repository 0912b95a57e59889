"""The JSON schemas of the Responses API, for the OpenAPI document. Tests compare them with parser and bodies."""

from __future__ import annotations

from typing import Final

from llmrun.serving.protocol.openai.messages import MOST_TOOLS, NAME
from llmrun.serving.protocol.openai.options import EFFORTS, MOST_LOGPROBS
from llmrun.serving.protocol.openai.schemas import common_fields, thinking_fields, token_logprobs
from llmrun.serving.protocol.openai_responses.requests import ITEM_TYPES, LOGPROBS, REFUSED_IN_RESPONSES, ROLES
from llmrun.serving.protocol.wire import COUNT, FINGERPRINT, NUMBER, OPTIONAL_TEXT, TEXT, Schema, fixed_object, ref

_STATUS: Final[Schema] = {"enum": ["in_progress", "completed", "incomplete"]}
_OPTIONAL_COUNT: Final[Schema] = {"type": ["integer", "null"]}


def response_schemas() -> dict[str, Schema]:
    """Return the schemas of requests and answers, by name."""
    return {
        "ResponseRequest": _request(),
        "ResponseInputItem": _input_item(),
        "ResponseTool": _tool(),
        "Response": _response(),
        "ResponseOutputItem": {"anyOf": [_message(), _reasoning(), _function_call()]},
        "ResponseEvent": {"anyOf": [_event_of_response(), _event_of_item(), _event_of_error()]},
    }


def _request() -> Schema:
    shared = {**common_fields(), **thinking_fields()}
    properties = {
        "input": {
            "description": "A text, or the items of a conversation. The server stores none, so send all of them.",
            "anyOf": [TEXT, {"type": "array", "minItems": 1, "items": ref("ResponseInputItem")}],
        },
        "instructions": {**TEXT, "description": "The text of a system message before the conversation."},
        **{name: schema for name, schema in shared.items() if name not in REFUSED_IN_RESPONSES},
        "stream_options": {"type": "object"},
        "metadata": {"type": "object", "additionalProperties": TEXT, "description": "Repeated in the answer."},
        "max_output_tokens": {
            "type": "integer",
            "minimum": 1,
            "description": "The maximum number of generated tokens, including thinking. Without it, there is no limit.",
        },
        "max_tool_calls": {
            "type": "integer",
            "minimum": 1,
            "description": "Limits calls of tools that run on the server, of which there are none.",
        },
        "text": {
            "type": "object",
            "properties": {"format": _format(), "verbosity": {"enum": ["medium"]}},
            "description": "The format that the answer must have. It cannot be combined with tools.",
        },
        "reasoning": {
            "type": "object",
            "properties": {
                "effort": {
                    "enum": [*EFFORTS],
                    "description": "none turns thinking off, and the others turn it on if the model can think.",
                }
            },
        },
        "tools": {"type": "array", "maxItems": MOST_TOOLS, "items": ref("ResponseTool")},
        "tool_choice": _tool_choice(),
        "parallel_tool_calls": {"type": "boolean", "description": "On by default."},
        "include": {
            "type": "array",
            "items": TEXT,
            "description": f"{LOGPROBS} adds the log-probabilities of the text's tokens. Other names have no effect.",
        },
        "top_logprobs": {
            "type": "integer",
            "minimum": 0,
            "maximum": MOST_LOGPROBS,
            "description": "The number of likeliest tokens to return at each position.",
        },
    }
    return {"type": "object", "required": ["input"], "properties": properties}


def _input_item() -> Schema:
    part = {
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"enum": ["input_text", "output_text", "refusal", "reasoning_text"]}, "text": TEXT},
    }
    text: Schema = {"anyOf": [TEXT, {"type": "array", "items": part}]}
    return {
        "type": "object",
        "description": "The items of past answers can be sent as they were received.",
        "properties": {
            "type": {"enum": [*ITEM_TYPES], "description": "message by default."},
            "role": {"enum": [*ROLES], "description": "developer means the same as system."},
            "content": {**text, "description": "The content of a message, or past thinking."},
            "call_id": {**TEXT, "description": "The ID of a call."},
            "name": {**TEXT, "description": "The name of the function that was called."},
            "arguments": {**TEXT, "description": "A JSON object."},
            "output": {**text, "description": "The result of a call."},
        },
    }


def _tool() -> Schema:
    return {
        "type": "object",
        "required": ["name"],
        "properties": {
            "type": {"const": "function"},
            "name": {**TEXT, "pattern": f"^{NAME}$"},
            "description": OPTIONAL_TEXT,
            "parameters": {"type": ["object", "null"], "description": "The JSON schema of the arguments."},
            "strict": {"type": ["boolean", "null"], "description": "Refuse the tool if its schema cannot be enforced."},
        },
    }


def _tool_choice() -> Schema:
    function = {"type": "object", "properties": {"type": {"const": "function"}, "name": TEXT}}
    allowed = {
        "type": "object",
        "properties": {
            "type": {"const": "allowed_tools"},
            "mode": {"enum": ["auto", "required"]},
            "tools": {"type": "array"},
        },
    }
    return {"anyOf": [{"enum": ["none", "auto", "required"]}, function, allowed]}


def _format() -> Schema:
    return {
        "type": "object",
        "required": ["type"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "name": TEXT,
            "description": OPTIONAL_TEXT,
            "schema": {"type": ["object", "boolean", "string"]},
            "strict": {"type": "boolean", "description": "Every schema is enforced, also without `strict`."},
        },
    }


def _response() -> Schema:
    details = fixed_object(cached_tokens=COUNT, cache_write_tokens=COUNT)
    counted = fixed_object(
        input_tokens=COUNT,
        input_tokens_details=details,
        output_tokens=COUNT,
        output_tokens_details=fixed_object(reasoning_tokens=COUNT),
        total_tokens=COUNT,
    )
    error = fixed_object(code=TEXT, message=TEXT)
    schema = fixed_object(
        id=TEXT,
        object={"const": "response"},
        created_at=COUNT,
        completed_at=_OPTIONAL_COUNT,
        model=TEXT,
        status={"enum": ["in_progress", "completed", "incomplete", "failed"]},
        error=_optional(error),
        incomplete_details=_optional(fixed_object(reason={"const": "max_output_tokens"})),
        output={"type": "array", "items": ref("ResponseOutputItem")},
        usage=_optional(counted),
        seed={**COUNT, "description": "Send it again to get the same answer."},
        system_fingerprint={**TEXT, "description": FINGERPRINT},
        **_settings(),
    )
    schema["properties"]["timings"] = {**ref("Timings"), "description": "Missing until the answer has finished."}
    return schema


def _settings() -> dict[str, Schema]:
    """Return the schemas of what the answer repeats of the request."""
    return {
        "background": {"const": False},
        "instructions": OPTIONAL_TEXT,
        "max_output_tokens": _OPTIONAL_COUNT,
        "max_tool_calls": _OPTIONAL_COUNT,
        "metadata": {"type": "object", "additionalProperties": TEXT},
        "parallel_tool_calls": {"type": "boolean"},
        "temperature": NUMBER,
        "top_p": NUMBER,
        "presence_penalty": NUMBER,
        "frequency_penalty": NUMBER,
        "previous_response_id": {"type": "null"},
        "reasoning": fixed_object(effort=OPTIONAL_TEXT, summary={"type": "null"}),
        "service_tier": {"const": "default"},
        "store": {"const": False},
        "text": fixed_object(format=_format(), verbosity={"const": "medium"}),
        "tool_choice": _tool_choice(),
        "tools": {"type": "array", "items": ref("ResponseTool")},
        "top_logprobs": COUNT,
        "truncation": {"const": "disabled"},
        "user": OPTIONAL_TEXT,
        "safety_identifier": OPTIONAL_TEXT,
        "prompt_cache_key": OPTIONAL_TEXT,
    }


def _text_part() -> Schema:
    return fixed_object(
        type={"const": "output_text"},
        text=TEXT,
        annotations={"type": "array", "maxItems": 0},
        logprobs={"type": "array", "items": token_logprobs()},
    )


def _reasoning_part() -> Schema:
    return fixed_object(type={"const": "reasoning_text"}, text=TEXT)


def _message() -> Schema:
    return fixed_object(
        id=TEXT,
        type={"const": "message"},
        status=_STATUS,
        role={"const": "assistant"},
        content={"type": "array", "items": _text_part()},
    )


def _reasoning() -> Schema:
    return fixed_object(
        id=TEXT,
        type={"const": "reasoning"},
        status=_STATUS,
        summary={"type": "array", "maxItems": 0},
        content={"type": "array", "items": _reasoning_part()},
    )


def _function_call() -> Schema:
    return fixed_object(
        id=TEXT, type={"const": "function_call"}, status=_STATUS, call_id=TEXT, name=TEXT, arguments=TEXT
    )


def _event_of_response() -> Schema:
    kinds = ("created", "in_progress", "completed", "incomplete", "failed")
    return fixed_object(
        type={"enum": [f"response.{kind}" for kind in kinds]}, sequence_number=COUNT, response=ref("Response")
    )


def _event_of_item() -> Schema:
    kinds = (
        *("output_item.added", "output_item.done", "content_part.added", "content_part.done"),
        *("output_text.delta", "output_text.done", "reasoning_text.delta", "reasoning_text.done"),
        *("function_call_arguments.delta", "function_call_arguments.done"),
    )
    schema = fixed_object(
        type={"enum": [f"response.{kind}" for kind in kinds]}, sequence_number=COUNT, output_index=COUNT
    )
    schema["properties"] |= {
        "item": ref("ResponseOutputItem"),
        "item_id": TEXT,
        "content_index": COUNT,
        "part": {"anyOf": [_text_part(), _reasoning_part()]},
        "delta": TEXT,
        "text": TEXT,
        "logprobs": {"type": "array", "items": token_logprobs()},
        "arguments": TEXT,
    }
    return schema


def _event_of_error() -> Schema:
    told = {"code": OPTIONAL_TEXT, "message": TEXT, "param": OPTIONAL_TEXT}
    return fixed_object(type={"const": "error"}, sequence_number=COUNT, **told, error=fixed_object(type=TEXT, **told))


def _optional(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}
