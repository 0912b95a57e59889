"""The input history of the prompt, which is shared by all chats.

Each line of the file is a JSON string. Multi-line input is therefore one entry, and an entry that was truncated because
the disk was full does not damage the others. Only the user can read the file. Several chats may append to it at the
same time. When the file reaches LARGEST bytes, its older half is dropped. If the file cannot be read or written, the
chat prints one note and continues without a stored history.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import History

from llmrun.base.open_flags import O_BINARY
from llmrun.cli.console.output import out

LARGEST = 1 << 20  # bytes
LONGEST = 1 << 16  # bytes per entry; longer entries would displace many others, and the conversation saves them anyway


class StoredHistory(History):
    """A prompt_toolkit history that is stored in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._told = False
        self._last = ""

    def load_history_strings(self) -> Iterable[str]:
        """Return the entries, newest first."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            self._tell(error)
            return []
        entries = list(reversed(_entries(data)))
        self._last = entries[0] if entries else ""
        return entries

    def store_string(self, string: str) -> None:
        line = json.dumps(string).encode() + b"\n"
        if string == self._last or len(line) > LONGEST:
            return
        self._last = string
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._append(line)
        except (OSError, TimeoutError) as error:
            self._tell(error)

    def _append(self, line: bytes) -> None:
        from filelock import FileLock

        with FileLock(self._path.with_suffix(".lock"), timeout=1, mode=0o600):
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | O_BINARY, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                if size:
                    os.lseek(descriptor, size - 1, os.SEEK_SET)
                    if os.read(descriptor, 1) != b"\n":  # the previous entry was truncated
                        line = b"\n" + line
                os.write(descriptor, line)
            finally:
                os.close(descriptor)
            if size + len(line) > LARGEST:
                self._forget()

    def _forget(self) -> None:
        """Drop the older half of the file."""
        data = self._path.read_bytes()
        kept = data[data.index(b"\n", len(data) - LARGEST // 2) + 1 :]
        beside = self._path.with_suffix(".new")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | O_BINARY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(kept)
        beside.replace(self._path)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            out.note(f"history: {self._path}: {error.strerror or error}: input will not be remembered")


def _entries(data: bytes) -> list[str]:
    """Return the strings in a history file, skipping invalid lines."""
    entries = []
    for line in data.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, str):
            entries.append(entry)
    return entries
