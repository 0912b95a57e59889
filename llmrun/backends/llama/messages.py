"""The protocol between llmrun and the process that runs llama.cpp. Requests and answers are numbered lines of JSON.

Forward passes use a plain format instead of JSON. The weights have just evicted everything else from the CPU caches,
so the code and tables of the JSON parser would have to be loaded from memory again. The plain format, which also has
fewer checks, reduced the time between two forward passes from 820 to 690 us (135M parameters, 7 ms per token).
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import Any

# This line wakes the reader shortly before the answer arrives. Otherwise, the reader would not be scheduled until the
# writer goes to sleep. With one thread on each of 2 processors, this reduced the time between two forward passes from
# 690 us (568 to 719) to 485 us (462 to 529). With a single thread, it made no difference.
NEARLY = b"nearly\n"
_FORWARD = b"forward "
_DONE = b"done "
_WATCHED_S = 0.0005  # a little longer than the 0.3 ms between two tokens


def request_line(operation: str, number: int, fields: dict[str, Any]) -> bytes:
    """Encode a request. "forward" has the fields `rows`, `wanted` and `hidden`; other operations have their own."""
    if operation == "forward":
        return b"%s%d %d %d %d\n" % (_FORWARD, number, fields["rows"], fields["wanted"], fields["hidden"])
    return json.dumps({"do": operation, "number": number, **fields}).encode() + b"\n"


def read_request(line: bytes) -> tuple[str, int, dict[str, Any]] | None:
    """Decode a request into its operation, number and fields. Returns None if the line is incomplete."""
    try:
        if line.startswith(_FORWARD):
            _, number, rows, wanted, hidden = line.split()
            return "forward", int(number), {"rows": int(rows), "wanted": int(wanted), "hidden": int(hidden)}
        fields = json.loads(line)
        return fields.pop("do"), fields.pop("number"), fields
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def answer_line(number: int, answer: dict[str, Any]) -> bytes:
    """Encode an answer. The answer to a successful forward pass, {"status": 0}, is sent without JSON."""
    if answer == {"status": 0}:
        return b"%s%d\n" % (_DONE, number)
    return json.dumps({"number": number, **answer}).encode() + b"\n"


def read_answer(line: bytes) -> dict[str, Any]:
    """Decode an answer with its "number". Returns {} if the line is not a complete answer."""
    try:
        if line.startswith(_DONE):
            return {"number": int(line[len(_DONE) :]), "status": 0}
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def read_soon(descriptor: int) -> bytes:
    """Read from a pipe, polling briefly for data before blocking.

    Use this if data is expected soon. A blocked process wakes up late. We measured 50 to 110 us on a virtual machine
    whose processor had gone idle.
    """
    if sys.platform != "win32":
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        end = time.monotonic() + _WATCHED_S
        while not waiting.poll(0) and time.monotonic() < end:
            pass
    return os.read(descriptor, 1 << 16)
