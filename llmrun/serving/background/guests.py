"""The clients that are connected to a background engine.

Each connection has a thread that reads messages. The engine's threads send messages and never wait for a client: data
that a client does not read at once is buffered, and another thread sends it.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Final

from llmrun.base.processes.frames import BadMessage, FrameTooLong, framed, read_frame
from llmrun.engine.child.messages import (
    FROM_CHILD,
    LONGEST,
    TO_CHILD,
    Beat,
    Begun,
    Cancel,
    Close,
    FromChild,
    Note,
    Open,
    Prefilling,
    Preparing,
    Rejected,
    Stepped,
    Taken,
    ToChild,
)
from llmrun.engine.requests import Failed, Finished

if TYPE_CHECKING:
    from llmrun.engine.requests import Event

_MOST_UNREAD = 64 << 20  # bytes; a client that leaves more unread loses its connection
_MOST_GUESTS: Final = 500  # more are turned away, because each needs a descriptor, and the limit may be 1,024
_ID_BITS: Final = 32  # the low bits of a request's id; the bits above are the number of its connection


class Guest:
    """One connection. Only the thread that runs `serve` calls methods other than `send` and `close`.

    first_id  the ids of this client's requests are from `first_id` to `first_id` + 2**32 - 1
    """

    def __init__(self, connection: socket.socket, number: int) -> None:
        self._connection = connection
        self._stream: IO[bytes] = connection.makefile("rb")
        self._number = number
        self._last_id = self.first_id - 1
        self._lock = threading.Lock()  # guards the fields below
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._is_sending = False  # True while a thread is sending `_unsent`
        self._has_left = False

    @property
    def first_id(self) -> int:
        return self._number << _ID_BITS

    def owns(self, request_id: int) -> bool:
        """Return whether an id belongs to this connection."""
        return request_id >> _ID_BITS == self._number

    def use(self, request_id: int) -> None:
        """Record the id of a new request. Raises BadMessage if the id is another client's or was used before."""
        if not self.owns(request_id) or request_id <= self._last_id:
            raise BadMessage(f"the id {request_id} of another request")
        self._last_id = request_id

    def receive(self, longest: int, seconds: float | None = None) -> bytes | None:
        """Return the next frame, or None if the client has left or sends nothing in time. Raises FrameTooLong."""
        with contextlib.suppress(OSError, ValueError):
            self._connection.settimeout(seconds)
            frame = read_frame(self._stream, longest)
            self._connection.settimeout(None)
            return frame
        return None

    def send(self, data: bytes) -> None:
        """Send a frame without waiting. Nothing is sent to clients that have left. Thread-safe."""
        frame = framed(data)
        with self._lock:
            if self._has_left:
                return
            if not self._is_sending:
                frame = frame[self._sent_at_once(frame) :]
            if not frame or self._has_left:
                return
            self._unsent.append(frame)
            self._unsent_bytes += len(frame)
            if self._unsent_bytes > _MOST_UNREAD:
                self._leave()
            elif not self._is_sending:
                self._is_sending = True
                threading.Thread(target=self._send_rest, name="sending", daemon=True).start()

    def close(self) -> None:
        """End the connection. Messages that are not sent yet are lost. Idempotent and thread-safe."""
        with self._lock:
            self._leave()

    def _sent_at_once(self, frame: bytes) -> int:
        if sys.platform == "win32":
            return 0  # Windows cannot send without waiting
        try:
            return self._connection.send(frame, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0
        except OSError:
            self._leave()
            return 0

    def _send_rest(self) -> None:
        while True:
            with self._lock:
                if self._has_left or not self._unsent:
                    self._is_sending = False
                    return
                frame = self._unsent.popleft()
                self._unsent_bytes -= len(frame)
            try:
                self._connection.sendall(frame)
            except OSError:
                self.close()

    def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._unsent.clear()
            with contextlib.suppress(OSError):  # the client has closed the connection
                self._connection.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Free the descriptor, after which no method may be called. The reading thread calls this method at its end."""
        self.close()
        with contextlib.suppress(OSError):
            self._stream.close()
        self._connection.close()


class Guests:
    """The clients that have said hello, and their unfinished requests and calls.

    take     passes a message to the engine
    on_over  called when requests or calls are over: before they stop counting, and again when none is left
    """

    def __init__(self, take: Callable[[ToChild], None], on_over: Callable[[], None]) -> None:
        self._take = take
        self._on_over = on_over
        self._lock = threading.Lock()
        self._guests: dict[int, Guest] = {}
        self._unfinished: set[int] = set()
        self._n_received = 0
        self._n_open = 0
        self._refuses = False

    @property
    def answers(self) -> int:
        """The number of unfinished requests and calls."""
        return len(self._unfinished)

    def received(self, connection: socket.socket) -> Guest | None:
        """Return the guest for a new connection, which only `serve` reads, or None if there are too many guests."""
        with self._lock:
            if self._n_open >= _MOST_GUESTS:
                return None
            self._n_received += 1
            self._n_open += 1
            return Guest(connection, self._n_received)

    def release(self, guest: Guest) -> None:
        """End a connection that no thread serves any more."""
        guest.release()
        with self._lock:
            self._n_open -= 1

    def refuse_if_idle(self) -> bool:
        """If no request is unfinished, refuse all further requests. Returns whether they are refused."""
        with self._lock:
            self._refuses = self._refuses or not self._unfinished
            return self._refuses

    def serve(self, guest: Guest) -> None:
        """Pass a client's messages to the engine until the client leaves, and then cancel its requests.

        Raises BadMessage if the client sends anything that this version does not send.
        """
        number = guest.first_id >> _ID_BITS
        with self._lock:
            self._guests[number] = guest
        try:
            while (frame := guest.receive(LONGEST)) is not None:
                if not self._took(guest, TO_CHILD.decode(frame)):
                    return
        except FrameTooLong as error:
            raise BadMessage(str(error)) from error
        finally:
            with self._lock:
                del self._guests[number]
                left = tuple(each for each in self._unfinished if guest.owns(each))
            if left:
                self._take(Cancel(left))

    def _took(self, guest: Guest, message: ToChild) -> bool:
        """Pass a message to the engine, or return False if the engine is leaving."""
        match message:
            case Open() | Close():
                raise BadMessage("clients may not open or close the model")
            case Cancel(ids=ids):
                if not all(map(guest.owns, ids)):
                    raise BadMessage("the id of another client's request")
            case _:
                guest.use(message.id)
                with self._lock:
                    if self._refuses:
                        return False
                    self._unfinished.add(message.id)
        self._take(message)
        return True

    def send(self, message: FromChild) -> None:
        """Send a message to the clients whose requests it concerns. Thread-safe."""
        for request_id, part in _parts(message):
            with self._lock:
                guest = self._guests.get(request_id >> _ID_BITS)
            if guest is not None:
                guest.send(FROM_CHILD.encode(part))
        over = [each for each in _ended(message) if each in self._unfinished]
        if over:
            self._on_over()  # before the engine counts as idle, since an idle engine leaves after a time
            with self._lock:
                self._unfinished.difference_update(over)
                is_idle = not self._unfinished
            if is_idle:
                self._on_over()

    def close(self) -> None:
        """End all connections, and refuse all further requests."""
        with self._lock:
            self._refuses = True
            guests = [*self._guests.values()]
        for guest in guests:
            guest.close()


def _parts(message: FromChild) -> Iterator[tuple[int, FromChild]]:
    """Yield the parts of a message for each client, with the id of one of the client's requests."""
    match message:
        case Stepped(events=events) | Prefilling(events=events):
            by_client: dict[int, list[Event]] = {}
            for event in events:
                by_client.setdefault(event.request_id >> _ID_BITS, []).append(event)
            for number, its_events in by_client.items():
                yield number << _ID_BITS, Stepped(tuple(its_events))
        case Begun() | Beat() | Note(id=0) | Preparing():  # no client needs these messages
            return
        case Taken(id=request_id) | Rejected(id=request_id):
            yield request_id, message
        case _ if (call := getattr(message, "id", None)) is not None:
            yield call, message


def _ended(message: FromChild) -> list[int]:
    """Return the ids of the requests and calls that a message ends."""
    match message:
        case Stepped(events=events):
            return [event.request_id for event in events if isinstance(event, Finished | Failed)]
        case Begun() | Beat() | Note() | Prefilling() | Preparing() | Taken():
            return []
    call = getattr(message, "id", None)
    is_over = getattr(message, "is_last", True)
    return [call] if call is not None and is_over else []
