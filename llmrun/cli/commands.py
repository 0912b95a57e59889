"""The commands by name. A command's module is imported when that command is asked for: `llmrun list` does not pay for
`bench`, and `--help` for none (30 ms of 160).
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import typer

from llmrun.cli.examples import EXAMPLES
from llmrun.cli.usage import CommandGroup, SingleCommand


class Command(NamedTuple):
    """Where a command is, and the first line of its help."""

    module: str  # below llmrun.cli
    function: str  # or a Typer with commands of its own
    help: str


COMMANDS: dict[str, Command] = {
    "chat": Command("chat", "chat", "Talk with a model."),
    "generate": Command("generate", "generate", "Answer one prompt."),
    "bench": Command("bench", "bench", "Measure how fast models are on this machine."),
    "fit": Command("fit", "fit", "Tell whether models fit this machine, and how fast they will be."),
    "pull": Command("pull", "pull", "Fetch models."),
    "list": Command("list", "list_models", "List the models on this machine."),
    "show": Command("show", "show", "Show what a model is, without running it."),
    "rm": Command("rm", "remove", "Remove models from this machine."),
    "verify": Command("verify", "verify", "Check that models are whole and unchanged."),
    "prune": Command("prune", "prune", "Remove what newer downloads have replaced."),
    "doctor": Command("doctor", "doctor", "Look at this machine: what works, and what to do where something does not."),
}
ALIASES = {"ls": "list", "run": "chat"}  # as in a shell; as in Ollama


class Commands(CommandGroup):
    """The group of COMMANDS, none of them imported yet."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        names: dict[str, Any] = dict.fromkeys(COMMANDS)
        self.commands = names  # for "did you mean"

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        del ctx
        name = ALIASES.get(cmd_name, cmd_name)
        return load(name) if name in COMMANDS else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.help) for name, command in COMMANDS.items()])


def load(name: str) -> Any:
    """The command of this name, ready to be invoked."""
    command = COMMANDS[name]
    made = getattr(import_module(f"llmrun.cli.{command.module}"), command.function)
    if not isinstance(made, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name, cls=SingleCommand, epilog=EXAMPLES[name])(made)
        made = alone
    return typer.main.get_command(made)
