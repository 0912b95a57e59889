"""A shell on a real terminal, to run programs as a user does: in our own pseudo-terminal or in tmux."""

from __future__ import annotations

import bisect
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import pexpect
import pytest

if sys.platform == "win32":
    pytest.skip("needs POSIX shells", allow_module_level=True)

from tests.support.cli.terminals import Terminal

READY = "READY> "  # the shell's prompt
_BASH = ("bash", "--norc", "--noprofile", "-i")


class Stream:
    """A terminal's complete output with arrival times. One thread writes it and another reads it."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._ends: list[int] = []
        self._moments: list[float] = []
        self._grown = threading.Condition()

    def add(self, data: bytes) -> None:
        moment = time.monotonic()
        with self._grown:
            self._data += data
            self._ends.append(len(self._data))
            self._moments.append(moment)
            self._grown.notify_all()

    def __len__(self) -> int:
        with self._grown:
            return len(self._data)

    def since(self, start: int) -> bytes:
        with self._grown:
            return bytes(self._data[start:])

    def moment_of(self, position: int) -> float:
        """Return when the byte at a position arrived."""
        with self._grown:
            return self._moments[bisect.bisect_right(self._ends, position)]

    def wait(self, pattern: bytes, start: int, seconds: float) -> re.Match[bytes] | None:
        """Return the first match at or after `start`, with positions relative to `start`, or None on timeout."""
        compiled = re.compile(pattern, re.DOTALL)
        deadline = time.monotonic() + seconds
        with self._grown:
            while True:
                if found := compiled.search(self._data[start:]):
                    return found
                left = deadline - time.monotonic()
                if left <= 0 or not self._grown.wait(left):
                    return None


class Shell(Protocol):
    """A user's view of a shell in a terminal. `pid` is the shell's process."""

    stream: Stream
    pid: int

    def send(self, text: str) -> None:
        """Type the text. Control characters act as keys."""

    def paste(self, text: str) -> None:
        """Paste the text as one bracketed paste."""

    def resize(self, columns: int, lines: int) -> None: ...

    def rows(self) -> list[str]:
        """Return the rows of scrollback and screen, from top to bottom."""

    def close(self) -> None: ...


def _environment(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return an environment that disables bracketed paste in the shell, so that only the program under test enables
    it."""
    settings = folder / "inputrc"
    settings.write_text("set enable-bracketed-paste off\n")
    return {**os.environ, "PS1": READY, "INPUTRC": str(settings), "HISTFILE": "", **more}


class PtyShell:
    """A shell in a pseudo-terminal, with a screen emulated by pyte."""

    def __init__(self, folder: Path, environment: Mapping[str, str], columns: int = 100, lines: int = 30) -> None:
        self.stream = Stream()
        self._process = pexpect.spawn(
            _BASH[0],
            list(_BASH[1:]),
            env={"TERM": "xterm-256color", **_environment(folder, environment)},
            dimensions=(lines, columns),
        )
        self.pid: int = self._process.pid
        self._terminal = Terminal(columns, lines)
        self._shown = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._process.child_fd, 1 << 16)
            except OSError:  # the shell exited
                return
            if not data:
                return
            self.stream.add(data)

    def send(self, text: str) -> None:
        self._process.send(text.encode())

    def paste(self, text: str) -> None:
        self.send("\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~")

    def resize(self, columns: int, lines: int) -> None:
        self.rows()
        self._terminal.resize(columns, lines)
        self._process.setwinsize(lines, columns)

    def rows(self) -> list[str]:
        data = self.stream.since(self._shown)
        self._shown += len(data)
        self._terminal.write(data.decode("utf-8", "replace"))
        return self._terminal.rows()

    def close(self) -> None:
        self._process.close(force=True)


class TmuxShell:
    """A shell in its own tmux server. The program's output is piped to us as it arrives."""

    def __init__(self, folder: Path, environment: Mapping[str, str], columns: int = 100, lines: int = 30) -> None:
        self.stream = Stream()
        self._server = f"llmrun-{os.getpid()}-{id(self):x}"
        pipe = folder / f"{self._server}.pipe"
        os.mkfifo(pipe)
        everything = _environment(folder, environment)
        everything.pop("TERM", None)
        self._run("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(lines), *_BASH, env=everything)
        self._run("set-option", "-g", "history-limit", "100000")
        self._run("pipe-pane", "-O", f"exec cat > '{pipe}'")
        self._reader = threading.Thread(target=self._read, args=(pipe,), daemon=True)
        self._reader.start()
        self.pid = int(self._run("display-message", "-p", "#{pane_pid}"))

    def _run(self, *arguments: str, stdin: str = "", env: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._server, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=True,
            env=env,
            timeout=60,
        )
        return done.stdout

    def _read(self, pipe: Path) -> None:
        with pipe.open("rb", buffering=0) as file:
            while data := file.read(1 << 16):
                self.stream.add(data)

    def send(self, text: str) -> None:
        for piece in re.findall(r"[\x00-\x1f\x7f]+|[^\x00-\x1f\x7f]+", text):
            if piece[0] < " " or piece[0] == "\x7f":
                self._run("send-keys", "-H", *(f"{ord(key):02x}" for key in piece))
            else:
                self._run("send-keys", "-l", "--", piece)

    def paste(self, text: str) -> None:
        self._run("load-buffer", "-", stdin=text)
        self._run("paste-buffer", "-p", "-d")

    def resize(self, columns: int, lines: int) -> None:
        self._run("resize-window", "-x", str(columns), "-y", str(lines))

    def rows(self) -> list[str]:
        return self._run("capture-pane", "-p", "-J", "-S", "-").splitlines()

    def close(self) -> None:
        self._run("kill-server")
