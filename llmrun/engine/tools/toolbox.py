"""The tools of a chat: starts the servers, assigns names and descriptions for a model, and calls the tools.

Names, descriptions, schemas and results come from tools and are untrusted. Such text contains no control characters,
but a template must treat the text as data, because it may contain the text of control tokens.

A tool runs without confirmation only if the user has marked the tool as safe, in the tools file or in a chat. A mark
is bound to the sha256 of the tool's definition, so a tool loses its mark if the server changes the definition. A mark
is also bound to one program, which is a command with its working directory and its declared variables: `cwd`
determines which files relative arguments name, and variables such as PATH or NODE_OPTIONS determine which code runs.

Marks are stored in tools/safe-tools.json in the data folder. The file contains only the sha256 of each program, because
a program's arguments and variables may contain API keys.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from llmrun.base.errors import Cancelled, LlmrunError, nearest, shown
from llmrun.base.folders import data_folder, write_whole
from llmrun.engine.tools import tool
from llmrun.engine.tools.command import command_definition, run_command
from llmrun.engine.tools.mcp_server import McpServer
from llmrun.engine.tools.tool import Definition, Limits, ToolFailed, ToolInfo, ToolResult, Validator, digest_of
from llmrun.engine.tools.tools_file import (
    CommandDeclaration,
    ServerDeclaration,
    ToolsFile,
    exposed_names,
    read_tools_file,
)

_VERSION = 1
_MOST_BYTES = 1 << 22
CHANGED = "the definition has changed since the tool was marked as safe"
REMOVED = "the mark was removed in a chat"

Program = ServerDeclaration | CommandDeclaration
_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class _Mark:
    """A mark for a tool.

    server   the server's name in the user's file; "" for a command
    command  the sha256 of the program, which is the server or the command itself
    tool     the tool's own name
    digest   the sha256 of the definition that the user has marked; "" if the user has removed the mark
    in_chat  True if the mark was made in a chat, and so applies even if the user's file contains no mark
    """

    server: str
    command: str
    tool: str
    digest: str
    in_chat: bool

    @property
    def key(self) -> _Key:
        return self.server, self.command, self.tool


class SafeMarks:
    """The marks of one file. Every change first reads the file again and then replaces the file atomically."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or data_folder("tools") / "safe-tools.json"
        self._marks = {mark.key: mark for mark in self._read()}

    def why_unsafe(self, program: Program, tool: Definition, *, in_file: bool) -> str | None:
        """Return None if a tool is safe, "" if its mark is missing, or another reason why the tool needs confirmation.

        in_file  True if the user's file marks the tool. The first definition of such a tool is saved as its mark
        """
        mark = self._marks.get((tool.server, _digest_of_program(program), tool.name))
        if mark is None and in_file:
            try:
                self.add(program, tool, tool.digest, in_chat=False)
            except LlmrunError as error:
                return f"the definition cannot be saved: {error}"
            return None
        if mark is None or not (in_file or mark.in_chat):
            return ""
        if not mark.digest:
            return REMOVED
        return None if mark.digest == tool.digest else CHANGED

    def add(self, program: Program, tool: Definition, digest: str, *, in_chat: bool) -> None:
        """Replace the mark of a tool. The arguments become fields of `_Mark`. Raises LlmrunError if saving fails."""
        mark = _Mark(tool.server, _digest_of_program(program), tool.name, digest, in_chat)
        marks = {known.key: known for known in self._read()} | {mark.key: mark}  # another chat may have added marks
        self._write(marks)
        self._marks = marks

    def _read(self) -> list[_Mark]:
        """Return the saved marks. Raises LlmrunError for a damaged file, so that no mark is trusted by mistake."""
        try:
            with self._path.open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
            if len(data) > _MOST_BYTES:
                raise ValueError(f"more than {_MOST_BYTES >> 20} MiB")
            table = json.loads(data)
            if table["version"] != _VERSION:
                raise ValueError(f"version {table['version']!r:.20}")
            return [_mark(entry) for entry in table["marks"]]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LlmrunError(
                f"tools: {self._path}: damaged: {error!s:.80}",
                hint="delete the file, which also deletes the marks that you made in chats",
            ) from error
        except OSError as error:
            raise LlmrunError(f"tools: {self._path}: {error.strerror or error}") from error

    def _write(self, marks: dict[_Key, _Mark]) -> None:
        text = json.dumps({"version": _VERSION, "marks": [asdict(mark) for mark in marks.values()]}, indent=1)
        try:
            write_whole(self._path, text.encode())
        except OSError as error:
            raise LlmrunError(
                f"disk: {self._path}: cannot be written: {error.strerror or error}",
                hint="set LLMRUN_DATA_DIR to a folder that you can write to",
            ) from error


def _digest_of_program(program: Program) -> str:
    """Return the sha256 of a program: the command, the working directory and the declared variables."""
    folder = None if program.folder is None else str(program.folder)
    return digest_of([program.command, folder, dict(program.environment)])


