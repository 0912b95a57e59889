"""The times and counts of one request, parsed from its response after the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from llmrun.base.errors import NetworkError
from llmrun.engine.remote.stream import Teller, Usage, read_chunks, server_words
from llmrun.jobs.bench.serving.driver import REJECTED, Sent, Try


@dataclass(frozen=True, slots=True)
class Record:
    """One request. Times are in seconds since the run began.

    number   the number of its prompt
    due      when the request should have been sent; TTFT and E2E count from here
    sent     when it was sent for the first time
    moments  the arrival times of the pieces of text; empty if the request did not succeed
    problem  the kind of failure, such as "HTTP 500" or "connection lost"; empty if the request succeeded
    words    the server's message about the failure
    left     whether the client disconnected as planned
    usage    the server's token counts, or None
    digest   the sha256 of the answer in hexadecimal; empty if the request did not succeed
    tries    the attempts to send it, with times in seconds since the run began
    """

    group: str
    number: int
    due: float
    sent: float
    moments: tuple[float, ...]
    ended: float
    problem: str
    words: str
    left: bool
    usage: Usage | None
    digest: str
    tries: tuple[Try, ...]

    @property
    def succeeded(self) -> bool:
        return not self.problem and not self.left

    @property
    def is_rejected(self) -> bool:
        """Whether the server rejected the last attempt because it is too busy."""
        return self.tries[-1].status == REJECTED

    @property
    def output_tokens(self) -> int:
        """The server's count of the answer's tokens, or the number of pieces if the server does not count."""
        return (self.usage.completion_tokens if self.usage else 0) or len(self.moments)

    @property
    def gaps(self) -> list[float]:
        """The ITLs: the times between two pieces of text."""
        return [later - earlier for earlier, later in zip(self.moments, self.moments[1:], strict=False)]


def parsed(sent: Sent, started: float, teller: Teller) -> Record:
    """Parse a request's response. `started` is the start of the run, from time.perf_counter."""
    last = sent.last
    moments: list[float] = []
    usage, digest, words, problem = None, "", "", last.problem
    if not last.left and not problem:
        problem, words = _refusal(sent, teller)
    if not last.left and not problem:
        if last.headers.get("content-type", "").lower().startswith("text/event-stream"):
            moments, usage, digest, problem, words = _read(last.pieces, last.ended, teller)
        else:
            moments, problem = _whole(sent)
    return Record(
        group=sent.planned.group,
        number=sent.planned.number,
        due=sent.due - started,
        sent=sent.tries[0].sent - started,
        moments=tuple(moment - started for moment in moments),
        ended=last.ended - started,
        problem=problem,
        words=words,
        left=last.left,
        usage=usage,
        digest=digest,
        tries=tuple(
            Try(one.sent - started, one.ended - started, one.status, one.retry_after, one.predicted_wait)
            for one in sent.tries
        ),
    )


def _refusal(sent: Sent, teller: Teller) -> tuple[str, str]:
    """Return the problem and the server's message if the status is not a success."""
    if 200 <= sent.last.status < 300:
        return "", ""
    try:
        words = server_words(json.loads(sent.last.body))
    except (ValueError, RecursionError):
        words = ""
    return f"HTTP {sent.last.status}", teller.shown(words)


def _read(
    pieces: Sequence[tuple[float, bytes]], ended: float, teller: Teller
) -> tuple[list[float], Usage | None, str, str, str]:
    """Return the moments, the usage, the digest, the problem and the message about it."""
    moments: list[float] = []
    usage: Usage | None = None
    answer = hashlib.sha256()
    finish = ""
    try:
        for chunk in read_chunks(pieces, teller):
            usage, finish = chunk.usage or usage, chunk.finish or finish
            if chunk.text or chunk.reasoning:
                moments.append(chunk.arrived)
                answer.update((chunk.reasoning + chunk.text).encode())
    except NetworkError as error:
        problem, _, words = str(error).partition(": ")
        return [], usage, "", problem, words
    answer.update(f"\n{finish}".encode())
    # Without any text, the end token counts as the only token.
    return moments or [ended], usage, answer.hexdigest(), "", ""


def _whole(sent: Sent) -> tuple[list[float], str]:
    """Return the moments and the problem of a response that is not a stream."""
    wants_stream = json.loads(sent.planned.content).get("stream", False)
    return ([], "answer is not an event stream") if wants_stream else ([sent.last.ended], "")
