"""Show help for llmrun or one of its commands.

The output is the same as with `llmrun COMMAND --help`.

Examples:
    llmrun help
    llmrun help chat
    llmrun help bench compare
"""

from __future__ import annotations

from typing import Annotated

import typer

LISTING = {"place": 170}


def command(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]...", help="Command, and its subcommand if any."),
    ] = None,
) -> int:
    top = context.find_root()
    with top.command.make_context(top.info_name, [*(names or ()), "--help"]) as asked:
        top.command.invoke(asked)
    return 0
