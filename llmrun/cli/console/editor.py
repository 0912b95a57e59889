"""Edits text in the user's editor."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from llmrun.base.errors import UsageError
from llmrun.cli.console.terminal import is_terminal

_USUAL = ("editor", "nano", "vim", "vi", "notepad")


def edited(text: str) -> str:
    """Open text in an editor and return the saved text without trailing newlines.

    The editor is $VISUAL, $EDITOR or a common editor. Graphical editors need an option to wait until the window is
    closed, as in "code --wait". Raises UsageError if no editor is found, if the editor fails, or if the saved text is
    not UTF-8.
    """
    command = _editor()
    descriptor, name = tempfile.mkstemp(prefix="llmrun-", suffix=".md")  # only the user can read this file
    path = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text + "\n" if text else "")
        _run(command, path, "nothing was sent")
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n").rstrip("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"editor: {command[0]}: the saved text is not UTF-8: byte {error.start:,}") from error
    except OSError as error:
        raise _failure(command, error) from error
    finally:
        path.unlink(missing_ok=True)


def edit_file(path: Path, consequence: str) -> None:
    """Open a file in the editor that `edited` uses, and wait until it is closed.

    Raises UsageError if no editor is found or if the editor fails; `consequence` completes the message "exit code 1,
    so ...".
    """
    _run(_editor(), path, consequence)


def _editor() -> list[str]:
    for variable in ("VISUAL", "EDITOR"):
        if value := os.environ.get(variable, "").strip():
            try:
                return shlex.split(value, posix=sys.platform != "win32")
            except ValueError as error:
                raise UsageError(f"editor: {variable}: {value!r:.80}: {error}") from error
    for name in _USUAL:
        if shutil.which(name):
            return [name]
    raise UsageError("editor: none found", hint='set EDITOR, for example to "nano" or "code --wait"')


def _run(command: list[str], path: Path, consequence: str) -> None:
    """Run the editor on the terminal, even if stdout is redirected. Raises UsageError if it fails."""
    shown_on_stderr = is_terminal(sys.stderr) and not is_terminal(sys.stdout)
    stdout = sys.stderr if shown_on_stderr else None
    try:
        with _interrupts_are_its_own():
            code = subprocess.run([*command, str(path)], stdout=stdout, check=False).returncode
    except OSError as error:
        raise _failure(command, error) from error
    if code:
        raise UsageError(
            f"editor: {command[0]}: exit code {code}, so {consequence}", hint="set EDITOR to choose another editor"
        )


def _failure(command: list[str], error: OSError) -> UsageError:
    return UsageError(f"editor: {command[0]}: {error.strerror or error}", hint="set EDITOR to another editor")


@contextmanager
def _interrupts_are_its_own() -> Iterator[None]:
    """Ignore Ctrl-C in this process while the editor runs, because the terminal sends it to both processes.

    The handler is an empty function instead of SIG_IGN, which the editor would inherit.
    """

    def nothing(number: int, frame: FrameType | None) -> None:
        return

    before = signal.signal(signal.SIGINT, nothing)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
