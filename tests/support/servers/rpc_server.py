"""RPC servers for tests: llama.cpp's own program, and fakes that misbehave."""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAM = "ggml-rpc-server"  # scripts/test_rpc builds it next to Python
_START_S = 20.0


def closed_port() -> int:
    """Return a port of the loopback interface on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@dataclass
class RealServer:
    """A running ggml-rpc-server."""

    process: subprocess.Popen[bytes]
    name: str
    port: int

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def start_server(port: int | None = None) -> RealServer:
    """Start ggml-rpc-server on the loopback interface, and wait until it accepts connections."""
    program = Path(sys.executable).with_name(PROGRAM)
    found = program if program.exists() else shutil.which(PROGRAM)
    assert found is not None, f"{PROGRAM} is missing; run scripts/test_rpc"
    port = port or closed_port()
    command = [str(found), "--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
    # The server writes to clients that are gone, and would be killed by SIGPIPE if it did not inherit our "ignore".
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, restore_signals=False)
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return RealServer(process, f"127.0.0.1:{port}", port)
        time.sleep(0.02)
    raise AssertionError(f"{PROGRAM} does not listen on port {port}")


@contextlib.contextmanager
def real_server(port: int | None = None) -> Iterator[RealServer]:
    server = start_server(port)
    try:
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def fake_server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Run a server that calls `answer` for each connection, and yield its HOST:PORT."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    answer(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def silent(connection: socket.socket) -> None:
    """Read everything and never answer, like a server that has another client or hangs."""
    while connection.recv(1 << 16):
        pass


def hangs_up(connection: socket.socket) -> None:
    """Read a request and close the connection, like a server whose protocol is older."""
    connection.recv(1 << 16)


def other_version(connection: socket.socket) -> None:
    """Answer the greeting like a server with version 6.1.0 of the protocol."""
    start = _received(connection, 9)  # a byte with the command, and the size of the rest
    if len(start) < 9:
        return  # The client only tried whether the port is open.
    (size,) = struct.unpack_from("<Q", start, 1)
    _received(connection, size)
    connection.sendall(struct.pack("<Q4B", size + 4, 6, 1, 0, 0) + bytes(size))
    silent(connection)


def _received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data
