"""An MCP server built with the official Python SDK. It runs in .venv-clients, where `mcp` is installed."""

from __future__ import annotations

import os
import time

from mcp.server import MCPServer
from mcp.server.mcpserver import Image


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def picture() -> Image:
    """Return an image."""
    return Image(data=b"123", format="png")


def fail() -> str:
    """Fail."""
    raise ValueError("no luck")


def red() -> str:
    """Return a control sequence."""
    return "\x1b[31mred"


def sleep(seconds: float) -> str:
    """Sleep."""
    time.sleep(seconds)
    return "awake"


def secrets() -> list[str]:
    """List the names of the environment's variables."""
    return sorted(os.environ)


def crash() -> str:
    """Crash."""
    os._exit(5)


server = MCPServer("sdk")
for tool in (add, picture, fail, red, sleep, secrets, crash):
    server.add_tool(tool)
server.run("stdio")
