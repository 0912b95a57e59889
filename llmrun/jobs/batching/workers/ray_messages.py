"""The kinds of messages between the batch, the process that talks to Ray, and the workers on the nodes."""

from __future__ import annotations

from typing import Any, Final

from llmrun.engine.child.codec import error_from_json
from llmrun.jobs.batching.workers.base import WorkerLost

# answers to calls, with a value
OK: Final = "ok"
FAILED: Final = "failed"  # the JSON of an LlmrunError
LOST: Final = "lost"  # the reason why there can be no answer now

# what there is to show
LOADING: Final = "loading"  # a description and a fraction
NOTE: Final = "note"
DETAIL: Final = "detail"

# unasked messages from the process that talks to Ray
CONNECTED: Final = "connected"  # the nodes
NEWS: Final = "news"  # a worker's name, followed by one of the kinds above with its values
GONE: Final = "gone"  # the reason why the cluster cannot be used any more


def value_of(kind: str, value: Any) -> Any:
    """Return the value of an answer. Raises WorkerLost, or the error with which the call failed."""
    if kind == FAILED:
        raise error_from_json(value)
    if kind == LOST:
        raise WorkerLost(str(value))
    return value
