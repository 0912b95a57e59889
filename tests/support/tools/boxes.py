"""Opens toolboxes on fake servers and on commands that are Python programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmrun.engine.tools.tool import Limits
from llmrun.engine.tools.toolbox import Toolbox
from llmrun.engine.tools.tools_file import CommandDeclaration, ServerDeclaration, ToolsFile

FAKE_SERVER = Path(__file__).parent.parent / "servers" / "mcp_server.py"
LIMITS = Limits(line=1 << 20, unasked=1 << 20, end_s=0.5)
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def fake_server(mode: str, argument: str = "", *, name: str = "fake", **others: Any) -> ServerDeclaration:
    """Return a declaration of the fake server. A call that must time out needs a short `timeout_s`."""
    command = (sys.executable, "-I", "-S", str(FAKE_SERVER), mode, argument)
    return replace(ServerDeclaration(name, command, timeout_s=30.0, start_timeout_s=30.0), **others)


def python_command(program: str, *arguments: str, name: str = "program", **others: Any) -> CommandDeclaration:
    """Return a declaration of a command that runs a Python program. All its arguments are strings."""
    parameters: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
    command = (sys.executable, "-I", "-S", "-c", program, *arguments)
    return replace(CommandDeclaration(name, "Run a program.", command, parameters, timeout_s=30.0), **others)


@dataclass
class OpenBox:
    """An open toolbox with the notes that it has written."""

    toolbox: Toolbox
    notes: list[str] = field(default_factory=list)


@contextmanager
def opened(*declared: ServerDeclaration | CommandDeclaration, **options: Any) -> Iterator[OpenBox]:
    """Open a toolbox with these tools, and close it at the end."""
    file = ToolsFile(
        Path("tools.toml"),
        tuple(one for one in declared if isinstance(one, ServerDeclaration)),
        tuple(one for one in declared if isinstance(one, CommandDeclaration)),
    )
    notes: list[str] = []
    with Toolbox.open(file, note=notes.append, **{"limits": LIMITS, **options}) as toolbox:
        yield OpenBox(toolbox, notes)
