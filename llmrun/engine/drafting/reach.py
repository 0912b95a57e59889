"""Computes how much faster drafts can make a model."""

from __future__ import annotations

from itertools import accumulate, repeat
from operator import mul

from llmrun.engine.drafting.base import LONGEST_DRAFT


def reachable_speedup(acceptance: float, draft_cost: float, row_cost: float) -> tuple[float, int]:
    """Return (speed-up, draft length) for the draft length that gives the most tokens per second.

    acceptance  the probability that a draft token is right if all draft tokens before it are right
    draft_cost  the time to draft a token, in steps without drafts
    row_cost    the time that each additional row adds to a step, in steps without drafts

    A step with n draft tokens yields 1 + a + a^2 + ... + a^n tokens (Leviathan et al., arXiv:2211.17192) and takes
    1 + n (draft_cost + row_cost). If drafts do not pay, the result is (1.0, 0).
    """
    tokens = accumulate(accumulate(repeat(acceptance, LONGEST_DRAFT), mul, initial=1.0))
    speedups = [gained / (1 + n * (draft_cost + row_cost)) for n, gained in enumerate(tokens)]
    best = max(speedups)
    return best, speedups.index(best)
