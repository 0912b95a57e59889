"""Recognizes answers that consist only of tool calls, in plain JSON instead of the model's own format.

    {"name": "get_weather", "arguments": {"city": "Oslo"}}

The objects may be inside code fences, or inside the tags that enclose the list of tools in the prompt. Some models,
such as Qwen2.5-Coder, write calls in this form although their chat templates describe another form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from llmrun.engine.constraint.strict_json import parse, parse_unique
from llmrun.engine.tool_calls.reader import Malformed, Reader, Reading

_FENCE = re.compile(r"(?:`+|~+)?")
_SHORTEST_FENCE = 3  # characters
_OPENING, _CLOSING = "<tools>", "</tools>"
_LANGUAGE = re.compile(r"[ \t]*[\w+.-]*")
_NAME, _ARGUMENTS = "name", "arguments"
_DEEPEST = 60  # levels of nested values
_ESCAPES, _HEXADECIMAL = '"\\/bfnrtu', "0123456789abcdefABCDEF"
# Every prefix of a word or a number matches, as `Reader.pattern` requires.
_SCALAR = re.compile(
    r"t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?"
    r"|-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][-+]?[0-9]*)?)?"
)


class TextCallDecoder:
    """Holds an answer back while the answer may still become calls in plain JSON.

    The calls that `finish` returns do not depend on how the text is split into chunks.
    """

    def __init__(
        self, schemas: Mapping[str, str], is_valid: Callable[[str, str], bool], *, parallel: bool = True
    ) -> None:
        """Create a decoder for one answer.

        schemas   the JSON schema of the arguments of each tool, by the tool's name
        is_valid  a function that returns whether a JSON text matches a schema, which is also a JSON text
        parallel  False if an answer with several calls is text
        """
        self._schemas = schemas
        self._is_valid = is_valid
        self._parallel = parallel
        self._reader = Reader()
        self._calls: list[tuple[str, str]] = []
        self._may_be_call = True
        self._reading = self._answer()

    def feed(self, text: str) -> str:
        """Add text of the answer. Returns the text that can be shown because the answer is not a call."""
        if not self._may_be_call:
            return text
        self._reader.text += text
        return "" if self._advance() else self.release()

    def release(self) -> str:
        """Return the text that is held back, and stop looking for a call."""
        held, self._reader.text = self._reader.text, ""
        self._may_be_call = False
        return held

    def finish(self) -> Sequence[tuple[str, str]]:
        """End a complete answer. Returns the tool's name and the arguments, as JSON text, of each call."""
        self._reader.ended = True
        if not self._may_be_call or not self._advance():
            return ()
        try:
            for _, arguments in self._calls:
                parse_unique(arguments)  # if a key occurs twice, JSON parsers disagree about its value
        except ValueError:
            return ()
        return self._calls if all(self._is_valid(each, self._schemas[name]) for name, each in self._calls) else ()

    def _advance(self) -> bool:
        """Read the new text. Returns False if the answer is not a call."""
        try:
            next(self._reading, None)
        except Malformed:
            return False
        return True

    def _answer(self) -> Reading[None]:
        """Read the whole answer. Raises Malformed as soon as the answer cannot become calls."""
        reader = self._reader
        yield from reader.skip_space()
        while not self._calls or reader.at < len(reader.text):
            ending = yield from self._enclosed()
            yield from self._call()
            while ending and not (yield from reader.begins(ending)):
                yield from self._call()
            reader.at += len(ending)
            yield from reader.skip_space()

    def _enclosed(self) -> Reading[str]:
        """Read the beginning of a code fence or the opening tag. Returns what ends it, or "" if neither comes next."""
        reader = self._reader
        if (yield from reader.begins(_OPENING)):
            reader.at += len(_OPENING)
            return _CLOSING
        fence = yield from reader.pattern(_FENCE)
        if fence:
            if len(fence) < _SHORTEST_FENCE:
                raise Malformed("not a code fence")
            yield from reader.pattern(_LANGUAGE)
        return fence

    def _call(self) -> Reading[None]:
        """Read a call, and the whitespace after it. Raises Malformed."""
        if self._calls and not self._parallel:
            raise Malformed("a second call")
        self._calls.append((yield from self._object()))
        yield from self._reader.skip_space()

    def _object(self) -> Reading[tuple[str, str]]:
        """Read the object with the name and the arguments, in any order."""
        reader, found = self._reader, dict[str, str]()
        yield from self._sign("{")
        for sign in (",", "}"):
            key = yield from self._one_of([key for key in (_NAME, _ARGUMENTS) if key not in found])
            yield from self._sign(":")
            if key == _NAME:
                found[key] = yield from self._one_of(self._schemas)
            else:
                yield from reader.skip_space()
                start = reader.at
                yield from self._members("{", "}", 1)
                found[key] = reader.text[start : reader.at]
            yield from self._sign(sign)
        return found[_NAME], found[_ARGUMENTS]

    def _one_of(self, words: Iterable[str]) -> Reading[str]:
        """Read a string that is one of the given words, without escapes."""
        yield from self._reader.skip_space()
        for word in words:
            if (yield from self._reader.begins(f'"{word}"')):
                self._reader.at += len(word) + 2
                return word
        raise Malformed("an unknown name")

    # --- JSON, which is checked character by character

    def _value(self, depth: int) -> Reading[None]:
        reader = self._reader
        yield from reader.skip_space()
        first = yield from reader.peek()
        if first == '"':
            yield from self._string()
        elif first == "{":
            yield from self._members("{", "}", depth)
        elif first == "[":
            yield from self._members("[", "]", depth)
        else:
            yield from self._scalar()

    def _members(self, opening: str, closing: str, depth: int) -> Reading[None]:
        """Read an object or an array. `depth` counts the objects and arrays from the arguments to this value."""
        if depth > _DEEPEST:
            raise Malformed("nested too deeply")
        yield from self._sign(opening)
        yield from self._reader.skip_space()
        if (yield from self._reader.peek()) == closing:
            self._reader.at += 1
            return
        sign = ","
        while sign == ",":
            if opening == "{":
                yield from self._string()
                yield from self._sign(":")
            yield from self._value(depth + 1)
            sign = yield from self._sign("," + closing)

    def _string(self) -> Reading[None]:
        yield from self._sign('"')
        while (letter := (yield from self._reader.peek())) != '"':
            if letter < " ":
                raise Malformed("a control character in a string")
            self._reader.at += 1
            if letter == "\\" and (yield from self._letter(_ESCAPES)) == "u":
                for _ in range(4):
                    yield from self._letter(_HEXADECIMAL)
        self._reader.at += 1

    def _scalar(self) -> Reading[None]:
        try:
            parse((yield from self._reader.pattern(_SCALAR)))
        except ValueError:
            raise Malformed("not a JSON value") from None

    def _sign(self, signs: str) -> Reading[str]:
        """Read whitespace and one of the given characters."""
        yield from self._reader.skip_space()
        return (yield from self._letter(signs))

    def _letter(self, letters: str) -> Reading[str]:
        """Read one of the given characters."""
        letter = yield from self._reader.peek()
        if letter not in letters:
            raise Malformed(f"expected one of {letters}")
        self._reader.at += 1
        return letter
