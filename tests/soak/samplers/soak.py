"""Compares our samplers with libllama's for random logits. Used by the tests and by scripts/soak_samplers.

sampler_sets.py describes when two sets of candidates are equal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from llmrun.engine import sampling
from llmrun.engine.samplers import adaptive, mirostat
from llmrun.engine.samplers.chain import apply_samplers
from llmrun.engine.samplers.state import initial_state
from llmrun.engine.samplers.xtc import without_top_choices
from llmrun.sampling_params import SamplingParams
from tests.soak.samplers.cases import OFF, Case, place
from tests.soak.samplers.dry_comparison import compare_dry
from tests.soak.samplers.sets import ROUNDING, UNDEFINED, Different, compare_logits, compare_sets
from tests.support.engine import float32_bounds as bounds
from tests.support.engine.float32_bounds import UNIT, Certain
from tests.support.models.llama_samplers import Applied, LlamaSampler

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.sampling import Candidates

DIFFERENT = "different"
_INT_MAX = 2.0**31


@dataclass
class Tally:
    """How many arrays of logits were compared, and with which results, by sampler."""

    results: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, kind: str, result: str) -> None:
        self.results.setdefault(kind, Counter())[result] += 1

    def arrays_of(self, kind: str) -> int:
        """Return the number of comparisons that have a result."""
        counts = self.results.get(kind, Counter())
        return counts.total() - counts[UNDEFINED]

    @property
    def arrays(self) -> int:
        return sum(map(self.arrays_of, self.results))

    def count(self, result: str) -> int:
        return sum(counts[result] for counts in self.results.values())

    def described(self, kind: str) -> str:
        return ", ".join(f"{count:,} {result}" for result, count in self.results[kind].most_common())


# --- samplers that keep a set


def compare_top_k(case: Case) -> str:
    given, is_sorted = case.candidates()
    k = int(case.random.integers(0, case.one_of(3, 50, 200, 6000)))
    ours = apply_samplers(given, ["top_k"], place(replace(OFF, top_k=k), 1))
    with LlamaSampler("top_k", k) as sampler:
        theirs = sampler.apply(*given, is_sorted=is_sorted)
    return compare_sets(given, ours, theirs, bounds.certain_everything(len(given[0])))


def compare_top_p(case: Case) -> str:
    given, is_sorted = case.candidates()
    p = case.one_of(0.0, 1.0, 0.5, case.between(0, 1), case.between(0.9, 1))
    ours = apply_samplers(given, ["top_p"], place(replace(OFF, top_p=p), 1))
    with LlamaSampler("top_p", p, 0) as sampler:
        theirs = sampler.apply(*given, is_sorted=is_sorted)
    return compare_sets(given, ours, theirs, bounds.certain_top_p(given[1], p))


def compare_min_p(case: Case) -> str:
    given, is_sorted = case.candidates()
    p = case.one_of(0.0, 1.0, 0.5, case.between(0, 1), case.between(0, 0.1))
    ours = apply_samplers(given, ["min_p"], place(replace(OFF, min_p=p), 1))
    with LlamaSampler("min_p", p, 0) as sampler:
        theirs = sampler.apply(*given, is_sorted=is_sorted)
    certain = bounds.certain_min_p(given[1], p) if p > 0 else bounds.certain_everything(len(given[0]))
    return compare_sets(given, ours, theirs, certain)


def compare_typical(case: Case) -> str:
    # libllama's entropy is NaN if a probability underflows to 0.
    given, is_sorted = case.candidates(bans=False, widest=80.0)
    p = case.one_of(0.0, 1.0, case.between(0, 1), case.between(0.9, 1))
    ours = apply_samplers(given, ["typ_p"], place(replace(OFF, typical_p=p), 1))
    with LlamaSampler("typical", p, 0) as sampler:
        theirs = sampler.apply(*given, is_sorted=is_sorted)
    certain = bounds.certain_typical(given[1], p) if p < 1 else bounds.certain_everything(len(given[0]))
    return compare_sets(given, ours, theirs, certain)


def compare_top_n_sigma(case: Case) -> str:
    given, is_sorted = case.candidates()
    n = case.one_of(-1.0, 0.0, 1.0, case.between(0, 4))
    ours = apply_samplers(given, ["top_n_sigma"], place(replace(OFF, top_n_sigma=n), 1))
    with LlamaSampler("top_n_sigma", n) as sampler:
        theirs = sampler.apply(*given, is_sorted=is_sorted)
    if len(ours[0]) != len(theirs.ids):
        raise Different("top-n-sigma does not change the number of candidates")
    certain = bounds.certain_top_n_sigma(given[1], n) if n > 0 else bounds.certain_everything(len(given[0]))
    return compare_sets(given, ours, theirs, certain)


def compare_xtc(case: Case) -> str:
    """Compare XTC when it applies. Its random numbers are our own, so with other probabilities only 0 is compared."""
    given, is_sorted = case.candidates()
    threshold = case.one_of(0.0, 0.1, 0.5, 0.51, case.between(0, 0.3), case.between(0, 0.01))
    probability = case.one_of(1.0, 1.0, 1.0, 0.0)
    params = replace(OFF, xtc_probability=probability, xtc_threshold=threshold)
    ours = apply_samplers(given, ["xtc"], place(params, 1))
    with LlamaSampler("xtc", probability, threshold, 0, 1) as sampler:
        theirs = sampler.apply(*given, is_sorted=is_sorted)
    if probability and threshold <= 0.5 and not np.array_equal(ours[0], without_top_choices(given, threshold)[0]):
        raise Different("XTC with probability 1 does not apply")
    return compare_sets(given, ours, theirs, bounds.certain_xtc(given[1], threshold))


# --- samplers that change logits


def compare_bias(case: Case) -> str:
    n = case.size()
    logits = case.logits(n)
    chosen = case.random.permutation(n)[: case.random.integers(0, min(n, 30) + 1)].tolist()
    bias = {token: case.one_of(-math.inf, case.between(-20, 20)) for token in chosen}
    ours = np.arange(n), sampling.apply_logit_bias(logits, bias).astype(np.float64)
    with LlamaSampler.logit_bias(n, bias) as sampler:
        return compare_logits(ours, sampler.apply(np.arange(n), logits), 0.0)


def compare_penalties(case: Case) -> str:
    given, is_sorted = case.candidates()
    vocabulary = int(given[0].max()) + 1
    history = case.random.integers(0, vocabulary, case.random.integers(0, 300)).tolist()
    last_n = int(case.one_of(0, 1, 64, 300))
    numbers = (
        case.one_of(1.0, case.between(0.5, 2)),
        case.one_of(0.0, case.between(-1, 2)),
        case.one_of(0.0, case.between(-1, 2)),
    )
    params = replace(
        OFF, repeat_penalty=numbers[0], frequency_penalty=numbers[1], presence_penalty=numbers[2], repeat_last_n=last_n
    )
    ours = apply_samplers(given, ["penalties"], place(params, vocabulary, history))
    with LlamaSampler("penalties", vocabulary, last_n, *numbers) as sampler:
        sampler.accept(*history)
        theirs = sampler.apply(*given, is_sorted=is_sorted)
    # libllama subtracts the sum of two penalties, of which the counts are at most 300.
    return compare_logits(ours, theirs, 8 * UNIT * (2 * np.abs(given[1]) + 600))


def compare_temperature(case: Case) -> str:
    given, is_sorted = case.candidates()
    value = case.one_of(0.0, 1.0, case.between(0.01, 2), case.between(0.1, 10))
    spread = case.one_of(0.0, 0.0, case.between(0, 1), case.between(0, 3))
    exponent = case.one_of(1.0, 0.0, case.between(0.1, 3))
    params = replace(OFF, temperature=value, dynatemp_range=spread, dynatemp_exponent=exponent)
    ours = apply_samplers(given, ["temperature"], place(params, 1))
    with LlamaSampler("temp_ext", value, spread, exponent) as sampler:
        theirs = sampler.apply(*given, is_sorted=is_sorted)
    if spread == 0 or len(given[0]) == 1:
        if value == 0 and spread == 0:
            return compare_sets(given, ours, theirs, bounds.certain_everything(len(given[0])))
        errors = 4 * UNIT * np.abs(ours[1])
    else:
        low, high = bounds.dynamic_temperatures(given[1], value, spread, exponent)
        if low < 1e-3:
            return UNDEFINED  # libllama divides by 0 or by a number that is mostly rounding
        errors = np.abs(given[1]) * (1 / low - 1 / high) + 4 * UNIT * np.abs(ours[1])
    return compare_logits(ours, theirs, np.nan_to_num(errors))


# --- samplers with a state, for which a case is a sequence of arrays


def compare_mirostat_1(case: Case) -> Iterator[str]:
    return _compare_mirostat(case, 1)


def compare_mirostat_2(case: Case) -> Iterator[str]:
    return _compare_mirostat(case, 2)


def _compare_mirostat(case: Case, version: int) -> Iterator[str]:
    """Compare the kept sets. Each depends on the update of mu, given the token that libllama has chosen."""
    tau, eta = case.one_of(5.0, case.between(0, 8)), case.one_of(0.1, case.between(0, 1))
    params = replace(OFF, mirostat=version, mirostat_tau=tau, mirostat_eta=eta)
    vocabulary, mu = case.size(), initial_state(params).mu
    init = ("mirostat", vocabulary, 1, tau, eta, 100) if version == 1 else ("mirostat_v2", 1, tau, eta)
    with LlamaSampler(*init) as sampler:
        for _ in range(4):
            logits = case.logits(vocabulary, narrowest=1.0, widest=80.0)
            given: Candidates = np.arange(vocabulary), logits.astype(np.float64)
            theirs = sampler.apply(*given)
            ours = mirostat.keep_unsurprising(given, params, mu, vocabulary)
            result = (
                _compare_mirostat_1_sets(given, ours, theirs, mu)
                if version == 1
                else compare_sets(
                    given, ours, theirs, _with_likeliest(bounds.certain_mirostat_2(given[1], mu), given[1])
                )
            )
            yield result
            if result in (ROUNDING, UNDEFINED):
                return  # the token's probability, and so mu, depends on the set
            # With a tie, libllama's token may not be in our set. Its surprise is that of a token with an equal logit.
            logit = given[1][theirs.selected]
            mu = mirostat.next_mu(ours, int(ours[0][ours[1] == logit][0]), params, mu)


def _with_likeliest(certain: Certain, logits: NDArray[np.float64]) -> Certain:
    """If no candidate is unsurprising, one of the likeliest stays."""
    return certain._replace(dropped=certain.dropped & (logits < logits.max()))


def _compare_mirostat_1_sets(given: Candidates, ours: Candidates, theirs: Applied, mu: float) -> str:
    n = len(given[0])
    low, high = bounds.mirostat_1_sizes(given[1], mu, n) if n > 1 else (1.0, 1.0)
    if not (low < _INT_MAX and high < _INT_MAX):
        return UNDEFINED  # converting k to int overflows
    sizes = range(min(max(int(low), 1), n), min(max(int(high), 1), n) + 1)
    if len(ours[0]) not in sizes or len(theirs.ids) not in sizes:
        raise Different(f"mirostat keeps {len(ours[0])}, libllama {len(theirs.ids)} of {n}; expected {sizes}")
    if len(ours[0]) != len(theirs.ids):
        return ROUNDING
    return compare_sets(given, ours, theirs, bounds.certain_everything(n))


def compare_adaptive(case: Case) -> Iterator[str]:
    """Compare the transformed logits. They depend on the tokens that libllama has chosen before."""
    target, decay = case.between(0, 1), case.one_of(0.9, case.between(0, 0.99))
    params = replace(OFF, adaptive_target=target, adaptive_decay=decay)
    state = initial_state(params)
    error = 0.0
    with LlamaSampler("adaptive_p", target, decay, 1) as sampler:
        for _ in range(4):
            given, is_sorted = case.candidates()
            theirs = sampler.apply(*given, is_sorted=is_sorted)
            ours = adaptive.prefer_target(given, params, state)
            error = max(error, bounds.shares(given[1]).error) + 4 * UNIT / (1 - decay)
            yield compare_logits(ours, theirs, 10 / 0.3 * error + 8 * UNIT * np.abs(np.nan_to_num(ours[1])))
            sampler.accept(theirs.selected)
            state = adaptive.next_state(given, theirs.selected, params, state)


# --- chains


def compare_chain(case: Case) -> Iterator[str]:
    """Compare the sets after each sampler of a chain in random order, or in the default one."""
    n = case.size()
    ours: Candidates = np.arange(n), case.logits(n, widest=60.0).astype(np.float64)
    theirs = Applied(ours[0].astype(np.int64), ours[1].astype(np.float32), False, -1)
    names = ["top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    if case.random.random() < 0.5:
        names = case.random.permutation(names)[: case.random.integers(2, 8)].tolist()
    for name in names:
        given = ours
        if name == "typ_p" and (given[1] < given[1].max() - 80).any():
            return  # NaN in libllama
        params, init, certain = _stage(case, name, given[1])
        ours = apply_samplers(given, [name], place(params, n))
        with LlamaSampler(*init) as sampler:
            theirs = sampler.apply(theirs.ids, theirs.logits, is_sorted=theirs.is_sorted)
        if name == "temperature":
            compare_logits(ours, theirs, 4 * UNIT * np.abs(np.nan_to_num(ours[1])))
        result = compare_sets(given, ours, theirs, certain)
        yield result
        if result == ROUNDING:
            return
        # The next sampler gets libllama's choice among equal logits, and libllama's rounding of the temperature.
        by_id = np.zeros(n)
        by_id[theirs.ids] = theirs.logits
        ids = given[0][np.isin(given[0], theirs.ids)]
        ours = ids, by_id[ids]


def _stage(case: Case, name: str, logits: NDArray[np.float64]) -> tuple[SamplingParams, tuple[Any, ...], Certain]:
    """Return random parameters of a sampler, ours and libllama's, and what is certain about its result."""
    everything = bounds.certain_everything(len(logits))
    p = case.between(0.3, 0.99)
    match name:
        case "top_k":
            k = int(case.random.integers(1, 100))
            return replace(OFF, top_k=k), ("top_k", k), everything
        case "top_p":
            return replace(OFF, top_p=p), ("top_p", p, 0), bounds.certain_top_p(logits, p)
        case "typ_p":
            return replace(OFF, typical_p=p), ("typical", p, 0), bounds.certain_typical(logits, p)
        case "min_p":
            p = case.between(0.001, 0.2)
            return replace(OFF, min_p=p), ("min_p", p, 0), bounds.certain_min_p(logits, p)
        case "top_n_sigma":
            n = case.between(0.5, 4)
            return replace(OFF, top_n_sigma=n), ("top_n_sigma", n), bounds.certain_top_n_sigma(logits, n)
        case "xtc":
            p = case.between(0.01, 0.3)
            params = replace(OFF, xtc_probability=1.0, xtc_threshold=p)
            return params, ("xtc", 1.0, p, 0, 1), bounds.certain_xtc(logits, p)
    value = case.between(0.2, 3)
    return replace(OFF, temperature=value), ("temp_ext", value, 0.0, 1.0), everything


