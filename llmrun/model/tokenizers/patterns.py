r"""Parses the subset of regular expressions that pre-tokenizers use into a syntax tree.

The subset consists of literals, `\r \n \t`, escaped punctuation, `\s \S \p{..}` (with the names in code_points.NAMED),
`[...]` with ranges, `^` and one `&&[...]`, `(?:...)`, `|`, the greedy quantifiers `? * + {n} {m,n}`, and the lookahead
`(?!\S)`, which matches before whitespace and at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmrun.model.tokenizers import code_points

if TYPE_CHECKING:
    from llmrun.model.tokenizers.code_points import CodePoints

_ESCAPED = {"r": "\r", "n": "\n", "t": "\t"}
_NO_MORE_WORD = r"(?!\S)"


@dataclass(frozen=True, eq=False)
class OneOf:
    """A node that matches one character of a set."""

    members: CodePoints


@dataclass(frozen=True, eq=False)
class Ahead:
    """A lookahead that matches before a character of a set and at the end of the text."""

    members: CodePoints


@dataclass(frozen=True, eq=False)
class Sequence:
    """A node that matches its parts one after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Choice:
    """A node that matches the first of its parts that leads to a match of the whole pattern."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, eq=False)
class Repeat:
    """A node that matches its part `least` to `most` times, as often as possible. `most` is None for no limit."""

    part: Node
    least: int
    most: int | None


Node = OneOf | Ahead | Sequence | Choice | Repeat


def parse(pattern: str) -> Node:
    """Parse a pattern. Raises ValueError if it is not in the subset described above."""
    parser = _Parser(pattern)
    node = parser.choice()
    if parser.at < len(pattern):
        raise ValueError(f"pattern {pattern!r}: unexpected {pattern[parser.at]!r} at {parser.at}")
    return node


class _Parser:
    """A recursive-descent parser for patterns. `at` is the current position in the pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def choice(self) -> Node:
        parts = [self._sequence()]
        while self._takes("|"):
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self._pattern) and self._pattern[self.at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return Sequence(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        if self._takes("?"):
            return Repeat(node, 0, 1)
        if self._takes("*"):
            return Repeat(node, 0, None)
        if self._takes("+"):
            return Repeat(node, 1, None)
        if self._takes("{"):
            least, comma, most = self._until("}").partition(",")
            return Repeat(node, int(least), int(most if comma else least))
        return node

    def _atom(self) -> Node:
        if self._takes(_NO_MORE_WORD):
            return Ahead(code_points.named("s"))
        if self._takes("(?:"):
            node = self.choice()
            self._expect(")")
            return node
        if self._takes("["):
            return OneOf(self._bracket())
        return OneOf(self._character()[0])

    def _bracket(self) -> CodePoints:
        """Parse a bracket expression up to and including its closing bracket."""
        inverted = self._takes("^")
        sets: list[CodePoints] = []
        while not self._takes("]"):
            if self._takes("&&["):
                sets = [code_points.intersection(code_points.union(*sets), self._bracket())]
                continue
            members, first = self._character()
            if first is not None and not self._pattern.startswith("-]", self.at) and self._takes("-"):
                last = self._character()[1]
                if last is None or last < first:
                    raise ValueError(f"pattern {self._pattern!r}: invalid range before {self.at}")
                members = code_points.span(first, last)
            sets.append(members)
        members = code_points.union(*sets)
        return code_points.complement(members) if inverted else members

    def _character(self) -> tuple[CodePoints, int | None]:
        """Parse one character or escape. Returns a set, and its code point if it is a single character."""
        if self._takes("\\"):
            if self._takes("p{"):
                return code_points.named(self._until("}")), None
            if self._takes("s"):
                return code_points.named("s"), None
            if self._takes("S"):
                return code_points.complement(code_points.named("s")), None
            escaped = self._next()
            if escaped.isalnum() and escaped not in _ESCAPED:
                raise ValueError(f"pattern {self._pattern!r}: unknown escape \\{escaped}")
            character = _ESCAPED.get(escaped, escaped)
        else:
            character = self._next()
        return code_points.span(ord(character), ord(character)), ord(character)

    def _next(self) -> str:
        if self.at >= len(self._pattern):
            raise ValueError(f"pattern {self._pattern!r}: unexpected end")
        self.at += 1
        return self._pattern[self.at - 1]

    def _takes(self, text: str) -> bool:
        if not self._pattern.startswith(text, self.at):
            return False
        self.at += len(text)
        return True

    def _expect(self, text: str) -> None:
        if not self._takes(text):
            raise ValueError(f"pattern {self._pattern!r}: {text!r} is missing at {self.at}")

    def _until(self, text: str) -> str:
        end = self._pattern.find(text, self.at)
        if end < 0:
            raise ValueError(f"pattern {self._pattern!r}: {text!r} is missing")
        found = self._pattern[self.at : end]
        self.at = end + len(text)
        return found
