"""Scripts for servers that a server forwards to, for `hostile_server.serving`."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

from tests.support.servers.hostile_server import Asked, HangUp, Script, response

MODEL = "tiny"
TRAITS = {"owned_by": "llmrun", "system_fingerprint": "fp-1"}
ANSWER = f"{'0' * 24}-{'a' * 8}"  # the ID of an answer


def upstream(answer: Script | bytes, model: str = MODEL, **traits: Any) -> Script:
    """Return the script of a server with one model. `answer` is sent for each POST request."""
    listed = {"object": "list", "data": [{"id": model, "object": "model", **TRAITS, **traits}]}

    def script(asked: Asked, connection: socket.socket) -> None:
        if asked.method == "GET":
            known = asked.path == "/v1/models"
            body = json.dumps(listed if known else {"error": "no such path"}).encode()
            connection.sendall(response(body, status="200 OK" if known else "404 No", kind="application/json"))
        elif isinstance(answer, bytes):
            connection.sendall(answer)
            raise HangUp
        else:
            answer(asked, connection)

    return script


def whole(text: str = "fine") -> bytes:
    """Return a response with a whole answer."""
    body = {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
    return response(json.dumps(body).encode(), kind="application/json")


def refusal(status: str, message: str = "no", headers: Mapping[str, str] | None = None, **error: Any) -> bytes:
    """Return a response with an error."""
    body = json.dumps({"error": {"message": message, "type": "server_error", "param": None, "code": None, **error}})
    return response(body.encode(), status=status, kind="application/json", **(headers or {}))


def chunked(*events: bytes, is_complete: bool = False) -> bytes:
    """Return a streamed response. If it is not complete, closing the connection cuts it off."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    parts = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
    return head + parts + (b"0\r\n\r\n" if is_complete else b"")
