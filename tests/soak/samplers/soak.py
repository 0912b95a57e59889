"""Compares our samplers with libllama's for random logits.

The sets must be equal, except in two cases, which are counted:

- tie: the kept logits are equal, but some ids with equal logits are exchanged, because libllama's sorts are not stable
- rounding: a candidate is closer to the boundary than the errors of float32 (tests/support/engine/float32_bounds.py)

Logits that a sampler changes must be equal within such errors.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from llmrun.engine import samplers as samplers_module
from llmrun.engine.samplers import Breakers, Place, apply_samplers, find_breakers, initial_state
from llmrun.options.sampling_params import SamplingParams
from tests.soak.driver import Broken, Soak
from tests.soak.driver import Case as SoakCase
from tests.support.engine import float32_bounds as bounds
from tests.support.engine.float32_bounds import UNIT, Certain, certain_everything
from tests.support.models.llama_samplers import Applied, LlamaSampler
from tests.support.tokenizers.vocabularies import llama_vocabulary, our_tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.sampling import Candidates

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
EQUAL, TIE, ROUNDING = "equal", "tie", "rounding"


class Case:
    """Draws the random inputs of a case. They depend only on the seed and the number of the case."""

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
        """Return logits of one of many distributions, some of them with ties, that differ by at most `widest`."""
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
        """Return candidates as in a chain: all tokens by id, some tokens sorted, or some tokens in any order.

        The second value says whether libllama may take the candidates as sorted.
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


class Different(Broken):
    """A difference that neither a tie nor rounding explains."""


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
        # libllama may keep any of several equal logits.
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


MOST_ROUNDING = 0.02  # share of the comparisons in which rounding may decide


def samplers(soak: Soak) -> Iterator[SoakCase]:
    """Compare the samplers in turn. A case compares up to seven arrays of logits, whose results are counted."""
    kinds, arrays = [*KINDS], Counter[str]()

    def case(number: int) -> str:
        number, index = divmod(number, len(kinds))
        compare_case(kinds[index], Case(soak.seed, number), arrays)
        return kinds[index]

    yield case
    soak.counts.update({f"arrays: {result}": count for result, count in arrays.items()})
    if arrays[ROUNDING] > 1 + MOST_ROUNDING * arrays.total():
        raise Broken(f"rounding decides in {arrays[ROUNDING]} of {arrays.total()} comparisons")


# --- samplers that keep a set


def _stage(
    case: Case, name: str, logits: NDArray[np.float64], *, alone: bool
) -> tuple[SamplingParams, tuple[Any, ...], Certain]:
    """Return random parameters of a sampler, ours and libllama's, and what is certain about its result.

    alone  false in a chain, where extreme parameters would leave nothing for the next sampler
    """
    everything, random = certain_everything(len(logits)), case.random
    p = case.one_of(0.0, 1.0, 0.5, case.between(0, 1), case.between(0.9, 1)) if alone else case.between(0.3, 0.99)
    match name:
        case "top_k":
            k = int(random.integers(0, case.one_of(3, 50, 200, 6000)) if alone else random.integers(1, 100))
            return replace(OFF, top_k=k), ("top_k", k), everything
        case "top_p":
            return replace(OFF, top_p=p), ("top_p", p, 0), bounds.certain_top_p(logits, p)
        case "typ_p":
            certain = bounds.certain_typical(logits, p) if p < 1 else everything
            return replace(OFF, typical_p=p), ("typical", p, 0), certain
        case "min_p":
            p = case.one_of(p, case.between(0, 0.1)) if alone else case.between(0.001, 0.2)
            return replace(OFF, min_p=p), ("min_p", p, 0), bounds.certain_min_p(logits, p) if p > 0 else everything
        case "top_n_sigma":
            n = case.one_of(-1.0, 0.0, 1.0, case.between(0, 4)) if alone else case.between(0.5, 4)
            certain = bounds.certain_top_n_sigma(logits, n) if n > 0 else everything
            return replace(OFF, top_n_sigma=n), ("top_n_sigma", n), certain
        case "xtc":
            # Its random numbers are our own, so only the probabilities 0 and 1 are compared.
            threshold = case.one_of(0.0, 0.1, 0.5, 0.51, case.between(0, 0.3)) if alone else case.between(0.01, 0.3)
            probability = case.one_of(1.0, 1.0, 1.0, 0.0) if alone else 1.0
            params = replace(OFF, xtc_probability=probability, xtc_threshold=threshold)
            return params, ("xtc", probability, threshold, 0, 1), bounds.certain_xtc(logits, threshold)
    value = case.between(0.2, 3)
    return replace(OFF, temperature=value), ("temp_ext", value, 0.0, 1.0), everything


