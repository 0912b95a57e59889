"""A TCP relay that records when each request was sent and when its text began, and that can cut connections."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_CONTENT = re.compile(rb'"(?:content|text)": ?"[^"]')  # in an event with text


@dataclass
class Relay:
    """A running relay.

    `ttft_s` has the time of each request from its last byte to the packet in which its text begins.
    """

    port: int
    ttft_s: list[float] = field(default_factory=list)
    lines: list[socket.socket] = field(default_factory=list)

    def cut(self) -> None:
        """Break all connections."""
        while self.lines:
            with contextlib.suppress(OSError):  # closed already
                self.lines.pop().shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def relay_to(port: int, cuts: Sequence[int] = ()) -> Iterator[Relay]:
    """Relay connections to a port. The first connections are cut after these numbers of bytes for the client."""
    left = [*cuts]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        relay = Relay(listener.getsockname()[1])

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                server = socket.create_connection(("127.0.0.1", port))
                relay.lines.extend((client, server))
                for end in (client, server):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _Watched(relay, client, server, left.pop(0) if left else None).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield relay
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            relay.cut()


class _Watched:
    """One connection, in both directions."""

    def __init__(self, relay: Relay, client: socket.socket, server: socket.socket, cut: int | None) -> None:
        self._relay, self._client, self._server = relay, client, server
        self._left = cut
        self._asked = 0.0
        self._waiting = False
        self._seen = b""

    def start(self) -> None:
        for pump in (self._up, self._down):
            threading.Thread(target=pump, daemon=True).start()

    def _up(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._client.recv(1 << 16):
                self._server.sendall(data)
                self._asked, self._waiting, self._seen = time.perf_counter(), True, b""
            self._server.shutdown(socket.SHUT_WR)

    def _down(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._server.recv(1 << 16):
                arrived = time.perf_counter()
                self._seen += data
                if self._waiting and _CONTENT.search(self._seen):
                    self._relay.ttft_s.append(arrived - self._asked)
                    self._waiting = False
                if self._left is not None:
                    data, self._left = data[: self._left], self._left - len(data)
                self._client.sendall(data)
                if self._left is not None and self._left <= 0:
                    self._server.shutdown(socket.SHUT_RDWR)
                    break
            self._client.shutdown(socket.SHUT_WR)
