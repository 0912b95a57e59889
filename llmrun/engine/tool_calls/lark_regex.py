"""Converts Lark grammars of custom tools into regular expressions.

The input of a custom tool is a string in the arguments of a call, and most call formats escape some characters of
strings. llguidance can enforce a regular expression in spite of the escapes, but not a grammar. Rules that begin or end
with themselves become repetitions. Other recursive rules are expanded to a limited depth, so the expression may match
only a part of the grammar's language.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

_LONGEST: Final = 50_000  # characters of an expression, which llguidance compiles in 0.2 s
_MOST_ITEMS: Final = 5_000  # items of an expression, which are expanded in 0.1 s
_MOST_CHARACTERS: Final = 500_000  # of the items of an expression, some of which are dropped
_LONGEST_GRAMMAR: Final = 50_000  # characters, which are read in 0.1 s; Codex's grammars have 1,000
_DEEPEST: Final = 6  # how often a rule may contain itself
_START: Final = "start"
# The terminals of `%import common`
_COMMON: Final[Mapping[str, str]] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[-+]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][-+]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)",
    "SIGNED_FLOAT": r"[-+]?(?:[0-9]+[eE][-+]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?",
    "SIGNED_NUMBER": r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
_TOKENS: Final = re.compile(
    r"""(?P<skip>[ \t\f\r]+|//[^\n]*|\#[^\n]*)
    |(?P<newline>\n)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<directive>%[a-z]+)
    |(?P<number>[0-9]+)
    |(?P<sign>->|\.\.|[!?*+~|:()\[\]{}.,])""",
    re.VERBOSE,
)


_WORDS: Final = {"newline": "the end of the line", "word": "a name", "string": "a string", "number": "a number"}


@lru_cache(maxsize=64)
def lark_regex(grammar: str) -> str:
    """Return a regular expression for a grammar's language, or for a part of it if rules are recursive.

    The expression has neither anchors nor newlines. Raises ValueError, whose message names the problem.
    """
    if len(grammar) > _LONGEST_GRAMMAR:
        raise ValueError(f"the grammar has more than {_LONGEST_GRAMMAR:,} characters")
    reader, found = _Grammar(_tokens_of(grammar)), None
    try:
        reader.read()
        for depth in range(_DEEPEST + 1):
            expansion = _Expansion(reader, depth)
            found = expansion.whole() or found
            if not expansion.is_cut:
                break
    except _TooLong:
        pass  # the expression of the previous depth was not too long
    except RecursionError:
        raise ValueError("the grammar is nested too deeply") from None
    if found is None:
        raise ValueError("the grammar is too large or matches nothing")
    return found


def _tokens_of(grammar: str) -> list[tuple[str, str]]:
    """Return the (kind, text) of each token. Newlines that do not end a rule are left out."""
    tokens: list[tuple[str, str]] = []
    at = depth = 0
    while at < len(grammar):
        found = _TOKENS.match(grammar, at)
        if found is None:
            raise ValueError(f"unknown syntax at {grammar[at : at + 20]!r}")
        at, kind, text = found.end(), str(found.lastgroup), found[0]
        depth += (text in ("(", "[", "{")) - (text in (")", "]", "}"))
        if text == "|" and tokens and tokens[-1][0] == "newline":
            tokens.pop()
        if kind != "skip" and not (kind == "newline" and (depth or not tokens or tokens[-1][0] == "newline")):
            tokens.append((kind, text))
    return [*tokens, ("newline", "\n"), ("end", "")]


@dataclass(frozen=True, slots=True)
class _Name:
    name: str


@dataclass(frozen=True, slots=True)
class _Text:
    regex: str


@dataclass(frozen=True, slots=True)
class _Repeated:
    item: _Item
    times: str


@dataclass(frozen=True, slots=True)
class _Options:
    options: tuple[tuple[_Item, ...], ...]


_Item = _Name | _Text | _Repeated | _Options


@dataclass(slots=True)
class _Grammar:
    """The rules and terminals of a grammar. `ignored` are the terminals that may follow every terminal."""

    tokens: Sequence[tuple[str, str]]
    rules: dict[str, _Options] = field(default_factory=dict)
    ignored: list[_Item] = field(default_factory=list)
    _at: int = 0

    def read(self) -> None:
        """Read all lines. Raises ValueError."""
        while self._kind != "end":
            if self._kind == "newline":
                self._next()
            elif self._kind == "directive":
                self._directive(self._next())
            else:
                self._rule()
        for name in [name for options in self.rules.values() for name in _names(options)]:
            if name not in self.rules:
                raise ValueError(f"{name} is not defined")
        if _START not in self.rules:
            raise ValueError(f"the rule {_START} is missing")

    @property
    def _kind(self) -> str:
        return self.tokens[self._at][0]

    @property
    def _text(self) -> str:
        return self.tokens[self._at][1]

    def _next(self) -> str:
        self._at += 1
        return self.tokens[self._at - 1][1]

    def _takes(self, sign: str) -> bool:
        """Skip the next token if it is the given sign. Returns whether it was."""
        if self._kind != "sign" or self._text != sign:
            return False
        self._at += 1
        return True

    def _expect(self, kind: str, sign: str = "") -> str:
        if self._kind != kind or (sign and self._text != sign):
            found = repr(self._text) if self._text.strip() else "the end"
            raise ValueError(f"expected {sign or _WORDS.get(kind, kind)}, got {found}")
        return self._next()

    def _directive(self, name: str) -> None:
        if name == "%ignore":
            self.ignored.append(self._expansions())
        elif name == "%import":
            self._import()
        else:
            raise ValueError(f"{name} is not supported")
        self._expect("newline")

    def _import(self) -> None:
        if self._expect("word") != "common":
            raise ValueError("only terminals of `common` can be imported")
        if self._takes("."):
            name = self._expect("word")
            self._define_common(name, self._expect("word") if self._takes("->") else name)
            return
        self._expect("sign", "(")
        while not self._takes(")"):
            name = self._expect("word")
            self._define_common(name, name)
            self._takes(",")

    def _define_common(self, name: str, alias: str) -> None:
        if name not in _COMMON:
            raise ValueError(f"common.{name} is not supported")
        self.rules[alias] = _Options(((_Text(_COMMON[name]),),))

    def _rule(self) -> None:
        while self._takes("?") or self._takes("!"):
            pass
        name = self._expect("word")
        if self._takes("."):
            self._expect("number")  # the priority, which only decides between readings of the same text
        self._expect("sign", ":")
        if name in self.rules:
            raise ValueError(f"{name} is defined twice")
        self.rules[name] = self._expansions()
        self._expect("newline")

    def _expansions(self) -> _Options:
        options = [self._sequence()]
        while self._takes("|"):
            options.append(self._sequence())
        return _Options(tuple(options))

    def _sequence(self) -> tuple[_Item, ...]:
        items: list[_Item] = []
        while self._kind in ("word", "string", "regex") or (self._kind == "sign" and self._text in "(["):
            items.append(self._repeated(self._atom()))
        if self._takes("->"):
            self._expect("word")
        return tuple(items)

    def _atom(self) -> _Item:
        if self._takes("("):
            options = self._expansions()
            self._expect("sign", ")")
            return options
        if self._takes("["):
            options = self._expansions()
            self._expect("sign", "]")
            return _Repeated(options, "?")
        if self._kind == "regex":
            return _Text(_own_regex(self._next()))
        if self._kind == "word":
            return _Name(self._next())
        text = _string(self._next())
        if not self._takes(".."):
            return _Text(text)
        last = _string(self._expect("string"))
        if len(text.removeprefix("\\")) != 1 or len(last.removeprefix("\\")) != 1:
            raise ValueError("a range needs two single letters")
        return _Text(f"[{text}-{last}]")

    def _repeated(self, item: _Item) -> _Item:
        for times in ("?", "*", "+"):
            if self._takes(times):
                return _Repeated(item, times)
        if self._takes("~"):
            least = self._expect("number")
            return _Repeated(item, f"{{{least},{self._expect('number')}}}" if self._takes("..") else f"{{{least}}}")
        if self._takes("{"):
            times = self._expect("number")
            if self._takes(","):
                times += "," + (self._next() if self._kind == "number" else "")
            self._expect("sign", "}")
            return _Repeated(item, f"{{{times}}}")
        return item


def _names(item: _Item) -> list[str]:
    """Return the names to which an item refers."""
    if isinstance(item, _Name):
        return [item.name]
    if isinstance(item, _Repeated):
        return _names(item.item)
    if isinstance(item, _Options):
        return [name for option in item.options for each in option for name in _names(each)]
    return []


_PLAIN: Final = re.compile(r"[\w ]")


def _string(token: str) -> str:
    """Return a regular expression for a string literal."""
    ignores_case = token.endswith("i")
    try:
        text = json.loads(token.removesuffix("i"))
    except ValueError:
        raise ValueError(f"invalid string: {token}") from None
    written = "".join(map(_letter, text))
    return f"(?i:{written})" if ignores_case else written


def _letter(letter: str) -> str:
    if ord(letter) < 0x20 or ord(letter) == 0x7F:
        return f"\\x{ord(letter):02x}"
    return letter if _PLAIN.match(letter) else re.escape(letter)


def _own_regex(token: str) -> str:
    body, _, flags = token[1:].rpartition("/")
    if set(flags) - set("isu"):
        raise ValueError(f"the flags {flags} of a regular expression are not supported")
    body = body.replace("\\/", "/")
    flags = flags.replace("u", "")
    return f"(?{flags}:{body})" if flags else f"(?:{body})"


class _Expansion:
    """Expands the rules of a grammar. `is_cut` is True if any recursion was cut off at the maximum depth."""

    def __init__(self, grammar: _Grammar, depth: int) -> None:
        """Expand the ignored terminals. `depth` is how often a rule may contain itself. Raises _TooLong."""
        self.is_cut = False
        self._grammar, self._depth = grammar, depth
        self._open: dict[str, int] = {}  # how often each rule is being expanded
        self._items = self._characters = 0
        self._ignored = ""
        ignored = [self._item(each, in_terminal=True) for each in grammar.ignored]
        if texts := [text for text in ignored if text is not None]:
            self._ignored = f"(?:{'|'.join(texts)})*"

    def whole(self) -> str | None:
        """Return the expression for the start rule, or None if the rule matches nothing. Raises _TooLong."""
        found = self._rule(_START, in_terminal=False)
        if found is not None and len(found) > _LONGEST:
            raise _TooLong
        return None if found is None else self._ignored + found

    def _rule(self, name: str, *, in_terminal: bool) -> str | None:
        if self._open.get(name, 0) > self._depth:
            self.is_cut = True
            return None
        self._open[name] = self._open.get(name, 0) + 1
        try:
            return self._looped(name, self._grammar.rules[name].options, in_terminal)
        finally:
            self._open[name] -= 1

    def _looped(self, name: str, options: Sequence[tuple[_Item, ...]], in_terminal: bool) -> str | None:
        """Return the expression for a rule. Options that begin or end with the rule itself are repeated."""
        own = _Name(name)
        after = [option[1:] for option in options if len(option) > 1 and option[0] == own]
        before = [option[:-1] for option in options if len(option) > 1 and option[-1] == own != option[0]]
        others = [option for option in options if own not in (*option[:1], *option[-1:])]
        found = self._options(others, in_terminal)
        if found is None:
            return None
        head, tail = self._options(before, in_terminal), self._options(after, in_terminal)
        return f"{f'(?:{head})*' if head else ''}{found}{f'(?:{tail})*' if tail else ''}"

    def _options(self, options: Sequence[tuple[_Item, ...]], in_terminal: bool) -> str | None:
        """Return the expression for one of the options, or None if none can be expanded."""
        texts = [text for option in options if (text := self._sequence(option, in_terminal)) is not None]
        if not texts:
            return None
        return texts[0] if len(texts) == 1 else f"(?:{'|'.join(texts)})"

    def _sequence(self, items: Sequence[_Item], in_terminal: bool) -> str | None:
        texts = []
        for each in items:
            text = self._item(each, in_terminal=in_terminal)
            if text is None:
                return None
            texts.append(text)
        return "".join(texts)

    def _item(self, item: _Item, *, in_terminal: bool) -> str | None:
        self._items += 1
        if self._items > _MOST_ITEMS:
            raise _TooLong
        if isinstance(item, _Options):
            return self._options(item.options, in_terminal)
        if isinstance(item, _Repeated):
            inner = self._item(item.item, in_terminal=in_terminal)
            return f"(?:{inner}){item.times}" if inner else "" if item.times in ("?", "*") else inner
        if isinstance(item, _Text):
            text = item.regex if in_terminal else item.regex + self._ignored
            self._characters += len(text)
            if self._characters > _MOST_CHARACTERS:
                raise _TooLong
            return text
        is_terminal = item.name.lstrip("_").isupper()
        found = self._rule(item.name, in_terminal=in_terminal or is_terminal)
        return found + self._ignored if found is not None and is_terminal and not in_terminal else found


class _TooLong(Exception):
    """The expression exceeds _LONGEST, _MOST_ITEMS or _MOST_CHARACTERS."""
