"""Keeps a server alive as long as somebody holds a lease on it, and ends it even if the holders are killed.

A lease is a lock on a file, which the system releases when its holder ends. `llmrun launch` takes a lease before it
starts a server, and several runs may hold leases on one server. The server regularly looks for leases, and ends if
there are none.

A server has a folder of its own:

    join.lock    held while a run joins or starts the server, and while the server decides to end
    alive.lock   held by the server's process
    server.json  how to reach the server, once it accepts requests (ServerFacts)
    key          the API key of a server whose key is not kept
    log          the server's messages
    runs/        a lock and a folder with the holder's private files for each lease
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Final

from msgspec import MsgspecError, Struct, json

from llmrun.base.folders import private_folder, write_private
from llmrun.base.processes.locks import LockHeld, claim, claimed, is_held, locked

_LOOK_S: Final = 0.5  # how often a server looks for leases
_PROBE_S: Final = 0.1  # longer than another process takes to find out whether a server is alive
_LONGEST_LOG: Final = 1 << 20  # bytes
_KEPT_LOG: Final = 1 << 18  # bytes that remain of a log that has become too long


class ServerFacts(Struct, frozen=True):
    """How to reach a server.

    url      without /v1
    model    the name that requests use
    context  in tokens
    tools    whether the model can call tools
    """

    url: str
    model: str
    context: int
    tools: bool


class ServerPlace:
    """The folder of one server. Methods raise OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self.key = path / "key"
        self._facts = path / "server.json"
        self._runs = path / "runs"
        self._alive = path / "alive.lock"

    def create(self) -> None:
        """Create the folders, which must be private to this user. Raises UsageError."""
        for folder in (self.path, self._runs):
            private_folder(folder)

    def joining(self, seconds: float) -> AbstractContextManager[None]:
        """Hold the lock for joining, starting or ending the server. Raises LockHeld."""
        return locked(self.path / "join.lock", seconds)

    @contextmanager
    def lease(self) -> Iterator[Path]:
        """Hold a lease in the `with` block. Yields a private folder, which is removed at the end."""
        with claim(self._runs) as lock:
            try:
                yield private_folder(lock.with_suffix(""))
            finally:
                _remove_folder_of(lock)

    def has_leases(self) -> bool:
        """Return whether anybody holds a lease, and remove the folders of holders that were killed."""
        return claimed(self._runs, _remove_folder_of)

    def is_alive(self) -> bool:
        """Return whether the server's process exists."""
        return is_held(self._alive, _PROBE_S)

    def facts(self) -> ServerFacts | None:
        """Return how to reach the server, or None if it does not accept requests."""
        with suppress(FileNotFoundError, MsgspecError):
            return json.decode(self._facts.read_bytes(), type=ServerFacts)
        return None

    def clear(self) -> None:
        """Remove what an ended server has left, except its log."""
        for path in (self._facts, self.key):
            path.unlink(missing_ok=True)

    # Only the server's process calls the methods below.

    @contextmanager
    def served(self) -> Iterator[None]:
        """Be the server of this folder in the `with` block. Raises LockHeld if there is another one."""
        with locked(self._alive):
            try:
                yield
            finally:
                self.clear()

    def announce(self, facts: ServerFacts) -> None:
        """Let others join."""
        write_private(self._facts, json.encode(facts))

    async def end_unused(self, end: Callable[[], None]) -> None:
        """Wait until nobody holds a lease, make sure that nobody can join, and call `end`."""
        while True:
            await asyncio.sleep(_LOOK_S)
            with suppress(LockHeld, OSError):  # for example, too many files may be open at the moment
                self._shorten_log()
                if self.has_leases():
                    continue
                with self.joining(0):
                    if self.has_leases():
                        continue
                    self._facts.unlink(missing_ok=True)
                    end()
                    return

    def _shorten_log(self) -> None:
        """Keep only the end of a long log, to which this process appends."""
        with suppress(FileNotFoundError), self.log.open("r+b") as file:
            if os.fstat(file.fileno()).st_size > _LONGEST_LOG:
                file.seek(-_KEPT_LOG, os.SEEK_END)
                end = file.read()
                file.seek(0)
                file.truncate()
                file.write(end)


def _remove_folder_of(lock: Path) -> None:
    shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
