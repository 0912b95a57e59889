"""The IDs of events in the streams of our servers, from which a client can tell whether a stream really continues."""

from __future__ import annotations

import re
from typing import Final

FORM: Final = re.compile(r"(?P<answer>[0-9a-f]{24})-(?P<check>[0-9a-f]{8})-(?P<number>[0-9]{1,9})", re.ASCII)


def is_event_id(text: str) -> bool:
    """Return whether a text has the form of the IDs that llmrun gives."""
    return FORM.fullmatch(text) is not None


def follows(event_id: str, last_id: str) -> bool:
    """Return whether an event comes directly after another one of the same answer."""
    found, last = FORM.fullmatch(event_id), FORM.fullmatch(last_id)
    if found is None or last is None:
        return False
    same_answer = found.group("answer", "check") == last.group("answer", "check")
    return same_answer and int(found["number"]) == int(last["number"]) + 1
