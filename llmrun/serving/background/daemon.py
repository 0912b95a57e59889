"""The process of a background engine, an isolated Python process that its first client starts.

The process first talks to that client through its pipes: it receives a frame with Birth and a frame with Open, and
answers with the messages of opening a model (engine/child/messages.py). Once the model is open, the process closes the
pipes and listens on its socket, where all clients, including the first one, say hello (handshake.py).

The process leaves when nobody has used it for a while, when other programs need the memory, when llmrun or the model's
files have changed, when its socket has been removed or replaced, and when `llmrun stop` or SIGTERM asks it to.
"""

from __future__ import annotations

import faulthandler
import gc
import math
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import to_builtins

from llmrun import __version__
from llmrun.base.errors import LlmrunError, kernel_warnings_told
from llmrun.base.folders import O_BINARY, O_NOFOLLOW
from llmrun.base.machine.memory import memory_in_use, return_freed_memory
from llmrun.base.machine.memory_pressure import PressureWatch, volunteer_for_oom
from llmrun.base.processes.commands import HANGUP, TERMINATING
from llmrun.base.processes.frames import BadMessage, FrameTooLong
from llmrun.engine.base import check_generates
from llmrun.engine.child.main import SWITCH_S, Connection, as_llmrun_error, end_process
from llmrun.engine.child.messages import CannotOpen, Close, Listening, Note, Open
from llmrun.engine.child.opening import open_engine
from llmrun.engine.child.serving import EngineServing, Heart
from llmrun.engine.templates.chat_template import TemplateProcess
from llmrun.options.settings import default_sampling
from llmrun.serving.background.eligibility import Standing, difference
from llmrun.serving.background.guests import Guests
from llmrun.serving.background.handshake import (
    BIRTH,
    BUSY,
    FACTS,
    HELLO,
    INFO,
    LEAVING,
    LONGEST_GREETING,
    REFUSED,
    STOP,
    STOPPING,
    WELCOME,
    BackgroundFacts,
    Birth,
    EngineState,
    ShownTemplate,
    build_id,
    greeting,
    read_greeting,
)
from llmrun.serving.background.place import Listener, open_folder, peer_is_us

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmrun.engine.engine import Engine
    from llmrun.serving.background.guests import Guest

_PRESSURE_S: Final = 0.2  # seconds between two checks of the memory while answers keep the engine from leaving
_LOOK_S: Final = 2.0  # the longest time between two checks of the clock and the socket
_LONGEST_LIFE_S: Final = 24 * 3600.0  # an idle engine leaves after this time, so that it cannot grow for days
_LEAST_STAY_S: Final = 1.0  # the shortest stay, for the first request of a client that has just said hello
_GREETING_S: Final = 10.0  # a client that sends nothing for this long loses its connection
_DRAINED_S: Final = 0.01


def run() -> None:
    """Open the model for the first client, and serve all clients until it is time to leave."""
    sys.setswitchinterval(SWITCH_S)
    build = build_id()
    _detach()
    connection = Connection.on_standard_streams()
    birth = BIRTH.decode(connection.frame() or b"")
    asked = next(connection.received(), None)
    if not isinstance(asked, Open):
        end_process(0)
        return
    with kernel_warnings_told(lambda words: connection.send(Note(words))):
        try:
            daemon = Daemon(birth, asked, build, connection)
            daemon.listen()
        except Exception as error:  # noqa: BLE001 - reported to the client
            connection.send(CannotOpen(as_llmrun_error(error)))
            end_process(1)
            return
    end_process(daemon.run(connection))


