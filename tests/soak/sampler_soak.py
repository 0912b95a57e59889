"""Compares our samplers with libllama's for random logits. Used by the tests and by scripts/soak_samplers.

The sets of candidates must be equal, except in two cases, which are counted:

- tie: the kept logits are equal, but some ids with equal logits are exchanged, because libllama's sorts are not stable
- rounding: a candidate is closer to the boundary than the errors of float32 (tests/support/engine/float32_bounds.py)

Logits that a sampler changes must be equal within such errors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from llmrun.engine import sampling
from llmrun.engine.samplers import adaptive, mirostat
from llmrun.engine.samplers.base import Place, initial_state
from llmrun.engine.samplers.breakers import NO_BREAKERS, Breakers, find_breakers
from llmrun.engine.samplers.chain import apply_samplers
from llmrun.engine.samplers.xtc import without_top_choices
from llmrun.sampling_params import SamplingParams
from tests.support.engine import float32_bounds as bounds
from tests.support.engine.float32_bounds import UNIT, Certain
from tests.support.models.llama_samplers import Applied, LlamaSampler
from tests.support.tokenizers.vocabularies import llama_vocabulary, our_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.sampling import Candidates

EQUAL, TIE, ROUNDING, UNDEFINED, DIFFERENT = "equal", "tie", "rounding", "undefined in C++", "different"
OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
VOCABULARIES = ("smollm2", "llama-spm", "qwen2")
BREAKERS = ("\n", ":", '"', "*", "\n\n", " the", "ing t", "</s>", "é", "?!")
_INT_MAX = 2.0**31


class Different(AssertionError):
    """A difference that neither a tie nor rounding explains."""


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


class Case:
    """A case, which is determined by seed and number."""

    def __init__(self, seed: int, number: int, *, largest: int = 152_000) -> None:
        self.random = np.random.default_rng([seed, number])
        self._largest = largest

    def one_of(self, *values: Any) -> Any:
        return values[int(self.random.integers(len(values)))]

    def between(self, low: float, high: float) -> float:
        """Return a number that float32 represents exactly, so that libllama gets the same one."""
        return float(np.float32(self.random.uniform(low, high)))

    def size(self) -> int:
        kind = self.random.random()
        if kind < 0.02:
            return int(self.random.integers(self._largest // 4, self._largest))
        return int(self.random.integers(1, self.one_of(4, 40, 140, 1100, 1100, 5000)))

    def logits(self, n: int, *, narrowest: float = 0.05, widest: float = 200.0) -> NDArray[np.float32]:
        """Return logits of one of many distributions, some of them with ties.

        narrowest  the smallest deviation, or so
        widest     the largest difference
        """
        random, width = self.random, float(np.exp(self.random.uniform(math.log(narrowest), 2.3)))
        values: NDArray[np.float64] = self.one_of(
            lambda: random.normal(0, width, n),
            lambda: random.uniform(-width, width, n),
            lambda: -width * np.log(random.permutation(n) + 1.0),
            lambda: np.where(random.random(n) < 0.01, 5 * width, random.normal(0, width, n)),
            lambda: random.exponential(width, n),
            lambda: np.full(n, width),
            lambda: random.choice(random.normal(0, width, 5), n),
        )()
        if random.random() < 0.25:
            values = values.round(self.one_of(0, 1, 2))
        values = values + self.one_of(0.0, 0.0, 12.0, -30.0)
        raised: NDArray[np.float32] = np.maximum(values, values.max() - widest).astype(np.float32)
        return raised

    def candidates(self, *, bans: bool = True, widest: float = 200.0) -> tuple[Candidates, bool]:
        """Return candidates as in a chain: all tokens by id, some of them sorted, or some in any order.

        The second value says whether libllama may take them as sorted.
        """
        n = self.size()
        logits = self.logits(n, widest=widest)
        if bans and n > 1 and self.random.random() < 0.15:
            logits[self.random.permutation(n)[: self.random.integers(n)]] = -np.inf
        ids = np.arange(n)
        order = self.one_of("ids", "sorted", "any")
        if order == "sorted":
            ids = np.argsort(-logits, kind="stable")[: self.random.integers(1, n + 1)]
        if order == "any":
            ids = self.random.permutation(n)[: self.random.integers(1, n + 1)]
            ids = ids if np.isfinite(logits[ids]).any() else np.arange(n)
        return (ids.astype(np.intp), logits[ids].astype(np.float64)), order == "sorted"


def place(
    params: SamplingParams, vocabulary: int, history: Sequence[int] = (), breakers: Breakers = NO_BREAKERS
) -> Place:
    return Place(history, params, len(history), vocabulary, breakers)


def compare_sets(given: Candidates, ours: Candidates, theirs: Applied, certain: Certain) -> str:
    """Compare the candidates that were kept. Candidates with logits of -inf do not count."""
    ids, logits = given
    kept = np.isin(ids, ours[0][ours[1] > -np.inf])
    kept_there = np.isin(ids, theirs.ids[theirs.logits > -np.inf])
    if np.array_equal(kept, kept_there):
        return EQUAL
    counts, counts_there = Counter(logits[kept].tolist()), Counter(logits[kept_there].tolist())
    if counts == counts_there:
        return TIE
    doubtful = ~certain.kept & ~certain.dropped
    for value in counts.keys() | counts_there.keys():
        # Of equal logits, any may be the one that libllama keeps.
        if counts[value] != counts_there[value] and not doubtful[logits == value].any():
            raise Different(f"{counts[value]} logits of {value}, libllama keeps {counts_there[value]}")
    return ROUNDING


def compare_logits(ours: Candidates, theirs: Applied, errors: NDArray[np.float64] | float) -> str:
    """Compare the logits by id. Those below -3e38 are equal, because libllama's may overflow to -inf."""
    by_id = dict(zip(theirs.ids.tolist(), theirs.logits.tolist(), strict=True))
    expected = np.array([by_id[token] for token in ours[0].tolist()])
    lowest = (ours[1] < -3e38) & (expected < -3e38)
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(ours[1] - expected) <= errors) & ~lowest
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise Different(f"logit of {ours[0][at]}: ours {ours[1][at]}, libllama's {expected[at]}")
    return EQUAL


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


