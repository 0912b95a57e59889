"""A server of the Model Context Protocol (MCP) in a child process: starting it, listing its tools and calling them.

llmrun supports revision 2025-06-18 and older revisions, but only their tools. The messages are JSON-RPC over the
server's standard input and output, one per line. https://modelcontextprotocol.io/specification/2025-06-18

The server is untrusted: it may send anything at any time, or nothing, and may stop reading. Therefore, one thread reads
and another writes, and every request has a time limit.
"""

from __future__ import annotations

import contextlib
import io
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from llmrun import __version__
from llmrun.base.errors import Cancelled, shown
from llmrun.base.processes.child import Child
from llmrun.base.processes.frames import write_all
from llmrun.engine.tools import tool
from llmrun.engine.tools.command import start
from llmrun.engine.tools.tool import (
    Definition,
    Limits,
    RefusedJson,
    ToolFailed,
    ToolResult,
    cleaned,
    cleaned_json,
    decode_json,
    digest_of,
    result_of,
)
from llmrun.engine.tools.tools_file import ServerDeclaration, environment

TOOLS_CHANGED = "notifications/tools/list_changed"
_INITIALIZE = "initialize"  # the only request that clients must not cancel
_METHOD_NOT_FOUND = -32601
_LOOK_S = 0.05  # how often a waiting request checks for Ctrl-C
_MOST_WAITING = 1000  # maximum queue length; reached only if the server does not read its input


