"""Every command with its help page, for tests of all pages."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.cli.registry import command_names, load


def every_command() -> list[tuple[list[str], Any]]:
    """Return every command, including subcommands such as those of `bench`, with the words that call it."""
    commands = [([name], load(name)) for name in command_names()]
    return commands + [
        ([*words, name], below) for words, group in commands for name, below in getattr(group, "commands", {}).items()
    ]


_COMMANDS = every_command()
each_command = pytest.mark.parametrize(("words", "command"), _COMMANDS, ids=[" ".join(words) for words, _ in _COMMANDS])
