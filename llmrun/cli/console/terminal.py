"""Detects the capabilities of terminals, makes untrusted text safe to print, and handles the display of Ctrl-C.

On Ctrl-C, terminals by default show `^C` in the middle of an answer and discard output that is not yet on the screen.
This module changes the terminal modes to prevent the echo and the loss of output.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import BinaryIO, TextIO

# Text from a model, a file or a server may contain escape sequences that move the cursor, set the clipboard or type
# input for the user. On a terminal, every control character except newline and tab is therefore replaced by its symbol
# (U+2400 to U+2421). Characters without a symbol are shown as code points: the C1 controls, the two Unicode line
# separators, and the bidirectional embeddings, overrides and isolates, which change the order of displayed text.
_PICTURES = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES[0x7F] = "\u2421"
_PICTURES |= {code: f"<{code:02X}>" for code in range(0x80, 0xA0)}
_PICTURES |= {code: f"<{code:04X}>" for code in (*range(0x2028, 0x202F), *range(0x2066, 0x206A))}
_ONE_LINE = _PICTURES | {ord("\n"): " ", ord("\t"): " "}
_VIRTUAL_TERMINAL = 4  # ENABLE_VIRTUAL_TERMINAL_PROCESSING
_IN_JSON = {code: f"\\u{code:04x}" for code in _PICTURES if code >= 0x7F}  # JSON escapes codes below 0x20


def visible(text: str) -> str:
    """Make the control characters in a text visible.

    Each character is replaced separately, so an escape sequence that is split over two tokens is handled too.
    """
    return text.translate(_PICTURES)


def visible_line(text: str) -> str:
    """Make control characters visible, and replace newlines and tabs with spaces."""
    return text.translate(_ONE_LINE)


def visible_json(text: str) -> str:
    """Escape the control characters in a JSON text, as in `\\u009b`. The JSON value does not change."""
    return text.translate(_IN_JSON)


def is_terminal(stream: TextIO) -> bool:
    """Return whether the stream is connected to a terminal."""
    return not stream.closed and stream.isatty()


def discard_input(stream: BinaryIO) -> None:
    """Discard typed input that has not been read from a terminal."""
    if sys.platform == "win32":
        import msvcrt

        while msvcrt.kbhit():
            msvcrt.getwch()
    else:
        import termios

        termios.tcflush(stream.fileno(), termios.TCIFLUSH)


def can_move_cursor(stream: TextIO) -> bool:
    """Return whether the stream is a terminal on which a line can be overwritten."""
    if not is_terminal(stream) or os.environ.get("TERM") == "dumb":
        return False
    return _interprets_escapes(stream)


def _interprets_escapes(stream: TextIO) -> bool:
    """Return whether a terminal interprets escape sequences, after enabling them in the Windows console."""
    if sys.platform == "win32":
        import ctypes
        import msvcrt

        console, mode = ctypes.c_void_p(msvcrt.get_osfhandle(stream.fileno())), ctypes.c_uint32()
        kernel32 = ctypes.windll.kernel32
        if not kernel32.GetConsoleMode(console, ctypes.byref(mode)):
            return False
        return bool(kernel32.SetConsoleMode(console, mode.value | _VIRTUAL_TERMINAL))
    return True


def can_color(stream: TextIO, choice: str = "auto") -> bool:
    """Return whether to use color on a stream.

    The order of precedence is NO_COLOR, the user's setting `choice`, FORCE_COLOR, and the kind of stream.
    """
    if os.environ.get("NO_COLOR") or choice == "never":
        return False
    if choice == "always" or os.environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return can_move_cursor(stream)


def columns() -> int:
    """Return the width of the terminal in columns, or 100 if there is no terminal."""
    return shutil.get_terminal_size(fallback=(100, 24)).columns


def room(stream: TextIO) -> int:
    """Return the maximum number of columns per line for a stream, which is limited only for terminals."""
    return columns() if is_terminal(stream) else sys.maxsize


def width(text: str) -> int:
    """Return the number of columns that a line of text takes up.

    The width of multi-character emoji differs between terminals; the result is the largest possible width.
    """
    return len(text) if text.isascii() else sum(map(_columns_of, text))


def shortened(text: str, limit: int) -> str:
    """Shorten text to at most `limit` columns."""
    taken = 0
    for end, character in enumerate(text):
        taken += _columns_of(character)
        if taken > limit:
            return text[:end]
    return text


@lru_cache(maxsize=4096)
def _columns_of(character: str) -> int:
    if character in _TWO_ON_SOME_TERMINALS:
        return 2
    if character == _EMOJI_STYLE:  # this character makes the preceding symbol one column wider
        return 1
    if unicodedata.category(character) in ("Mn", "Me", "Cf") and character != _SOFT_HYPHEN:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


_EMOJI_STYLE = "\ufe0f"
_SOFT_HYPHEN = "\u00ad"
_TWO_ON_SOME_TERMINALS = frozenset(map(chr, range(0x1F1E6, 0x1F200)))  # the letters that form flag emoji


_LOCAL = 3  # index into the list returned by tcgetattr


def hide_control_echo() -> Callable[[], None]:
    """Stop showing control characters on the terminal of stdin. Return an idempotent function that restores the echo.

    If stdin is not a terminal, or if the process is in the background, nothing is changed. On Windows, consoles do not
    show control characters.
    """
    if sys.platform == "win32":
        return lambda: None
    import termios

    return _set_modes(termios.ECHOCTL, 0)


def keep_output_at_ctrl_c(*, echo: bool = True) -> Callable[[], None]:
    """Stop the terminal of stdin from showing control characters and from discarding output at Ctrl-C.

    If `echo` is false, other typed characters are not shown either. Programs can still read them later.

    The terminal then also keeps typed input, so a handler of SIGINT should call `discard_typed_input`.
    """
    if sys.platform == "win32":
        return lambda: None
    import termios

    hidden = termios.ECHOCTL | (0 if echo else termios.ECHO)
    return _set_modes(hidden | termios.NOFLSH, termios.NOFLSH)


def saved_modes() -> Callable[[], None]:
    """Return a function that restores all present modes of the terminal of stdin, after another program has used it."""
    if sys.platform == "win32" or not _owns_terminal():
        return lambda: None
    import termios

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def restore() -> None:
        if _owns_terminal():
            with suppress(termios.error, OSError):
                termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    return restore


def discard_typed_input() -> None:
    """Discard unread input from the terminal of stdin, as terminals do at Ctrl-C by default."""
    if _owns_terminal():
        discard_input(sys.stdin.buffer)


def _owns_terminal() -> bool:
    """Return whether stdin is a terminal and this process is in its foreground.

    A background process would be stopped if it changed the terminal's settings.
    """
    if sys.platform == "win32" or sys.stdin is None or sys.stdin.closed or not sys.stdin.isatty():
        return False
    with suppress(OSError):
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return False


def _set_modes(mask: int, wanted: int) -> Callable[[], None]:
    """Set the local modes in `mask` if they can be set now. Return an idempotent function that restores the modes."""
    before = _change(mask, wanted)
    if before is None or before == wanted:
        return lambda: None

    def restore() -> None:
        _change(mask, before)

    return restore


def _change(mask: int, modes: int) -> int | None:
    """Set the local modes in `mask` and return their earlier values, or None if they cannot be changed."""
    if sys.platform == "win32" or not _owns_terminal():
        return None
    import termios

    with suppress(termios.error, OSError):
        descriptor = sys.stdin.fileno()
        attributes = termios.tcgetattr(descriptor)
        before: int = attributes[_LOCAL] & mask
        attributes[_LOCAL] = attributes[_LOCAL] & ~mask | modes
        termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
        return before
    return None
