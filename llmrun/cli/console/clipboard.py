"""Copies text to the clipboard, with a clipboard program or with the terminal's OSC 52 sequence."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from llmrun.base.errors import UsageError
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import can_move_cursor

_MOST_BYTES = 74_994  # maximum text size, because terminals ignore OSC 52 sequences of more than 100,000 bytes
_PATIENCE_S = 5.0


def copy_text(text: str) -> str:
    """Copy text to the clipboard. Return a phrase that says where the text is now. Raises UsageError.

    In an SSH session, the terminal is used, because it runs on the user's machine. A clipboard program would set only
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

    Its output is discarded, because xclip and wl-copy stay in the background and would keep a pipe open.
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

    tmux forwards the sequence only if it is in a wrapper, in which every ESC is doubled.
    """
    sequence = f"\x1b]52;c;{base64.b64encode(data).decode()}\x07"
    if os.environ.get("TMUX"):
        return "\x1bPtmux;" + sequence.replace("\x1b", "\x1b\x1b") + "\x1b\\"
    return sequence
