"""The declarations of servers and commands in the user's tools file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ServerDeclaration:
    """An MCP server.

    command          the program's absolute path and its arguments
    environment      variables in addition to those that all tools get (see environment.py)
    folder           working directory; None for llmrun's own
    timeout_s        seconds for each call
    start_timeout_s  seconds to start; `uvx` and `npx` may have to download the server first
    safe             the server's names for the tools that run without confirmation
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)  # may contain keys
    folder: Path | None = None
    timeout_s: float = TIMEOUT_S
    start_timeout_s: float = START_TIMEOUT_S
    safe: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandDeclaration:
    """A command that is itself a tool.

    command     the program's absolute path and its arguments, in which {name} stands for an argument of the call
    parameters  the JSON schema of the call's arguments, whose type is "object"
    json_stdin  whether the call's arguments are written to standard input, as a JSON object
    """

    name: str
    description: str
    command: tuple[str, ...]
    parameters: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    folder: Path | None = None
    timeout_s: float = TIMEOUT_S
    json_stdin: bool = False
    is_safe: bool = False


@dataclass(frozen=True, slots=True)
class ToolsFile:
    """The contents of a tools file. `path` is used in messages."""

    path: Path
    servers: tuple[ServerDeclaration, ...] = ()
    commands: tuple[CommandDeclaration, ...] = ()