def _compare_alone(case: Case, name: str) -> Iterator[str]:
    # libllama's typical-p is NaN if a probability underflows to 0.
    given, is_sorted = case.candidates(bans=False, widest=80.0) if name == "typ_p" else case.candidates()
    params, init, certain = _stage(case, name, given[1], alone=True)
    ours, theirs = _applied(name, init, Place((), params, 0, 1), given, is_sorted=is_sorted)
    yield compare_sets(given, ours, theirs, certain)


def _applied(
    name: str, init: tuple[Any, ...], place: Place, given: Candidates, *, is_sorted: bool
) -> tuple[Candidates, Applied]:
    """Apply our sampler and libllama's to the same candidates. `init` are the arguments of LlamaSampler."""
    with LlamaSampler(*init) as sampler:
        sampler.accept(*place.history)
        return apply_samplers(given, [name], place), sampler.apply(*given, is_sorted=is_sorted)


# --- samplers that change logits


def compare_penalties(case: Case) -> Iterator[str]:
    given, is_sorted = case.candidates()
    vocabulary = int(given[0].max()) + 1
    history = case.random.integers(0, vocabulary, case.random.integers(0, 300)).tolist()
    last_n = int(case.one_of(0, 1, 64, 300))
    repeat = case.one_of(1.0, case.between(0.5, 2))
    frequency, presence = (case.one_of(0.0, case.between(-1, 2)) for _ in range(2))
    params = replace(
        OFF, repeat_penalty=repeat, frequency_penalty=frequency, presence_penalty=presence, repeat_last_n=last_n
    )
    init = ("penalties", vocabulary, last_n, repeat, frequency, presence)
    place = Place(history, params, len(history), vocabulary)
    ours, theirs = _applied("penalties", init, place, given, is_sorted=is_sorted)
    # libllama subtracts the sum of two penalties, whose counts are at most 300.
    yield compare_logits(ours, theirs, 8 * UNIT * (2 * np.abs(given[1]) + 600))


def compare_temperature(case: Case) -> Iterator[str]:
    given, is_sorted = case.candidates()
    value = case.one_of(0.0, 1.0, case.between(0.01, 2), case.between(0.1, 10))
    spread = case.one_of(0.0, 0.0, case.between(0, 1), case.between(0, 3))
    exponent = case.one_of(1.0, 0.0, case.between(0.1, 3))
    params = replace(OFF, temperature=value, dynatemp_range=spread, dynatemp_exponent=exponent)
    init = ("temp_ext", value, spread, exponent)
    ours, theirs = _applied("temperature", init, Place((), params, 0, 1), given, is_sorted=is_sorted)
    if value == spread == 0:
        yield compare_sets(given, ours, theirs, certain_everything(len(given[0])))
        return
    errors = 4 * UNIT * np.abs(ours[1])
    if spread > 0 and len(given[0]) > 1:
        low, high = bounds.dynamic_temperatures(given[1], value, spread, exponent)
        if low < 1e-3:
            return  # libllama divides by 0 or by a number that is mostly rounding
        errors += np.abs(given[1]) * (1 / low - 1 / high)
    yield compare_logits(ours, theirs, np.nan_to_num(errors))


# --- DRY, for repetitive histories in real vocabularies

VOCABULARIES = ("smollm2", "llama-spm", "qwen2")
BREAKERS = ("\n", ":", '"', "*", "\n\n", " the", "ing t", "</s>", "é", "?!")


@cache
def _breakers(vocabulary: str, texts: tuple[str, ...]) -> Breakers:
    return find_breakers(texts, our_tokenizer(vocabulary))


@cache  # with breakers, creating one takes a second
def _llama_dry(vocabulary: str, numbers: tuple[float, float, int, int], texts: tuple[str, ...]) -> LlamaSampler:
    return LlamaSampler.dry(llama_vocabulary(vocabulary), numbers, texts)


