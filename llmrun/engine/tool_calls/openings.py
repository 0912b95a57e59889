"""The texts that begin a tool call, and the parts of a call before its arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llmrun.engine.templates.tool_format import NAME, SLOTS, ToolCallFormat
from llmrun.engine.tool_calls.calls_json import json_call

_TAG = r"(?:<[^<>\n]{1,80}>|\[/?[A-Z_]{2,40}\]|[\ud800-\udfff])"
_TAGS = re.compile(rf"{_TAG}(?=\s*{_TAG})")
_FIRST_TAG = re.compile(_TAG)
_SLOT = re.compile(f"([{SLOTS}])")
_SURE = 8  # A text without tags begins a call only if it has this many characters; "{" also begins other answers.


@dataclass(frozen=True, slots=True)
class Opening:
    """A text after which the model writes a call.

    text  the text to look for. It may be empty if `sure` is False.
    sure  False if the text also occurs elsewhere, so that a call begins only if the name of a tool follows
    """

    text: str
    sure: bool


def openings(found: ToolCallFormat) -> list[Opening]:
    """Return the texts that begin a call, in any order."""
    heads = [found.section_start + start for start in call_starts(found)]
    heads += call_starts(found) if found.section_start else []
    texts = dict.fromkeys(_trigger(head) for head in heads)
    all_ = [Opening(text, is_sure(text)) for text in texts]
    if found.after_plain.strip():
        after = found.after_plain.strip()
        all_ += [Opening(after + each.text, is_sure(each.text)) for each in all_]
    return all_


def call_starts(found: ToolCallFormat) -> list[str]:
    """Return the texts that may stand before the arguments of a call.

    Models that should write two tags sometimes leave out the first one: "<tool_call>" before "<function=".
    """
    starts = [found.call_start, *found.other_starts]
    first = _TAGS.match(found.call_start)
    if first and NAME in found.call_start[first.end() :]:
        starts.append(found.call_start[first.end() :].lstrip())
    return starts


def call_heads(found: ToolCallFormat) -> list[str]:
    """Return the texts before the first slot of a call, or up to the brace of a call that is a JSON object."""
    call = json_call(found)
    return [call.head + "{"] if call else [parts(start)[0] for start in call_starts(found)]


def first_tag(text: str) -> str:
    """Return a text up to its first tag, if another tag follows it, or else the whole text without whitespace."""
    two = _TAGS.search(text)
    return text[: two.end()] if two else text.strip()


def parts(text: str) -> list[str]:
    """Split a text of a format into slots and the texts between them, which may be empty."""
    return _SLOT.split(text)


def is_sure(text: str) -> bool:
    """Return True if a text is unlikely to occur outside of calls."""
    return bool(_FIRST_TAG.search(text)) or len("".join(text.split())) >= _SURE


def _trigger(head: str) -> str:
    """Return the beginning of a text that is enough to recognize it: up to the first of two tags, a slot or JSON."""
    fixed = parts(head)[0]
    two = _TAGS.search(fixed)
    fixed = fixed[: two.end()] if two else fixed
    json_at = re.search(r"\[?\s*\{", fixed)
    cut = fixed[: json_at.start()] if json_at else fixed
    return cut.strip() if is_sure(cut) else ""
