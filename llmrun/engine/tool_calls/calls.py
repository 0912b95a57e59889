"""Reads one call: its name, its id and its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial

from llmrun.engine.requests import LONGEST_TOOL_NAME
from llmrun.engine.templates.tool_format import CALL_ID, INDEX, NAME
from llmrun.engine.tool_calls.arguments import ItemReader
from llmrun.engine.tool_calls.calls_json import JsonCall, json_call
from llmrun.engine.tool_calls.openings import call_starts, first_tag, parts
from llmrun.engine.tool_calls.reader import Ended, Malformed, Reader, Reading
from llmrun.engine.tool_calls.schemas import Tool
from llmrun.engine.tool_calls.spelling import ToolSpelling

_WORD = re.compile(rf"[a-zA-Z0-9_-]{{0,{LONGEST_TOOL_NAME}}}")
_DIGITS = re.compile(r"[0-9]{0,9}")
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})


class CallReader:
    """A reader of calls.

    start      is called with the name and the id ("" if unknown) of a call, before its arguments
    arguments  is called with each piece of the JSON text of the arguments
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
        self._json = json_call(spelling.format)
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
        """Return True if a call to a known tool begins here. The position changes."""
        first = self._starts[0]
        if self._json and self._json.name_key is None:
            first = [self._json.head + '{"', NAME, '"']
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
        if self._json is not None:
            yield from self._read_json(self._json)
            return
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
        """Read part number `at` of one of these texts. Returns the texts that have this part."""
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
        """Read the text after a call. It may be missing at the end of the answer, and so may all but its first tag."""
        reader = self._reader
        if not end.strip():
            return
        yield from reader.skip_space()
        if reader.ended and reader.at_end() and self._format.arguments.style == "json":
            return
        first = first_tag(end) or end
        for part in parts(first):
            if part in (NAME, CALL_ID):
                yield from self._word("a name or an id")
            elif part == INDEX:
                yield from reader.pattern(_DIGITS)
            else:
                yield from reader.expect(part)
        rest = end[len(first) :]
        if rest.strip():
            yield from reader.match(rest)

    def _announce(self) -> None:
        if not self.announced:
            self.announced = True
            form = self._format.id_form
            if NAME in form:
                self._id = form.replace(NAME, self._name).replace(INDEX, self._index)
            self._start(self._name, self._id)

    def _read_arguments(self) -> Reading[None]:
        """Read arguments that are a JSON object, and pass them on while they arrive."""
        yield from self._reader.skip_space()
        if (yield from self._reader.peek()) != "{":
            raise Malformed("the arguments are not a JSON object")
        self._sent = self._reader.at
        yield from self._reader.json_value()
        self.send()
        self._sent = None

    # --- calls that are one JSON object

    def _read_json(self, call: JsonCall) -> Reading[None]:
        reader = self._reader
        if call.head.strip():
            yield from reader.expect(call.head)
        waiting: list[str] = []
        yield from reader.members(partial(self._read_member, call, waiting))
        if not self._name:
            raise Malformed("the name of the tool is missing")
        if not self.announced:
            self._announce()
            self._arguments(waiting[0] if waiting else "{}")
        yield from self._read_end(call.tail)

    def _read_member(self, call: JsonCall, waiting: list[str], key: str) -> Reading[None]:
        """Read the value of one key of a call. Arguments that come before the name are added to `waiting`."""
        reader = self._reader
        first = yield from reader.peek()
        if call.name_key is None and not self._name:
            self._name = key
            yield from self._read_value(first, waiting)
        elif key == call.name_key and first == '"':
            self._name = yield from reader.json_string()
            if not _WORD.fullmatch(self._name) or not self._name:
                raise Malformed("the name of the tool is invalid")
        elif key == call.id_key and first == '"':
            self._id = yield from self._read_id()
        elif key == call.arguments_key or (key in _ARGUMENT_KEYS and call.arguments_key is not None):
            yield from self._read_value(first, waiting)
        elif key == call.wrapper and first == "{":
            yield from reader.members(partial(self._read_member, call, waiting))
        else:
            yield from reader.json_value()

    def _read_id(self) -> Reading[str]:
        found = yield from self._reader.json_string()
        return found if _WORD.fullmatch(found) else ""

    def _read_value(self, first: str, waiting: list[str]) -> Reading[None]:
        """Read the arguments: an object, a text that contains one, or null for none."""
        if self.announced or waiting:
            raise Malformed("the call has arguments twice")
        if first == "{" and self._name:
            self._announce()
            yield from self._read_arguments()
            return
        text = yield from self._reader.json_value()
        waiting.append(_as_object(text))
        if self._name:
            self._announce()
            self._arguments(waiting[0])


def _as_object(text: str) -> str:
    """Return the text of a JSON object that may be wrapped in a JSON string. Raises Malformed."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            text, value = value, json.loads(value)
    except (ValueError, RecursionError):
        value = 0
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Malformed("the arguments are not a JSON object")
    return text
