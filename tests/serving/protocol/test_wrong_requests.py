"""Compares the outcome of wrong and of unusual requests with a recorded corpus, over all APIs.

`wrong_requests.json` holds the requests with their status, headers and error body. Clients read these errors, so no
message, path or order of checks may change by accident. The fake model accepts everything that the parsers accept, so
the corpus contains no errors of the engine.

After an intended change, record the outcomes again, and read the diff:

    python -m tests.serving.protocol.test_wrong_requests
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import structs

from llmrun.base.types import Adapter
from tests.support.serving.fake_model import FACTS, FakeModel
from tests.support.serving.servers import Reply, RunningServer, serving

CORPUS: Final = Path(__file__).with_name("wrong_requests.json")
Case = dict[str, Any]
CASES: Final[list[Case]] = json.loads(CORPUS.read_text(encoding="utf-8"))
_VARYING: Final = ("content-length", "date", "request-id", "x-request-id")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with models() as running:
        yield running


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_requests_have_their_recorded_outcome(server: RunningServer, case: Case) -> None:
    assert outcome(server, case) == case["expected"]


def test_names_of_requests_are_unique() -> None:
    assert len({case["name"] for case in CASES}) == len(CASES)


@contextmanager
def models() -> Iterator[RunningServer]:
    """Run a server with three models: `fake` can do everything, `simple` only chats, and `base` only completes."""
    able, simple, base = FakeModel(), FakeModel(), FakeModel()
    info = replace(FACTS.info, adapters=(Adapter("first", "first.gguf", 1.0, (), "1"),))
    able.facts = structs.replace(FACTS, info=info, takes_tools=True, thinks=True, end_tokens=(2, 3))
    simple.facts = structs.replace(FACTS, name="simple", fills=False)
    base.facts = structs.replace(FACTS, name="base", takes_chats=False, fills=False)
    with serving(able, others=[simple, base]) as running:
        yield running


def outcome(server: RunningServer, case: Case) -> Case:
    """Send a request and return the status, the headers, and the body of an error or the keys of an answer.

    The request has a JSON value as `body`, or, for bodies that Python would not write, text as `raw` or bytes as
    `base64`.
    """
    body = case.get("body")
    if "body" in case:
        body = json.dumps(body).encode()
    elif "raw" in case:
        body = case["raw"].encode()
    elif "base64" in case:
        body = base64.b64decode(case["base64"])
    reply = server.send(case["method"], case["path"], body, case["headers"])
    found: Case = {"status": reply.status, "headers": _headers(reply)}
    if reply.status >= 400:
        found["body"] = reply.json
    elif reply.headers["content-type"] == "application/json":
        found["keys"] = [*reply.json] if isinstance(reply.json, dict) else None
    return found


def _headers(reply: Reply) -> dict[str, str]:
    found = {name.lower(): value for name, value in reply.headers.items() if name.lower() not in _VARYING}
    if "allow" in found:  # Starlette lists the methods in any order
        found["allow"] = ", ".join(sorted(found["allow"].split(", ")))
    return found


def record() -> None:
    """Record today's outcome of each request in the corpus. Each request and each outcome has its own line."""
    with models() as server:
        for case in CASES:
            case["expected"] = outcome(server, case)
    lines = []
    for case in CASES:
        request = {name: value for name, value in case.items() if name != "expected"}
        lines.append(f'{json.dumps(request)[:-1]},\n "expected": {json.dumps(case["expected"])}}}')
    CORPUS.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    record()
