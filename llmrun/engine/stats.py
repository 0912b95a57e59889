"""Computes the timings of a request from its timestamps. The metrics are defined as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from llmrun.types import Timings


def request_timings(
    *,
    load_s: float,
    submitted: float,
    prefill_started: float,
    step_times: Sequence[float],
    ended: float,
    prompt_tokens: int,
    cached_tokens: int,
    generated_tokens: int,
    steps: int = 0,
    drafted_tokens: int = 0,
    accepted_tokens: int = 0,
    forced_tokens: int = 0,
) -> Timings:
    """Return the Timings of one request. All timestamps are in seconds of the same monotonic clock.

    submitted        when the request was submitted, before tokenization
    prefill_started  start of its first forward pass; time in the queue counts toward the TTFT, but not the prefill
    step_times       when each step that generated tokens ended, or when each piece of text arrived
    ended            when the request ended; used only if no token was generated (TTFT and decode time are 0 then)
    steps            number of steps that generated tokens; 0 if unknown (remote)
    """
    first = step_times[0] if step_times else ended
    last = step_times[-1] if step_times else ended
    return Timings(
        load_s=load_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        generated_tokens=generated_tokens,
        prefill_s=first - prefill_started,
        ttft_s=first - submitted if step_times else 0.0,
        decode_s=last - first,
        total_s=last - submitted,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(step_times)),
        steps=steps,
        drafted_tokens=drafted_tokens,
        accepted_tokens=accepted_tokens,
        forced_tokens=forced_tokens,
    )
