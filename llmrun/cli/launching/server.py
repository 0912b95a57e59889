"""Starts a server for agents, or joins one that another run has started. The server ends with its last user."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llmrun import __version__
from llmrun.base.amounts import format_seconds_roughly
from llmrun.base.errors import LlmrunError
from llmrun.base.folders import O_BINARY, data_folder, private_folder, write_private
from llmrun.base.processes.commands import command, ending, environment, in_own_session
from llmrun.base.processes.locks import LockHeld
from llmrun.cli.console.output import out
from llmrun.cli.launching.models import PARALLEL
from llmrun.options.settings import MMPROJ_OFF
from llmrun.serving.background.place import socket_name, this_computer
from llmrun.serving.leases import ServerPlace

if TYPE_CHECKING:
    from llmrun.options.settings import Settings
    from llmrun.serving.leases import ServerFacts

_LOOK_S: Final = 0.05
_END_S: Final = 60.0  # a server that ends may have to save a long prefix
_OLD_S: Final = 7 * 24 * 3600.0  # folders of servers that ended earlier are removed
_DAY_S: Final = 24 * 3600  # agents wait for their turn, because a refused request would end some of them
_DRAIN_S: Final = 2
_ERROR: Final = re.compile(r"^error: (.*)\n(?:hint: (.*)\n)?", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The server that a run needs.

    settings  the server's options, except the context
    model     a name that means the same model in any folder
    context   the smallest context, in tokens
    saves     whether the server saves prefixes on disk
    """

    settings: Settings
    model: str
    context: int
    saves: bool

    def arguments(self, context: int) -> list[str]:
        """Return the arguments of `llmrun` that start the server, without address and key."""
        flags = ["--ctx-size", str(context), "--parallel", str(PARALLEL), "--max-wait", str(_DAY_S)]
        flags += ["--drain", str(_DRAIN_S)]
        given = {"--kv-type": self.settings.kv_type, "--threads": self.settings.threads}
        given["--backend"] = None if self.settings.backend == "auto" else self.settings.backend
        # A projector takes memory that the long contexts of agents need.
        flags += ["--no-mmproj"] if self.settings.mmproj in (None, MMPROJ_OFF) else ["--mmproj", self.settings.mmproj]
        for flag, value in given.items():
            flags += [] if value is None else [flag, str(value)]
        flags += ["--offline"] if self.settings.offline else []
        flags += ["--save-prefixes"] if self.saves else []
        return ["serve", self.model, *flags]

    def place(self, context: int) -> ServerPlace:
        """Return the folder of a server with this context."""
        return ServerPlace(servers_folder() / f"{self._name}-{context}")

    def running(self) -> Iterator[ServerPlace]:
        """Yield the folders of servers that accept requests and have enough context."""
        for path in sorted(servers_folder().glob(f"{self._name}-*")):
            place = ServerPlace(path)
            facts = place.facts()
            if facts is not None and facts.context >= self.context and place.is_alive():
                yield place

    @property
    def _name(self) -> str:
        """Digits that identify this computer and everything that two runs must agree on to share a server."""
        settings = replace(self.settings, ctx_size=None, quiet=False, color="auto", warm=True, offline=False)
        return socket_name("\0".join([__version__, *self.arguments(0), repr(settings)]))


@dataclass(frozen=True, slots=True)
class Connected:
    """A server in use. `folder` is for this run's private files, and is removed at the end."""

    facts: ServerFacts
    key: str
    folder: Path


def launch_folder() -> Path:
    return data_folder("launch")


def servers_folder() -> Path:
    return launch_folder() / "servers"


def kept_key_file() -> Path:
    """Return the file of the API key that remains the same between runs, because saved prefixes belong to a key."""
    return launch_folder() / "key"


