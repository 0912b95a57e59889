"""A server on 127.0.0.1 that sends arbitrary bytes over raw sockets, with one thread per connection."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

LONGEST_WAIT_S = 30.0  # for a client that never returns


@dataclass(frozen=True)
class Asked:
    """One request as received."""

    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case
    content: bytes
    connection: int  # the number of its connection to the server

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.content)
        return found


@dataclass
class HostileServer:
    """A running server. `asked` lists all requests. `hung_up` is set when a client disconnects during an answer."""

    port: int
    asked: list[Asked] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1#tiny"


Script = Callable[[Asked, socket.socket], None]  # sends the answer; raises HangUp to close the connection afterwards


class HangUp(Exception):
    """Raised by a script to close the connection."""


@contextlib.contextmanager
def serving(script: Script | bytes) -> Iterator[HostileServer]:
    """Run a server that answers each request with the script, or with fixed bytes followed by closing the
    connection."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        server = HostileServer(listener.getsockname()[1])
        open_ones: list[socket.socket] = []

        def accept() -> None:
            for number in range(1 << 30):
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                open_ones.append(connection)
                threading.Thread(target=_serve, args=(server, connection, number, script), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            for ended in (listener, *open_ones):
                with contextlib.suppress(OSError):
                    ended.shutdown(socket.SHUT_RDWR)


def _serve(server: HostileServer, connection: socket.socket, number: int, script: Script | bytes) -> None:
    connection.settimeout(LONGEST_WAIT_S)
    with connection, contextlib.suppress(HangUp, OSError), connection.makefile("rb") as stream:
        while (first := stream.readline()).strip():
            method, path, _ = first.decode().split()
            lines = iter(lambda: stream.readline().strip(), b"")
            headers = {name.lower(): value for name, _, value in (line.decode().partition(": ") for line in lines)}
            content = stream.read(int(headers.get("content-length", 0)))
            asked = Asked(method, path, headers, content, number)
            server.asked.append(asked)
            if isinstance(script, bytes):
                connection.sendall(script)
                return
            try:
                script(asked, connection)
            except (BrokenPipeError, ConnectionResetError):
                server.hung_up.set()
                raise


def response(body: bytes, *, status: str = "200 OK", kind: str = "text/event-stream", **headers: str) -> bytes:
    """Return a complete response with Content-Length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def stream_head() -> bytes:
    """Return the header of a stream that ends when the connection closes."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(data: object) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def said(text: str | None = None, finish: str | None = None, **fields: Any) -> bytes:
    """Return one event of a chat completion."""
    delta = {} if text is None else {"content": text}
    return event({"choices": [{"index": 0, "delta": delta | fields, "finish_reason": finish}]})


def counted(prompt: int, completion: int, cached: int = 0) -> bytes:
    """Return the event with the token usage."""
    details = {"cached_tokens": cached}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event({"choices": [], "usage": usage})


DONE = event(b"[DONE]")
HELLO = said("", role="assistant") + said("Hel") + said("lo") + said(finish="stop") + counted(7, 3, 2) + DONE


def wait_for_hang_up(server: HostileServer, connection: socket.socket) -> None:
    """Send nothing more until the client closes the connection."""
    connection.settimeout(LONGEST_WAIT_S)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    server.hung_up.set()
