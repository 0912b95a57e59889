"""Reads one tool call: its name, its id and its arguments.

Arguments that are written one by one, such as `<parameter=key>`, are converted to JSON.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from llmrun.engine.constraint.strict_json import parse
from llmrun.engine.requests import LONGEST_TOOL_NAME
from llmrun.engine.templates.tool_format import (
    CALL_ID,
    INDEX,
    JSON_TYPES,
    KEY,
    NAME,
    ArgumentFormat,
    ValueForm,
    json_type,
)
from llmrun.engine.tool_calls.openings import ToolSpelling, at_first_tag, call_starts, first_tag, parts
from llmrun.engine.tool_calls.reader import Ended, Malformed, Reader, Reading
from llmrun.engine.tool_calls.schemas import Tool, types

_LONGEST_KEY = 256  # characters
_DEEPEST = 60  # levels of nested values
_BARE_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)(\s*:)")
_JSON_NAMES = {"true": True, "false": False, "null": None}
_ROOT: Mapping[str, Any] = {}


class ItemReader:
    """Reads the arguments of one call.

    tool  the definition of the tool; None if no tool has this name, in which case types are guessed
    end   the text that follows the arguments
    emit  a function that receives each piece of the arguments as JSON text
    texts maps the code points of placeholders to the text of their tokens
    """

    def __init__(
        self,
        reader: Reader,
        form: ArgumentFormat,
        tool: Tool | None,
        end: str,
        emit: Callable[[str], None],
        texts: Mapping[int, str],
    ) -> None:
        self._reader = reader
        self._form = form
        self._root = tool.parameters if tool else _ROOT
        self._properties = tool.properties() if tool else {}
        self._end = form.closing + end
        self._emit = emit
        self._texts = texts
        self._prefixes = {each.prefix: each for each in form.forms.values()}
        self._key_end = _shared_start([prefix.split()[0] for prefix in self._prefixes])

    def read(self) -> Reading[None]:
        """Read all arguments, but not the text that follows the arguments. Raises Malformed."""
        reader, form = self._reader, self._form
        keys: set[str] = set()
        yield from reader.match(form.opening)
        while not (yield from self._is_end()):
            if keys and form.separator.strip():
                yield from reader.expect(form.separator)
            if not keys and (yield from self._is_end()):
                break
            yield from reader.expect(form.key_prefix)
            key, value = yield from self._item()
            if key in keys:
                raise Malformed(f"the argument {key[:40]} is given twice")
            self._emit(("{" if not keys else ", ") + json.dumps(key, ensure_ascii=False) + ": " + value)
            keys.add(key)
        yield from reader.match(form.closing)
        self._emit("{}" if not keys else "}")

    def _is_end(self) -> Reading[bool]:
        """Return True if the text after the arguments comes next. Between items, a separator is not the end."""
        options = [self._end, self._form.key_prefix] if self._form.key_prefix.strip() else [self._end]
        if not self._end.strip():
            yield from self._reader.skip_space()
            return self._reader.at_end() or (yield from self._reader.found([self._form.key_prefix])) is None
        found = yield from self._reader.found(options)
        return found is not None and found[0] == self._end

    def _item(self) -> Reading[tuple[str, str]]:
        """Read the name and the value of an argument. Returns the name and the value as JSON text."""
        reader, form = self._reader, self._form
        key, stop = yield from reader.until(self._key_end, longest=_LONGEST_KEY)
        reader.at -= len(stop)
        key = key.strip().translate(self._texts)
        wanted = types(self._properties[key], self._root) if key in self._properties else frozenset(JSON_TYPES)
        expected = {form.forms[kind].prefix for kind in wanted & form.forms.keys()}
        prefix = (yield from reader.match(*expected)) or (yield from reader.match(*self._prefixes))
        if prefix is None:
            raise Malformed("expected a value")
        kinds = {kind for kind, each in form.forms.items() if each.prefix == prefix}
        return key, (yield from self._value(self._prefixes[prefix], kinds, key, wanted))

    def _value(self, around: ValueForm, kinds: set[str], key: str, wanted: frozenset[str]) -> Reading[str]:
        """Read a value and the text after it. Returns the JSON text of the value.

        kinds   the types that this notation may stand for
        wanted  the types that the schema allows
        """
        form = self._form
        suffix = around.suffix.replace(KEY, key)
        raw = form.strings == "raw" and bool(suffix.strip())
        only_string = raw and (kinds == {"string"} or wanted == {"string"})
        text = None if only_string else (yield from self._structured(suffix))
        if text is None and suffix.strip():
            text = yield from self._raw(around.prefix, suffix)
        elif text is None:
            text = yield from self._balanced()
        if only_string:
            return json.dumps(text.translate(self._texts), ensure_ascii=False)
        found = as_json(text, form, self._texts)
        kind = json_type(json.loads(found)) if found is not None else ""
        if raw and "string" in kinds & wanted and (found is None or kind == "string" or kind not in wanted):
            return json.dumps(text.translate(self._texts), ensure_ascii=False)
        if found is None:
            raise Malformed(f"the value of {key[:40]} is invalid")
        return found

    def _raw(self, prefix: str, suffix: str) -> Reading[str]:
        """Read text up to and including the suffix. Returns the text before the suffix."""
        start, end = self._form.wrapper or ("", "")
        reader = self._reader
        if start and (yield from reader.begins(start)):
            text, _ = yield from reader.until(end + suffix.strip())
            return text.removeprefix(start)
        text, _ = yield from reader.until(suffix.strip())
        return _trimmed(text, prefix, suffix)

    def _structured(self, suffix: str) -> Reading[str | None]:
        """Read an array or an object and the suffix after it, even if strings in the value contain the suffix.

        Returns None, and reads nothing, if no array or object comes next, or if the suffix does not follow.
        """
        reader = self._reader
        start = reader.at
        yield from reader.skip_space()
        try:
            if (yield from reader.peek()) in "[{":
                text = yield from self._balanced(once=True)
                if not suffix.strip() or (yield from reader.match(suffix)) is not None:
                    return text
        except Malformed:
            pass
        reader.at = start
        return None

    def _balanced(self, once: bool = False) -> Reading[str]:
        """Read a value up to a separator or the end of the arguments. If `once`, read one array or object."""
        reader, form = self._reader, self._form
        start, depth = reader.at, 0
        quotes = {"bare": (form.quote,), "python": ('"', "'")}.get(form.arrays, ('"',))
        stops = {form.separator.strip()[:1], self._end.strip()[:1]}
        while True:
            try:
                character = yield from reader.peek()
            except Ended:
                if self._end.strip():
                    raise
                break
            if depth == 0 and character in stops and not once:
                break
            if character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
            if depth < 0 or depth > _DEEPEST:
                raise Malformed("the arguments are nested too deeply" if depth > 0 else "unbalanced brackets")
            quote = next((quote for quote in quotes if quote[0] == character), "")
            if quote and (yield from reader.begins(quote)):
                yield from self._quoted(quote)
                continue
            reader.at += 1
            if once and depth == 0:
                break
        return reader.text[start : reader.at].strip()

    def _quoted(self, quote: str) -> Reading[None]:
        """Read up to the end of a string."""
        reader = self._reader
        reader.at += len(quote)
        while True:
            character = yield from reader.peek()
            if (yield from reader.begins(quote)):
                reader.at += len(quote)
                return
            reader.at += 1
            if character == "\\" and self._form.arrays != "bare":
                yield from reader.peek()
                reader.at += 1


def _shared_start(texts: list[str]) -> str:
    """Return the longest common prefix of texts."""
    shared = ""
    for letters in zip(*texts, strict=False):
        if len(set(letters)) > 1:
            break
        shared += letters[0]
    return shared


def _trimmed(text: str, prefix: str, suffix: str) -> str:
    """Remove the whitespace that belongs to the tags around a value: either all of it or none."""
    before = prefix[len(prefix.rstrip()) :]
    after = suffix[: len(suffix) - len(suffix.lstrip())]
    return text.removeprefix(before).removesuffix(after)


def as_json(text: str, form: ArgumentFormat, texts: Mapping[int, str]) -> str | None:
    """Convert a value in JSON, Python or bare notation to JSON text. Returns None if the value is invalid."""
    candidate = _quoted_keys(text, form.quote) if form.arrays == "bare" else text.strip()
    candidate = candidate.translate(texts)
    try:
        parse(candidate)
    except (ValueError, RecursionError):
        return _python_as_json(candidate)
    return candidate


def _python_as_json(text: str) -> str | None:
    """Convert a Python literal, which may also contain true, false and null, to JSON. Returns None for invalid text."""
    try:
        with warnings.catch_warnings():  # warnings about invalid escape sequences
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
        return json.dumps(ast.literal_eval(_JsonNames().visit(tree)), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


class _JsonNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_NAMES[node.id]) if node.id in _JSON_NAMES else node


def _quoted_keys(text: str, quote: str) -> str:
    """Convert JSON with unquoted keys, and with `quote` around strings, to standard JSON."""
    parts = text.strip().split(quote)
    if len(parts) % 2 == 0:
        return text
    # Outside of strings, every key follows a bracket or a comma. A key right after a string starts a new part.
    for at in range(0, len(parts), 2):
        parts[at] = _BARE_KEY.sub(lambda found: found[1] + json.dumps(found[2]) + found[3], parts[at])
    for at in range(1, len(parts), 2):
        parts[at] = json.dumps(parts[at], ensure_ascii=False)
    return "".join(parts)


_WORD = re.compile(rf"[a-zA-Z0-9_.-]{{0,{LONGEST_TOOL_NAME}}}")
_DIGITS = re.compile(r"[0-9]{0,9}")


class CallReader:
    """A reader of calls.

    start      a function that receives the name and the id ("" if unknown) of a call, before the arguments
    arguments  a function that receives each piece of the JSON text of the arguments
    announced  True once `start` was called for the current call
    """

    def __init__(
        self,
        reader: Reader,
        spelling: ToolSpelling,
        tools: Mapping[str, Tool],
        start: Callable[[str, str], None],
        arguments: Callable[[str], None],
    ) -> None:
        self._reader = reader
        self._format = spelling.format
        self._texts = spelling.texts
        self._tools = tools
        self._start = start
        self._arguments = arguments
        self._starts = [parts(start) for start in call_starts(spelling.format)]
        self._end = first_tag(spelling.format.call_end) or spelling.format.call_end
        self.reset()

    def reset(self) -> None:
        """Prepare for another call."""
        self.announced = False
        self._name = self._id = self._index = ""
        self._sent: int | None = None  # the end of the arguments that were passed on

    def send(self) -> None:
        """Pass on the arguments that have been read so far."""
        if self._sent is not None:
            self._arguments(self._reader.text[self._sent : self._reader.at])
            self._sent = self._reader.at

    def starts(self) -> Reading[bool]:
        """Read the beginning of a call. Returns True if a call to a known tool begins here."""
        first = self._starts[0]
        if first[0].strip() and (yield from self._reader.match(first[0])) is None:
            return False
        yield from self._reader.skip_space()
        name = yield from self._reader.pattern(_WORD)
        if name not in self._tools:
            return False
        after = (first[2] if len(first) > 2 else "").strip()
        yield from self._reader.skip_space()
        return not after or (yield from self._reader.peek()) == after[0]

    def read(self) -> Reading[None]:
        """Read a call up to its end. Raises Malformed."""
        yield from self._read_start()
        self._announce()
        if self._format.arguments.style == "json":
            yield from self._read_arguments()
        else:
            items = ItemReader(
                self._reader,
                self._format.arguments,
                self._tools.get(self._name),
                self._end or self._format.section_end,
                self._arguments,
                self._texts,
            )
            yield from items.read()
        yield from self._read_end(self._format.call_end)

    def _read_start(self) -> Reading[None]:
        """Read everything before the arguments."""
        starts = self._starts
        for at in range(max(map(len, starts))):
            part = starts[0][at]
            if part == NAME:
                name = yield from self._word("the name of the tool")
                if self._name and name != self._name:
                    raise Malformed("two names of one call differ")
                self._name = name
            elif part == CALL_ID:
                self._id = yield from self._word("the id of the call")
            elif part == INDEX:
                self._index = yield from self._reader.pattern(_DIGITS)
            else:
                starts = yield from self._matching(starts, at)
            starts = [start for start in starts if len(start) > at + 1]
            if not starts:
                break
        if not self._name:
            raise Malformed("the name of the tool is missing")

    def _matching(self, starts: list[list[str]], at: int) -> Reading[list[list[str]]]:
        """Read part number `at` of the given texts. Returns the texts whose part `at` matches."""
        found = yield from self._reader.match(*{start[at] for start in starts})
        fitting = [start for start in starts if start[at] == found or not (found or start[at].strip())]
        if not fitting:
            yield from self._reader.expect(starts[0][at])
        return fitting

    def _word(self, what: str) -> Reading[str]:
        yield from self._reader.skip_space()
        word = yield from self._reader.pattern(_WORD)
        if not word:
            raise Ended if self._reader.ended and self._reader.at_end() else Malformed(f"{what} is missing")
        return word

    def _read_end(self, end: str) -> Reading[None]:
        """Read the text after a call.

        At the end of the answer, all tags may be missing. Before other text, all tags except the first may be missing.
        """
        reader = self._reader
        before, tags = at_first_tag(end)
        yield from self._read_parts(before)
        yield from reader.skip_space()
        if reader.ended and reader.at_end() and self._format.arguments.style == "json":
            return
        first = first_tag(tags)
        yield from self._read_parts(first)
        if rest := tags.strip().removeprefix(first):
            yield from reader.match(rest)

    def _read_parts(self, text: str) -> Reading[None]:
        for part in parts(text):
            if part in (NAME, CALL_ID):
                yield from self._word("a name or an id")
            elif part == INDEX:
                yield from self._reader.pattern(_DIGITS)
            else:
                yield from self._reader.expect(part)

    def _announce(self) -> None:
        if not self.announced:
            self.announced = True
            self._start(self._name, self._format.id_of(self._name, self._index) or self._id)

    def _read_arguments(self) -> Reading[None]:
        """Read arguments that are a JSON object, and pass on the text as it arrives."""
        yield from self._reader.skip_space()
        if (yield from self._reader.peek()) != "{":
            raise Malformed("the arguments are not a JSON object")
        self._sent = self._reader.at
        yield from self._reader.json_object()
        self.send()
        self._sent = None
