"""Tests of the help: few options first, everything with --help-all, and `llmrun help` as another way to both."""

from __future__ import annotations

import re
from typing import Any

import pytest

from llmrun.cli.arguments.help_page import help_page, sections, whole_page
from llmrun.cli.registry import load
from tests.support.cli.commands import llmrun
from tests.support.cli.help_pages import each_command

SCREEN = 29  # lines of a page above the prompt of a terminal with 30 lines
LONG = ("chat", "generate", "batch", "serve", "bench", "eval")
HEADINGS = {
    *("Arguments", "Options", "Prompt", "Model", "Sampling", "Several samples", "Thinking", "Answer format"),
    *("Speed and memory", "GPUs and servers", "Output", "General"),
    *("Access", "Other servers", "Requests"),  # serve
    *("Workload", "Servers under load"),  # bench
}


@pytest.fixture(autouse=True)
def width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def context_of(words: list[str], command: Any) -> Any:
    return command.make_context(" ".join(["llmrun", *words]), [], resilient_parsing=True)


@each_command
def test_the_help_fits_a_terminal_of_30_lines(words: list[str], command: Any) -> None:
    lines = help_page(context_of(words, command)).splitlines()
    assert max(map(len, lines)) < 80
    assert len(lines) <= SCREEN, "move options under a heading with `under` (cli/arguments/options.py)"
    assert lines[0].startswith(f"Usage: llmrun {' '.join(words)} [OPTIONS]")


def test_the_help_of_llmrun_fits_a_terminal_of_30_lines() -> None:
    lines = llmrun("--help").stdout.decode().splitlines()
    assert len(lines) <= SCREEN
    assert lines[-1] == "For more, see `llmrun COMMAND --help` and `llmrun --help-all`."


@each_command
def test_help_all_shows_every_option_once(words: list[str], command: Any) -> None:
    context = context_of(words, command)
    text = whole_page(context)
    terms = [term for section in sections(context) for term, _ in section.rows]
    assert [term for term in terms if f"\n  {term}" not in text] == []
    names = [name for term in terms for name in re.findall(r"(?<![\w-])--?[\w-]+", term)]
    options = [each for each in command.get_params(context) if each.param_type_name == "option" and not each.hidden]
    assert sorted(names) == sorted(name for each in options for name in (*each.opts, *each.secondary_opts))
    assert {section.heading for section in sections(context)} <= HEADINGS


@pytest.mark.parametrize("name", LONG)
def test_long_help_shows_few_options_and_counts_the_others(name: str) -> None:
    context = context_of([name], load(name))
    text, rows = help_page(context), [row for section in sections(context) for row in section.rows]
    shown = [names for names, _ in rows if f"\n  {names}" in text]
    assert 5 <= len(shown) <= 14
    assert text.endswith(f"\n\n`llmrun {name} --help-all` shows the other {len(rows) - len(shown)} options.")
    assert text.count("\n  llmrun ") >= 2  # examples


def test_short_help_leaves_nothing_out() -> None:
    context = context_of(["rm"], load("rm"))
    assert help_page(context) == whole_page(context)
    assert "--help-all` shows" not in help_page(context)


@each_command
@pytest.mark.parametrize("columns", [60, 40])
def test_narrow_help_is_wrapped_between_words(
    words: list[str], command: Any, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    context = context_of(words, command)
    for text in (help_page(context), whole_page(context)):
        explained, _, _ = text.partition("\n\nExamples:")  # examples stay on one line
        assert max(len(line) for line in explained.splitlines()) < columns
        monkeypatch.setenv("COLUMNS", "1000")
        wide = whole_page(context)
        monkeypatch.setenv("COLUMNS", str(columns))
        assert set(explained.split()) <= set(wide.split()) | {"`llmrun"} | set(text.rpartition("\n\n")[2].split())


def test_explanations_at_60_columns_have_at_least_half_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    lines = help_page(context_of(["chat"], load("chat"))).splitlines()
    assert max(len(line) - len(line.lstrip()) for line in lines) <= 30


@pytest.mark.push
@pytest.mark.parametrize("words", [[], ["chat"], ["ls"], ["bench"], ["bench", "compare"], ["help"]])
@pytest.mark.parametrize(("asked", "flag"), [([], "--help"), (["--all"], "--help-all")])
def test_help_of_a_command_is_what_its_flag_prints(words: list[str], asked: list[str], flag: str) -> None:
    done, expected = llmrun("help", *asked, *words), llmrun(*words, flag)
    assert done.stdout == expected.stdout
    assert (done.returncode, done.stderr, expected.returncode) == (0, b"", 0)
    assert done.stdout.startswith(f"Usage: {' '.join(['llmrun', *words])} [".encode())


@pytest.mark.push
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
