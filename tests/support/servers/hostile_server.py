"""A server on 127.0.0.1 that says whatever a test wants said: raw bytes over raw sockets, a thread a connection."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

LONGEST_WAIT_S = 30.0  # for a client that never comes back


@dataclass(frozen=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: Mapping[str, str]  # names in small letters
    content: bytes
    connection: int  # which one of the server's it came over

    @property
    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.content)
        return found


@dataclass
class HostileServer:
    """`asked` has every request; `hung_up` is set when a client closed a connection it was being answered on."""

    port: int
    asked: list[Asked] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1#tiny"


Script = Callable[[Asked, socket.socket], None]  # says the answer; raises HangUp to close the connection after it


class HangUp(Exception):
    """The script is through with this connection."""


@contextlib.contextmanager
def serving(script: Script | bytes) -> Iterator[HostileServer]:
    """A server that answers every request by the script, or with the same bytes and the end of the connection."""
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
    """A whole response with a length."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def stream_head() -> bytes:
    """The beginning of a stream that ends with the connection."""
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def event(data: object) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def said(text: str | None = None, finish: str | None = None, **fields: Any) -> bytes:
    """An event of a chat completion."""
    delta = {} if text is None else {"content": text}
    return event({"choices": [{"index": 0, "delta": delta | fields, "finish_reason": finish}]})


def counted(prompt: int, completion: int, cached: int = 0) -> bytes:
    """The event with the usage."""
    details = {"cached_tokens": cached}
    usage = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return event({"choices": [], "usage": usage})


DONE = event(b"[DONE]")
HELLO = said("", role="assistant") + said("Hel") + said("lo") + said(finish="stop") + counted(7, 3, 2) + DONE


def wait_for_hang_up(server: HostileServer, connection: socket.socket) -> None:
    """Say nothing more until the client closes the connection."""
    connection.settimeout(LONGEST_WAIT_S)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    server.hung_up.set()
