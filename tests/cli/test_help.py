"""Tests that `llmrun help` prints the same text as --help."""

from __future__ import annotations

import pytest

from tests.support.cli.commands import llmrun

pytestmark = pytest.mark.push


@pytest.mark.parametrize("words", [[], ["chat"], ["ls"], ["bench"], ["bench", "compare"], ["help"]])
def test_help_of_a_command_is_what_its_flag_prints(words: list[str]) -> None:
    asked, expected = llmrun("help", *words), llmrun(*words, "--help")
    assert asked.stdout == expected.stdout
    assert (asked.returncode, asked.stderr, expected.returncode) == (0, b"", 0)
    assert asked.stdout.startswith(f"Usage: {' '.join(['llmrun', *words])} [".encode())


@pytest.mark.parametrize(
    ("words", "sentence", "hint"),
    [
        (["chatt"], "no such command 'chatt'", "did you mean 'chat'?"),
        (["zzz"], "no such command 'zzz'", "see llmrun --help"),
        (["bench", "comparr"], "no such command 'comparr'", "did you mean 'compare'?"),
    ],
)
def test_an_unknown_command_gets_a_suggestion(words: list[str], sentence: str, hint: str) -> None:
    done = llmrun("help", *words)
    assert done.stderr.decode() == f"error: {sentence}\nhint: {hint}\n"
    assert (done.returncode, done.stdout) == (2, b"")
