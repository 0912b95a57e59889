"""Random request bodies: valid ones, in which some values are replaced, removed or moved."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

from llmrun.options.sampling_params import SAMPLING
from tests.support.protocol.answers import TOOL, USER

_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_COMMON: dict[str, Any] = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True},
    "n": 2,
    "seed": 5,
    "max_tokens": 10,
    "max_completion_tokens": 10,
    "stop": ["a", "b"],
    "logit_bias": {"5": -100},
    "ignore_eos": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}},
    "structured_outputs": {"choice": ["a"]},
    "guided_regex": "a",
    "grammar": "",
    "metadata": {},
    "samplers": ["top_k"],
    "dry_sequence_breakers": ["\n"],
    "temperature": 0.5,
    "repetition_penalty": 1,
    "repeat_penalty": 1,
    "min_tokens": 0,
}
CHAT: dict[str, Any] = {
    **_COMMON,
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "found"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
    "logprobs": True,
    "top_logprobs": 3,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": True},
    "think_budget": 5,
    "continue_final_message": False,
}
COMPLETION: dict[str, Any] = {
    **_COMMON,
    "prompt": ["a", [1, 2]],
    "logprobs": 1,
    "echo": False,
    "best_of": 2,
    "suffix": "",
}
_FLAT = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
_CHAT_ONLY = {"n", "max_tokens", "max_completion_tokens", "response_format", "min_tokens"}
RESPONSE: dict[str, Any] = {
    **{name: value for name, value in _COMMON.items() if name not in _CHAT_ONLY},
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        USER,
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "found"},
    ],
    "instructions": "Be kind.",
    "max_output_tokens": 10,
    "tools": [_FLAT],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}, "verbosity": "medium"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 3,
    "store": False,
    "truncation": "disabled",
    "chat_template_kwargs": {"enable_thinking": True},
}
MESSAGE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 10,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "call_1", "name": "look", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "found", "is_error": False}],
        },
        {"role": "system", "content": "Be nice."},
    ],
    "system": [{"type": "text", "text": "Be brief."}],
    "stream": True,
    "stop_sequences": ["a", "b"],
    "tools": [{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}, "strict": True}],
    "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "a"},
    "service_tier": "auto",
    "temperature": 0.5,
    "top_k": 3,
    "seed": 5,
}
# With all fields at once, formats and tools contradict each other, so most bodies have only some of them.
_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([10**18, 2**64, 10**400, 1e300, -1e300, 0.5, "", "auto", "none", "function", "text", "x" * 300])
    | st.text(max_size=5)
)
_INNER = {"type", "role", "content", "function", "name", "json", "call_id", "output", "arguments", "effort", "format"}
_NAMES = st.sampled_from(sorted({*CHAT, *COMPLETION, *MESSAGE, *RESPONSE, *SAMPLING, *_INNER}))

_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES | st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn, valid: dict[str, Any]) -> dict[str, Any]:
    """Draw a body that keeps some fields of a valid one, with up to three changes at any depth."""
    required = {"messages", "prompt", "input"} & {*valid}
    kept = draw(st.sets(st.sampled_from(sorted(valid)), max_size=8)) | required
    body = {name: copy.deepcopy(value) for name, value in valid.items() if name in kept}
    for _ in range(draw(st.integers(0, 3))):
        place: Any = body
        while True:
            keys = [*place] if isinstance(place, dict) else [*range(len(place))]
            key = draw(st.sampled_from(keys) if keys else st.just(None))
            if key is None or not isinstance(place[key], dict | list) or draw(st.booleans()):
                break
            place = place[key]
        if key is None or (isinstance(place, dict) and draw(st.booleans())):
            key = draw(_NAMES) if isinstance(place, dict) else None
        if key is None:
            place.append(draw(_VALUES))
        elif isinstance(place, dict) and draw(st.integers(0, 3)) == 0:
            place.pop(key, None)
        else:
            place[key] = draw(_VALUES)
    return body
