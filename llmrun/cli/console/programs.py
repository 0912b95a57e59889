"""Runs the user's own programs: the editor, and a clipboard program.

Without a clipboard program, text is copied with the terminal's OSC 52 sequence.
"""

from __future__ import annotations

import base64
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from llmrun.base.errors import UsageError
from llmrun.base.folders import decoded_text
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import can_move_cursor, is_terminal

_MOST_BYTES = 74_994  # maximum text size, because terminals ignore OSC 52 sequences of more than 100,000 bytes
_PATIENCE_S = 5.0


def copy_text(text: str) -> str:
    """Copy text to the clipboard. Return a phrase that names the destination. Raises UsageError.

    In an SSH session, the text is sent to the terminal on the user's machine. A clipboard program would set only
    the clipboard of the remote machine.
    """
    data = text.encode("utf-8", "replace")
    remote = bool(os.environ.get("SSH_TTY") or os.environ.get("SSH_CONNECTION"))
    for where, command in () if remote else _programs():
        if _gave(command, data):
            return f"to the clipboard with {where}"
    if os.environ.get("TMUX") and _gave(("tmux", "load-buffer", "-w", "-"), data):
        return "to tmux's buffer, and to the clipboard if the terminal allows it"
    if not any(map(can_move_cursor, (sys.stdout, sys.stderr))):
        raise UsageError("/copy: no clipboard found", hint="install wl-clipboard or xclip")
    if len(data) > _MOST_BYTES:
        raise UsageError(
            f"/copy: {len(data):,} bytes exceed the terminal clipboard's limit of {_MOST_BYTES:,}",
            hint="install wl-clipboard or xclip",
        )
    out.sequence(_osc_52(data))
    return "to the terminal's clipboard (OSC 52), if the terminal allows it"


def _programs() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the clipboard programs for this session, most likely first."""
    if os.environ.get("WAYLAND_DISPLAY"):
        yield "wl-copy", ("wl-copy",)
    if os.environ.get("DISPLAY"):
        yield "xclip", ("xclip", "-selection", "clipboard")
        yield "xsel", ("xsel", "--clipboard", "--input")
    if sys.platform == "darwin":
        yield "pbcopy", ("pbcopy",)


def _gave(command: Sequence[str], data: bytes) -> bool:
    """Run a clipboard program and return whether it succeeded.

    The program's output is discarded, because xclip and wl-copy stay in the background and would keep a pipe open.
    """
    program = shutil.which(command[0])
    if program is None:
        return False
    try:
        done = subprocess.run(
            [program, *command[1:]],
            input=data,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _osc_52(data: bytes) -> str:
    """Return the escape sequence that sets the terminal's clipboard.

    tmux forwards the sequence only inside a wrapper, in which every ESC is doubled.
    """
    sequence = f"\x1b]52;c;{base64.b64encode(data).decode()}\x07"
    if os.environ.get("TMUX"):
        return "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"
    return sequence


_USUAL = ("editor", "nano", "vim", "vi", "notepad")


def edited(text: str, suffix: str = ".md") -> str:
    """Open text in an editor and return the saved text without trailing newlines.

    suffix  the suffix of the temporary file, by which editors choose the syntax to highlight

    The editor is $VISUAL, $EDITOR or a common editor. Graphical editors need an option to wait until the window is
    closed, as in "code --wait". Raises UsageError if no editor is found, if the editor fails, or if the saved text is
    not UTF-8.
    """
    command = _editor()
    descriptor, name = tempfile.mkstemp(prefix="llmrun-", suffix=suffix)  # a file that only the user can read
    path = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace", newline="") as file:
            file.write(text + "\n" if text else "")
        _run(command, path)
        saved = decoded_text(path.read_bytes(), f"editor: {command[0]}: the saved text")
        return saved.replace("\r\n", "\n").rstrip("\n")
    except OSError as error:
        raise _failure(command, error) from error
    finally:
        path.unlink(missing_ok=True)


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


def _run(command: list[str], path: Path) -> None:
    """Run the editor on the terminal, even if stdout is redirected. Raises UsageError if the editor fails."""
    shown_on_stderr = is_terminal(sys.stderr) and not is_terminal(sys.stdout)
    stdout = sys.stderr if shown_on_stderr else None
    try:
        with _interrupts_are_its_own():
            code = subprocess.run([*command, str(path)], stdout=stdout, check=False).returncode
    except OSError as error:
        raise _failure(command, error) from error
    if code:
        hint = "set EDITOR to choose another editor"
        raise UsageError(f"editor: {command[0]}: exit code {code}, so its text was not used", hint=hint)


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
