"""Probes a chat template to find how it writes tool calls.

The template renders conversations whose calls are made of marker words. The texts around the markers are the format. A
format is accepted only if it predicts, character by character, how the template writes another message.

A short list contains the formats that templates do not reveal, because a template renders no past calls or because
the models of a family write calls in two different ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from msgspec.structs import replace

from llmrun.engine.templates.jinja import Tries
from llmrun.engine.templates.tool_format import (
    CALL_ID,
    INDEX,
    JSON_TYPES,
    KEY,
    NAME,
    SLOTS,
    ArgumentFormat,
    ThinkingTags,
    ToolAbilities,
    ToolCallFormat,
    ValueForm,
    bare,
    call_objects,
    written_arguments,
)

_KIMI_K2 = ToolCallFormat(
    f"<|tool_call_begin|>functions.{NAME}:{INDEX}<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    ArgumentFormat(),
    section_start="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    id_form=f"functions.{NAME}:{INDEX}",
)
_LFM2 = ToolCallFormat(
    f"{NAME}(",
    ")",
    ArgumentFormat(
        "items",
        separator=", ",
        forms=dict.fromkeys(JSON_TYPES, ValueForm("=", "")),
        strings="python",
        scalars="python",
        arrays="python",
        objects="python",
    ),
    section_start="<|tool_call_start|>[",
    separator=", ",
    section_end="]<|tool_call_end|>",
)
_GRANITE_3 = ToolCallFormat(
    f'{{"name": "{NAME}", "arguments": ',
    "}",
    ArgumentFormat(),
    section_start="<|tool_call|>[",
    separator=", ",
    section_end="]",
)
# A template has a format if it contains all texts listed for the format, shows tools and does not render past calls.
# Kimi's templates render calls only outside a sandbox, and LFM2's and Granite 3's templates do not render calls at all.
_BY_TEXTS = (
    (("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"), _KIMI_K2),
    (("List of tools: ", "<|im_start|>", "<|tool_list_start|>"), _LFM2),
    (("List of tools: [", "<|im_start|>"), _LFM2),
    (("<|tool_call|> followed by a JSON list of tools",), _GRANITE_3),
)
# gpt-oss writes the recipient before or after the channel; its template writes the recipient before the channel.
_OTHER_STARTS = {
    f"to=functions.{NAME}<|channel|>commentary json<|message|>": (
        f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>",
        f"<|channel|>commentary to=functions.{NAME}<|message|>",
    )
}

_MARKUP = re.compile(r"<[^<>\n]{1,80}>|\[/?[A-Z_]{2,40}\]")
_NUMBER = r"(?<![\w.]){}(?![\w.])"
_SEPARATORS = ((", ", ": "), (",", ":"), (", ", ":"), (",", ": "))


@dataclass(frozen=True, slots=True)
class Layout:
    """The texts of a list of calls or arguments: the texts before, between, after and around the elements."""

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
    """Yield the possible layouts of a list of two elements, best first.

    head     the text before the first element's content
    between  the text between the contents of the two elements
    tail     the text after the second element's content
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
    """Return the positions smaller than `before` at which arguments may start, nearest first."""
    return [at for at in range(before - 1, max(-1, before - 200), -1) if text[at] == "{"]


def _json_format(text: str, value: Mapping[str, Any]) -> ArgumentFormat:
    """Return the JSON notation that matches the text of a value."""
    for pair, ascii_only in product(_SEPARATORS, (False, True)):
        if json.dumps(value, separators=pair, ensure_ascii=ascii_only) == text:
            return ArgumentFormat("json", pair, ascii=ascii_only)
    return ArgumentFormat("json", None, ascii="\\u" in text)


