"""A real HTTP server in a thread, and clients for it: whole requests, and raw sockets."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrun.serving.app import make_app
from llmrun.serving.bodies import Bodies
from llmrun.serving.http_server import HttpServer, bound_socket, run_server
from llmrun.serving.models.known import KnownModel, KnownModels
from llmrun.serving.models.registry import ModelLimits, Models
from llmrun.serving.options import ServingOptions
from llmrun.serving.processes.stop_signals import StopSignals
from llmrun.serving.service import Service
from llmrun.serving.upstreams.front import Upstreams
from tests.support.protocol.openapi import check_reply
from tests.support.serving.fake_model import TIMEOUT_S, FakeModel

CHAT = "/v1/chat/completions"
HELLO: Mapping[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}


@dataclass
class Reply:
    """A complete response."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json["error"]
        assert isinstance(found, dict)
        return found


@dataclass
class RunningServer:
    """A server in a thread. `log` and `traces` collect what it says."""

    service: Service
    model: FakeModel
    port: int
    signals: StopSignals
    loop: asyncio.AbstractEventLoop
    ready: threading.Event = field(default_factory=threading.Event)
    log: list[str] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)

    def call(self, action: Callable[[], object]) -> None:
        """Run an action in the server's thread, and wait until it is done."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(action)
        self.loop.call_soon_threadsafe(done.set)
        assert done.wait(TIMEOUT_S)

    def stop(self) -> None:
        """Do what a signal does, without waiting."""
        self.loop.call_soon_threadsafe(self.signals.receive)

    def release(self) -> None:
        """Let the requests that hold go on."""
        self.call(self.model.released.set)

    def send(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        """Send a request and return the response, which must match the OpenAPI document.

        A body that is not bytes is sent as JSON.
        """
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        fields = {**({} if data is None else {"content-type": "application/json"}), **(headers or {})}
        line.request(method, path, data, fields)
        response = line.getresponse()
        reply = Reply(response.status, response.headers, response.read())
        line.close()
        if self.service.upstreams is None and not (isinstance(body, Mapping) and "response_fields" in body):
            check_reply(method, path, reply.status, reply.headers.get("content-type", ""), reply.body)
        return reply

    def chat(self, **fields: Any) -> Reply:
        return self.send("POST", CHAT, {**HELLO, **fields})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)

    def begin_chat(self, **fields: Any) -> socket.socket:
        """Send a chat request and return its connection without reading the response."""
        line = self.connect()
        line.sendall(post(CHAT, {**HELLO, **fields}))
        return line


def fake_models(*fakes: FakeModel, limits: ModelLimits | None = None) -> Models:
    """Return a registry of fake models, which are called by the names in their facts."""
    by_name = {fake.facts.name if fake.facts else "fake": fake for fake in fakes}

    async def opener(known: KnownModel, room: int | None) -> FakeModel:
        return by_name[known.name]

    known = KnownModels([KnownModel(name, Path(name)) for name in by_name])
    return Models(known, opener, limits or ModelLimits(), created=1234, note=lambda words: None)


def post(path: str, body: Any, **headers: str) -> bytes:
    """Return the bytes of a request with a JSON body."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(data)), **headers}
    head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + data


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def read_all(line: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    parts = []
    try:
        while part := line.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        parts.append(b"(reset)")
    return b"".join(parts)


def read_until(line: socket.socket, mark: bytes) -> bytes:
    """Read until the response contains `mark`."""
    data = b""
    while mark not in data:
        part = line.recv(65536)
        assert part, f"closed after {data!r}"
        data += part
    return data


@contextmanager
def serving(
    model: FakeModel | None = None,
    options: ServingOptions | None = None,
    *,
    others: Sequence[FakeModel] = (),
    drain_s: float = 30.0,
    fails: type[Exception] | None = None,
    tls: ssl.SSLContext | None = None,
    upstreams: Upstreams | None = None,
    port: int = 0,
) -> Iterator[RunningServer]:
    """Run a server while the block runs, and then stop it at once.

    others  more models, which are loaded when a request names them
    fails  the error that ends the server, if one should
    """
    options, listening = options or ServingOptions(), bound_socket("127.0.0.1", port)
    made: list[RunningServer] = []
    shown = model or FakeModel()
    failures: list[BaseException] = []

    async def run() -> None:
        models = fake_models(shown, *others)
        service = Service(models, options, Bodies(options.limits), upstreams=upstreams)
        running = RunningServer(service, shown, listening.getsockname()[1], StopSignals(), asyncio.get_running_loop())
        app = make_app(service, log=running.log.append, trace=running.traces.append)
        made.append(running)
        await run_server(
            HttpServer(app, options.limits, tls),
            models,
            listening,
            drain_s=drain_s,
            ready=running.ready.set,
            say=running.log.append,
            signals=running.signals,
            upstreams=upstreams,
        )

    def in_thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failures.append(error)
            if not isinstance(error, fails or ()):
                raise

    thread = threading.Thread(target=in_thread, daemon=True)
    thread.start()
    shown.wait_for("started")
    try:
        yield made[0]
    finally:
        for _ in range(2):
            if thread.is_alive():
                with contextlib.suppress(RuntimeError):  # the loop has just been closed
                    made[0].loop.call_soon_threadsafe(made[0].signals.receive)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        assert [type(failure) for failure in failures] == ([] if fails is None else [fails])
        listening.close()
    assert made[0].traces == []
