"""Check this machine and explain how to fix problems.

The exit code is 1 if something that llmrun needs does not work. Missing optional parts are reported as notes. --paths
lists all files and folders that llmrun writes, with their sizes.

Examples:
    llmrun doctor
    llmrun doctor --offline --json
    llmrun doctor --paths
"""

from __future__ import annotations

from typing import Annotated

import typer

from llmrun.cli.arguments import options
from llmrun.cli.arguments.usage import Debug
from llmrun.cli.console.output import out
from llmrun.options.settings import load_sound_settings

LISTING = {"heading": "Help", "place": 40}


def command(
    paths: Annotated[bool, typer.Option("--paths", help="List what llmrun writes, without any checks.")] = False,
    json_output: options.Json = False,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    debug: Debug = False,
) -> int:
    # Errors about invalid settings are ignored here because the report lists them.
    settings, _ = load_sound_settings({"offline": offline or None, "quiet": quiet or None})
    out.quiet, out.verbose, out.color = settings.quiet, verbose, settings.color
    if paths:
        from llmrun.cli.doctoring import show_paths

        show_paths(as_json=json_output)
        return 0
    from llmrun.cli.console.progress import LiveReporter
    from llmrun.cli.doctoring import look_at_terminal, show_json, show_report
    from llmrun.jobs.doctor.examine import Machine, examine

    with LiveReporter() as waiting:
        report = examine(
            Machine(settings.offline), lambda words: waiting.progress(f"{words} …"), [("Terminal", look_at_terminal)]
        )
    (show_json if json_output else show_report)(report)
    if debug:
        for trace in report.traces:
            out.trace(trace)
    return 0 if report.works else 1
