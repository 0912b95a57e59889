"""A server of the Model Context Protocol (MCP) in a child process: starting it, listing its tools and calling them.

We speak revision 2025-06-18 and older ones, and use only tools: https://modelcontextprotocol.io/specification/2025-06-18
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from llmrun import __version__
from llmrun.engine.tools import tool
from llmrun.engine.tools.child import Child
from llmrun.engine.tools.connection import Connection
from llmrun.engine.tools.content import result_of
from llmrun.engine.tools.declared import ServerDeclaration
from llmrun.engine.tools.environment import environment
from llmrun.engine.tools.limits import Limits
from llmrun.engine.tools.tool import Definition, ToolFailed, ToolResult, digest_of
from llmrun.engine.tools.untrusted import cleaned, cleaned_json
from llmrun.formats.gguf.problems import shown

REVISION = "2025-06-18"
_REVISIONS = (REVISION, "2025-03-26", "2024-11-05")
_DEFINING = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")  # keys of a tool
_MOST_NOTES = 20
_MOST_PAGES = 100


class McpServer:
    """One server from the user's file. It runs from `start` to `close`, and `call` restarts it if it has died.

    declared  its entry in the user's file
    tools     the tools that it offered last
    notes     lines for the user, which are safe to print
    limits    for its messages and results
    """

    def __init__(self, declaration: ServerDeclaration, limits: Limits) -> None:
        self.tools: tuple[Definition, ...] = ()
        self.notes: deque[str] = deque(maxlen=_MOST_NOTES)
        self.declared = declaration
        self.limits = limits
        self._connection: Connection | None = None

    def start(self, cancelled: tool.Cancelled) -> None:
        """Start the server and list its tools. Raises ToolFailed and Cancelled, after which the server is closed."""
        self.close()
        declared = self.declared
        child = Child(declared.command, environment(declared.environment), declared.folder)
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
        """List the tools again if the server has reported a change. Returns whether it has."""
        connection = self._connection
        if connection is None or not connection.tools_changed.is_set():
            return False
        self._list(connection, time.monotonic() + self.declared.timeout_s, cancelled)
        return True

    def call(self, name: str, arguments: Mapping[str, Any], cancelled: tool.Cancelled) -> ToolResult:
        """Call a tool of a running server. Raises ToolFailed and Cancelled."""
        if self._connection is None:
            raise ToolFailed("it is not running")
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
            "capabilities": {},  # no roots, sampling or elicitation
            "clientInfo": {"name": "llmrun", "version": __version__},
        }
        answer = connection.request("initialize", params, _until(deadline), cancelled)
        revision = answer.get("protocolVersion") if isinstance(answer, dict) else None
        if revision not in _REVISIONS:
            known = ", ".join(_REVISIONS)
            raise ToolFailed(f"it speaks revision {shown(str(revision))} of MCP, but llmrun supports only {known}")
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
                raise ToolFailed("its list of tools is not valid")
            received += len(tools)
            if received > self.limits.tools:
                raise ToolFailed(f"it offers more than {self.limits.tools} tools")
            for one in tools:
                self._add(one, found)
            cursor = page.get("nextCursor")
            if not isinstance(cursor, str):
                self.tools = tuple(found.values())
                return
            params = {"cursor": cursor}
        raise ToolFailed(f"its list of tools has more than {_MOST_PAGES} pages")

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
        raise ValueError("it has no name")
    raw = {key: value[key] for key in _DEFINING if key in value}
    size = len(json.dumps(raw))
    if size > limit:
        raise ValueError(f"{shown(name)}: its definition has {size:,} characters; the limit is {limit:,}")
    description, schema = value.get("description", ""), value.get("inputSchema")
    if not isinstance(description, str):
        raise ValueError(f"{shown(name)}: its description is not text")
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise ValueError(f"{shown(name)}: its input schema is not the schema of an object")
    return Definition(declared.name, name, cleaned(description), cleaned_json(schema), digest_of(raw))
