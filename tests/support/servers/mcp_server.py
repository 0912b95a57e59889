"""A fake MCP server, run as `python mcp_server.py MODE [ARGUMENT]`. The mode selects how it behaves or misbehaves.

It imports only the standard library, so it starts in 20 ms with `python -I -S`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODE = sys.argv[1]
ARGUMENT = sys.argv[2] if len(sys.argv) > 2 else ""
ECHO: dict[str, Any] = {
    "name": "echo",
    "description": "Repeat a text.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
FOREVER_S = 600.0  # longer than any test waits


def main() -> None:
    if MODE == "dies at start":
        sys.stderr.write("no such module: time\n")
        sys.exit(3)
    if MODE == "writes garbage first":
        write(b"Starting up \x1b[31m...\nnull\n\n[1]\n")
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if MODE == "never reads":
        time.sleep(FOREVER_S)
    for line in sys.stdin.buffer:
        receive(json.loads(line))
    if MODE == "stubborn":
        time.sleep(FOREVER_S)


def receive(message: dict[str, Any]) -> None:
    if MODE in ("logs", "hangs") and ARGUMENT:
        with Path(ARGUMENT).open("a", encoding="utf-8") as file:
            file.write(json.dumps(message) + "\n")
    method, params = message.get("method"), message.get("params", {})
    if "id" not in message or method is None:
        return
    if MODE == "never answers":
        time.sleep(FOREVER_S)
    result: dict[str, Any] | None
    if method == "initialize":
        result = initialized(params)
    elif method == "tools/list":
        result = listed(params)
    else:
        result = called(params)
    if result is not None:
        answer(message["id"], result)


def initialized(params: dict[str, Any]) -> dict[str, Any]:
    revision = ARGUMENT if MODE == "revision" else params["protocolVersion"]
    return {"protocolVersion": revision, "capabilities": {"tools": {}}, "serverInfo": {"name": "fake", "version": "1"}}


def listed(params: dict[str, Any]) -> dict[str, Any]:
    page = int(params.get("cursor", "0"))
    if MODE == "pages":
        following = {"nextCursor": str(page + 1)} if page < 2 else {}
        return {"tools": [{**ECHO, "name": f"echo-{page}"}], **following}
    if MODE == "endless pages":
        return {"tools": [], "nextCursor": str(page + 1)}
    if MODE == "tools":
        return {"tools": json.loads(ARGUMENT)}
    if MODE == "tools in a file":
        return {"tools": json.loads(Path(ARGUMENT).read_text())}
    return {"tools": [ECHO]}


def called(params: dict[str, Any]) -> dict[str, Any] | None:
    """Return the result of a call, or None if the answer has been written or there is none."""
    if MODE == "result":
        write(b'{"jsonrpc": "2.0", "id": 3, "result": %s}\n' % ARGUMENT.encode())
    elif MODE == "line":
        write(ARGUMENT.encode() + b"\n")
    elif MODE == "error":
        write(b'{"jsonrpc": "2.0", "id": 3, "error": %s}\n' % ARGUMENT.encode())
    elif MODE == "environment":
        return text(json.dumps(dict(os.environ)))
    elif MODE == "hangs":
        os.write(2, b"still \x1b[2J busy\n")
        return None
    elif MODE == "dies":
        os.write(2, b"out of cheese\n\n")
        os._exit(4)
    elif MODE == "dies once" and not Path(ARGUMENT).exists():
        Path(ARGUMENT).touch()
        os._exit(4)
    elif MODE == "dies but its child lives":
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"])
        os._exit(4)
    elif MODE == "closes its output":
        os.close(1)
        time.sleep(FOREVER_S)
    elif MODE == "floods":
        while True:
            write(b'{"jsonrpc": "2.0", "method": "notifications/message", "params": {"data": "%s"}}\n' % (b"x" * 60000))
    elif MODE == "one long line":
        write(b'{"jsonrpc": "2.0", "id": 3, "result": {"content": "%s"}}\n' % (b"x" * int(ARGUMENT)))
    elif MODE == "no line end":
        while True:
            write(b"x" * 60000)
    elif MODE == "floods stderr":
        os.write(2, b"x" * 1_000_000)
        return text("done")
    elif MODE == "stops reading":
        while True:
            write(b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\n')
    elif MODE == "asks":
        write(b'{"jsonrpc": "2.0", "id": "a", "method": "ping"}\n')
        write(b'{"jsonrpc": "2.0", "id": "b", "method": "sampling/createMessage", "params": {}}\n')
        return text(json.dumps([json.loads(sys.stdin.buffer.readline()) for _ in range(2)]))
    elif MODE == "changes":
        write(b'{"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}\n')
        return text("changed")
    elif MODE == "grandchild":
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER_S})"])
        return text(str(child.pid))
    else:
        return text(params["arguments"].get("text", ""))
    return None


def text(words: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": words}], "isError": False}


def answer(number: object, result: dict[str, Any]) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode() + b"\n")


def write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


main()
