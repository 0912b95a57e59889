"""Answers of a malicious model that attacks the terminal.

They contain control sequences of every family, raw and as HTML entities, alone and hidden in every Markdown construct.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

_ST = ("\x07", "\x1b\\", "\x9c")
_NUMBERS = ("", "0", "1", "2", "5", "8", "14", "25", "47", "52", "99", "1000", "1049", "2004", "65535", "4294967297")
_SINGLE = (
    *(
        "c",
        "7",
        "8",
        "=",
        ">",
        "D",
        "E",
        "H",
        "M",
        "N",
        "O",
        "V",
        "W",
        "Z",
        "\\",
        "n",
        "o",
        "|",
        "}",
        "~",
        "F",
        "G",
        "l",
        "m",
    ),
    *("#3", "#8", "%G", "%@", "(0", "(B", ")0", "*0", "+0"),
)
_C0 = "\x00\x01\x05\x07\x08\x0b\x0c\x0d\x0e\x0f\x10\x11\x13\x18\x1a\x1b\x1c\x7f"
_PAYLOADS = (
    "pwned",
    "?",
    "c;cm0gLXJmIH4=",
    "8;;http://evil/",
    "0;rgb:ff/00/00",
    "File=inline=1:AAAA",
    "notify;a;b",
    "#FFF",
)
_BIDIRECTIONAL = "\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u061c"
_ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff\u00ad\u034f\u2028\u2029\ufe0f\U000e0041"
_MARKS = "\u0301\u0336\u20dd\u0489\u0e47\u0591\u1ab0"
_WORDS = (
    "the",
    "answer",
    "is",
    "42",
    "snake_case",
    "5 * 3",
    "**bold**",
    "`code`",
    "日本語",
    "😀",
    "é",
    "a" * 70,
    "-",
    "1.",
)
_NAMED = {
    "\n": "&NewLine;",
    "\t": "&Tab;",
    "[": "&lbrack;",
    "\\": "&bsol;",
    ";": "&semi;",
    "]": "&rsqb;",
    "\u202e": "&#8238;",
}


def _control(source: random.Random) -> str:
    """Return one control sequence, usually a complete one."""
    numbers = ";".join(source.choice(_NUMBERS) for _ in range(source.randrange(4)))
    begin = source.choice(("\x1b", "\x1b", "\x1b", ""))  # "" selects the 8-bit form

    def opened(seven: str, eight: str) -> str:
        return f"\x1b{seven}" if begin else eight

    kinds: Sequence[Callable[[], str]] = (
        lambda: opened("[", "\x9b") + source.choice(("", "?", ">", "=", "!", "<")) + numbers
        + source.choice(("", " ", "$", "'", '"', "!")) + chr(source.randrange(0x40, 0x7F)),
        lambda: opened("]", "\x9d") + source.choice(_NUMBERS) + ";" + source.choice(_PAYLOADS) + source.choice(_ST),
        lambda: opened("P", "\x90") + source.choice(("$q", "+q", "q#0~", "1$r", "=1s")) + source.choice(_PAYLOADS)
        + source.choice(_ST),
        lambda: opened(*source.choice((("_", "\x9f"), ("^", "\x9e"), ("X", "\x98")))) + "G" + source.choice(_ST),
        lambda: "\x1b" + source.choice(_SINGLE),
        lambda: source.choice(_C0) * source.choice((1, 1, 3)),
        lambda: chr(source.randrange(0x80, 0xA0)),
        lambda: source.choice(_BIDIRECTIONAL + _ZERO_WIDTH),
        lambda: "a" + source.choice(_MARKS) * source.choice((1, 5, 60)),
    )  # fmt: skip
    sequence = source.choice(kinds)()
    return sequence if source.random() < 0.85 else sequence[: source.randrange(len(sequence) + 1)]


def _entities(source: random.Random, text: str) -> str:
    """Encode characters as HTML entities, in any of their forms."""
    forms: Sequence[Callable[[str], str]] = (
        lambda c: f"&#{ord(c)};",
        lambda c: f"&#x{ord(c):x};",
        lambda c: f"&#X{ord(c):04X};",
        lambda c: _NAMED.get(c, c),
    )
    return "".join(source.choice(forms)(c) for c in text)


def _hostile(source: random.Random) -> str:
    text = "".join(_control(source) for _ in range(source.choice((1, 1, 2))))
    return _entities(source, text) if source.random() < 0.35 else text


def _inline(source: random.Random) -> str:
    """Return a few words with a hostile sequence in between."""
    parts = [source.choice(_WORDS) for _ in range(source.randrange(1, 6))]
    parts.insert(source.randrange(len(parts) + 1), _hostile(source))
    return source.choice((" ", " ", "", "\\")).join(parts)


_CONSTRUCTS: Sequence[Callable[[random.Random, str, str], str]] = (
    lambda source, a, b: a,
    lambda source, a, b: f"**{a}** and *{b}*",
    lambda source, a, b: f"`{a}` ~~{b}~~",
    lambda source, a, b: f"[{a}](http://x/{b})",
    lambda source, a, b: f'[{a}](<http://x y/{b}> "{a}")',
    lambda source, a, b: f"![{a}](http://x/{b} '{a}')",
    lambda source, a, b: f"<http://x/{a}>",
    lambda source, a, b: f"[{a}]: http://x/{b} 'title'\n\n[{a}]",
    lambda source, a, b: f"# {a}\n\n{b}\n===",
    lambda source, a, b: f"> {a}\n> > {b}",
    lambda source, a, b: f"- {a}\n  1. {b}\n\n     {a}",
    lambda source, a, b: f"| {a} | {b} |\n|---|:-:|\n| {b} | {a} |\n",
    lambda source, a, b: f"```{a}\n{b}\n{a}\n```",
    lambda source, a, b: f"```python\n# {a}\n'''{b}\n```",
    lambda source, a, b: f"~~~~\n{a}",
    lambda source, a, b: f"    {a}\n    {b}",
    lambda source, a, b: f"<div onclick='{a}'>{b}</div>\n<!-- {a} -->",
    lambda source, a, b: f"$\\({a}\\)$ \\[{b}\\]",
    lambda source, a, b: f"{a}\r\n{b}\r{a}",
    lambda source, a, b: f"***{a}\n{b}",
)


def hostile_answer(source: random.Random) -> str:
    """Return an answer of one to four blocks."""
    blocks = [
        source.choice(_CONSTRUCTS)(source, _inline(source), _inline(source)) for _ in range(source.choice((1, 1, 2, 4)))
    ]
    return source.choice(("\n\n", "\n", "")).join(blocks)


def in_pieces(source: random.Random, text: str) -> list[str]:
    """Split the text into token-like pieces, possibly in the middle of a sequence."""
    pieces = []
    at = 0
    while at < len(text):
        size = source.choice((1, 1, 2, 3, 5, 9, 40))
        pieces.append(text[at : at + size])
        at += size
    return pieces
