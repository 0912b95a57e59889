"""Lists and stops the background engines of this user, and asks idle ones to leave if models need their memory.

No function starts an engine. Engines of other versions are listed and stopped, too, because these messages never change
(handshake.py). An engine that does not answer within a second may be suspended or busy, so only `force` ends it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from llmrun.base.amounts import counted
from llmrun.base.errors import LlmrunError
from llmrun.serving.background.eligibility import RunsAlone
from llmrun.serving.background.handshake import BUSY, INFO, STOP, EngineState
from llmrun.serving.background.joining import Link
from llmrun.serving.background.place import connect, open_folder, peer_pid

if TYPE_CHECKING:
    from llmrun.serving.background.place import Folder

_ANSWER_S: Final = 1.0  # an engine answers within milliseconds
_AGREE_S: Final = 5.0  # only force ends an engine that does not answer, so a busy machine gets more time
_END_S: Final = 30.0  # an engine that is about to end may have accepted another request just before
_FORCED_END_S: Final = 3.0
_LONGEST_LOG: Final = 1 << 16  # bytes
_FATAL: Final = "Fatal Python error"  # faulthandler writes these words first, and the names of functions last

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """A background engine.

    socket   the name of its socket
    pid      its process, or None if unknown
    state    None if the engine has not answered
    problem  why it has not answered, or ""
    """

    socket: str
    pid: int | None
    state: EngineState | None
    problem: str = ""

    @property
    def is_idle(self) -> bool:
        """True if the engine has answered and has no unfinished requests."""
        return self.state is not None and not self.state.answers

    @property
    def title(self) -> str:
        """The model's display name, or words for an engine that has not answered."""
        return f"an unknown model (process {self.pid or 'unknown'})" if self.state is None else self.state.name

    @property
    def activity(self) -> str:
        """The engine's activity: "generating", "idle" or "not answering"."""
        return "not answering" if self.state is None else "idle" if self.is_idle else "generating"

    def as_json(self) -> dict[str, Any]:
        """Return what is known about the engine. Unknown values are None."""
        state = self.state
        return {
            "model": state and state.name,
            "named": state and state.model,
            "path": state and state.path,
            "state": self.activity,
            "answers": state and state.answers,
            "memory_bytes": state and state.memory_bytes,
            "started": state and state.started,
            "used": state and state.used,
            "until": state and state.until,
            "pid": self.pid,
            "version": state and state.version,
            "problem": self.problem,
        }

    def is_named(self, name: str) -> bool:
        """Return whether the engine's model has this name: as displayed, as typed, or the path of its file."""
        if self.state is None:
            return False
        path = os.path.abspath(os.path.expanduser(name))  # noqa: PTH100, PTH111  (Path may raise, and keeps "..")
        return name.lower() in (self.state.name.lower(), self.state.model.lower()) or path == self.state.path


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file of an engine whose process has ended without removing it.

    path     the file
    socket   the name of the engine's socket
    problem  the message that the engine wrote before it ended, or ""
    """

    path: Path
    socket: str
    problem: str = ""


def running() -> list[RunningEngine]:
    """Return the background engines of this user on this computer. Raises LlmrunError for an unsafe folder."""
    with _folder() as folder:
        if folder is None:
            return []
        found = _in_parallel(lambda name: _asked(folder, name), folder.names())
        return [engine for engine in found if engine is not None]


def stop(engine: RunningEngine, *, force: bool = False) -> None:
    """End an engine, and return when its process is gone.

    force  end the engine even if it is answering, and kill it if it does not answer

    Raises LlmrunError if the engine is answering or does not answer, and if its process does not end.
    """
    from llmrun.base.processes.others import OtherProcess

    with _folder() as folder:
        if folder is None or (connection := connect(folder, engine.socket, _ANSWER_S)) is None:
            return
        link = Link.of(connection)
        try:
            pid = peer_pid(connection)
            process = None if pid is None else OtherProcess(pid)
            wait_s = _FORCED_END_S if force else _END_S
            try:
                kind, values = link.ask(STOP, within_s=_ANSWER_S if force else _AGREE_S, force=force)
            except RunsAlone:
                if not force:
                    raise _not_ended(engine, "does not answer") from None
                kind, values, wait_s = STOP, {}, 0.0
            if kind == BUSY:
                answers = counted(int(values.get("answers", 1)), "answer")
                raise _not_ended(engine, f"is generating {answers}")
            if process is not None and not process.ends_within(wait_s):
                if not force:
                    raise _not_ended(engine, "has not ended")
                process.kill()
                process.ends_within(_END_S)
                with suppress(LlmrunError):  # another process is starting the engine, and replaces the files
                    _remove_unused(folder, engine.socket)
        finally:
            link.close()


def make_room(*, most_idle: int = 0, only: str = "") -> bool:
    """Ask idle engines to leave until at most `most_idle` remain. Those that have been idle longest leave first.

    Returns whether any engine has left. The memory of these engines is then free.

    only  the socket of the only engine to ask, or "" to ask all engines
    """
    try:
        idle = [engine for engine in running() if engine.is_idle and engine.socket == (only or engine.socket)]
    except LlmrunError:
        return False  # an unsafe folder has no engines that this user could ask
    idle.sort(key=lambda engine: 0.0 if engine.state is None else engine.state.used)
    return any(_in_parallel(_has_left, idle[: max(0, len(idle) - most_idle)]))


def leftovers() -> list[Leftover]:
    """Return the sockets on which nobody listens, and the error messages of engines that have crashed."""
    with _folder() as folder:
        if folder is None:
            return []
        sockets = folder.names()
        unused = [name for name in sockets if _is_unused(folder, name)]
        logs = [name for name in folder.names("log") if name in unused or name not in sockets]
        found = [Leftover(folder.path / f"{name}.log", name, _last_words(folder.path / f"{name}.log")) for name in logs]
        # An engine without a socket may still be finishing an answer, and its log is then empty.
        told = [each for each in found if each.problem or each.socket in unused]
        return [*(Leftover(folder.path / f"{name}.sock", name) for name in unused), *told]


def remove(path: Path) -> None:
    """Remove the leftover with this path, unless an engine uses it by now. Raises LlmrunError."""
    with _folder() as folder:
        if folder is not None:
            _remove_unused(folder, path.stem)


@contextmanager
def _folder() -> Iterator[Folder | None]:
    folder = open_folder(create=False)
    if folder is None:
        yield None
        return
    with folder:
        yield folder


def _asked(folder: Folder, name: str) -> RunningEngine | None:
    """Ask an engine for its state. Returns None if nobody listens on the socket."""
    try:
        connection = connect(folder, name, _ANSWER_S)
    except LlmrunError as error:
        return RunningEngine(name, None, None, str(error))
    if connection is None:
        return None
    link, pid = Link.of(connection), peer_pid(connection)
    try:
        kind, values = link.ask(INFO, within_s=_ANSWER_S)
        if kind != INFO:
            return RunningEngine(name, pid, None, "the engine is about to end")
        return RunningEngine(name, pid, _state(values))
    except RunsAlone as error:
        return RunningEngine(name, pid, None, str(error))
    except (ValueError, TypeError) as error:
        return RunningEngine(name, pid, None, f"the engine sent an invalid answer: {error}")
    finally:
        link.close()


def _state(values: Any) -> EngineState:
    """Return the state in a message. Later versions may send more. Raises ValueError and TypeError."""
    from msgspec import convert

    return convert({name: values[name] for name in EngineState.__struct_fields__ if name in values}, EngineState)


def _not_ended(engine: RunningEngine, reason: str) -> LlmrunError:
    return LlmrunError(f"cannot stop {engine.title}: the engine {reason}", hint="`--force` ends the process")


def _has_left(engine: RunningEngine) -> bool:
    with suppress(LlmrunError):
        stop(engine)
        return True
    return False


def _is_unused(folder: Folder, name: str) -> bool:
    """Return whether nobody listens on a socket. Other files, and sockets of other users, count as used."""
    try:
        connection = connect(folder, name, _ANSWER_S)
    except LlmrunError:
        return False
    if connection is not None:
        connection.close()
    return connection is None


def _remove_unused(folder: Folder, name: str) -> None:
    """Remove the files of an engine that has ended. Raises LlmrunError if another process is starting an engine."""
    with folder.lock(name, seconds=_ANSWER_S):
        if _is_unused(folder, name):
            folder.remove(name)
            with suppress(FileNotFoundError):
                folder.unlink(f"{name}.log")


def _last_words(log: Path) -> str:
    with suppress(OSError), log.open("rb") as file:
        lines = file.read(_LONGEST_LOG).decode("utf-8", "replace").splitlines()
        written = [line.strip() for line in lines if line.strip()]
        return next((line for line in written if line.startswith(_FATAL)), written[-1] if written else "")
    return ""


def _in_parallel(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Call the function for each item at the same time, because each call may wait for a second."""
    if len(items) < 2:
        return [function(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(items)) as pool:
        return [*pool.map(function, items)]
