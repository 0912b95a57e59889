"""Tests of the regular expressions for Lark grammars."""

from __future__ import annotations

import re

import pytest

from llmrun.engine.tool_calls.lark_regex import lark_regex
from tests.support.tool_calls.grammars import CODEX_PATCH

PATCHES = (
    "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch",
    "*** Begin Patch\n*** Delete File: a\n*** Update File: b\n*** Move to: c\n@@ def f\n-a\n+b\n c\n*** End Patch\n",
)
NO_PATCHES = (
    "",
    "*** Begin Patch\n*** End Patch\n",
    "*** Begin Patch\n*** Add File: a.py\nx = 1\n*** End Patch\n",
    PATCHES[0] + "\n\n",
)
SUMS = """
// A comment
?start: sum
?sum: product | sum "+" product -> add | sum "-" product
?product.2: atom | atom "*" product
!atom: NUMBER # another comment
    | "(" sum ")"
%import common.NUMBER
%import common.WS_INLINE -> SPACE
%ignore SPACE
"""


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (CODEX_PATCH, PATCHES, NO_PATCHES),
        (SUMS, ("1", "1+2*3 - 4", " ( 1 + 2 ) * 3", "((1))" + "+2" * 50), ("", "1+", "()", "(1", "1 2")),
        ('start: "a"i "\\"" /b\\/c/i', ('a"b/c', 'A"B/C'), ('a"b', "a")),
        ('start: "x".."z" ["-" DIGIT~2..3]\n%import common (DIGIT, INT)', ("y", "z-12", "x-123"), ("w", "y-1")),
        ('start: A{2} B{1,} c?\nA: "a"\nB: "b" | "."\nc: "(c)"', ("aab", "aa.b(c)"), ("ab", "aac")),
        ('start: "é\\n" list\nlist: ITEM | list "," ITEM\nITEM: /[^,]+/s', ("é\na", "é\na,b\nb,c"), ("é\n", "é\na,")),
        ('start: (\n  "a"\n  | "b"\n)+\n', ("abab",), ("", "c")),
        ('start: "a" start "b" | "c"', ("c", "acb", "aaacbbb"), ("ac", "acbb")),
        (
            "start: ESCAPED_STRING | SIGNED_FLOAT\n%import common.ESCAPED_STRING\n%import common.SIGNED_FLOAT\n",
            (r'"a\"b"', "-1.5e3"),
            ('"a', "1"),
        ),
    ],
)
def test_the_expression_matches_the_language(grammar: str, texts: tuple[str, ...], others: tuple[str, ...]) -> None:
    found = re.compile(lark_regex(grammar))
    assert [text for text in texts if not found.fullmatch(text)] == []
    assert [text for text in others if found.fullmatch(text)] == []


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "the rule start is missing"),
        ("start: other", "other is not defined"),
        ('start: "a"\nstart: "b"', "start is defined twice"),
        ('start: "a', "unknown syntax at '\"a'"),
        ('start: "\\x"', "invalid string"),
        ('start: "ab".."c"', "single letters"),
        ("start: /a/m", "the flags m of a regular expression are not supported"),
        ('start: "a"{1,', "expected }, got the end"),
        ("start: " + "(" * 10_000, "nested too deeply"),
        ("\n".join(f"a{each}: a{each + 1} a{each + 1}" for each in range(40)) + "\na40:\nstart: a0", "too large"),
        ("start: (", "expected ), got the end"),
        ("start: a ) b", "expected the end of the line, got ')'"),
        ("start: <think>", "unknown syntax"),
        ('start: %json {"type": "object"}', "expected the end of the line, got '%json'"),
        ("%declare A", "%declare is not supported"),
        ("%import python.NAME", "only terminals of `common`"),
        ("%import common.OTHER", "common.OTHER is not supported"),
        ("start: start", "too large or matches nothing"),
        ('start: "a" start', "too large or matches nothing"),
        ("start: " + '"a" ' * 10_000, "too large or matches nothing"),
        ("start: " + '"a" ' * 60_000, "more than 50,000 characters"),
        ("start: " + "A " * 4000 + '\nA: "' + "a" * 20_000 + '"', "too large or matches nothing"),
    ],
)
def test_other_grammars_are_refused_with_a_reason(grammar: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        lark_regex(grammar)
