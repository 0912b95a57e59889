"""Writes the token counts and the timings of answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llmrun.base.types import Timings
from llmrun.engine.requests import Finished


def usage(finished: Sequence[Finished], n: int) -> dict[str, Any]:
    """Return `usage` for the choices of a call, of which each `n` have the same prompt.

    A prompt counts once, however many choices it has. Its cached tokens are those of the choice that reused the
    fewest, because the others also reuse what that one computed.
    """
    timings = [each.timings for each in finished]
    firsts = timings[::n]
    cached = [min(each.cached_tokens for each in timings[at : at + n]) for at in range(0, len(timings), n)]
    prompt, completion = sum(each.prompt_tokens for each in firsts), sum(each.generated_tokens for each in timings)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
        "completion_tokens_details": {"reasoning_tokens": sum(each.thinking_tokens for each in finished)},
    }


def timings(finished: Sequence[Finished]) -> dict[str, Any]:
    """Return `timings` as llama-server does. For several choices, tokens are added up, and times are the longest."""
    each = [one.timings for one in finished]
    prompt_n = sum(one.prompt_tokens - one.cached_tokens for one in each)
    predicted_n = sum(one.generated_tokens for one in each)
    later_n = sum(max(0, one.generated_tokens - 1) for one in each)  # the first tokens belong to the prompts' time
    prompt_s = max((one.prefill_s for one in each), default=0.0)
    predicted_s = max((one.decode_s for one in each), default=0.0)
    return {
        "cache_n": sum(one.cached_tokens for one in each),
        "prompt_n": prompt_n,
        "prompt_ms": _ms(prompt_s),
        "prompt_per_token_ms": _ms(prompt_s / prompt_n) if prompt_n else 0.0,
        "prompt_per_second": _rate(prompt_n, prompt_s),
        "predicted_n": predicted_n,
        "predicted_ms": _ms(predicted_s),
        "predicted_per_token_ms": _ms(predicted_s / later_n) if later_n else 0.0,
        "predicted_per_second": _rate(later_n, predicted_s),
        **_drafts(each),
    }


def _drafts(timings: Sequence[Timings]) -> dict[str, int]:
    """Return the counts of drafted tokens, if there are any."""
    drafted = sum(one.drafted_tokens for one in timings)
    return {"draft_n": drafted, "draft_n_accepted": sum(one.accepted_tokens for one in timings)} if drafted else {}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rate(tokens: int, seconds: float) -> float:
    return round(tokens / seconds, 3) if seconds > 0 else 0.0
