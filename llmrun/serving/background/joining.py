"""The client's side of the handshake: joins a background engine that is running, or starts one."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from llmrun.base.processes.child import Child
from llmrun.base.processes.commands import isolated_command, isolated_environment
from llmrun.base.processes.frames import BadMessage, FrameTooLong, framed, read_frame
from llmrun.engine.child.messages import FROM_CHILD, LONGEST, TO_CHILD, CannotOpen, Listening, Loading, Note
from llmrun.serving.background.eligibility import RunsAlone, Standing, inherited
from llmrun.serving.background.handshake import (
    BIRTH,
    FACTS,
    HELLO,
    LEAVING,
    LONGEST_GREETING,
    REFUSED,
    WELCOME,
    BackgroundFacts,
    Birth,
    build_id,
    greeting,
    read_greeting,
)
from llmrun.serving.background.place import LockHeld, connect

if TYPE_CHECKING:
    from llmrun.engine.child.messages import Open
    from llmrun.serving.background.place import Folder

_GREETING_S: Final = 5.0  # how long a greeting may take; a client whose engine is slower opens the model itself
_LONGEST_WAIT_S: Final = 60.0  # how long to wait for another process that is starting the engine
_LOOK_S: Final = 0.5  # seconds between two attempts to join the engine in the meantime
_LONGEST_FACTS: Final = 1 << 24  # bytes; a chat template may be a megabyte long


@dataclass(frozen=True, slots=True)
class Link:
    """An open connection to a background engine."""

    connection: socket.socket
    stream: Any  # a binary stream for reading

    @classmethod
    def of(cls, connection: socket.socket) -> Link:
        return cls(connection, connection.makefile("rb", buffering=1 << 16))

    def send(self, data: bytes) -> None:
        """Send a frame. Raises OSError if the engine has ended.

        If KeyboardInterrupt stops this method or `receive`, part of a frame may be lost, so the connection is closed.
        """
        try:
            self.connection.sendall(framed(data))
        except BaseException:
            self.close()
            raise

    def receive(self, longest: int = LONGEST) -> bytes | None:
        """Return the next frame, or None if the engine has ended. Raises FrameTooLong."""
        try:
            return read_frame(self.stream, longest)
        except (OSError, ValueError):
            return None
        except BaseException:
            self.close()
            raise

    def ask(self, kind: str, *, within_s: float = _GREETING_S, **values: Any) -> tuple[str, Mapping[str, Any]]:
        """Send a message of the handshake and return the answer, which is `leaving` if the engine has ended.

        Raises RunsAlone if no answer arrives within this time.
        """
        try:
            self.connection.settimeout(within_s)
            self.send(greeting(kind, **values))
            return read_greeting(self.receive_within(within_s, LONGEST_GREETING))
        except TimeoutError:
            raise RunsAlone(f"the background engine did not answer within {within_s:g} s") from None
        except (OSError, BadMessage, FrameTooLong):
            return LEAVING, {}

    def receive_within(self, seconds: float, longest: int) -> bytes | None:
        """Return the next frame, or None if the engine has ended. Raises OSError and FrameTooLong.

        Raises TimeoutError after this time, even if single bytes arrive.
        """
        limited: Any = _Limited(self, time.monotonic() + seconds)
        data = read_frame(limited, longest)
        self.connection.settimeout(None)
        return data

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with suppress(OSError):
            self.stream.close()
        self.connection.close()


@dataclass(frozen=True, slots=True)
class _Limited:
    """The stream of a link, with a deadline for reading."""

    link: Link
    end: float  # in seconds of `time.monotonic`

    def read(self, size: int) -> bytes:
        """Return at least one byte, or b"" at the end of the stream. Raises TimeoutError."""
        if (left := self.end - time.monotonic()) <= 0:
            raise TimeoutError
        self.link.connection.settimeout(left)
        return bytes(self.link.stream.read1(size))


@dataclass(frozen=True, slots=True)
class Joined:
    """A connection that an engine has welcomed.

    first_id  the first id for the requests of this client
    """

    link: Link
    pid: int
    first_id: int
    facts: BackgroundFacts


def join(folder: Folder, name: str, keep_alive_s: float | None) -> Joined | None:
    """Join the engine with this socket. Returns None if there is no engine, or if the engine is leaving.

    keep_alive_s  how long the engine stays after an answer in seconds, negative until it is stopped; None for no change

    Raises RunsAlone if the engine refuses this client or does not answer, and PlaceError for an unsafe socket.
    """
    connection = connect(folder, name, _GREETING_S)
    if connection is None:
        return None
    link, joined = Link.of(connection), None
    try:
        standing = Standing.of_this_process().as_json()
        mine = {"build": build_id(), "standing": standing, "keep_alive_s": keep_alive_s}
        kind, values = link.ask(HELLO, within_s=_GREETING_S, **mine)
        if kind == REFUSED:
            raise RunsAlone(str(values.get("reason")))
        if kind == WELCOME and (data := link.receive_within(_GREETING_S, _LONGEST_FACTS)) is not None:
            joined = Joined(link, int(values["pid"]), int(values["first_id"]), FACTS.decode(data))
    except (BadMessage, FrameTooLong, KeyError, OSError, TypeError, ValueError) as error:
        raise RunsAlone(f"the background engine sent an invalid answer: {error}") from error
    finally:
        if joined is None:
            link.close()
    return joined


def join_or_start(
    folder: Folder,
    name: str,
    asked: Callable[[], AbstractContextManager[tuple[Birth, Open]]],
    *,
    keep_alive_s: float,
    tell: Callable[[Loading | Note], None],
    waiting: Callable[[], None] | None,
) -> tuple[Joined, bool]:
    """Join the engine with this socket, or start it. Returns whether this call has started it.

    asked    finds the model's files, which may take a while; the engine's process starts at the same time
    keep_alive_s  as in `join`
    tell     called with the progress of opening the model
    waiting  called once if another process is starting the engine

    Raises the errors of `asked`, RunsAlone if the engine cannot be started, and those of `join`.
    """
    end = time.monotonic() + _LONGEST_WAIT_S
    while True:
        with ExitStack() as held:
            try:
                held.enter_context(folder.lock(name, seconds=_LOOK_S, waiting=waiting))
            except LockHeld:  # perhaps by a suspended process, whose engine may be running
                waiting = None
                if (joined := join(folder, name, keep_alive_s)) is not None:
                    return joined, False
                if time.monotonic() >= end:
                    raise RunsAlone(f"another process has been starting the engine for {_LONGEST_WAIT_S:g} s") from None
                continue
            if (joined := join(folder, name, keep_alive_s)) is not None:
                return joined, False
            _start(asked, tell)
            joined = join(folder, name, keep_alive_s)
        if joined is None:
            raise RunsAlone("the background engine ended at once")
        return joined, True


def _start(
    asked: Callable[[], AbstractContextManager[tuple[Birth, Open]]], tell: Callable[[Loading | Note], None]
) -> None:
    """Start an engine, and wait until it listens on its socket. The engine ends if this process ends before that."""
    child = Child(
        isolated_command("serving.background.main"),
        purpose="the background engine",
        environment={**isolated_environment(), **inherited()},
    )
    try:
        with asked() as (birth, model):
            child.send(BIRTH.encode(birth))
            child.send(TO_CHILD.encode(model))
            while (frame := child.receive(LONGEST)) is not None:
                match FROM_CHILD.decode(frame):
                    case Loading() | Note() as news:
                        tell(news)
                    case CannotOpen(error=error):
                        raise RunsAlone(f"the background engine cannot open the model: {error}")
                    case Listening():
                        child.release()
                        return
        raise RunsAlone(f"the background engine ended: {child.ending()}")
    except (BadMessage, FrameTooLong) as error:
        raise RunsAlone(f"the background engine sent an invalid message: {error}") from error
    finally:
        child.end(0)
