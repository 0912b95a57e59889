"""Tests of finding the statements of a TOML text."""

from __future__ import annotations

import pytest

from llmrun.options.toml_text import line_of, statements

TEXT = '''\ufeff# comment [a]
top = 1

[a.b]  # heading
x = """
[not.a.heading]
y = 2 \\""" still """"
'quoted.key'."es\\u0063" . z = [
  1, # ]
  [2],
]
lit = \'\'\'
[nor.this]\'\'\'
inline = { c = { d = 1 } }\r
[[many]]
k = "[#"
[ "a" . b.'c' ]'''


def test_every_statement_is_found() -> None:
    found = [(each.path, each.is_heading) for each in statements(TEXT)]
    assert found == [
        (("top",), False),
        (("a", "b"), True),
        (("a", "b", "x"), False),
        (("a", "b", "quoted.key", "esc", "z"), False),
        (("a", "b", "lit"), False),
        (("a", "b", "inline"), False),
        (("many",), True),
        (("many", "k"), False),
        (("a", "b", "c"), True),
    ]


def test_statements_are_whole_lines() -> None:
    for each in statements(TEXT):
        assert each.start == 0 or TEXT[each.start - 1] == "\n"
        assert each.end == len(TEXT) or TEXT[each.end - 1] == "\n"


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("a", "b"), 4),
        (("a", "b", "x"), 5),
        (("a", "b", "quoted.key"), 8),
        (("a", "b", "inline", "c"), 14),
        (("many",), 15),
        (("a", "b", "c"), 17),
        (("zzz",), None),
    ],
)
def test_lines_are_found_by_key(path: tuple[str, ...], line: int | None) -> None:
    assert line_of(TEXT, path) == line
