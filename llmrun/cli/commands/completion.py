"""Print a shell completion script.

With the script, Tab completes commands, flags and their values, and model names. Without an argument, the command
prints the steps that install the script. --remove undoes these steps.

Examples:
    llmrun completion
    llmrun completion bash
    llmrun completion fish > ~/.config/fish/completions/llmrun.fish
    llmrun completion --remove
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.options import one_of
from llmrun.cli.completing import installed
from llmrun.cli.console.output import out

LISTING = {"heading": "Help", "place": 140}

_SHELLS = tuple(installed.SHELLS)


def command(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SHELL]",
            help=f"Shell: {', '.join(_SHELLS[:-1])} or {_SHELLS[-1]}.",
            autocompletion=one_of(*_SHELLS),
        ),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove completion from the files of all shells.")] = False,
    complete: Annotated[bool, typer.Option("--complete", hidden=True)] = False,  # called by the completion scripts
) -> int:
    words = words or []
    if complete:
        _complete(context, words)
    elif remove:
        if words:
            raise UsageError("completion: --remove applies to all shells", hint="leave out the shell")
        _remove()
    elif not words:
        out.lines(_instructions())
    elif len(words) > 1:
        raise UsageError(f"completion: expected one shell, got {len(words)}")
    elif words[0] not in _SHELLS:
        raise UsageError(f"completion: {words[0]!r} is not one of {', '.join(_SHELLS)}")
    else:
        folder = Path(__file__).parent.parent / "completing"
        out.answer((folder / f"llmrun.{words[0]}").read_text(encoding="utf-8"))
        out.end_answer()
    return 0


def _complete(context: typer.Context, words: list[str]) -> None:
    """Print the candidates for the last word, one per line. A tab precedes each description.

    The line `:files` tells the shell to complete file names.
    """
    from llmrun.cli.completing.candidates import candidates

    found, files = candidates(context.find_root().command, words)
    for each in found:
        out.answer(f"{each.word}\t{each.description}\n")
    if files:
        out.answer(":files\n")


def _remove() -> None:
    changed = installed.remove()
    out.lines([f"removed completion from {path}" for path in changed] or ["No shell loads llmrun's completion."])


def _instructions() -> Iterator[str]:
    own = os.path.basename(os.environ.get("SHELL", ""))  # noqa: PTH119
    for shell in [own] if own in _SHELLS else _SHELLS:
        yield f"To enable completion in {shell}, run this once and start a new shell:"
        yield f"  {installed.SHELLS[shell].command}"
    if own in _SHELLS:
        others = " or ".join(f"`llmrun completion {shell}`" for shell in _SHELLS if shell != own)
        yield f"For another shell, {others} prints the script."