KINDS: dict[str, Callable[[Case], str | Iterator[str]]] = {
    "bias": compare_bias,
    "penalties": compare_penalties,
    "dry": compare_dry,
    "top_n_sigma": compare_top_n_sigma,
    "top_k": compare_top_k,
    "typ_p": compare_typical,
    "top_p": compare_top_p,
    "min_p": compare_min_p,
    "xtc": compare_xtc,
    "temperature": compare_temperature,
    "mirostat 1": compare_mirostat_1,
    "mirostat 2": compare_mirostat_2,
    "adaptive_p": compare_adaptive,
    "chain": compare_chain,
}


def compare_case(kind: str, case: Case, tally: Tally) -> None:
    """Run a case and add its results to the tally. Raises Different."""
    result = KINDS[kind](case)
    for one in [result] if isinstance(result, str) else result:
        tally.add(kind, one)


def compare_many(kind: str, arrays: int, seed: int, tally: Tally, *, largest: int = 152_000) -> Iterator[str]:
    """Compare at least this many arrays of logits. Yields a description of each difference."""
    number = 0
    while tally.arrays_of(kind) < arrays:
        try:
            compare_case(kind, Case(seed, number, largest=largest), tally)
        except Different as error:
            tally.add(kind, DIFFERENT)
            yield f"{kind}, case {number} of seed {seed}: {error}"
        number += 1
