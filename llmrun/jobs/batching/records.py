"""Writes the lines of the output, in the format of OpenAI's Batch API.

A record depends only on the run, its line and the answer, never on the time or on what else was running. That is why an
interrupted run has the same output as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llmrun.jobs.batching.requests import BadLine, Call
from llmrun.jobs.batching.workers.base import CHAT, COMPLETION, Reply

_OK: Final = 200
_PREFIXES: Final = {CHAT: "chatcmpl", COMPLETION: "cmpl"}


@dataclass(frozen=True, slots=True)
class LineId:
    """The identity of a line: its number, the digest of its bytes, and its own ID, or None if it could not be read."""

    number: int
    digest: bytes
    custom_id: str | None


@dataclass(frozen=True, slots=True)
class RecordWriter:
    """Writes the records of one run.

    run    identifies everything that can change an answer, apart from the line
    model  the name of the model in all answers, or None to keep what each worker says
    """

    run: str
    model: str | None

    def record_id(self, number: int, digest: bytes) -> str:
        """Return the ID of a line's record, which proves that the record belongs to this line and this run."""
        return f"batch_req_{self._hex(number, digest.hex())}"

    def answered(self, line: LineId, call: Call, reply: Reply, fingerprint: str | None) -> bytes:
        """Return the record of a line with an answer.

        fingerprint  identifies the worker, in runs with workers whose answers may differ; otherwise None
        """
        digits = self._hex(call.url, call.key.hex())
        body = reply.body
        if reply.status == _OK:
            body = _lasting(body) | {"id": f"{_PREFIXES[call.url]}-{digits}", "created": 0}
            if self.model is not None:
                body["model"] = self.model
        response = {"status_code": reply.status, "request_id": f"req_{digits}", "body": body}
        return self._record(line, response, None, {} if fingerprint is None else {"fingerprint": fingerprint})

    def failed(self, line: LineId, code: str, message: str) -> bytes:
        """Return the record of a line that got no answer at all."""
        return self._record(line, None, {"code": code, "message": message}, {})

    def bad(self, line: LineId, problem: BadLine) -> bytes:
        """Return the record of a line that is not a request."""
        return self.failed(line, problem.code, str(problem))

    def copied(self, line: LineId, record: bytes) -> bytes:
        """Return the record of a line whose call equals that of another line, from the other line's record."""
        other = json.loads(record)
        return _encoded(other | {"id": self.record_id(line.number, line.digest), "custom_id": line.custom_id})

    def _record(
        self, line: LineId, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None, more: Mapping[str, Any]
    ) -> bytes:
        head = {"id": self.record_id(line.number, line.digest), "custom_id": line.custom_id}
        return _encoded({**head, "response": response, "error": error, **more})

    def _hex(self, *parts: object) -> str:
        return hashlib.sha256(json.dumps([self.run, *parts]).encode()).hexdigest()[:24]


def is_success(record: bytes) -> bool:
    """Return whether a record has an answer. Raises ValueError if it is not a record."""
    try:
        parsed = json.loads(record)
    except RecursionError:
        parsed = None
    if not isinstance(parsed, dict) or "response" not in parsed:
        raise ValueError("not a record of a batch")
    response = parsed["response"]
    return isinstance(response, dict) and response.get("status_code") == _OK


def _encoded(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode()


def _lasting(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an answer that do not depend on the time and on the state of the cache."""
    kept = {name: value for name, value in body.items() if name != "timings"}
    usage = kept.get("usage")
    if isinstance(usage, dict):
        kept["usage"] = {name: value for name, value in usage.items() if name != "prompt_tokens_details"}
    return kept
