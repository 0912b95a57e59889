"""Finds tool calls in the streamed text of an answer, and separates the calls from the other text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from llmrun.engine.requests import ToolCallDelta
from llmrun.engine.streaming import length_begun
from llmrun.engine.tool_calls.calls import CallReader
from llmrun.engine.tool_calls.openings import Opening, ToolSpelling, call_starts, first_tag, openings, parts
from llmrun.engine.tool_calls.reader import Ended, Malformed, Reader, Reading
from llmrun.engine.tool_calls.schemas import Tool

if TYPE_CHECKING:
    from llmrun.engine.tool_calls.text_calls import TextCallDecoder

_ID_LETTERS = 24  # OpenAI's ids are "call_" and 24 letters or digits
_SHORT_ID = 9  # Mistral's ids
_KEPT = 4096  # number of returned characters of the answer that may stay in memory


class CallDecoder:
    """An AnswerReader that finds tool calls.

    Text that may begin a call is held back until more text arrives. Whitespace next to calls is dropped. The
    result does not depend on how the text is split into chunks, except for the sizes of the returned pieces.

    placeholders  maps the ids of control tokens to the characters that stand for them in the text
    complete      the number of complete calls
    text_call     recognizes an answer that consists only of calls in plain JSON, or None if such an answer is text
    """

    def __init__(
        self,
        spelling: ToolSpelling,
        tools: Sequence[Tool],
        seed: str = "",
        text_call: TextCallDecoder | None = None,
    ) -> None:
        """Create a decoder for one answer.

        spelling  the format as spelled in the model's vocabulary
        tools     the tools that the model may call
        seed      makes the ids of calls differ from those in other answers with the same text; for example, the number
                  of earlier messages
        """
        self.placeholders: Mapping[int, str] = spelling.characters
        self.complete = 0
        self.text_call = text_call
        self._format = spelling.format
        self._texts = spelling.texts
        self._tools = {tool.name: tool for tool in tools}
        self._openings = openings(spelling.format)
        self._heads = [parts(start)[0] for start in call_starts(spelling.format)]
        self._reader = Reader()
        self._call = CallReader(self._reader, spelling, self._tools, self._start_call, self._arguments)
        self._found: list[str | ToolCallDelta] = []
        self._hash = hashlib.sha256(seed.encode("utf-8", "surrogatepass"))
        self._space = ""  # whitespace that is dropped if a call follows
        self._after_call = False
        self._calls = 0
        self._reading = self._answer()

    def feed(self, text: str) -> list[str | ToolCallDelta]:
        """Add text with placeholders. Returns text outside of calls and pieces of calls."""
        self._reader.text += text
        return self._advance()

    def finish(self) -> list[str | ToolCallDelta]:
        """End the answer. Returns the text that was held back and the pieces of unfinished calls."""
        self._reader.ended = True
        return self._advance()

    def add(self, calls: Iterable[tuple[str, str]]) -> tuple[ToolCallDelta, ...]:
        """Add complete calls that the model has written in plain JSON. Returns the pieces of the calls."""
        pieces: list[ToolCallDelta] = []
        for number, (name, arguments) in enumerate(calls, self._format.first_index):
            begun = self._first_piece(name, self._format.id_of(name, str(number)))
            pieces += begun, ToolCallDelta(begun.index, arguments=arguments)
            self.complete += 1
        return tuple(pieces)

    def _advance(self) -> list[str | ToolCallDelta]:
        if next(self._reading, self) is None:
            self._call.send()
        found, self._found = self._found, []
        return found

    # --- the answer around calls

    def _answer(self) -> Reading[None]:
        while (yield from self._call_is_next()) or (yield from self._read_text()):
            self._forget()
            self._space = ""
            yield from self._section()

    def _call_is_next(self) -> Reading[bool]:
        """Return True if the next text is a call whose opening, such as "{", also occurs outside of calls."""
        if all(each.text for each in self._openings):
            return False
        return (yield from self._is_call(self._reader.at, self._format.separator if self._after_call else ""))

    def _is_call(self, at: int, before: str = "") -> Reading[bool]:
        """Return True if a call to a known tool begins at the given position. The position does not change."""
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
        """Read the answer up to the next call. Returns False at the end of the answer."""
        reader = self._reader
        seen = reader.at
        while True:
            opening, place = self._next_opening(seen)
            overlap = 0 if reader.ended else length_begun(reader.text, (each.text for each in self._openings))
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
                    self._found.append(self._space)
                return False
            if reader.at > _KEPT:
                partial -= reader.at
                self._forget()
            seen = partial
            yield from reader.more()

    def _next_opening(self, seen: int) -> tuple[Opening | None, int]:
        """Return the first opening in the text after position `seen`, and the position of the opening."""
        found: tuple[Opening | None, int] = (None, -1)
        for each in self._openings:
            place = self._reader.text.find(each.text, seen) if each.text else -1
            if place >= 0 and (found[0] is None or (place, len(each.text)) < (found[1], len(found[0].text))):
                found = each, place
        return found

    def _say(self, end: int) -> None:
        """Emit the answer up to the given position, except for whitespace that may precede a call."""
        text = self._space + self._reader.text[self._reader.at : end].translate(self._texts)
        self._reader.at = end
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._found.append(said.lstrip() if self._after_call else said)
            self._after_call = False

    # --- calls

    def _section(self) -> Reading[None]:
        """Read the calls that begin at the current position."""
        reader, form = self._reader, self._format
        begun = reader.at
        try:
            yield from reader.match(form.after_plain, form.separator if self._after_call else "")
            yield from reader.match(form.section_start, first_tag(form.section_start))
            while True:
                self._call.reset()
                yield from self._call.read()
                self.complete += 1
                self._after_call = True
                begun = reader.at
                if not (yield from self._another()):
                    break
            yield from reader.match(form.section_end)
        except Malformed as error:
            self._broken(begun, error)

    def _another(self) -> Reading[bool]:
        """Return True if another call of the same section follows, and read the text between the two calls."""
        separator = self._format.separator
        heads = [separator + head for head in self._heads]
        found = yield from self._reader.found([*heads, self._format.section_end])
        if found is None or found[0] not in heads:
            return False
        yield from self._reader.match(separator)
        return True

    def _broken(self, begun: int, error: Malformed) -> None:
        """Report an invalid call. Treat the rest of the answer, and any call whose name is incomplete, as text.

        The grammar keeps calls valid, so invalid calls occur only where the answer was cut off.
        """
        self._call.send()
        self._after_call = False
        reader = self._reader
        reader.at = len(reader.text) if isinstance(error, Ended) else max(reader.at, begun + 1)
        if self._call.announced:
            self._found.append(ToolCallDelta(self._calls - 1, problem=str(error)))
        else:
            self._found.append(reader.text[begun : reader.at].translate(self._texts))
        self._call.reset()

    def _start_call(self, name: str, call_id: str) -> None:
        self._found.append(self._first_piece(name, call_id))

    def _first_piece(self, name: str, call_id: str) -> ToolCallDelta:
        """Return the first piece of the next call."""
        begun = ToolCallDelta(self._calls, call_id or self._made_id(name), name)
        self._calls += 1
        return begun

    def _arguments(self, text: str) -> None:
        if text:
            self._found.append(ToolCallDelta(self._calls - 1, arguments=text.translate(self._texts)))

    def _made_id(self, name: str) -> str:
        """Return an id for a call: a hash of the answer so far, so that equal answers have equal ids."""
        digest = self._hash.copy()
        digest.update(self._reader.text[: self._reader.at].encode("utf-8", "surrogatepass"))
        digest.update(f"{self._calls} {name}".encode())
        letters = digest.hexdigest()
        return letters[:_SHORT_ID] if self._format.id_form == "short" else f"call_{letters[:_ID_LETTERS]}"

    def _forget(self) -> None:
        """Drop the text that has been returned."""
        self._hash.update(self._reader.text[: self._reader.at].encode("utf-8", "surrogatepass"))
        self._reader.forget()
