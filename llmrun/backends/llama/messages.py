"""What llmrun and the process that runs llama.cpp say to each other: numbered requests and answers, lines of JSON.

A forward pass is said without JSON. Weights have gone through the caches just before, so that its code and its tables
come from memory again. Without JSON and with less to check, 690 us passed between two tokens instead of 820 (a model of
135M parameters, 7 ms a token).
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

# Wakes whoever waits for an answer that is about to come, as the reader takes the writer's processor when that goes to
# sleep. With a thread on each of 2 processors 485 us (462 to 529) between two tokens instead of 690 (568 to 719); with
# one thread no difference.
NEARLY = b"nearly\n"
_FORWARD = b"forward "
_DONE = b"done "
_WATCHED_S = 0.0005  # between two tokens pass 0.3 ms


def request_line(operation: str, number: int, fields: dict[str, Any]) -> bytes:
    """A request: "forward", with `rows` and `wanted`, or another operation with whatever it takes."""
    if operation == "forward":
        return b"%s%d %d %d\n" % (_FORWARD, number, fields["rows"], fields["wanted"])
    return json.dumps({"do": operation, "number": number, **fields}).encode() + b"\n"


def read_request(line: bytes) -> tuple[str, int, dict[str, Any]] | None:
    """Operation, number and fields of a request; None for a part of one."""
    try:
        if line.startswith(_FORWARD):
            _, number, rows, wanted = line.split()
            return "forward", int(number), {"rows": int(rows), "wanted": int(wanted)}
        fields = json.loads(line)
        return fields.pop("do"), fields.pop("number"), fields
    except (ValueError, TypeError, AttributeError, KeyError):
        return None


def answer_line(number: int, answer: dict[str, Any]) -> bytes:
    """An answer. That of a forward pass that went well is {"status": 0}."""
    if answer == {"status": 0}:
        return b"%s%d\n" % (_DONE, number)
    return json.dumps({"number": number, **answer}).encode() + b"\n"


def read_answer(line: bytes) -> dict[str, Any]:
    """An answer with its "number"; empty for what is none, or the rest of one."""
    try:
        if line.startswith(_DONE):
            return {"number": int(line[len(_DONE) :]), "status": 0}
        answer = json.loads(line)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def read_soon(descriptor: int) -> bytes:
    """Read from a pipe into which something is about to be written. A sleeping process wakes late: 50 to 110 us on a
    virtual machine whose processor has gone idle meanwhile."""
    if hasattr(select, "poll"):  # not on Windows
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        end = time.monotonic() + _WATCHED_S
        while not waiting.poll(0) and time.monotonic() < end:
            pass
    return os.read(descriptor, 1 << 16)