def tidy() -> None:
    """Remove what killed runs have left, and the folders of servers that ended long ago. Raises OSError.

    Home directories may be on network file systems, where the locks of other computers are not always visible.
    """
    for path in servers_folder().glob("*"):
        with suppress(FileNotFoundError, LockHeld):  # another run tidies, too, or joins the server
            place, is_old = ServerPlace(path), time.time() - path.stat().st_mtime > _OLD_S
            if path.name.startswith(this_computer()):
                with place.joining(0):
                    if place.has_leases() or place.is_alive():
                        continue
                    place.clear()
            if is_old:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def connected(wanted: Wanted, place: ServerPlace, context: int) -> Iterator[Connected]:
    """Join the server of a folder, or start it with this context, and use it in the `with` block.

    At the end, wait until the server has ended, unless others use it. Raises LlmrunError.
    """
    for folder in (launch_folder(), servers_folder()):
        private_folder(folder)
    place.create()
    key_file = kept_key_file() if wanted.saves else place.key
    try:
        with ExitStack() as held:
            with _joining(place):
                folder = held.enter_context(place.lease())
                facts = _joined(wanted, place, context, key_file)
            yield Connected(facts, key_file.read_text("ascii").strip(), folder)
    finally:
        out.clear_progress()
        _wait_for_end(place)


@contextmanager
def _joining(place: ServerPlace) -> Iterator[None]:
    """Hold the lock for joining or starting a server, which another run may hold while the model is loaded."""
    with ExitStack() as held:
        while True:
            try:
                held.enter_context(place.joining(_LOOK_S))
                break
            except LockHeld:
                out.progress("waiting for another launch to start the server")
        yield


def _joined(wanted: Wanted, place: ServerPlace, context: int, key_file: Path) -> ServerFacts:
    """Return how to reach the server of a folder, after starting it if it does not run. Raises LlmrunError."""
    process: subprocess.Popen[bytes] | None = None
    began = time.monotonic()
    try:
        while True:
            is_alive, facts = place.is_alive(), place.facts()
            if is_alive and facts is not None:
                return facts
            if not is_alive and process is None:
                place.clear()
                process = _start(wanted, place, context, key_file)
            if process is not None and (code := process.poll()) is not None:
                raise _not_started(place, code)
            what = "waiting for an earlier server to end" if process is None else "starting the server"
            out.progress(f"{what}  {format_seconds_roughly(time.monotonic() - began)}")
            time.sleep(_LOOK_S)
    except BaseException:
        if process is not None:
            process.terminate()
        raise


def _start(wanted: Wanted, place: ServerPlace, context: int, key_file: Path) -> subprocess.Popen[bytes]:
    if not key_file.exists():
        write_private(key_file, secrets.token_urlsafe(32).encode())
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | O_BINARY, 0o600)
    try:
        return subprocess.Popen(
            server_command(wanted, place, context, key_file),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**environment(), "LLMRUN_QUIET": "0"},
            **in_own_session(),
        )
    except OSError as error:
        raise LlmrunError(f"cannot start the server: {error.strerror or error}") from error
    finally:
        os.close(log)


def server_command(wanted: Wanted, place: ServerPlace, context: int, key_file: Path) -> list[str]:
    own = ["--port", "0", "--api-key-file", str(key_file), "--leases", str(place.path)]
    return command("", *wanted.arguments(context), *own)


def _not_started(place: ServerPlace, code: int) -> LlmrunError:
    """Return the error that the server has written to its log, with the server's exit code."""
    log = place.log.read_text(encoding="utf-8", errors="replace")
    found = _ERROR.findall(log) or [(f"the server ended before it was ready: {ending(code)}", "")]
    sentence, hint = found[-1]
    error = LlmrunError(sentence, hint=hint or f"the server's messages are in {place.log}")
    error.exit_code = max(code, LlmrunError.exit_code)
    return error


def _wait_for_end(place: ServerPlace) -> None:
    """Wait until the server has ended, unless others use it."""
    end = time.monotonic() + _END_S
    while place.is_alive() and not place.has_leases() and time.monotonic() < end:
        out.progress("ending the server")
        time.sleep(_LOOK_S)
    out.clear_progress()
