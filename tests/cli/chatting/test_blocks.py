"""Tests of multi-line turns between triple quotes."""

from __future__ import annotations

import pytest

from llmrun.cli.chatting.plain import is_unfinished, without_quotes


@pytest.mark.parametrize("typed", ['"""', '"""a', '"""a\nb', '  """', '/system """a', '"""a"', '"""""', '"""a""" b'])
def test_a_block_goes_on_until_it_is_closed(typed: str) -> None:
    assert is_unfinished(typed)
    assert without_quotes(typed) is None


@pytest.mark.parametrize("typed", ["", "a", 'a """', 'say """x', '""', "/system x", '/system "a"', '""""""', '"""a"""'])
def test_anything_else_is_whole(typed: str) -> None:
    assert not is_unfinished(typed)


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ('"""a"""', "a"),
        ('""""""', ""),
        ('"""\na\n"""', "a"),
        ('"""\n\n  a\n\n"""', "\n  a\n"),
        (' """a\nb""" ', "a\nb"),
        ('"""/help"""', "/help"),
        ('""""quoted""""', '"quoted"'),
        ('/system """a"""', None),
        ("a", None),
    ],
)
def test_the_text_is_what_stands_between(typed: str, text: str | None) -> None:
    assert without_quotes(typed) == text
