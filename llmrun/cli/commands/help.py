"""Show help for llmrun or one of its commands.

The output is the same as with `llmrun COMMAND --help`, or with `llmrun COMMAND --help-all`, which shows all options.

Examples:
    llmrun help
    llmrun help chat
    llmrun help --all chat
    llmrun help bench compare
"""

from __future__ import annotations

from typing import Annotated

import typer

LISTING = {"heading": "Help", "place": 141}


def command(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]...", help="Command, and its subcommand if any."),
    ] = None,
    everything: Annotated[bool, typer.Option("-a", "--all", help="Show all options, or all commands.")] = False,
) -> int:
    top = context.find_root()
    flag = "--help-all" if everything else "--help"
    with top.command.make_context(top.info_name, [*(names or ()), flag]) as asked:
        top.command.invoke(asked)
    return 0
