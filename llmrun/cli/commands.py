"""The commands by name. A command's module is imported when that command is asked for: `llmrun list` does not pay for
`bench`, and `--help` for none (30 ms of 160).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperGroup


class Command(NamedTuple):
    """Where a command is, the first line of its help, and what its help ends with: lines to type."""

    module: str  # below llmrun.cli
    function: str  # or a Typer with commands of its own
    help: str
    examples: tuple[str, ...] = ()


COMMANDS: dict[str, Command] = {
    "chat": Command(
        "chat",
        "chat",
        "Talk with a model.",
        (
            "llmrun chat",
            "llmrun chat qwen3:4b --continue",
            'llmrun chat ./file.gguf -s "Be brief."',
        ),
    ),
    "generate": Command(
        "generate",
        "generate",
        "Answer one prompt.",
        (
            'llmrun generate "Why is the sky blue?"',
            'git diff | llmrun generate "What does this change?" -',
            'llmrun generate -m qwen3:4b --json --temp 0 "Name a colour."',
        ),
    ),
    "bench": Command(
        "bench",
        "bench",
        "Measure how fast models are on this machine.",
        (
            "llmrun bench -m qwen3:4b",
            "llmrun bench -m ./a.gguf,./b.gguf -p 128,1024 -t 1-4",
            "llmrun bench compare last~1 last --fail-above 5%",
        ),
    ),
    "fit": Command(
        "fit",
        "fit",
        "Tell whether models fit this machine, and how fast they will be.",
        (
            "llmrun fit qwen3:8b",
            "llmrun fit hf:org/repo -c 32768 --kv-type q8_0",
        ),
    ),
    "pull": Command(
        "pull",
        "pull",
        "Fetch models.",
        (
            "llmrun pull qwen3:4b hf:org/repo:Q5_K_M",
            "llmrun pull --dry-run qwen3:4b",
            "llmrun pull --lock qwen3:4b",
        ),
    ),
    "list": Command("list", "list_models", "List the models on this machine."),
    "show": Command(
        "show",
        "show",
        "Show what a model is, without running it.",
        (
            "llmrun show qwen3:4b",
            "llmrun show ./file.gguf --template",
        ),
    ),
    "rm": Command(
        "rm",
        "remove",
        "Remove models from this machine.",
        (
            "llmrun rm qwen3:4b hf:org/repo:Q8_0",
            "llmrun rm --dry-run qwen3:4b",
        ),
    ),
    "verify": Command(
        "verify",
        "verify",
        "Check that models are whole and unchanged.",
        (
            "llmrun verify",
            "llmrun verify ./file.gguf",
        ),
    ),
    "prune": Command(
        "prune",
        "prune",
        "Remove what newer downloads have replaced.",
        (
            "llmrun prune --dry-run",
            "llmrun prune org/repo",
        ),
    ),
    "doctor": Command("doctor", "doctor", "Look at this machine: what works, and what to do where something does not."),
}
ALIASES = {"ls": "list", "run": "chat"}  # as in a shell; as in Ollama


class Commands(TyperGroup):
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
        alone.command(name)(made)
        made = alone
    ready: Any = typer.main.get_command(made)
    if command.examples:
        ready.format_epilog = lambda _, formatter: _show_examples(command.examples, formatter)
    return ready


def _show_examples(examples: Sequence[str], formatter: Any) -> None:
    with formatter.section("Examples"):
        formatter.write("".join(f"  {example}\n" for example in examples))
