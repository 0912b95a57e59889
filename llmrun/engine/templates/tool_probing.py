"""Probes a chat template to find how it writes tool calls, without a list of known models.

The template renders conversations whose calls are made of marker words. The texts around the markers are the format. A
format counts only if it predicts, character by character, how the template writes another message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol

from llmrun.engine.templates import tool_layout as layout
from llmrun.engine.templates.abilities import ThinkingTags, ToolAbilities
from llmrun.engine.templates.known_tools import known_format, other_starts
from llmrun.engine.templates.tool_format import (
    KEY,
    NAME,
    SLOTS,
    ArgumentFormat,
    ToolCallFormat,
    ValueForm,
    written_arguments,
)

_ASKED, _SAID, _RESULT = "Qzask", "Qzsaid", "Qzresult"
_NAMES = ("qztool", "qzother")
_KEYS = ("qzone", "qztwo")
_STRINGS = ("Qzred", "Qzblue")
_TRICKY = "Qz\"'\\\n<é"
_VALUES: dict[str, Any] = {
    "integer": 70707,
    "number": 7.25,
    "boolean": True,
    "null": None,
    "object": {"qzkey": [True, "qzs"]},
    "array": [True, "qzs"],
}
_SHORT_IDS = ("qzcallab1", "qzcallab2")  # Mistral's templates accept only nine letters and digits
_LONG_IDS = ("call_qzfirstcall", "call_qzsecondcall")
_LONGEST_TEXT = 400  # characters of a text between two slots
_HELP = "Qzhelp"
_ANY = {"type": "string", "description": _HELP}
_USER = {"role": "user", "content": _ASKED}
_ANSWER = {"role": "assistant", "content": _SAID}

Call = tuple[str, Mapping[str, Any]]


class Renderer(Protocol):
    """Renders test conversations within a time limit; see probing.py."""

    def text(self, messages: Sequence[Mapping[str, object]], **variables: object) -> str | None:
        """Render a conversation. Returns None if the template rejects it or no time is left."""
        ...


def tool_abilities(source: str, tries: Renderer, tags: ThinkingTags | None) -> ToolAbilities:
    """Find out whether a template accepts tools, and how it writes calls."""
    plain = tries.text([_USER], tools=None)
    shown = tries.text([_USER], tools=_tools()) or ""
    takes = _NAMES[0] in shown and _NAMES[1] in shown and _NAMES[0] not in (plain or "")
    results = False
    first: ToolAbilities | None = None
    for style in _styles():
        messages = _Messages(tries, style, tags)
        results = results or messages.takes_results()
        found = messages.format()
        if found is not None:
            abilities = ToolAbilities(takes, results, True, found, style.as_text, style.null_content)
            if messages.can_follow():  # some templates reject a content of None, but not in the last message
                return abilities
            first = first or abilities
    if first is not None:
        return first
    return ToolAbilities(takes, results, tool_format=known_format(source) if takes else None)


@dataclass(frozen=True, slots=True)
class _Style:
    """One way to write a message with calls: the ids, arguments as a JSON text or an object, content null or ""."""

    as_text: bool
    null_content: bool
    ids: tuple[str, str]


def _styles() -> list[_Style]:
    """Return the ways to write messages, the most common first."""
    return [
        _Style(as_text, null, ids)
        for as_text, ids, null in product((False, True), (_LONG_IDS, _SHORT_IDS), (True, False))
    ]


def _tools(kind: str = "string") -> list[dict[str, Any]]:
    inner = {"items": _ANY} if kind == "array" else {"additionalProperties": _ANY} if kind == "object" else {}
    value = {"type": kind, "description": _HELP, **inner}
    schema = {"type": "object", "properties": dict.fromkeys(_KEYS, value), "required": []}
    return [
        {"type": "function", "function": {"name": name, "description": _HELP, "parameters": schema}} for name in _NAMES
    ]


class _Messages:
    """Renders messages with calls in one style and compares the results."""

    def __init__(self, tries: Renderer, style: _Style, tags: ThinkingTags | None) -> None:
        self._tries = tries
        self._style = style
        self._tags = tags
        self._start: str = ""  # the text before the calls
        self._end: str = ""  # the text after the calls
        self._after_plain = ""

    def format(self) -> ToolCallFormat | None:
        """Return the format of calls, or None if this style does not work."""
        call = (_NAMES[0], {_KEYS[0]: _STRINGS[0]})
        text = self._text([call])
        written = _after_question(text)
        if text is None or not all(word in written for word in (call[0], _KEYS[0], _STRINGS[0])):
            return None
        if self._style.null_content and "None" in written:
            return None
        plain_start = self._find_ends(text)
        arguments = self._arguments(self._body([call]))
        if arguments is None:
            return None
        found = self._calls(arguments)
        if found is None:
            return None
        found = replace(
            found,
            other_starts=other_starts(found.call_start),
            plain_start=plain_start,
            after_plain=self._after_plain,
        )
        return found if _is_sound(found) and self._predicts(found) else None

    def can_follow(self) -> bool:
        """Return True if the conversation may go on after a call and its result."""
        call = self._message([(_NAMES[0], {_KEYS[0]: _STRINGS[0]})])
        result = {"role": "tool", "tool_call_id": self._style.ids[0], "name": _NAMES[0], "content": _RESULT}
        return self._tries.text([_USER, call, result, _ANSWER, _USER], tools=_tools()) is not None

    def takes_results(self) -> bool:
        """Return True if the template shows the result of a call, at least if the call is written as text."""
        call = self._message([(_NAMES[0], {_KEYS[0]: _STRINGS[0]})])
        result = {"role": "tool", "tool_call_id": self._style.ids[0], "name": _NAMES[0], "content": _RESULT}
        texts = (self._tries.text([_USER, each, result], tools=_tools()) for each in (call, _ANSWER))
        return any(_RESULT in (text or "") for text in texts)

    def _message(self, calls: Sequence[Call], content: str = "") -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": content or (None if self._style.null_content else ""),
            "tool_calls": [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {
                        "name": name,
                        "arguments": json.dumps(arguments, ensure_ascii=False) if self._style.as_text else arguments,
                    },
                }
                for call_id, (name, arguments) in zip(self._style.ids, calls, strict=False)
            ],
        }

    def _text(self, calls: Sequence[Call], kind: str = "string", content: str = "") -> str | None:
        messages = [_USER, self._message(calls, content)]
        return self._tries.text(messages, tools=_tools(kind), add_generation_prompt=False)

    def _body(self, calls: Sequence[Call], kind: str = "string") -> str | None:
        """Return the text of calls alone, without the texts around them."""
        text = _after_question(self._text(calls, kind))
        if not text.startswith(self._start) or not text.endswith(self._end):
            return None
        return text[len(self._start) : len(text) - len(self._end)]

    def _find_ends(self, text: str) -> str:
        """Find the texts around the calls of a message. Returns the text before an answer without calls.

        They are shared with a message without calls. The generation prompt shows where the model's own text begins.
        """
        said = _after_question(self._tries.text([_USER, _ANSWER], tools=_tools(), add_generation_prompt=False))
        prompt = _after_question(self._tries.text([_USER], tools=_tools(), add_generation_prompt=True))
        text = _after_question(text)
        start = layout.shared_prefix(text, said)
        own = len(prompt)
        if text.startswith(prompt) and (start < own or not layout.ends_with_tag(text[own:start])):
            start = own
        start = min(start, text.find(_NAMES[0]), text.find(_KEYS[0]))
        before, _, after = said.rpartition(_SAID)
        closing = self._tags.answer_closing if self._tags else ""
        end = len(text) - layout.shared_suffix(text[start:], after.removeprefix(closing))
        if closing and text.startswith(closing, start):
            self._after_plain = closing
            start += len(closing)
        body = text[start:end]
        self._start = text[: end - len(body.lstrip())]
        self._end = text[start + len(body.rstrip()) :]
        return self._plain_start(before, prompt, text)

    def _plain_start(self, before: str, prompt: str, text: str) -> str:
        """Return the text that begins an answer without calls, unless a tag does, and note what ends such an answer."""
        begun = before[len(prompt) :] if before.startswith(prompt) else ""
        if not begun.strip() or layout.ends_with_tag(begun) or len(begun) > 40 or not text.startswith(prompt):
            return ""
        both = self._text([(_NAMES[0], {_KEYS[0]: _STRINGS[0]})], content=_SAID) or ""
        between = both.rpartition(_SAID)[2].partition(_NAMES[0])[0]
        self._after_plain = between if len(between) <= 40 else ""
        return begun

    # --- arguments

    def _arguments(self, body: str | None) -> ArgumentFormat | None:
        """Return the notation of arguments, given the body of a call with one argument."""
        if body is None:
            return None
        found = layout.json_arguments(body, _KEYS[0], {_KEYS[0]: _STRINGS[0]})
        if found is None:
            return self._items(body)
        two = {_KEYS[0]: _STRINGS[0], _KEYS[1]: {"qzkey": [True, "qzé"]}}
        again = layout.json_arguments(self._body([(_NAMES[0], two)]) or "", _KEYS[0], two)
        return again[2] if again else None

    def _items(self, body: str) -> ArgumentFormat | None:
        both = dict(zip(_KEYS, _STRINGS, strict=True))
        texts = layout.ItemTexts(self._body([(_NAMES[0], {})]), body, self._body([(_NAMES[0], both)]), _KEYS, _STRINGS)
        found = layout.item_layout(texts)
        if found is None:
            return None
        strings, string, wrapper = self._strings(found)
        forms, notations, quote = self._forms(found)
        if "integer" not in forms:
            return None
        form = ArgumentFormat(
            "items",
            (", ", ": "),
            found.opening,
            found.closing,
            found.key_prefix,
            found.separator,
            {"string": string, **forms},
            strings,
            notations.get("boolean", "json"),
            notations.get("array", "json"),
            notations.get("object", "json"),
            quote,
            wrapper=wrapper,
        )
        if "array" not in forms:
            form = self._tagged(found, form)
        return replace(form, forms={**dict.fromkeys(_VALUES, forms["integer"]), **form.forms})

    def _tagged(self, found: layout.ItemLayout, form: ArgumentFormat) -> ArgumentFormat:
        """Return the format with the notation of arrays and objects if it is that of the arguments themselves."""
        for kind in ("array", "object"):
            text = self._body([(_NAMES[0], {_KEYS[0]: _VALUES[kind]})], kind) or ""
            tagged = layout.tagged_form(text, found, _KEYS[0], _VALUES[kind], form)
            if tagged is None:
                return form
            item_key, around = tagged
            form = replace(form, arrays="tags", objects="tags", item_key=item_key, forms={**form.forms, kind: around})
        return form

    def _strings(self, found: layout.ItemLayout) -> tuple[str, ValueForm, tuple[str, str] | None]:
        """Return the notation of strings, the texts around them, and the texts around those that contain markup."""
        form = found.string
        around = form.prefix[-1:] if form.suffix[:1] == form.prefix[-1:] and form.suffix[:1] in ('"', "'") else ""
        if around:
            inner = ValueForm(form.prefix[:-1], form.suffix[1:])
            return "json" if around == '"' else "python", inner, None
        body = self._body([(_NAMES[0], {_KEYS[0]: _TRICKY})]) or ""
        before = found.head + found.opening + found.key_prefix + _KEYS[0] + form.prefix
        after = form.suffix.replace(KEY, _KEYS[0]) + found.closing + found.tail
        start, said, end = body[len(before) : len(body) - len(after)].partition(_TRICKY)
        return "raw", form, (start, end) if said and start.strip() and end.strip() else None

    def _forms(self, found: layout.ItemLayout) -> tuple[dict[str, ValueForm], dict[str, str], str]:
        """Return the texts around values and their notations, by type, where found, and the quote of bare values."""
        forms: dict[str, ValueForm] = {}
        notations: dict[str, str] = {}
        quote = '"'
        for kind, value in _VALUES.items():
            text = self._body([(_NAMES[0], {_KEYS[0]: value})], kind)
            written = layout.value_form(text, found, _KEYS[0], value) if text is not None else None
            if written is not None:
                notations[kind], forms[kind], found_quote = written
                quote = found_quote if notations[kind] == "bare" else quote
        return forms, notations, quote

    # --- calls

    def _calls(self, arguments: ArgumentFormat) -> ToolCallFormat | None:
        """Return the format of calls whose arguments have this notation."""
        one: Call = (_NAMES[0], {_KEYS[0]: _STRINGS[0]})
        two: Call = (_NAMES[1], {_KEYS[1]: _STRINGS[1]})
        single = self._slotted([one], arguments)
        if single is None:
            return None
        head, core, tail = single[0], single[1][0], single[2]
        id_form = "any" if self._style.ids == _LONG_IDS else "short"
        pair = self._slotted([one, two], arguments)
        if pair is None or len(pair[1]) < 2:
            call_start, call_end = _halves(head + core + tail)
            return ToolCallFormat(call_start, call_end, arguments, parallel=False, id_form=id_form)
        head, cores, tail = pair
        between = cores[1]
        core, head, between, first = layout.with_index((cores[0], cores[2]), (head, between))
        for found in layout.list_layouts(head, between, tail):
            start, end = _halves(found.before + core + found.after)
            return ToolCallFormat(
                start, end, arguments, found.opening, found.separator, found.closing, first, True, id_form
            )
        return None

    def _slotted(self, calls: Sequence[Call], form: ArgumentFormat) -> tuple[str, list[str], str] | None:
        """Return (head, texts, tail) of a body, with slots and "\\0" for the arguments.

        The texts are those from the first to the last slot of the first call, between the calls, and of the second
        call. None if the arguments are not where they should be.
        """
        body = self._body(calls)
        if body is None:
            return None
        spans: list[tuple[int, int, int, int]] = []
        at = 0
        for call_id, (name, arguments) in zip(self._style.ids, calls, strict=False):
            key = next(iter(arguments))
            if form.style == "items":
                written = written_arguments(form, arguments)
                start = body.find(written, max(at, body.find(name, at)))
                end = start + len(written)
            else:
                found = layout.json_arguments(body[at:], key, arguments)
                start, end = (found[0] + at, found[1] + at) if found else (-1, -1)
            name_at = body.find(name, at)
            if start < 0 or name_at < 0:
                return None if not spans else self._joined(body, spans, calls)
            id_at = body.find(call_id, at)
            places = [name_at, start] + ([id_at] if id_at >= 0 else [])
            last = max([end, name_at + len(name)] + ([id_at + len(call_id)] if id_at >= 0 else []))
            spans.append((min(places), start, end, last))
            at = last
        return self._joined(body, spans, calls)

    def _joined(
        self, body: str, spans: Sequence[tuple[int, int, int, int]], calls: Sequence[Call]
    ) -> tuple[str, list[str], str]:
        texts: list[str] = []
        at = spans[0][0]
        for (first, start, end, last), call_id, (name, _) in zip(spans, self._style.ids, calls, strict=False):
            if texts:
                texts.append(layout.slotted(body[at:first], name, call_id))
            parts = body[first:start], body[end:last]
            texts.append("\0".join(layout.slotted(part, name, call_id) for part in parts))
            at = last
        name, call_id = calls[len(spans) - 1][0], self._style.ids[len(spans) - 1]
        return body[: spans[0][0]], texts, layout.slotted(body[at:], name, call_id)

    def _predicts(self, found: ToolCallFormat) -> bool:
        """Return True if the format predicts the text of another message."""
        arguments = {_KEYS[0]: "Qz text", _KEYS[1]: "Qz more"}
        calls: list[Call] = [(_NAMES[1], arguments), (_NAMES[0], {_KEYS[1]: "Qz last"})]
        calls = calls[: 2 if found.parallel else 1]
        said = self._body(calls) or ""
        ids = self._style.ids
        expected = found.written([(name, given, ids[at]) for at, (name, given) in enumerate(calls)])
        if found.arguments.separators is None:
            return "".join(said.split()) == "".join(expected.split())
        return said == expected


def _after_question(text: str | None) -> str:
    return (text or "").rpartition(_ASKED)[2]


def _halves(call: str) -> tuple[str, str]:
    """Return the texts of a call before and after its arguments."""
    start, _, end = call.partition("\0")
    return start, end


def _is_sound(found: ToolCallFormat) -> bool:
    """Return True if a format can be parsed: it has a name, no text is too long or contains a slot of another text.

    The prefixes of all values must begin with the same character, which ends the name of an argument.
    """
    form = found.arguments
    around = [text for each in form.forms.values() for text in (each.prefix, each.suffix)]
    fixed = [found.section_start, found.separator, found.section_end, form.opening, form.closing, form.key_prefix]
    fixed += [form.separator, form.quote, *(form.wrapper or ())]
    longest = max(map(len, [*fixed, *around, found.call_start, found.call_end, found.after_plain]))
    slots = set("".join(fixed)) & set(SLOTS + "\0")
    first = {each.prefix.lstrip()[:1] for each in form.forms.values()}
    ends = form.style == "json" or bool((form.closing + found.call_end + found.section_end).strip())
    named = NAME in found.call_start + found.call_end
    return named and longest <= _LONGEST_TEXT and not slots and len(first) <= 1 and "" not in first and ends
