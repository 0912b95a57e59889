"""Explain why prefixes were not reused.

`llmrun serve` reuses the beginning (prefix) of a prompt if an earlier prompt has the same beginning. This command reads
the server's prefix log and shows, for each program, how many requests did not reuse their prefix, why, and how much
time that cost. The log contains at most 40 characters of each text that differs, and only you can read it.

Examples:
    llmrun why
    llmrun why -n 20 --json
"""

from __future__ import annotations

from typing import Annotated

import typer

from llmrun.base.amounts import counted
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings
from llmrun.cli.console.output import out

LISTING = {"heading": "Run models", "place": 105}


def command(
    count: Annotated[
        int, typer.Option("-n", "--count", metavar="N", min=0, help="Read only the last N requests; 0 reads all.")
    ] = 0,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    apply_settings({"quiet": quiet})

    from llmrun.cli.prefix_advice import as_json, clients_of, sentences_of
    from llmrun.serving.prefix_log import prefix_log_folder, read_records

    folder = prefix_log_folder()
    records = read_records(folder)
    if records.damaged:
        out.note(f"skipped {counted(records.damaged, 'unreadable line')} in {folder}")
    clients = clients_of(records.found[-count:])
    if json_output:
        out.json({"clients": [as_json(client) for client in clients]})
    elif not clients:
        out.lines(["No requests recorded yet. `llmrun serve` records the requests that it answers."])
    for number, client in enumerate([] if json_output else clients):
        out.lines([""] if number else [])
        out.lines(sentences_of(client))
    return 0