def _mark(entry: Any) -> _Mark:
    """Convert an entry of the file. Raises KeyError or TypeError."""
    mark = _Mark(entry["server"], entry["command"], entry["tool"], entry["digest"], entry["in_chat"])
    texts = (*mark.key, mark.digest)
    if not all(isinstance(text, str) for text in texts) or not isinstance(mark.in_chat, bool):
        raise TypeError("an entry has a wrong type")
    return mark


_LOOK_S = 0.05  # how often to check for Ctrl-C while servers start


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tool and its origin."""

    definition: Definition
    source: McpServer | CommandDeclaration

    @property
    def program(self) -> Program:
        return self.source.declared if isinstance(self.source, McpServer) else self.source

    @property
    def is_marked(self) -> bool:
        """True if the user's file marks the tool as safe."""
        if isinstance(self.source, CommandDeclaration):
            return self.source.is_safe
        return self.definition.name in self.source.declared.safe


class Toolbox:
    """The tools of one file, open until `close`. Not thread-safe.

    failures  why servers could not be started, by name; these lines are safe to print
    """

    def __init__(
        self,
        declared: ToolsFile,
        *,
        validate: Validator | None = None,
        note: Callable[[str], None] = lambda line: None,
        progress: Callable[[str], None] = lambda line: None,
        limits: Limits | None = None,
        marks: SafeMarks | None = None,
    ) -> None:
        """Create a toolbox without starting anything. `open` also starts the servers.

        validate  a function of a call's arguments and their schema that returns the problem, or None if they are valid
        note      a function for lines that the user should read, such as a server's failure; lines are safe to print
        progress  a function for lines about starting servers; called several times a second
        """
        self.failures: dict[str, str] = {}
        self._declared = declared
        self._validate = validate or (lambda arguments, schema: None)
        self._note = note
        self._progress = progress
        self._limits = limits or Limits()
        self._marks = marks or SafeMarks()
        self._servers = [McpServer(server, self._limits) for server in declared.servers]
        self._entries: dict[str, _Entry] = {}

    @classmethod
    def open(cls, source: Path | ToolsFile, **options: Any) -> Toolbox:
        """Read a tools file, start all of its servers in parallel and wait for them.

        A server that cannot be started is left out, with a note. Raises UsageError for an invalid file. `options` are
        passed to the constructor.
        """
        toolbox = cls(read_tools_file(source) if isinstance(source, Path) else source, **options)
        toolbox._start()
        return toolbox

    def __enter__(self) -> Toolbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        """The names by which a model calls the tools: commands first, then servers, in the order of the file."""
        return [*self._entries]

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """The tools in the format of OpenAI's API."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": entry.definition.description,
                    "parameters": entry.definition.schema,
                },
            }
            for name, entry in self._entries.items()
        ]

    def describe(self, name: str) -> ToolInfo:
        """Return information about a tool for the user. Raises ToolFailed if no tool has the given name."""
        entry = self._entry(name)
        found, why = entry.definition, self._why_unsafe(entry)
        return ToolInfo(
            name=name,
            server=found.server,
            original=found.name,
            description=found.description,
            schema=found.schema,
            is_safe=why is None,
            why_not=why or "",
        )

    def mark_safe(self, name: str) -> None:
        """Let a tool run without confirmation from now on, until its definition changes. Raises LlmrunError."""
        entry = self._entry(name)
        self._marks.add(entry.program, entry.definition, entry.definition.digest, in_chat=True)

    def unmark(self, name: str) -> None:
        """Require confirmation for a tool again, even if the file marks the tool as safe. Raises LlmrunError."""
        entry = self._entry(name)
        self._marks.add(entry.program, entry.definition, "", in_chat=False)

    def limit_results(self, characters: int) -> None:
        """Cut the results of later calls after this many characters."""
        self._limits = replace(self._limits, result=characters)
        for server in self._servers:
            server.limits = self._limits

    def call(
        self, name: str, arguments: Mapping[str, Any], cancelled: threading.Event | tool.Cancelled | None = None
    ) -> ToolResult:
        """Call a tool, even if the tool is not safe. The caller must ask the user first.

        Returns a result with `is_error` if the tool reports an error, or if the arguments are not valid. Raises
        ToolFailed if there is no result, and Cancelled after `cancelled` is set or returns True.
        """
        entry = self._entry(name)
        if wrong := _not_json(arguments) or self._validate(arguments, entry.definition.schema):
            return ToolResult(f"invalid arguments: {shown(wrong, 500)}", is_error=True)
        started = time.monotonic()
        try:
            result = self._run(entry, arguments, _as_function(cancelled))
        except (ToolFailed, Cancelled) as error:
            raise type(error)(f"tool {name}: {error}", hint=error.hint) from error
        finally:
            self._tell_notes()
        return replace(result, seconds=time.monotonic() - started)

    def refresh(self, cancelled: threading.Event | tool.Cancelled | None = None) -> bool:
        """List the tools again for servers that have reported a change. Returns True if a server has reported a change.

        Call this method between turns. If a server fails, its old list is kept and a note is written. Raises Cancelled.
        """
        changed = False
        for server in self._servers:
            try:
                changed |= server.refresh(_as_function(cancelled))
            except ToolFailed as error:
                self._note(f"tools: {server.declared.name}: {error}")
        if changed:
            self._collect()
            self._check_marks()
        self._tell_notes()
        return changed

    def close(self) -> None:
        """End all servers in parallel. Idempotent."""
        threads = [threading.Thread(target=server.close, daemon=True) for server in self._servers]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C
            for server in self._servers:
                server.kill()
            raise

    # Starting

    def _start(self) -> None:
        """Start all servers. If the start is interrupted, kill all servers."""
        stop = threading.Event()
        starts = [_Start(server, stop.is_set) for server in self._servers]
        try:
            for start in starts:
                start.start()
            while waiting := [start for start in starts if start.is_alive()]:
                names = ", ".join(start.server.declared.name for start in waiting)
                self._progress(f"starting tool servers: {names}")
                waiting[0].join(_LOOK_S)
        except BaseException:  # Ctrl-C
            stop.set()
            for start in starts:
                start.server.kill()
                start.join(self._limits.end_s)
            self.close()
            raise
        for start in starts:
            name = start.server.declared.name
            if start.error:
                self.failures[name] = start.error
                self._note(f"tools: {name}: this server is left out: {start.error}")
        self._collect()
        self._check_names()
        self._check_marks()
        self._tell_notes()

    def _collect(self) -> None:
        """Assign names to all tools."""
        entries = [_Entry(command_definition(command), command) for command in self._declared.commands]
        entries += [_Entry(found, server) for server in self._servers for found in server.tools]
        names = exposed_names([(entry.definition.server, entry.definition.name) for entry in entries])
        self._entries = dict(zip(names, entries, strict=True))

    def _check_names(self) -> None:
        """Write a note for each name in `safe` that does not match a tool of the server."""
        for server in self._servers:
            offered = [found.name for found in server.tools]
            for name in server.declared.safe if server.declared.name not in self.failures else ():
                if name not in offered:
                    hint = shown(nearest(name, offered), 300)
                    self._note(f"tools: {server.declared.name}: safe: the server has no tool {shown(name)}; {hint}")

    def _check_marks(self) -> None:
        """Write a note for each tool whose mark is no longer valid, and record new definitions."""
        for name, entry in self._entries.items():
            if why := self._why_unsafe(entry):
                self._note(f"tools: {name}: {why}, so every call needs your confirmation")

    def _tell_notes(self) -> None:
        for server in self._servers:
            while server.notes:
                self._note(f"tools: {server.declared.name}: {server.notes.popleft()}")

    # Calling

    def _run(self, entry: _Entry, arguments: Mapping[str, Any], cancelled: tool.Cancelled) -> ToolResult:
        server = entry.source
        if isinstance(server, CommandDeclaration):
            return run_command(server, arguments, self._limits, cancelled)
        if not server.is_running:
            self._progress(f"starting tool servers: {server.declared.name}")
            server.start(cancelled)
            self._collect()
            if entry.definition not in server.tools:
                raise ToolFailed("the server was restarted and now defines this tool differently")
        return server.call(entry.definition.name, arguments, cancelled)

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ToolFailed(f"tool {shown(name)}: no such tool", hint=nearest(name, self._entries))
        return entry

    def _why_unsafe(self, entry: _Entry) -> str | None:
        return self._marks.why_unsafe(entry.program, entry.definition, in_file=entry.is_marked)


class _Start(threading.Thread):
    """A thread that starts a server. `error` is "" or describes the failure in one line that is safe to print."""

    def __init__(self, server: McpServer, cancelled: tool.Cancelled) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.error = ""
        self._cancelled = cancelled

    def run(self) -> None:
        try:
            self.server.start(self._cancelled)
        except LlmrunError as error:
            self.error = str(error)
        except Exception as error:  # noqa: BLE001 - after any error, the server must not count as started
            self.error = shown(f"unexpected error: {type(error).__name__}: {error}", 300)


def _not_json(arguments: object) -> str:
    """Return the reason why a call's arguments cannot be sent, or ""."""
    if not isinstance(arguments, Mapping):
        return "the arguments must be a JSON object"
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return "the arguments contain a value that JSON cannot represent, or are nested too deeply"
    return ""


def _as_function(cancelled: threading.Event | tool.Cancelled | None) -> tool.Cancelled:
    if cancelled is None:
        return lambda: False
    return cancelled.is_set if isinstance(cancelled, threading.Event) else cancelled
