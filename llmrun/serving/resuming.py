"""Resumes streams whose connection broke.

Nothing is stored. The ID of an event contains the ID of its answer, from which the time and the default seed are
derived, so a repeated request is answered with the same bytes, and events that the client has seen are left out. This
works even after a restart, and on another server with the same model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llmrun.engine.remote.event_ids import FORM
from llmrun.serving.exchanges import AnswerId
from llmrun.serving.models.ready import Ready
from llmrun.serving.refusals import Refused

HEADER: Final = "last-event-id"
_CHECK_LETTERS: Final = 8


@dataclass(frozen=True, slots=True)
class LastEvent:
    """The last event of a stream that a client has seen, from its header Last-Event-ID.

    check   identifies the request and the model, see `check_of`
    number  the number of the event, counted from 1
    """

    answer: AnswerId
    check: str
    number: int


def read_last_event(headers: Mapping[str, str]) -> LastEvent | None:
    """Return the last event that the client has seen, or None if the request does not continue a stream.

    Raises Refused for an ID that is not an llmrun server's.
    """
    given = headers.get(HEADER)
    if not given:
        return None
    found = FORM.fullmatch(given)
    if found is None:
        raise Refused(400, f"Last-Event-ID: {given[:60]!r} is not an event ID", code="invalid_event_id")
    return LastEvent(AnswerId(found["answer"]), found["check"], int(found["number"]))


@dataclass(slots=True)
class EventNumbers:
    """Numbers the events of a stream, and skips those that the client has seen.

    skipped  how many events at the beginning are not sent
    """

    prefix: str
    skipped: int = 0
    last: int = 0

    def next_id(self) -> str | None:
        """Return the ID of the next event, or None if the client has seen it. It is "" in streams without IDs."""
        self.last += 1
        if self.last <= self.skipped:
            return None
        return f"{self.prefix}-{self.last}" if self.prefix else ""


NO_IDS: Final = ""


def numbers_of(
    answer: AnswerId, last: LastEvent | None, api: str, body: Mapping[str, Any], ready: Ready, choices: int
) -> EventNumbers:
    """Return the numbers for the events of a stream. `api` identifies the form of the events.

    Only streams of one answer have IDs, because the events of several answers arrive in any order, and only those of
    models that repeat their answers. Raises Refused if the client wants to resume another stream.
    """
    resumable = choices == 1 and ready.facts.info.batch_invariant
    if last is None and not resumable:
        return EventNumbers(NO_IDS)
    check = check_of(body, f"{api} {ready.signature}")
    if last is not None and not (resumable and last.check == check):
        words = "Last-Event-ID: the stream belonged to another request or model; send the same body to the same model"
        raise Refused(409, words, code="other_stream")
    return EventNumbers(f"{answer}-{check}", 0 if last is None else last.number)


def check_of(body: Mapping[str, Any], signature: str) -> str:
    """Return a short hash of everything that determines the events of a stream, apart from the answer's ID.

    signature  identifies the model and the form of the events
    """
    content = json.dumps([signature, body], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:_CHECK_LETTERS]
