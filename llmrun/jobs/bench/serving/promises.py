"""Compares the waits that a server predicted with the waits that followed.

A 429 with Retry-After promises a wait, and so does the header x-llmrun-wait of an accepted request.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from llmrun.jobs.bench.serving.record import Record

# Shorter actual waits count as this long against Retry-After, which is in whole seconds, and are not compared with
# x-llmrun-wait, because the time of the prefill is only estimated.
SHORTEST_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """The accuracy of Retry-After. Times are in seconds.

    rejections       all 429s, of first and of later attempts
    with_time        those that had a Retry-After
    obeyed           requests that were sent again after the time
    accepted         the requests among them whose second attempt was accepted
    promised         the median and the range of Retry-After
    error            the median of |promised - actual| / actual, where actual is the time from a request's first 429 to
                     its first text, or None. A promise that was too short leads to more 429s and a longer actual wait
    newcomer_error   the same, where actual is the time from the 429 to the first text of any request that was sent
                     later and accepted at once. It reveals promises that were too long, which `error` cannot see
    """

    rejections: int
    with_time: int
    obeyed: int
    accepted: int
    promised: tuple[float, float, float] | None
    error: float | None
    newcomer_error: float | None


@dataclass(frozen=True, slots=True)
class PredictedWaits:
    """The accuracy of the predictions for accepted requests.

    predicted  the accepted requests with a prediction
    compared   those that waited for at least SHORTEST_WAIT_S
    error      the median of |predicted - actual| / actual
    within_2x  the share of those whose prediction is within a factor of 2
    """

    predicted: int
    compared: int
    error: float | None
    within_2x: float | None


def judge_retry_after(records: Sequence[Record]) -> RetryAfter:
    """Compare Retry-After with what happened."""
    rejections = [one for record in records for one in record.tries if one.status == 429]
    waits = sorted(one.retry_after for one in rejections if one.retry_after is not None)
    obeyed = [record for record in records if len(record.tries) > 1]
    errors, newcomer_errors = [], []
    at_once = sorted(
        (record.sent, record.moments[0]) for record in records if record.succeeded and len(record.tries) == 1
    )
    for record in obeyed:
        rejected = record.tries[0]
        promised = rejected.retry_after or 0.0
        if record.succeeded:
            errors.append(_relative(promised, record.moments[0] - rejected.ended))
        first = min((first for sent, first in at_once if sent > rejected.ended), default=None)
        if first is not None:
            newcomer_errors.append(_relative(promised, first - rejected.ended))
    return RetryAfter(
        rejections=len(rejections),
        with_time=len(waits),
        obeyed=len(obeyed),
        accepted=sum(record.tries[1].status != 429 for record in obeyed),
        promised=(statistics.median(waits), waits[0], waits[-1]) if waits else None,
        error=_median(errors),
        newcomer_error=_median(newcomer_errors),
    )


def judge_predicted_waits(records: Sequence[Record], prefill_s: float) -> PredictedWaits | None:
    """Compare the predictions for accepted requests with their waits. Return None if there are no predictions.

    The wait of a request is its time to the first text since it was sent, less `prefill_s`, the time to the first text
    on an idle server.
    """
    pairs = [
        (record.tries[-1].predicted_wait, record.moments[0] - record.tries[-1].sent - prefill_s)
        for record in records
        if record.succeeded and record.tries[-1].predicted_wait is not None
    ]
    if not pairs:
        return None
    compared = [(said, wait) for said, wait in pairs if said is not None and wait >= SHORTEST_WAIT_S]
    good = sum(wait / 2 <= said <= wait * 2 for said, wait in compared)
    return PredictedWaits(
        predicted=len(pairs),
        compared=len(compared),
        error=_median([_relative(said, wait) for said, wait in compared]),
        within_2x=good / len(compared) if compared else None,
    )


def _relative(promised: float, actual: float) -> float:
    actual = max(actual, SHORTEST_WAIT_S)
    return abs(promised - actual) / actual


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
