"""Derives a model's tool-call format from rendered messages, by comparing texts. It renders nothing itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from llmrun.engine.templates.tool_format import (
    CALL_ID,
    INDEX,
    KEY,
    NAME,
    ArgumentFormat,
    ValueForm,
    bare,
    written_value,
)

_MARKUP = re.compile(r"<[^<>\n]{1,80}>|\[/?[A-Z_]{2,40}\]")
_NUMBER = r"(?<![\w.]){}(?![\w.])"
_SEPARATORS = ((", ", ": "), (",", ":"), (", ", ":"), (",", ": "))


@dataclass(frozen=True, slots=True)
class Layout:
    """The texts of a list of calls or arguments: what precedes, separates, follows and surrounds them."""

    opening: str
    before: str
    after: str
    separator: str
    closing: str


def shared_prefix(a: str, b: str) -> int:
    """Return the length of the longest common prefix that does not end inside a tag of either text."""
    length = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return min(_tag_start(a, length), _tag_start(b, length))


def shared_suffix(a: str, b: str) -> int:
    """Return the length of the longest common suffix that does not begin inside a tag of either text."""
    pairs = enumerate(zip(reversed(a), reversed(b), strict=False))
    length = next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))
    return min(len(a) - _tag_end(a, len(a) - length), len(b) - _tag_end(b, len(b) - length))


def _tag_start(text: str, at: int) -> int:
    return next((tag.start() for tag in _MARKUP.finditer(text) if tag.start() < at < tag.end()), at)


def _tag_end(text: str, at: int) -> int:
    return next((tag.end() for tag in _MARKUP.finditer(text) if tag.start() < at < tag.end()), at)


def list_layouts(head: str, between: str, tail: str) -> Iterator[Layout]:
    """Yield possible layouts of a list of two, best first.

    head     the text before the first element's content
    between  the text between the contents of the two
    tail     the text after the second one's content
    """
    longest = shared_prefix(between, tail)
    for length in sorted({longest, len(between[:longest].rstrip())}, reverse=True):
        after, rest = between[:length], between[length:]
        size = shared_suffix(rest, head)
        before = rest[len(rest) - size :]
        yield Layout(head[: len(head) - size], before, after, rest[: len(rest) - size], tail[length:])


def json_arguments(text: str, key: str, arguments: Mapping[str, Any]) -> tuple[int, int, ArgumentFormat] | None:
    """Find arguments that are written as JSON. Returns (start, end, format), or None."""
    for start in _starts(text, text.find(key)):
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if value == arguments:
            return start, end, _json_format(text[start:end], arguments)
    return None


def _starts(text: str, before: int) -> list[int]:
    """Return the positions before `before` at which arguments may start, nearest first."""
    return [at for at in range(before - 1, max(-1, before - 200), -1) if text[at] == "{"]


def _json_format(text: str, value: Mapping[str, Any]) -> ArgumentFormat:
    """Return the JSON notation in which a value is written."""
    for pair, ascii_only in product(_SEPARATORS, (False, True)):
        if json.dumps(value, separators=pair, ensure_ascii=ascii_only) == text:
            return ArgumentFormat("json", pair, ascii=ascii_only)
    return ArgumentFormat("json", None, ascii="\\u" in text)


def with_index(core: tuple[str, str], start: tuple[str, str]) -> tuple[str, str, str, int]:
    """Replace the number of a call with INDEX, if the template writes one.

    core   the texts of two calls from the first to the last slot
    start  the texts before these

    Returns the core, the two starts and the number of the first call.
    """
    for first in (0, 1):
        one, two = (re.compile(_NUMBER.format(number)) for number in (first, first + 1))
        if core[0] != core[1] and one.sub(INDEX, core[0]) == two.sub(INDEX, core[1]):
            return one.sub(INDEX, core[0]), start[0], start[1], first
        before = (one.sub(INDEX, start[0]), two.sub(INDEX, start[1]))
        size = shared_suffix(*before)
        if INDEX in before[0][len(before[0]) - size :]:
            return core[0], *before, first
    return core[0], *start, 0


def slotted(text: str, name: str, call_id: str) -> str:
    """Replace the name and the id of a call with their slots."""
    return text.replace(name, NAME).replace(call_id, CALL_ID)


# --- arguments that are written one by one


@dataclass(frozen=True, slots=True)
class ItemTexts:
    """A message with one call, rendered with different arguments. `keys` are the names of the two arguments.

    none, one, two  the message with no, one and two arguments, whose values are the strings `values`
    """

    none: str | None
    one: str
    two: str | None
    keys: tuple[str, str]
    values: tuple[str, str]


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """The layout of arguments and the texts around them."""

    head: str
    tail: str
    opening: str
    closing: str
    key_prefix: str
    separator: str
    string: ValueForm


def item_layout(texts: ItemTexts) -> ItemLayout | None:
    """Return the layout of arguments that are written one by one, or None."""
    parts = _split(texts.one, texts.keys[:1], texts.values[:1])
    if parts is None:
        return None
    head, middle, _ = parts
    pairs = _split(texts.two, texts.keys, texts.values) if texts.two is not None else None
    if pairs is None or pairs[0] != head or pairs[1] != middle or pairs[3] != middle:
        return None
    found = None
    for layout in list_layouts(head, pairs[2], pairs[4]):
        start, end = layout.opening, layout.closing
        fitting = _around(start, end, texts.none)
        if fitting is None and found is not None:
            continue
        opening, closing = fitting or ("", "")
        found = ItemLayout(
            start.removesuffix(opening) if opening else start,
            end.removeprefix(closing) if closing else end,
            opening,
            closing,
            layout.before,
            layout.separator,
            ValueForm(middle, layout.after),
        )
        if fitting is not None:
            break
    return found


def _around(start: str, end: str, none: str | None) -> tuple[str, str] | None:
    """Return the texts around arguments that are missing if there are none, or None if `none` does not fit."""
    if none is None:
        return None
    if start + end == none:
        return "", ""
    size = shared_prefix(start, none)
    rest = none[size:]
    return (start[size:], end[: len(end) - len(rest)]) if end.endswith(rest) else None


def _split(text: str, keys: Sequence[str], values: Sequence[str]) -> list[str] | None:
    """Return the texts before, between and after the keys and values, with KEY for keys that are repeated, or None."""
    parts = []
    for key, value in zip(keys, values, strict=True):
        before, found, text = text.partition(key)
        middle, said, text = text.partition(value)
        if not found or not said:
            return None
        parts += [before, middle]
        text = _repeated(text, key)
    return [*parts, text]


def _repeated(text: str, key: str) -> str:
    return text.replace(key, KEY)


def value_form(text: str, layout: ItemLayout, key: str, value: Any) -> tuple[str, ValueForm, str] | None:
    """Return the notation of a value that is not a string, the texts around it and the quote, or None."""
    rest = _after_key(text, layout, key)
    quote = layout.string.prefix[-len(layout.string.suffix) :] if layout.string.suffix else '"'
    texts = {"json": json.dumps(value), "python": repr(value), "bare": bare(value, quote)}
    for notation, written in texts.items():
        at = rest.rfind(written)
        if at >= 0:
            return notation, ValueForm(rest[:at], rest[at + len(written) :]), quote
    return None


def tagged_form(
    text: str, layout: ItemLayout, key: str, value: Any, form: ArgumentFormat
) -> tuple[str, ValueForm] | None:
    """Return the key of array items and the texts around an array or object that is written as items, or None.

    form  the notation of the values inside it, as far as it is known
    """
    rest = _after_key(text, layout, key)
    first = re.escape(form.key_prefix) + r"([\w.-]{1,40})" + re.escape(form.forms["boolean"].prefix) + "true"
    found = re.search(first, rest) if "boolean" in form.forms else None
    if found is None:
        return None
    written = written_value(replace(form, arrays="tags", objects="tags", item_key=found[1]), value)
    at = rest.find(written)
    return (found[1], ValueForm(rest[:at], rest[at + len(written) :])) if at >= 0 else None


def _after_key(text: str, layout: ItemLayout, key: str) -> str:
    """Return the value of an argument with the texts around it; "" if it is not where it should be."""
    before, end = layout.head + layout.opening + layout.key_prefix + key, layout.closing + layout.tail
    fits = text.startswith(before) and text.endswith(end)
    return _repeated(text[len(before) : len(text) - len(end)], key) if fits else ""


def ends_with_tag(text: str) -> bool:
    """Return True if the text is blank or ends with a tag, apart from whitespace."""
    text = text.rstrip()
    tags = [*_MARKUP.finditer(text)]
    return not text or bool(tags and tags[-1].end() == len(text))
