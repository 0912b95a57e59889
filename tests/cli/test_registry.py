"""Tests of the commands, as their files describe them."""

from __future__ import annotations

import inspect
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from llmrun.cli import registry
from llmrun.cli.arguments.help_page import whole_page
from llmrun.cli.registry import aliases, command_names, load, page_of
from tests.support.cli.commands import llmrun
from tests.support.cli.help_pages import each_command

COMMANDS = command_names()


def stderr_of(*arguments: str) -> str:
    done = llmrun(*arguments)
    assert done.returncode == 2
    return done.stderr.decode()


def listed(text: str) -> dict[str, list[str]]:
    """Return the names of the commands under each heading of a help page."""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    return {
        block[0].removesuffix(":"): [line[2:].split("  ")[0] for line in block[1:] if line[2] != " "]
        for block in blocks
        if block[0].endswith(":")
    }


def test_the_help_lists_the_commands_in_their_order() -> None:
    assert listed(llmrun("--help-all").stdout.decode()) == {
        "Run models": ["chat, run", "generate", "serve", "launch", "batch", "embed", "rerank", "ps", "stop", "why"],
        "Find and fit models": ["fit", "search", "pull", "import"],
        "Manage files": ["list, ls", "show", "rm, remove", "verify", "prune", "preset", "conversations", "logs"],
        "Help": ["doctor", "completion", "help"],
        "Measure": ["bench", "eval", "replay"],
        "Make model files": ["quantize", "imatrix", "convert"],
        "General": ["--version", "--debug", "-h, --help", "--help-all"],
    }


def test_the_short_help_describes_everyday_commands_and_names_the_others() -> None:
    described = listed(llmrun("--help").stdout.decode())
    rare = " ".join(described.pop("More commands")).split(", ")
    assert described == {
        "Run models": ["chat, run", "generate", "serve", "launch"],
        "Find and fit models": ["fit", "search", "pull", "import"],
        "Manage files": ["list, ls", "show", "rm, remove"],
        "Help": ["doctor"],
    }
    everyday = [name.split(", ")[0] for names in described.values() for name in names]
    assert rare == sorted(set(COMMANDS) - set(everyday))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_text_of_a_file_says_what_its_module_says(name: str) -> None:
    """The text read without importing the command equals the one that Python reads."""
    module, page = import_module(f"llmrun.cli.commands.{name}"), page_of(name)
    text, _, examples = inspect.cleandoc(module.__doc__ or "").partition("\n\nExamples:\n")
    assert (page.help, page.examples) == (text, inspect.cleandoc(examples))
    optional = {"aliases": page.aliases, "extra": page.extra, "unknown": page.unknown}
    given = {key: value for key, value in optional.items() if value}
    assert {"heading": page.heading, "place": page.place, **given} == module.LISTING
    assert load(name).name == name
    assert load(name).get_short_help_str(1000) == page.summary


def test_commands_have_places_of_their_own() -> None:
    assert len({page_of(name).place for name in COMMANDS}) == len(COMMANDS)


def test_misspelled_commands_get_a_suggestion() -> None:
    assert "did you mean 'verify'?" in stderr_of("verfy")


@pytest.mark.push
def test_aliases_run_their_commands() -> None:
    assert aliases().items() >= {("ls", "list"), ("run", "chat"), ("remove", "rm")}
    assert llmrun("ls", "--help").stdout == llmrun("list", "--help").stdout.replace(b"llmrun list [", b"llmrun ls [")


@pytest.mark.push
def test_the_help_of_a_command_names_its_aliases() -> None:
    for alias, name in aliases().items():
        assert f"\n  Also: llmrun {alias}.\n" in llmrun(name, "--help-all").stdout.decode()


def test_a_new_file_is_a_new_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an entry in a listing, it comes last and has no aliases. Private modules are not commands."""
    last = max(page_of(name).place for name in COMMANDS)
    (tmp_path / "where.py").write_text('"""Print the\nfolders. And\n\nmore."""\n', encoding="utf-8")
    (tmp_path / "__init__.py").touch()
    monkeypatch.setattr(registry, "_FOLDER", tmp_path)
    assert command_names() == ["where"]
    page = page_of("where")
    assert (page.summary, page.examples, page.heading, page.aliases) == ("Print the folders.", "", "Other", ())
    assert page.place > last


@each_command
def test_help_ends_with_examples_that_can_be_typed(words: list[str], command: Any) -> None:
    assert command.epilog
    shown = whole_page(command.make_context(" ".join(words), [], resilient_parsing=True))
    assert shown.endswith("Examples:\n" + "\n".join(f"  {line}" for line in command.epilog.splitlines()))
    for example in command.epilog.splitlines():
        typed = shlex.split(example.rpartition("| ")[2])
        assert typed[: 1 + len(words)] == ["llmrun", *words]
        if typed[2:3] != ["compare"] or words[1:]:  # otherwise it is an example of a subcommand
            command.make_context(" ".join(words), typed[1 + len(words) :]).close()  # parsed, not run


@pytest.mark.night
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("bench -m x compare a b", "error: --model: does not apply to compare\n"),
        ("bench --html x compare a b", "error: --html: does not apply to compare\n"),
        (
            "bench --json compare a b",
            "error: --json: must come after compare\nhint: llmrun bench compare --json\n",
        ),
    ],
)
def test_flags_before_a_subcommand_are_not_ignored(arguments: str, error: str) -> None:
    assert stderr_of(*arguments.split()) == error
