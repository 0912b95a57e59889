"""When things happened becomes what is reported. Terms are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from llmrun.types import Timings


def request_timings(
    *,
    load_s: float,
    submitted: float,
    prefill_started: float,
    token_times: Sequence[float],
    ended: float,
    prompt_tokens: int,
    cached_tokens: int,
    generated_tokens: int | None = None,
) -> Timings:
    """The Timings of one request. Moments are seconds of one monotonic clock.

    submitted        the request was in hand, its prompt still text
    prefill_started  its first forward pass began: what it waited for others is in the TTFT, not in the prefill
    token_times      when each token was drawn, or each piece of text arrived
    ended            when it was over; counts only when no token was drawn (TTFT and decode are 0 then)
    generated_tokens where a piece may be several tokens; None: one at each of token_times
    """
    first = token_times[0] if token_times else ended
    last = token_times[-1] if token_times else ended
    return Timings(
        load_s=load_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        generated_tokens=len(token_times) if generated_tokens is None else generated_tokens,
        prefill_s=first - prefill_started,
        ttft_s=first - submitted if token_times else 0.0,
        decode_s=last - first,
        total_s=last - submitted,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(token_times)),
    )
