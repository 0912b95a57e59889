"""Chooses how the kernels prefetch weights: not at all, 4 KB ahead (linear), or the next chunk in four streams.

All methods compute the same bits, so the fastest method is used. The fastest method depends on the processor, so the
first single-row steps try all methods in turn, unless an earlier process has stored a result with the other speeds of
this machine. Without a clear result, nothing is stored, and the next process tries again. The table shows how fast
weights are read while a single row is multiplied, in GB/s:

                                            Q4_0          Q4_K          Q6_K          Q8_0
  threads                                 1     2       1     2       1     2       1     2
  Zen 3, AVX2: reading only             12.0  24.0    13.0  20.9    12.6  24.5    17.8  19.0
    none                                 7.6  14.4     6.8  14.3     6.2  13.3     9.0  14.8
    linear                               8.7  15.6     8.9  16.0     7.9  17.3    10.2  13.8
    streams                             12.8  21.6    11.6  19.5    10.4  21.0    12.6  17.9
  Zen 4, AVX-512: reading only          28.2  30.8    25.1  28.9    28.4  31.4    25.3  26.8
    none                                28.4  30.8    24.8  27.2    27.8  29.4    26.3  25.2
    linear                              25.0  28.6    25.4  26.0    27.9  26.9    25.5  24.7

"Reading only" multiplies nothing and has no software prefetching, so it is not an upper limit. "Streams" was not
measured on Zen 4. The matrices have 8,192 x 2,048 weights and are larger than the caches. The numbers are medians of 7
to 11 alternating rounds, on virtual machines with two cores, and vary by up to 10 % from run to run.
"""

from __future__ import annotations

import math
from typing import Final

from llmrun.base.compiled.host import host_target
from llmrun.formats.layouts.records import PREFETCH_LINEAR, PREFETCH_NONE, PREFETCH_STREAMS

WAYS: Final = {"none": PREFETCH_NONE, "linear": PREFETCH_LINEAR, "streams": PREFETCH_STREAMS}
_NAMES: Final = tuple(WAYS)
_WORDS: Final = {
    "none": "not prefetched",
    "linear": "prefetched 4 KB ahead",
    "streams": "prefetched in four streams",
}
_SUBJECT: Final = "prefetch"  # the key of the stored times
_LEAST_BYTES: Final = 256 << 20  # smaller models may fit in a cache, where prefetching does not matter
_ROUNDS: Final = 9
_CLEAR_ROUNDS: Final = 8  # by chance, one of two equal methods wins 8 of 9 rounds or more in 4 % of trials
_CLEAR_RATIO: Final = 0.97


def default_way() -> str:
    """Return the method to use until a trial has a clear result, based on this module's table."""
    return "none" if host_target().level.name == "avx512vnni" else "streams"


def stored_times(n_threads: int) -> dict[str, float]:
    """Return each method's stored step time divided by the default method's, or {} if no times are stored."""
    from llmrun.backends.cpu.speeds.measured import kept_speeds  # small models need no stored speeds

    times = kept_speeds(n_threads).get(_SUBJECT, {})
    if times.keys() != WAYS.keys() or not all(isinstance(one, float) and 0 < one < math.inf for one in times.values()):
        return {}
    return times


def chosen_way(n_threads: int) -> str:
    """Return the prefetching method that an engine with `n_threads` threads uses."""
    return _best_of(stored_times(n_threads))


def _best_of(times: dict[str, float]) -> str:
    return min(times, key=times.__getitem__) if times else default_way()


def way_in_words(n_threads: int) -> str:
    """Describe how weights are prefetched, and whether the method was measured, for `doctor` and `bench -v`."""
    times = stored_times(n_threads)
    way = _best_of(times)
    words = f"weights are {_WORDS[way]}"
    if not times:
        return f"{words}, the default for {host_target().level.name}; no clear measurement yet"
    slowest = max(times, key=times.__getitem__)
    saved = 1 - times[way] / times[slowest]
    return f"{words}; measured: {saved:.0%} less time per token than the slowest way ({_WORDS[slowest]})"


class Prefetching:
    """The method by which a team prefetches weights, and the trial that chooses the method."""

    def __init__(self, n_threads: int, weight_bytes: int = 0) -> None:
        """`weight_bytes` is the size of the model's weights, or 0 if trials must not use the model's steps."""
        times = stored_times(n_threads)
        self._n_threads = n_threads
        self._way = WAYS[_best_of(times)]
        self._tries = weight_bytes >= _LEAST_BYTES and not times
        self._seconds: list[float] = []  # how long each step of the trial took

    def way(self, rows: int) -> int:
        """Return how to prefetch in the next step (records.PREFETCH_...)."""
        return WAYS[self._next()] if self._tries and rows == 1 else self._way

    def took(self, rows: int, seconds: float) -> None:
        """Record how long the step took."""
        if not self._tries or rows != 1:
            return
        self._seconds.append(seconds)
        if len(self._seconds) == (1 + _ROUNDS) * len(WAYS):
            self._tries = False
            self._decide()

    def _next(self) -> str:
        """Return the method to try in the next step. The order of the methods changes from round to round."""
        done, place = divmod(len(self._seconds), len(WAYS))
        return _NAMES[(place + done) % len(WAYS)]

    def _decide(self) -> None:
        """Compare all rounds except the first, which is a warm-up. Without a clear winner, keep the default."""
        from statistics import median  # importing statistics takes 4 ms, and most processes need no median

        from llmrun.backends.cpu.speeds.measured import keep_speeds, kept_speeds

        rounds = []
        for done in range(1, 1 + _ROUNDS):
            taken = self._seconds[done * len(WAYS) : (done + 1) * len(WAYS)]
            rounds.append({_NAMES[(place + done) % len(WAYS)]: seconds for place, seconds in enumerate(taken)})
        default = default_way()
        times = {name: median(one[name] / one[default] for one in rounds) for name in WAYS}
        best = min(times, key=times.__getitem__)
        others = [name for name in WAYS if name != best]
        compared = others if best == default else [default]
        if all(_is_clear([one[best] / one[other] for one in rounds]) for other in compared):
            self._way = WAYS[best]
            keep_speeds(self._n_threads, {**kept_speeds(self._n_threads), _SUBJECT: times})


def _is_clear(ratios: list[float]) -> bool:
    """Return whether a method is faster than another method, given the ratios of their times."""
    from statistics import median

    return median(ratios) < _CLEAR_RATIO and sum(ratio < 1 for ratio in ratios) >= _CLEAR_ROUNDS
