"""The settings that a conversation may change for its answers: their names, values and syntax."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmrun.base.errors import UsageError
from llmrun.cli.arguments import formats
from llmrun.options.sampling_params import SAMPLING
from llmrun.options.settings import RULES

if TYPE_CHECKING:
    from llmrun.engine.constraint.base import ResponseFormat

Value = int | float | str | list[str]

STOP = "stop"  # strings that end an answer; all other preferences are settings in `settings.py`
CONTEXT = "ctx_size"  # saved with the conversation, but cannot change while the model is open
THINK = "think"
THINK_BUDGET = "think_budget"
ON_FULL = "on_full"
FORGET = "forget"  # the value of ON_FULL that drops the oldest turns
THINKING = (THINK, THINK_BUDGET, "hide_thinking")
NAMES = (*SAMPLING, "seed", "max_tokens", STOP, *formats.NAMES, CONTEXT, *THINKING, ON_FULL)

_BY_FLAG = {"schema": formats.JSON_SCHEMA} | {
    flag[2:].replace("-", "_"): name for name, parameter in SAMPLING.items() for flag in parameter.flags
}


def name_of(typed: str) -> str:
    """Return the preference with this name or flag. If there is none, raise UsageError and suggest the nearest name."""
    spelled = typed.lower().replace("-", "_")
    name = _BY_FLAG.get(spelled, spelled)
    if name in NAMES:
        return name
    import difflib

    near = difflib.get_close_matches(name, NAMES, n=1)
    raise UsageError(
        f"/set: {typed}: no such setting", hint=f"did you mean {near[0]}?" if near else "known: " + ", ".join(NAMES)
    )


def parse_value(name: str, text: str) -> Value:
    """Parse the value that the user gave for a preference. Raises UsageError.

    The value of `stop` is either a literal string or a JSON list of strings, in which "\\n" is a newline.
    """
    value: object = text
    if name == STOP:
        value = _stops(text)
    elif name in formats.NAMES:
        value = formats.checked_format(name, formats.format_text(name, text, f"/set {name}"), f"/set {name}").text
    else:
        try:
            value = RULES[name].parse(text)
        except ValueError:
            value = text  # `checked_value` rejects it with the usual message
    return checked_value(name, value)


def checked_value(name: str, value: object) -> Value:
    """Return the value if its type and range are valid for this preference. Raises UsageError otherwise."""
    if name == STOP:
        if isinstance(value, list) and value and all(isinstance(text, str) and text for text in value):
            return value
        raise UsageError(f"{name}: {value!r:.60} is not a list of texts")
    if name in formats.NAMES:
        if isinstance(value, str) and value:
            return value
        raise UsageError(f"{name}: {value!r:.60} is not text")
    if name not in NAMES:
        raise UsageError(f"{name!r:.40}: no such setting")
    try:
        checked = RULES[name].check(value)
    except ValueError:
        raise UsageError(f"{name}: {value!r:.60} is not {RULES[name].words}", hint=RULES[name].advice(value)) from None
    assert isinstance(checked, int | float | str)  # the rules for NAMES allow only these types
    return checked


def chosen_format(preferences: Mapping[str, Value]) -> ResponseFormat | None:
    """Return the format of the answers, or None if they may be any text."""
    for name in formats.NAMES:
        if name in preferences:
            return formats.response_format(name, str(preferences[name]), f"/set {name}")
    return None


def _stops(text: str) -> object:
    if not text.startswith("["):
        return [text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return [text]
