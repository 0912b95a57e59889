"""Finds tool calls in the streamed text of an answer, and separates them from the text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from llmrun.engine.requests import ToolCallDelta
from llmrun.engine.tool_calls.calls import CallReader
from llmrun.engine.tool_calls.openings import Opening, ToolSpelling, call_heads, first_tag, is_sure, openings
from llmrun.engine.tool_calls.reader import Ended, Malformed, Reader, Reading
from llmrun.engine.tool_calls.schemas import Tool


@dataclass(frozen=True, slots=True)
class AnswerText:
    """A piece of the answer that is not part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call begins. `index` counts the calls of the answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsText:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call is complete, and its arguments are a valid JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The model began a call that is malformed or unfinished.

    text    everything that the model wrote from the beginning of the call to its end, or to where another text begins
    reason  what is wrong with it
    index   the index of the call if CallStarted was already returned for it, or None. This index is not used again.
    """

    text: str
    reason: str
    index: int | None


ToolEvent = AnswerText | CallStarted | ArgumentsText | CallEnded | CallBroken


_ID_LETTERS = 24  # OpenAI's ids are "call_" and 24 letters or digits
_SHORT_ID = 9  # Mistral's ids
_KEPT = 4096  # characters of the answer that may stay in memory after they have been returned


class ToolCallParser:
    """A parser for one answer. The result does not depend on how the text is chunked, apart from the sizes of pieces.

    Text that may begin a call is held back until it is clear whether it does. Whitespace next to calls is dropped.

    spelling  the format as spelled in the model's vocabulary; `feed` expects its placeholders for control tokens
    tools     the tools that the model may call
    seed      makes the ids of calls differ from those in other answers with the same text; for example, the number of
              earlier messages
    """

    def __init__(self, spelling: ToolSpelling, tools: Sequence[Tool], seed: str = "") -> None:
        self._format = spelling.format
        self._texts = spelling.texts
        self._tools = {tool.name: tool for tool in tools}
        self._openings = openings(spelling.format)
        self._heads = call_heads(spelling.format)
        self._reader = Reader()
        self._call = CallReader(self._reader, spelling, self._tools, self._start_call, self._arguments)
        self._events: list[ToolEvent] = []
        self._hash = hashlib.sha256(seed.encode("utf-8", "surrogatepass"))
        self._space = ""  # whitespace that is dropped if a call follows
        self._after_call = False
        self._calls = 0
        self._reading = self._answer()

    @property
    def calls(self) -> int:
        """The number of calls that have begun."""
        return self._calls

    def feed(self, text: str) -> list[ToolEvent]:
        """Add text, and return what is new."""
        self._reader.text += text
        return self._advance()

    def finish(self) -> list[ToolEvent]:
        """End the answer, and return the text that was held back and the calls that are unfinished."""
        self._reader.ended = True
        return self._advance()

    def _advance(self) -> list[ToolEvent]:
        if next(self._reading, self) is None:
            self._call.send()
        events, self._events = self._events, []
        return events

    # --- the answer around calls

    def _answer(self) -> Reading[None]:
        plain = yield from self._plain_start()
        while True:
            if (plain or not (yield from self._call_is_next())) and not (yield from self._read_text()):
                return
            self._forget()
            self._space = ""
            yield from self._section()
            self._after_call, plain = True, False

    def _plain_start(self) -> Reading[bool]:
        """Skip the text that begins an answer without calls. Returns True if there is one."""
        start = self._format.plain_start
        if not start or not (yield from self._reader.begins(start)):
            return False
        self._reader.at += len(start)
        return True

    def _call_is_next(self) -> Reading[bool]:
        """Return True if a call begins here whose first text also occurs elsewhere, such as "{"."""
        if all(each.text for each in self._openings):
            return False
        return (yield from self._is_call(self._reader.at, self._format.separator if self._after_call else ""))

    def _is_call(self, at: int, before: str = "") -> Reading[bool]:
        """Return True if this position is the beginning of a call to a known tool. The position does not change."""
        reader, start = self._reader, self._reader.at
        reader.at = at
        try:
            if before.strip():
                yield from reader.match(before)
            yield from reader.match(self._format.section_start)
            return (yield from self._call.starts())
        except Malformed:
            return False
        finally:
            reader.at = start

    def _read_text(self) -> Reading[bool]:
        """Read the answer up to a call. Returns False at its end."""
        reader = self._reader
        seen = reader.at
        while True:
            opening, place = self._next_opening(seen)
            overlap = (
                0 if reader.ended else max((_overlap(reader.text, each.text) for each in self._openings), default=0)
            )
            partial = max(seen, len(reader.text) - overlap)
            if opening is not None and place <= partial:
                if opening.sure or (yield from self._is_call(place + len(opening.text))):
                    self._say(place)
                    return True
                seen = place + 1
                continue
            self._say(partial)
            if reader.ended:
                if self._space and not self._after_call:
                    self._events.append(AnswerText(self._space))
                return False
            if reader.at > _KEPT:
                partial -= reader.at
                self._forget()
            seen = partial
            yield from reader.more()

    def _next_opening(self, seen: int) -> tuple[Opening | None, int]:
        """Return the first opening in the text from `seen` on, and its position."""
        found: tuple[Opening | None, int] = (None, -1)
        for each in self._openings:
            place = self._reader.text.find(each.text, seen) if each.text else -1
            if place >= 0 and (found[0] is None or (place, len(each.text)) < (found[1], len(found[0].text))):
                found = each, place
        return found

    def _say(self, end: int) -> None:
        """Return the answer up to this position, except for whitespace that a call may follow."""
        text = self._space + self._reader.text[self._reader.at : end].translate(self._texts)
        self._reader.at = end
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._events.append(AnswerText(said.lstrip() if self._after_call else said))
            self._after_call = False

    # --- calls

    def _section(self) -> Reading[None]:
        """Read the calls that begin here."""
        reader, form = self._reader, self._format
        begun = reader.at
        try:
            yield from reader.match(form.after_plain, form.separator if self._after_call else "")
            yield from reader.match(form.section_start, first_tag(form.section_start))
            while True:
                self._call.reset()
                yield from self._call.read()
                self._events.append(CallEnded(self._calls - 1))
                begun = reader.at
                if not (yield from self._another()):
                    break
            yield from reader.match(form.section_end)
        except Malformed as error:
            yield from self._broken(begun, error)

    def _another(self) -> Reading[bool]:
        """Return True if another call of the same section follows, and read the text between the two."""
        reader, separator = self._reader, self._format.separator
        heads = [separator + head for head in self._heads]
        found = yield from reader.found([*heads, *filter(is_sure, self._heads), self._format.section_end])
        if found is None or found[0] == self._format.section_end:
            return False
        if found[0] in heads:
            yield from reader.match(separator)
        return True

    def _broken(self, begun: int, error: Malformed) -> Reading[None]:
        """Report a call that is not valid, up to its end or the beginning of the next."""
        reader, form = self._reader, self._format
        self._call.send()
        announced = self._call.announced
        self._call.reset()
        reader.at = max(reader.at, begun + 1)
        ends = [text for text in (first_tag(form.call_end), form.section_end.strip()) if text and is_sure(text)]
        starts = [each.text for each in self._openings if each.sure]
        try:
            _, stop = yield from reader.until(*ends, *starts, "\0")
            if stop in starts:
                reader.at -= len(stop)
            else:
                yield from reader.match(form.call_end.removeprefix(first_tag(form.call_end)))
                yield from reader.match(form.section_end)
        except Ended:
            reader.at = len(reader.text)
        text = reader.text[begun : reader.at].translate(self._texts)
        self._events.append(CallBroken(text, str(error), self._calls - 1 if announced else None))

    def _start_call(self, name: str, call_id: str) -> None:
        self._events.append(CallStarted(self._calls, call_id or self._made_id(name), name))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsText(self._calls - 1, text.translate(self._texts)))

    def _made_id(self, name: str) -> str:
        """Return an id for a call: a hash of the answer up to here, so that the same answer has the same ids."""
        digest = self._hash.copy()
        digest.update(self._reader.text[: self._reader.at].encode("utf-8", "surrogatepass"))
        digest.update(f"{self._calls} {name}".encode())
        letters = digest.hexdigest()
        return letters[:_SHORT_ID] if self._format.id_form == "short" else f"call_{letters[:_ID_LETTERS]}"

    def _forget(self) -> None:
        """Drop the text that has been returned."""
        self._hash.update(self._reader.text[: self._reader.at].encode("utf-8", "surrogatepass"))
        self._reader.forget()


def _overlap(text: str, opening: str) -> int:
    """Return the length of the longest suffix of a text that is a proper prefix of an opening."""
    return next((size for size in range(min(len(text), len(opening) - 1), 0, -1) if text.endswith(opening[:size])), 0)


class CallDecoder:
    """An AnswerReader that finds tool calls.

    placeholders  maps the ids of control tokens to the characters that stand for them in the text
    complete      how many calls are complete
    """

    def __init__(self, spelling: ToolSpelling, tools: Sequence[Tool], seed: str) -> None:
        """Create a decoder. ToolCallParser describes the parameters."""
        self.placeholders: Mapping[int, str] = spelling.characters
        self.complete = 0
        self._parser = ToolCallParser(spelling, tools, seed)

    def feed(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Add text with placeholders, and return the text that belongs to no call, and the pieces of calls."""
        return self._read(self._parser.feed(text))

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """End the answer, and return what was held back, as `feed` does."""
        return self._read(self._parser.finish())

    def _read(self, events: Sequence[ToolEvent]) -> tuple[str, tuple[ToolCallDelta, ...]]:
        self.complete += sum(isinstance(event, CallEnded) for event in events)
        return "".join(_texts(events)), tuple(_deltas(events))


def _texts(events: Iterable[ToolEvent]) -> Iterator[str]:
    """Yield the texts of the answer. A call that is broken before its name is complete is text, too."""
    for event in events:
        if isinstance(event, AnswerText) or (isinstance(event, CallBroken) and event.index is None):
            yield event.text


def _deltas(events: Iterable[ToolEvent]) -> Iterator[ToolCallDelta]:
    for event in events:
        if isinstance(event, CallStarted):
            yield ToolCallDelta(event.index, event.id, event.name)
        elif isinstance(event, ArgumentsText):
            yield ToolCallDelta(event.index, arguments=event.text)
        elif isinstance(event, CallBroken) and event.index is not None:
            yield ToolCallDelta(event.index, problem=event.reason)