def compare_dry(case: Case, vocabularies: Sequence[str] = VOCABULARIES) -> Iterator[str]:
    """Compare DRY for a repetitive history. The parameters are one of a few sets, for speed."""
    name = str(case.one_of(*vocabularies))
    texts = case.one_of((), (), BREAKERS[:4], BREAKERS[4:])
    numbers = case.one_of(
        (0.8, 1.75, 2, 300), (1.0, 1.0, 1, 40), (0.5, 3.0, 0, 300), (2.5, 1.2, 5, 64), (3.0, 4.0, 3, 5)
    )
    tokenizer = our_tokenizer(name)
    history = _repetitive(case, tokenizer.encode(_PROSE, add_special=False, parse_special=False).tolist())
    others = case.random.integers(0, tokenizer.vocabulary_size, case.random.integers(1, 400)).tolist()
    ids = np.array(sorted({*history, *others}), np.intp)
    given = ids, case.logits(len(ids)).astype(np.float64)
    multiplier, base, allowed, last_n = numbers
    params = replace(
        OFF, dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=last_n
    )
    place = Place(history, params, len(history), tokenizer.vocabulary_size, _breakers(name, texts))
    ours = apply_samplers(given, ["dry"], place)
    sampler = _llama_dry(name, numbers, texts)
    sampler.reset()
    sampler.accept(*history)
    theirs = sampler.apply(*given)
    penalties = np.abs(given[1] - ours[1])
    yield compare_logits(ours, theirs, 4 * UNIT * (np.abs(given[1]) + penalties))


_PROSE = (
    'He said: "the tea is *very* hot?!"\nShe was making tea, and he was making the tea.\n\n'
    "* the first thing\n* the second thing: étude\n* being there\n"
)


def _repetitive(case: Case, prose: list[int]) -> list[int]:
    """Return tokens with repetitions: repeated parts of a text or of a few tokens, and copies of earlier tokens."""
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


def _compare_mirostat(case: Case, version: int) -> Iterator[str]:
    """Compare the kept sets. Each depends on the update of mu, given the token that libllama has chosen."""
    tau, eta = case.one_of(5.0, case.between(0, 8)), case.one_of(0.1, case.between(0, 1))
    params = replace(OFF, mirostat=version, mirostat_tau=tau, mirostat_eta=eta)
    vocabulary, mu = case.size(), initial_state(params).mu
    init = ("mirostat", vocabulary, 1, tau, eta, 100) if version == 1 else ("mirostat_v2", 1, tau, eta)
    certain_of = bounds.certain_mirostat_1 if version == 1 else bounds.certain_mirostat_2
    with LlamaSampler(*init) as sampler:
        for _ in range(4):
            given = np.arange(vocabulary), case.logits(vocabulary, narrowest=1.0, widest=80.0).astype(np.float64)
            theirs = sampler.apply(*given)
            ours = samplers_module.keep_unsurprising(given, params, mu, vocabulary)
            certain = certain_of(given[1], mu)
            if certain is None:
                return
            result = compare_sets(given, ours, theirs, certain)
            yield result
            if result == ROUNDING:
                return  # the token's probability, and so mu, depends on the set
            # With a tie, libllama's token may not be in our set. Its surprise is that of a token with an equal logit.
            logit = given[1][theirs.selected]
            mu = samplers_module.next_mu(ours, int(ours[0][ours[1] == logit][0]), params, mu)


def compare_adaptive(case: Case) -> Iterator[str]:
    """Compare the transformed logits, which depend on the tokens that libllama has chosen before."""
    target, decay = case.between(0, 1), case.one_of(0.9, case.between(0, 0.99))
    params = replace(OFF, adaptive_target=target, adaptive_decay=decay)
    state = initial_state(params)
    error = 0.0
    with LlamaSampler("adaptive_p", target, decay, 1) as sampler:
        for _ in range(4):
            given, is_sorted = case.candidates()
            theirs = sampler.apply(*given, is_sorted=is_sorted)
            ours = samplers_module.prefer_target(given, params, state)
            error = max(error, bounds.shares(given[1]).error) + 4 * UNIT / (1 - decay)
            yield compare_logits(ours, theirs, 10 / 0.3 * error + 8 * UNIT * np.abs(np.nan_to_num(ours[1])))
            sampler.accept(theirs.selected)
            state = samplers_module.next_state(given, theirs.selected, params, state)


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
        params, init, certain = _stage(case, name, given[1], alone=False)
        ours = apply_samplers(given, [name], Place((), params, 0, n))
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


KINDS: dict[str, Callable[[Case], Iterator[str]]] = {
    "penalties": compare_penalties,
    "dry": compare_dry,
    **{name: partial(_compare_alone, name=name) for name in ("top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc")},
    "temperature": compare_temperature,
    "mirostat 1": partial(_compare_mirostat, version=1),
    "mirostat 2": partial(_compare_mirostat, version=2),
    "adaptive_p": compare_adaptive,
    "chain": compare_chain,
}


def compare_case(kind: str, case: Case, results: Counter[str]) -> None:
    """Run a case and count its results. Raises Different."""
    results.update(KINDS[kind](case))