class Connection:
    """A connection to a running server. Any thread may use the connection.

    notes          receives lines about the server's mistakes, which are safe to print
    tools_changed  set when the server reports that its list of tools has changed
    """

    def __init__(self, child: Child, limits: Limits, notes: deque[str]) -> None:
        self.tools_changed = threading.Event()
        self._child = child
        self._output = io.BufferedReader(child.stdout)
        self._limits = limits
        self._notes = notes
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Mapping[str, Any]]] = {}
        self._requests = 0
        self._unasked = 0  # bytes received since the last answer
        self._trouble = ""  # the reason why the connection ended
        self._closed = threading.Event()
        self._outgoing: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._writer.start()
        self._reader.start()

    @property
    def is_open(self) -> bool:
        """True while the server is running and its output has not ended."""
        return not (self._closed.is_set() or self._child.ended())

    def request(self, method: str, params: Mapping[str, Any], timeout_s: float, cancelled: tool.Cancelled) -> Any:
        """Send a request and return its result, which is untrusted. Raises ToolFailed and Cancelled."""
        pending: Future[Mapping[str, Any]] = Future()
        with self._lock:
            self._requests += 1
            number = self._requests
            self._pending[number] = pending
        try:
            self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
            return _result(self._answer(pending, timeout_s, cancelled))
        except BaseException as error:
            if method != _INITIALIZE and not pending.done():
                reason = "timed out" if isinstance(error, ToolFailed) else "cancelled by the user"
                with contextlib.suppress(ToolFailed):  # the connection is closed
                    self.notify("notifications/cancelled", {"requestId": number, "reason": reason})
            raise
        finally:
            with self._lock:
                del self._pending[number]

    def notify(self, method: str, params: Mapping[str, Any] | None = None) -> None:
        self._send({"jsonrpc": "2.0", "method": method} | ({"params": params} if params else {}))

    def close(self) -> None:
        """Close the server's input and end the server. Closing takes at most five times `end_s`. Idempotent."""
        with contextlib.suppress(queue.Full):  # if the server does not read its input, signals end the server
            self._outgoing.put_nowait(None)
        self._writer.join(self._limits.end_s)
        self._child.end(self._limits.end_s)
        self._reader.join(self._limits.end_s)

    def kill(self) -> None:
        """Kill the server without waiting."""
        self._child.kill()

    # Waiting

    def _answer(
        self, pending: Future[Mapping[str, Any]], timeout_s: float, cancelled: tool.Cancelled
    ) -> Mapping[str, Any]:
        """Wait for the answer to a request."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(TimeoutError):
                return pending.result(max(0.0, min(_LOOK_S, deadline - time.monotonic())))
            if cancelled():
                raise Cancelled("cancelled")
            if self._child.ended():  # the server's descendants, which may hold the output open, are dead now
                self._reader.join(self._limits.end_s)
                self._end_pending()
            elif time.monotonic() >= deadline:
                last = self._child.ending()
                words = f"; the last line of its standard error: {last}" if last else ""
                raise ToolFailed(f"no answer within {timeout_s:.3g} s{words}")

    def _end_pending(self) -> None:
        """Fail all current and future requests, because no more answers will arrive."""
        ended = self._child.wait(self._limits.end_s)  # a server that closed its output is probably about to exit
        self._trouble = self._trouble or (f"it ended: {self._child.ending()}" if ended else "it closed its output")
        self._closed.set()
        self._fail_pending(self._trouble)

    def _fail_pending(self, trouble: str) -> None:
        with self._lock:
            for pending in self._pending.values():
                if not pending.done():
                    pending.set_exception(ToolFailed(trouble))

    # Writing

    def _send(self, message: Mapping[str, Any]) -> None:
        """Queue a message, because writing blocks if the server does not read its input. Raises ToolFailed."""
        line = json.dumps(message).encode() + b"\n"
        if len(line) > self._limits.line:
            raise ToolFailed(f"a message of {len(line):,} bytes is too long; the limit is {self._limits.line:,}")
        if self._closed.is_set():
            raise ToolFailed(self._trouble)
        try:
            self._outgoing.put_nowait(line)
        except queue.Full:
            self._break_off("the server does not read its input")
            raise ToolFailed(self._trouble) from None

    def _write(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._child.stdin as stdin:  # the server has ended
            while (line := self._outgoing.get()) is not None:
                write_all(stdin, line)

    # Reading

    def _read(self) -> None:
        try:
            with contextlib.suppress(OSError, ValueError), self._output:  # closed while a descendant still holds it
                while line := self._line():
                    self._take(line)
        finally:
            self._end_pending()

    def _line(self) -> bytes:
        """Return the next line, or b"" at the end. Lines over the limit are skipped, and the pending requests fail."""
        while True:
            line = self._output.readline(self._limits.line)
            if line.endswith(b"\n") or len(line) < self._limits.line:
                return line
            while line and not line.endswith(b"\n"):
                self._count(line)
                line = self._output.readline(self._limits.line)
            self._fail_pending(self._trouble or f"the answer is longer than {self._limits.line:,} bytes")

    def _take(self, line: bytes) -> None:
        """Handle a line, which is a message or, before revision 2025-06-18, an array of messages."""
        self._count(line)
        if not line.strip():
            return
        try:
            value = decode_json(line, self._limits.depth)
        except RefusedJson as error:  # the line is probably a response
            self._fail_pending(f"the answer cannot be used: {shown(str(error))}")
            return
        except ValueError as error:  # a library has probably written a message to standard output
            self._notes.append(f"the output is not JSON: {shown(line.strip())} ({shown(str(error))})")
            return
        for message in value if isinstance(value, list) else [value]:
            if not isinstance(message, dict):
                self._notes.append(f"the output is not JSON-RPC: {shown(line.strip())}")
            elif not isinstance(method := message.get("method"), str):
                self._take_answer(message)
            elif "id" in message:
                self._reply(message["id"], method)
            elif method == TOOLS_CHANGED:
                self.tools_changed.set()

    def _take_answer(self, message: Mapping[str, Any]) -> None:
        number = message.get("id")
        with self._lock:
            pending = self._pending.get(number) if type(number) is int else None
            if pending is not None and not pending.done():  # otherwise, the request was cancelled or never existed
                self._unasked = 0
                pending.set_result(message)

    def _reply(self, number: object, method: str) -> None:
        """Answer a ping, and refuse all other requests, because llmrun offers nothing to servers."""
        if not isinstance(number, str | int):
            return
        error = {"code": _METHOD_NOT_FOUND, "message": "this client supports only ping"}
        with contextlib.suppress(ToolFailed):  # the connection is closed, or the server does not read its input
            self._send({"jsonrpc": "2.0", "id": number} | ({"result": {}} if method == "ping" else {"error": error}))

    def _count(self, line: bytes) -> None:
        """Count the bytes of a line. Kill a server that sends too much, because reading takes CPU time."""
        self._unasked += len(line)
        if self._unasked > self._limits.unasked:
            self._break_off(f"the server sent more than {self._limits.unasked:,} unrequested bytes")

    def _break_off(self, trouble: str) -> None:
        self._trouble = self._trouble or trouble
        self._child.kill()


def _result(answer: Mapping[str, Any]) -> Any:
    """Return the result of an answer, or raise ToolFailed for a JSON-RPC error."""
    error = answer.get("error")
    if error is not None or "result" not in answer:
        table = error if isinstance(error, dict) else {}
        code, message = table.get("code"), table.get("message")
        words = shown(message, 300) if isinstance(message, str) and message.strip() else "no reason given"
        raise ToolFailed(f"it refused: {words}" + (f" (error {code})" if type(code) is int else ""))
    return answer["result"]


REVISION = "2025-06-18"
_REVISIONS = (REVISION, "2025-03-26", "2024-11-05")
_DEFINING = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")  # keys of a tool
_MOST_NOTES = 20
_MOST_PAGES = 100


class McpServer:
    """A server from the user's file. The server runs from `start` to `close`, and `call` restarts a server that died.

    declared  the server's entry in the user's file
    tools     the tools in the server's most recent list
    notes     lines for the user, which are safe to print
    limits    the limits for messages and results
    """

    def __init__(self, declaration: ServerDeclaration, limits: Limits) -> None:
        self.tools: tuple[Definition, ...] = ()
        self.notes: deque[str] = deque(maxlen=_MOST_NOTES)
        self.declared = declaration
        self.limits = limits
        self._connection: Connection | None = None

    def start(self, cancelled: tool.Cancelled) -> None:
        """Start the server and list its tools. Raises ToolFailed and Cancelled after closing the server."""
        self.close()
        declared = self.declared
        child = start(declared.command, environment(declared.environment), declared.folder)
        self._connection = Connection(child, self.limits, self.notes)
        deadline = time.monotonic() + declared.start_timeout_s
        try:
            self._initialize(self._connection, deadline, cancelled)
            self._list(self._connection, deadline, cancelled)
        except BaseException:
            self.close()
            raise

    @property
    def is_running(self) -> bool:
        return self._connection is not None and self._connection.is_open

    def refresh(self, cancelled: tool.Cancelled) -> bool:
        """List the tools again if the server has reported a change. Returns True if a change was reported."""
        connection = self._connection
        if connection is None or not connection.tools_changed.is_set():
            return False
        self._list(connection, time.monotonic() + self.declared.timeout_s, cancelled)
        return True

    def call(self, name: str, arguments: Mapping[str, Any], cancelled: tool.Cancelled) -> ToolResult:
        """Call a tool of a running server. Raises ToolFailed and Cancelled."""
        if self._connection is None:
            raise ToolFailed("the server is not running")
        params = {"name": name, "arguments": arguments}
        result = self._connection.request("tools/call", params, self.declared.timeout_s, cancelled)
        return result_of(result, self.limits.result)

    def close(self) -> None:
        """End the server. Idempotent."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def kill(self) -> None:
        """Kill the server without waiting."""
        if self._connection is not None:
            self._connection.kill()

    def _initialize(self, connection: Connection, deadline: float, cancelled: tool.Cancelled) -> None:
        params = {
            "protocolVersion": REVISION,
            "capabilities": {},  # the client supports no roots, sampling or elicitation
            "clientInfo": {"name": "llmrun", "version": __version__},
        }
        answer = connection.request("initialize", params, _until(deadline), cancelled)
        revision = answer.get("protocolVersion") if isinstance(answer, dict) else None
        if revision not in _REVISIONS:
            known = ", ".join(_REVISIONS)
            raise ToolFailed(f"the server uses MCP revision {shown(str(revision))}, but llmrun supports only {known}")
        connection.notify("notifications/initialized")

    def _list(self, connection: Connection, deadline: float, cancelled: tool.Cancelled) -> None:
        """Request all pages of the list of tools."""
        connection.tools_changed.clear()
        found: dict[str, Definition] = {}
        received = 0
        params: dict[str, str] = {}
        for _ in range(_MOST_PAGES):
            page = connection.request("tools/list", params, _until(deadline), cancelled)
            if not isinstance(page, dict) or not isinstance(tools := page.get("tools"), list):
                raise ToolFailed("the list of tools is not valid")
            received += len(tools)
            if received > self.limits.tools:
                raise ToolFailed(f"the server offers more than {self.limits.tools} tools")
            for one in tools:
                self._add(one, found)
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str):
                self.tools = tuple(found.values())
                return
            params = {"cursor": cursor}
        raise ToolFailed(f"the list of tools has more than {_MOST_PAGES} pages")

    def _add(self, value: object, found: dict[str, Definition]) -> None:
        """Add a tool to `found`, or write a note if its definition cannot be used."""
        try:
            definition = _definition(self.declared, value, self.limits.definition)
        except ValueError as error:
            self.notes.append(f"a tool is left out: {error}")
            return
        if definition.name in found:
            self.notes.append(f"the tool {shown(definition.name)} is offered twice; the first one is used")
        found.setdefault(definition.name, definition)


def _until(deadline: float) -> float:
    """Return the seconds until a deadline."""
    return max(0.0, deadline - time.monotonic())


def _definition(declared: ServerDeclaration, value: object, limit: int) -> Definition:
    """Return a tool's definition. Raises ValueError with a one-line reason that is safe to print."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str) or not name:
        raise ValueError("the tool has no name")
    raw = {key: value[key] for key in _DEFINING if key in value}
    size = len(json.dumps(raw))
    if size > limit:
        raise ValueError(f"{shown(name)}: the definition has {size:,} characters; the limit is {limit:,}")
    description, schema = value.get("description", ""), value.get("inputSchema")
    if not isinstance(description, str):
        raise ValueError(f"{shown(name)}: the description is not text")
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise ValueError(f"{shown(name)}: the input schema is not the schema of an object")
    return Definition(declared.name, name, cleaned(description), cleaned_json(schema), digest_of(raw))
