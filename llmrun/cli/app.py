"""The `llmrun` entry point, which runs a command and catches every exception."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from llmrun import __version__
from llmrun.base.errors import BrokenEntry, LlmrunError, warnings_told
from llmrun.base.machine.processor import missing_instructions
from llmrun.base.processes.commands import TERMINATING
from llmrun.cli.arguments.usage import Debug, general_option
from llmrun.cli.console.output import Stdout, out, silence
from llmrun.cli.messages import message_for
from llmrun.cli.registry import Commands

INTERRUPTED = 130  # 128 + SIGINT
TERMINATED = 143  # 128 + SIGTERM
CLOSED_PIPE = 141  # 128 + SIGPIPE

app = typer.Typer(
    name="llmrun",
    cls=Commands,
    help="Run quantized GGUF language models on your own computer.",
    add_completion=False,
    rich_markup_mode=None,  # formatting help with Rich takes 64 ms longer
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.callback(invoke_without_command=True)
def llmrun(
    context: typer.Context,
    version: Annotated[bool, general_option("--version", help="Print the version and exit.")] = False,
    debug: Debug = False,
) -> None:
    if version:
        out.answer(f"llmrun {__version__}")
        out.end_answer()
        raise typer.Exit
    if context.invoked_subcommand is None:
        out.answer(context.get_help())
        out.end_answer()


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return the process's exit code."""
    if not _prepare_streams():
        return 1
    for number in TERMINATING:
        signal.signal(number, _terminate)
    try:
        _check_processor()
        with warnings_told(out.note, BrokenEntry):
            return _run(arguments)
    except KeyboardInterrupt:
        out.clear_progress()
        return INTERRUPTED
    except BrokenPipeError:
        silence(sys.stdout)
        return CLOSED_PIPE
    except Exception as error:  # noqa: BLE001  every error must produce a message and an exit code
        if _wants_traceback(arguments):
            import traceback

            out.trace(traceback.format_exc())
        message = message_for(error)
        out.error(message.sentence, message.hint)
        return message.exit_code


def _check_processor() -> None:
    """Raise LlmrunError if this processor cannot run NumPy, because importing NumPy would kill the process (SIGILL)."""
    if missing := missing_instructions():
        raise LlmrunError(
            f"this processor cannot run NumPy: it lacks {', '.join(missing)} (x86-64-v2)",
            hint="in a virtual machine, select the CPU type host",
        )


def _run(arguments: Sequence[str]) -> int:
    # `app()` is not called, because Typer would then handle exceptions itself and exit with 1 for a closed pipe.
    command = typer.main.get_command(app)
    try:
        with command.make_context("llmrun", list(arguments)) as context:
            code = command.invoke(context)
    except typer.Exit as stop:
        code = stop.exit_code
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _prepare_streams() -> bool:
    """Make sure that all three standard streams are open. Return False if stdout was closed.

    If a standard stream is closed, the next file that is opened reuses its descriptor, so the answer could be written
    to that file.
    """
    nowhere = Path(os.devnull)
    if sys.stdin is None:
        sys.stdin = nowhere.open(encoding="utf-8")
    closed = sys.stdout is None
    sys.stdout = Stdout(sys.stdout.buffer if sys.stdout else nowhere.open("wb"))
    sys.stderr = io.TextIOWrapper(
        sys.stderr.buffer if sys.stderr else nowhere.open("wb"),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )
    if closed:
        out.error("standard output is closed", "redirect it to a file, or to /dev/null")
    return not closed


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(TERMINATED)


def _wants_traceback(arguments: Sequence[str]) -> bool:
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--debug" in own or bool(os.environ.get("LLMRUN_DEBUG"))