# --- DRY


@cache
def _breakers(vocabulary: str, texts: tuple[str, ...]) -> Breakers:
    return find_breakers(texts, our_tokenizer(vocabulary))


@cache
def _llama_dry(vocabulary: str, numbers: tuple[float, float, int, int], texts: tuple[str, ...]) -> LlamaSampler:
    return LlamaSampler.dry(llama_vocabulary(vocabulary), numbers, texts)


def compare_dry(case: Case, vocabularies: Sequence[str] = VOCABULARIES) -> str:
    """Compare DRY for a repetitive history. With breakers, the parameters are one of a few sets, for speed."""
    name = str(case.one_of(*vocabularies))
    if case.random.random() < 0.5:
        texts, numbers = (), (case.between(0, 3), case.between(1, 4), *case.random.integers(0, 6, 1).tolist(), 0)
        numbers = (*numbers[:3], int(case.one_of(0, 5, 64, 400)))
    else:
        texts = case.one_of(BREAKERS[:4], BREAKERS[:4], BREAKERS[4:])
        numbers = case.one_of((0.8, 1.75, 2, 300), (1.0, 1.0, 1, 40), (0.5, 3.0, 0, 300))
    tokenizer = our_tokenizer(name)
    history = _repetitive(case, tokenizer.encode(_PROSE, add_special=False, parse_special=False).tolist())
    others = case.random.integers(0, tokenizer.vocabulary_size, case.random.integers(1, 400)).tolist()
    ids = np.array(sorted({*history, *others}), np.intp)
    given = ids, case.logits(len(ids)).astype(np.float64)
    multiplier, base, allowed, last_n = numbers
    params = replace(
        OFF, dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=last_n
    )
    ours = apply_samplers(given, ["dry"], place(params, tokenizer.vocabulary_size, history, _breakers(name, texts)))
    theirs = _dry_of_llama(name, numbers, texts, history, given)
    penalties = np.abs(given[1] - ours[1])
    return compare_logits(ours, theirs, 4 * UNIT * (np.abs(given[1]) + penalties))


def _dry_of_llama(
    name: str, numbers: tuple[float, float, int, int], texts: tuple[str, ...], history: list[int], given: Candidates
) -> Applied:
    if texts:
        sampler = _llama_dry(name, numbers, texts)
        sampler.reset()
        sampler.accept(*history)
        return sampler.apply(*given)
    with LlamaSampler.dry(llama_vocabulary(name), numbers, texts) as sampler:
        sampler.accept(*history)
        return sampler.apply(*given)


_PROSE = (
    'He said: "the tea is *very* hot?!"\nShe was making tea, and he was making the tea.\n\n'
    "* the first thing\n* the second thing: étude\n* being there\n"
)


def _repetitive(case: Case, prose: list[int]) -> list[int]:
    """Return tokens with repetitions: of a few tokens, of parts of a text, of a period, or both."""
    random = case.random
    alphabet = case.one_of(prose, prose[: random.integers(1, 8)])
    history: list[int] = []
    while len(history) < random.integers(0, 350):
        begin = int(random.integers(0, len(alphabet)))
        part = alphabet[begin : begin + int(random.integers(1, 30))]
        history += part * int(case.one_of(1, 1, 1, 2, 7))
        if random.random() < 0.3 and history:
            begin = int(random.integers(0, len(history)))
            history += history[begin : begin + int(random.integers(1, 40))]
    return history


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
        params, init, certain = _stage(case, name, given[1])
        if name == "typ_p" and (given[1] < given[1].max() - 80).any():
            return  # NaN in libllama
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
            return replace(OFF, typical_p=p), ("typical", p, 0), _typical_if_finite(logits, p)
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


def _typical_if_finite(logits: NDArray[np.float64], p: float) -> Certain:
    finite = np.isfinite(logits).all()
    return bounds.certain_typical(logits, p) if finite else bounds.certain_everything(len(logits))


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