def _detach() -> None:
    """Become independent of the first client's terminal and working directory, and write no core dumps."""
    os.chdir("/")
    os.umask(0o077)
    for number in (signal.SIGINT, *HANGUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    volunteer_for_oom()


class Daemon:
    """An open model with its clients."""

    def __init__(self, birth: Birth, asked: Open, build: str, connection: Connection) -> None:
        """Open the model. Raises the errors of `Engine.open`."""
        self._birth, self._asked, self._build = birth, asked, build
        self._files = _identities(birth.files)
        self._standing = Standing.of_this_process()
        self._started = time.time()
        self._keep_alive_s = birth.keep_alive_s
        self._changed = threading.Condition()  # guards the fields below; notified when `_watch_time` has to check them
        self._used = time.monotonic()
        self._is_new = True
        self._leaves = ""  # why the engine is leaving, or "" if it stays
        self._guests = Guests(lambda message: self._serving.take(message), self._note_use)
        templates = TemplateProcess()
        templates.start()
        self._engine = open_engine(
            asked, connection.send, lambda ids: self._serving.report_begun(ids), templates=templates
        )
        check_generates(self._engine.info)  # its client refuses an encoder, so nothing should stay loaded
        self._facts = FACTS.encode(_facts_about(self._engine, asked))
        return_freed_memory()
        gc.enable()
        gc.freeze()  # otherwise, each full collection would visit the vocabulary in the middle of a step
        self._serving = EngineServing(self._engine, self._guests.send, Heart(self._guests.send), None)

    def listen(self) -> None:
        """Listen on the socket, and write errors to a file from now on. Raises PlaceError."""
        folder = open_folder(create=True)
        assert folder is not None
        self._folder = folder
        self._log = folder.path / f"{self._birth.socket}.log"
        _write_errors_to(self._log)
        self._listener = Listener.open(folder, self._birth.socket)

    def run(self, connection: Connection) -> int:
        """Tell the first client that the engine listens, serve all clients, and return the exit status."""
        for number in TERMINATING:
            signal.signal(number, lambda *_: self._leave("asked to end"))
        for work in (self._accept, self._watch_time, self._watch_memory):
            threading.Thread(target=self._work, args=(work,), name=work.__name__, daemon=True).start()
        if not connection.sent(Listening()):
            self._leave("its first client has ended")
        connection.close()
        try:
            self._serving.run()
        except Exception as error:  # noqa: BLE001 - written to the log; clients open the model themselves
            as_llmrun_error(error)
            return 1
        finally:
            self._listener.close()
        self._engine.close()
        self._log.unlink(missing_ok=True)
        self._folder.close()
        return 0

    def _work(self, work: Callable[[], None]) -> None:
        """Do the work of a thread. If the work fails, the engine leaves."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - written to the log
            traceback.print_exception(error)
            self._leave("a bug in llmrun")

    def _accept(self) -> None:
        while (connection := self._listener.accept()) is not None:
            guest = self._guests.received(connection) if peer_is_us(connection) else None
            if guest is None:
                connection.close()
                continue
            try:
                threading.Thread(target=self._serve, args=(guest,), name="guest", daemon=True).start()
            except RuntimeError:  # the system allows no more threads
                self._guests.release(guest)

    def _serve(self, guest: Guest) -> None:
        """Answer a client's greetings and then its requests. Clients that send anything else lose the connection."""
        try:
            while self._greet(guest):
                pass
        except (BadMessage, FrameTooLong, AttributeError, KeyError, OverflowError, TypeError, ValueError):
            guest.send(greeting(LEAVING))
        finally:
            self._guests.release(guest)

    def _greet(self, guest: Guest) -> bool:
        """Answer one message of the handshake, and return whether another may follow."""
        kind, values = read_greeting(guest.receive(LONGEST_GREETING, _GREETING_S))
        if kind == INFO:
            guest.send(greeting(INFO, **to_builtins(self._state())))
            return True
        if kind == STOP:
            answers = self._guests.answers
            if answers and not values.get("force"):
                guest.send(greeting(BUSY, answers=answers))
                return True
            guest.send(greeting(STOPPING, pid=os.getpid()))
            self._leave("asked to end", at_once=bool(values.get("force")))
            return False
        if kind != HELLO:
            return False
        if self._out_of_date(str(values.get("build"))):
            self._leave("out of date")
        if self._leaves:
            guest.send(greeting(LEAVING, pid=os.getpid()))
            return False
        if reason := difference(Standing.from_json(values["standing"]), self._standing):
            guest.send(greeting(REFUSED, reason=reason))
            return False
        if (keep_alive_s := values.get("keep_alive_s")) is not None:
            self._keep_alive_s = float(keep_alive_s)
        self._note_use()
        guest.send(greeting(WELCOME, pid=os.getpid(), first_id=guest.first_id))
        guest.send(self._facts)
        self._guests.serve(guest)
        return False

    def _out_of_date(self, build: str) -> bool:
        """Return whether llmrun, the model's files or the meaning of the model's name have changed."""
        if build != self._build or _identities(self._birth.files) != self._files:
            return True
        if self._is_new:  # its first client has just resolved the name
            self._is_new = False
            return False
        return _path_of(self._birth.model) != Path(self._asked.path)

    def _state(self) -> EngineState:
        answers = self._guests.answers
        left = self._seconds_left()
        return EngineState(
            pid=os.getpid(),
            model=self._birth.model,
            name=self._asked.name,
            path=self._asked.path,
            version=__version__,
            answers=answers,
            memory_bytes=memory_in_use(),
            started=self._started,
            used=time.time() - (time.monotonic() - self._used),
            until=None if answers else time.time() + left,
        )

    def _seconds_left(self) -> float:
        """Return how long an idle engine stays, in seconds."""
        longest = self._started + _LONGEST_LIFE_S - time.time()
        if self._keep_alive_s < 0:
            return longest
        return min(longest, self._used + max(self._keep_alive_s, _LEAST_STAY_S) - time.monotonic())

    def _note_use(self) -> None:
        with self._changed:
            self._used = time.monotonic()
            self._changed.notify()

    def _watch_time(self) -> None:
        """Leave when nobody has used the engine for a while, and when the socket is no longer this engine's."""
        is_prepared = False
        while not self._leaves:
            with self._changed:
                left = math.inf if self._guests.answers else self._seconds_left()  # the last answer's end notifies
                self._changed.wait(min(_LOOK_S, max(_DRAINED_S, left)))
            if not (is_prepared or self._guests.answers):
                is_prepared = True
                _path_of(self._birth.model)  # the first call imports the hub, for which no client should have to wait
            if not self._listener.is_ours():
                self._leave("its socket was removed")
            elif not self._guests.answers and self._seconds_left() <= 0:
                self._leave("idle")

    def _watch_memory(self) -> None:
        """Leave when other programs need the memory, as soon as no answer is in progress."""
        watch = PressureWatch()
        while not self._leaves:
            reason = watch.wait(_LOOK_S)
            if reason and not self._guests.answers:
                self._leave(reason)
            elif reason:
                time.sleep(_PRESSURE_S)

    def _leave(self, why: str, *, at_once: bool = False) -> None:
        """Stop listening, finish all answers unless `at_once`, and end. Signal handlers may call this method."""
        with self._changed:
            is_first, self._leaves = not self._leaves, self._leaves or why
            self._changed.notify()
        if is_first or at_once:
            threading.Thread(target=self._end, args=(at_once,), name="leaving", daemon=True).start()

    def _end(self, at_once: bool) -> None:
        self._listener.withdraw()  # new clients start another engine
        while not (self._guests.refuse_if_idle() or at_once):
            time.sleep(_DRAINED_S)
        self._guests.close()  # otherwise, clients would get the cancelled answers as if they were complete
        self._serving.take(Close())


def _facts_about(engine: Engine, asked: Open) -> BackgroundFacts:
    template = engine.template
    return BackgroundFacts(
        name=asked.name,
        info=replace(engine.info, metadata={}),
        cache_tokens=engine.cache_tokens,
        takes_chats=engine.takes_chats,
        speculates=engine.speculates,
        has_draft_head=engine.has_draft_head,
        default_sampling=default_sampling(engine.info.metadata, asked.catalogue),
        load_s=engine.load_s,
        thinking_tags=asked.thinking_tags,
        template=None if template is None else ShownTemplate(template.source, template.name, template.origin),
        sees_images=engine.sees_images,
    )


def _identities(paths: Sequence[str]) -> list[tuple[int, ...]]:
    """Return an identity for each file, which changes if the file is replaced or written. Empty for missing files."""
    found: list[tuple[int, ...]] = []
    for path in paths:
        try:
            status = os.stat(path)  # noqa: PTH116
        except OSError:
            found.append(())
        else:
            found.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def _path_of(model: str) -> Path | None:
    """Return the local file that a model's name means now, or None."""
    from llmrun.hub.local.stored_models import find
    from llmrun.hub.progress_reporter import Silent
    from llmrun.hub.resolve.model_file import LocalPath, existing, understand

    try:
        meant = understand(model)
        return existing(meant) if isinstance(meant, LocalPath) else find(meant, Silent())
    except (LlmrunError, OSError):
        return None


def _write_errors_to(log: Path) -> None:
    """Redirect stdout and stderr to a file that only its owner can read."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | O_NOFOLLOW | O_BINARY, 0o600)
    os.dup2(descriptor, 2)
    os.dup2(descriptor, 1)
    os.close(descriptor)
    faulthandler.enable()
