"""The limits that keep a tool from using up the memory, the context or the user's time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits for each tool server and each command.

    line        bytes of one message from or to a server
    unasked     bytes that a server may send without answering a request, and bytes that a command may write to stdout
    result      characters of a result that the model gets to see
    depth       nested arrays and objects in a message
    tools       tools of one server
    definition  characters of one tool's definition as JSON
    end_s       seconds that a process has to end after each step: closing its input, SIGTERM, SIGKILL
    """

    line: int = 4 << 20
    unasked: int = 16 << 20
    result: int = 100_000
    depth: int = 64
    tools: int = 500
    definition: int = 65_536
    end_s: float = 1.0