def with_index(core: tuple[str, str], start: tuple[str, str]) -> tuple[str, str, str, int]:
    """Replace the number of a call with INDEX, if the template writes this number.

    core   the texts of two calls, each from the first slot to the last
    start  the texts before the two calls

    Returns the first core, both starts and the first call's number, with INDEX in place of the number.
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
class ItemLayout:
    """The layout of arguments and the texts around them."""

    head: str
    tail: str
    opening: str
    closing: str
    key_prefix: str
    separator: str
    string: ValueForm


def item_layout(none: str | None, one: str, two: str | None) -> ItemLayout | None:
    """Return the layout of arguments that are written one by one, or None.

    none, one, two  a message with one call, rendered with no, one and two of the arguments _TEXTS
    """
    parts = _split(one, 1)
    if parts is None or two is None:
        return None
    head, middle, _ = parts
    pairs = _split(two, 2)
    if pairs is None or pairs[0] != head or pairs[1] != middle or pairs[3] != middle:
        return None
    found = None
    for layout in list_layouts(head, pairs[2], pairs[4]):
        start, end = layout.opening, layout.closing
        fitting = _around(start, end, none)
        if fitting is None and found is not None:
            continue
        opening, closing = fitting or ("", "")
        found = ItemLayout(
            head=start.removesuffix(opening) if opening else start,
            tail=end.removeprefix(closing) if closing else end,
            opening=opening,
            closing=closing,
            key_prefix=layout.before,
            separator=layout.separator,
            string=ValueForm(middle, layout.after),
        )
        if fitting is not None:
            break
    return found


def _around(start: str, end: str, none: str | None) -> tuple[str, str] | None:
    """Return the texts around the arguments that are missing in `none`, or None if `none` does not match."""
    if none is None:
        return None
    if start + end == none:
        return "", ""
    size = shared_prefix(start, none)
    rest = none[size:]
    return (start[size:], end[: len(end) - len(rest)]) if end.endswith(rest) else None


def _split(text: str, count: int) -> list[str] | None:
    """Return the texts before, between and after the first keys and values, with KEY for repeated keys, or None."""
    parts = []
    for key, value in list(_TEXTS.items())[:count]:
        before, found, text = text.partition(key)
        middle, said, text = text.partition(value)
        if not found or not said:
            return None
        parts += [before, middle]
        text = text.replace(key, KEY)
    return [*parts, text]


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


def _after_key(text: str, layout: ItemLayout, key: str) -> str:
    """Return the value of an argument with the texts around it, or "" if the value is not at the expected place."""
    before, end = layout.head + layout.opening + layout.key_prefix + key, layout.closing + layout.tail
    fits = text.startswith(before) and text.endswith(end)
    return text[len(before) : len(text) - len(end)].replace(key, KEY) if fits else ""


def ends_with_tag(text: str) -> bool:
    """Return True if the text is blank or ends with a tag, apart from whitespace."""
    text = text.rstrip()
    tags = [*_MARKUP.finditer(text)]
    return not text or bool(tags and tags[-1].end() == len(text))


_ASKED, _SAID, _RESULT = "Qzask", "Qzsaid", "Qzresult"
_NAMES = ("qztool", "qzother")
_KEYS = ("qzone", "qztwo")
_STRINGS = ("Qzred", "Qzblue")
_TEXTS = dict(zip(_KEYS, _STRINGS, strict=True))
_TRICKY = "Qz\"'\\\n<é"
_VALUES: dict[str, Any] = {
    "integer": 70707,
    "number": 7.25,
    "boolean": True,
    "null": None,
    "object": {"qzkey": [True, "qzs"]},
    "array": [True, "qzs"],
}
_SHORT_IDS = ("qzcallab1", "qzcallab2")  # Mistral's templates accept only ids of nine letters or digits
_LONG_IDS = ("call_qzfirstcall", "call_qzsecondcall")
_LONGEST_TEXT = 400  # maximum length of a text between two slots, in characters
_HELP = "Qzhelp"
_ANY = {"type": "string", "description": _HELP}
_USER = {"role": "user", "content": _ASKED}
_ANSWER = {"role": "assistant", "content": _SAID}

Call = tuple[str, Mapping[str, Any]]


def tool_abilities(source: str, tries: Tries, tags: ThinkingTags | None) -> ToolAbilities:
    """Find out whether a template accepts tools, and how it writes calls."""
    plain = tries.text([_USER], tools=None)
    shown = tries.text([_USER], tools=_tools()) or ""
    takes = _NAMES[0] in shown and _NAMES[1] in shown and _NAMES[0] not in (plain or "")
    results = False
    first: ToolAbilities | None = None
    styles = product((False, True), (_LONG_IDS, _SHORT_IDS), (True, False))  # the most common style first
    for style in (_Style(as_text, null_content, ids) for as_text, ids, null_content in styles):
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
    known = next((found for texts, found in _BY_TEXTS if all(text in source for text in texts)), None)
    return ToolAbilities(takes, results, tool_format=known if takes else None)


@dataclass(frozen=True, slots=True)
class _Style:
    """One way to write a message with calls: the ids, arguments as a JSON text or an object, content null or ""."""

    as_text: bool
    null_content: bool
    ids: tuple[str, str]


def _tools(kind: str = "string") -> list[dict[str, Any]]:
    inner = {"items": _ANY} if kind == "array" else {"additionalProperties": _ANY} if kind == "object" else {}
    value = {"type": kind, "description": _HELP, **inner}
    schema = {"type": "object", "properties": dict.fromkeys(_KEYS, value), "required": []}
    return [
        {"type": "function", "function": {"name": name, "description": _HELP, "parameters": schema}} for name in _NAMES
    ]


class _Messages:
    """Renders messages with calls in one style and compares the results."""

    def __init__(self, tries: Tries, style: _Style, tags: ThinkingTags | None) -> None:
        self._tries = tries
        self._style = style
        self._tags = tags
        self._start: str = ""  # the text before the calls
        self._end: str = ""  # the text after the calls
        self._after_plain = ""

    def format(self) -> ToolCallFormat | None:
        """Return the format of calls, or None if the style does not work with the template."""
        call = (_NAMES[0], {_KEYS[0]: _STRINGS[0]})
        text = self._text([call])
        written = _after_question(text)
        if text is None or not all(word in written for word in (call[0], _KEYS[0], _STRINGS[0])):
            return None
        if self._style.null_content and "None" in written:
            return None
        fits = self._find_ends(text)
        arguments = self._arguments(self._body([call])) if fits else None
        if arguments is None:
            return None
        found = self._calls(arguments)
        if found is None:
            return None
        found = replace(
            found,
            other_starts=_OTHER_STARTS.get(found.call_start, ()),
            after_plain=self._after_plain,
        )
        return found if _is_sound(found) and self._predicts(found) else None

    def can_follow(self) -> bool:
        """Return True if the conversation may continue after a call and its result."""
        call = self._message([(_NAMES[0], {_KEYS[0]: _STRINGS[0]})])
        result = {"role": "tool", "tool_call_id": self._style.ids[0], "name": _NAMES[0], "content": _RESULT}
        return self._tries.text([_USER, call, result, _ANSWER, _USER], tools=_tools()) is not None

    def takes_results(self) -> bool:
        """Return True if the template shows a tool's result after a call or after an answer without calls."""
        call = self._message([(_NAMES[0], {_KEYS[0]: _STRINGS[0]})])
        result = {"role": "tool", "tool_call_id": self._style.ids[0], "name": _NAMES[0], "content": _RESULT}
        texts = (self._tries.text([_USER, each, result], tools=_tools()) for each in (call, _ANSWER))
        return any(_RESULT in (text or "") for text in texts)

    def _message(self, calls: Sequence[Call], content: str = "") -> dict[str, Any]:
        named = [(call_id, *call) for call_id, call in zip(self._style.ids, calls, strict=False)]
        return {
            "role": "assistant",
            "content": content or (None if self._style.null_content else ""),
            "tool_calls": call_objects(named, as_text=self._style.as_text),
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

    def _find_ends(self, text: str) -> bool:
        """Find the texts around the calls of a message. Returns False if other answers begin with a text without tags.

        The same texts surround a message without calls. The generation prompt shows where the model's own text begins.
        """
        said = _after_question(self._tries.text([_USER, _ANSWER], tools=_tools(), add_generation_prompt=False))
        prompt = _after_question(self._tries.text([_USER], tools=_tools(), add_generation_prompt=True))
        text = _after_question(text)
        start = shared_prefix(text, said)
        own = len(prompt)
        if text.startswith(prompt) and (start < own or not ends_with_tag(text[own:start])):
            start = own
        start = min(start, text.find(_NAMES[0]), text.find(_KEYS[0]))
        before, _, after = said.rpartition(_SAID)
        closing = self._tags.answer_closing if self._tags else ""
        end = len(text) - shared_suffix(text[start:], after.removeprefix(closing))
        if closing and text.startswith(closing, start):
            self._after_plain = closing
            start += len(closing)
        body = text[start:end]
        self._start = text[: end - len(body.lstrip())]
        self._end = text[start + len(body.rstrip()) :]
        begun = before[len(prompt) :] if before.startswith(prompt) and text.startswith(prompt) else ""
        return not begun.strip() or ends_with_tag(begun) or len(begun) > 40

    # --- arguments

    def _arguments(self, body: str | None) -> ArgumentFormat | None:
        """Return the notation of arguments, given the body of a call with one argument."""
        if body is None:
            return None
        found = json_arguments(body, _KEYS[0], {_KEYS[0]: _STRINGS[0]})
        if found is None:
            return self._items(body)
        two = {_KEYS[0]: _STRINGS[0], _KEYS[1]: {"qzkey": [True, "qzé"]}}
        again = json_arguments(self._body([(_NAMES[0], two)]) or "", _KEYS[0], two)
        return again[2] if again else None

    def _items(self, body: str) -> ArgumentFormat | None:
        found = item_layout(self._body([(_NAMES[0], {})]), body, self._body([(_NAMES[0], _TEXTS)]))
        if found is None:
            return None
        strings, string, wrapper = self._strings(found)
        forms, notations, quote = self._forms(found)
        if "integer" not in forms:
            return None
        return ArgumentFormat(
            style="items",
            separators=(", ", ": "),
            opening=found.opening,
            closing=found.closing,
            key_prefix=found.key_prefix,
            separator=found.separator,
            forms={**dict.fromkeys(_VALUES, forms["integer"]), "string": string, **forms},
            strings=strings,
            scalars=notations.get("boolean", "json"),
            arrays=notations.get("array", "json"),
            objects=notations.get("object", "json"),
            quote=quote,
            wrapper=wrapper,
        )

    def _strings(self, found: ItemLayout) -> tuple[str, ValueForm, tuple[str, str] | None]:
        """Return the notation of strings, the texts around strings, and the texts around strings with markup."""
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

    def _forms(self, found: ItemLayout) -> tuple[dict[str, ValueForm], dict[str, str], str]:
        """Return the texts around values by type, the notations by type, and the quote of bare values."""
        forms: dict[str, ValueForm] = {}
        notations: dict[str, str] = {}
        quote = '"'
        for kind, value in _VALUES.items():
            text = self._body([(_NAMES[0], {_KEYS[0]: value})], kind)
            written = value_form(text, found, _KEYS[0], value) if text is not None else None
            if written is not None:
                notations[kind], forms[kind], found_quote = written
                quote = found_quote if notations[kind] == "bare" else quote
        return forms, notations, quote

    # --- calls

    def _calls(self, arguments: ArgumentFormat) -> ToolCallFormat | None:
        """Return the format of calls whose arguments have the given notation."""
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
        core, head, between, first = with_index((cores[0], cores[2]), (head, between))
        for found in list_layouts(head, between, tail):
            start, end = _halves(found.before + core + found.after)
            return ToolCallFormat(
                call_start=start,
                call_end=end,
                arguments=arguments,
                section_start=found.opening,
                separator=found.separator,
                section_end=found.closing,
                first_index=first,
                parallel=True,
                id_form=id_form,
            )
        return None

    def _slotted(self, calls: Sequence[Call], form: ArgumentFormat) -> tuple[str, list[str], str] | None:
        """Return (head, texts, tail) of a body, with slots and "\\0" for the arguments.

        `texts` are the first call from its first to its last slot, the text between the calls, and the second call.
        Returns None if the arguments are not at the expected place.
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
                found = json_arguments(body[at:], key, arguments)
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
                texts.append(slotted(body[at:first], name, call_id))
            parts = body[first:start], body[end:last]
            texts.append("\0".join(slotted(part, name, call_id) for part in parts))
            at = last
        name, call_id = calls[len(spans) - 1][0], self._style.ids[len(spans) - 1]
        return body[: spans[0][0]], texts, slotted(body[at:], name, call_id)

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
    """Return True if a format can be parsed: it has a name, and no text is too long or contains a slot of another text.

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
    named = NAME in found.call_start
    return named and longest <= _LONGEST_TEXT and not slots and len(first) <= 1 and "" not in first and ends
