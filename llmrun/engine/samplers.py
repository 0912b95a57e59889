"""Draws a token with the samplers and the order that a request asks for.

    mask -> logit bias -> the samplers in `samplers` -> draw
    mask -> logit bias -> the samplers in `samplers` -> adaptive-p -> draw    with an adaptive target
    mask -> logit bias -> temperature -> Mirostat -> draw                     with Mirostat, which ignores `samplers`

The default of `samplers` is llama.cpp's order:

    penalties -> DRY -> top-n-sigma -> top-k -> typical-p -> top-p -> min-p -> XTC -> temperature

The sampler "infill" is used only if it is listed.

A sampler is a pure function of the candidates and their position in the sequence. In the default order, and without
samplers that only this file implements, the draws equal those of sampling.py bit for bit.

Results are bit-identical on every machine. The last bit of math.log(x) and math.exp(x) depends on the C library, so the
functions here use only operations whose rounding IEEE 754 defines, and sums in a fixed order. Samplers never need the
logarithm of an array: the logarithm of a probability is its logit minus a number that all candidates share.

The surprise of a token is its negative binary log-probability. The samplers come from these sources:

adaptive-p   llama.cpp, pull request 17927: prefers tokens whose probability is near a target
DRY          text-generation-webui, pull request 5677, with the sequence breakers of koboldcpp, pull request 982;
             llama.cpp has both, and this file follows it
infill       llama.cpp's `llama_sampler_init_infill`, with its numbers: ends answers sooner, after top-k and top-p
Mirostat     Basu et al., "Mirostat: A Neural Text Decoding Algorithm that Directly Controls Perplexity" (2020): both
             versions remove tokens that are too surprising, draw one of the others, and correct mu, the bound, by the
             difference between the drawn token's surprise and the target
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from llmrun.base.sampling_texts import ADAPTIVE_P, INFILL, TEMPERATURE, parse_samplers
from llmrun.engine import sampling
from llmrun.engine.sampling import LARGEST, exp, ordered_sum, uniform
from llmrun.formats.layouts.tokens import LN2_HIGH, LN2_LOW, SMALLEST_TEMPERATURE
from llmrun.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.engine.sampling import Candidates, Logits, Mask
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer

LN2 = LN2_HIGH + LN2_LOW
_SQRT_HALF = 0.7071067811865476
_LOG_TERMS = tuple(2 / n for n in range(23, 0, -2))


def uses_dry(params: SamplingParams) -> bool:
    """Return whether DRY penalizes anything."""
    return params.dry_multiplier != 0 and params.dry_penalty_last_n != 0


def uses_xtc(params: SamplingParams) -> bool:
    """Return whether XTC may remove tokens. At most one token can have a probability above 0.5."""
    return params.xtc_probability > 0 and params.xtc_threshold <= 0.5


class Softmax(NamedTuple):
    """The probabilities of candidates.

    weights  exp(logit - largest logit)
    total    their sum
    nats     the negative natural logarithms of the probabilities; inf for tokens that cannot be drawn
    """

    weights: NDArray[np.float64]
    total: float
    nats: NDArray[np.float64]

    @property
    def entropy(self) -> float:
        """The entropy in nats."""
        possible = self.weights > 0
        return ordered_sum(self.weights[possible] * self.nats[possible]) / self.total


def softmax(logits: NDArray[np.float64]) -> Softmax:
    """Return the probabilities of candidates with these logits."""
    below = logits.max() - logits
    weights = exp(-below)
    total = ordered_sum(weights)
    return Softmax(weights, total, np.where(weights > 0, below + log(total), np.inf))


def is_banned(logits: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which tokens are banned: those with a logit of -inf, or of -LARGEST after the penalties."""
    return logits <= -LARGEST


def log(x: float) -> float:
    """Return the natural logarithm of a positive float64, with an error of at most 2 units in the last place.

    x is m * 2^n, with m between sqrt(1/2) and sqrt(2), and log(m) is 2 atanh(s) with s = (m - 1) / (m + 1), as a series
    in odd powers of s. |s| is at most 0.172, so the first omitted term is below 2^-66 of the result.
    """
    m, n = math.frexp(x)
    if m < _SQRT_HALF:
        m, n = 2 * m, n - 1
    s = (m - 1) / (m + 1)
    square, series = s * s, 0.0
    for term in _LOG_TERMS:
        series = series * square + term
    return n * LN2_HIGH + (s * series + n * LN2_LOW)


def exp_of(x: float) -> float:
    """Return e^x, which is 0 below -700 and inf above 700."""
    value = float(exp(np.array([-abs(x)]))[0])
    if x <= 0:
        return value
    return 1 / value if value else math.inf


def integer_power(base: float, exponent: int) -> float:
    """Return base^exponent for an exponent of at least 0, by repeated squaring."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result


class SamplerState(NamedTuple):
    """The state of Mirostat and adaptive-p before a draw, which other samplers do not change.

    mu            Mirostat's largest surprise, in bits
    weighted_sum  adaptive-p's sum of the probabilities of earlier tokens, in which later ones weigh more
    total_weight  the sum of these weights
    """

    mu: float
    weighted_sum: float
    total_weight: float


def initial_state(params: SamplingParams) -> SamplerState:
    """Return the state before an answer's first token."""
    weight = 1 / (1 - params.adaptive_decay)
    return SamplerState(2 * params.mirostat_tau, params.adaptive_target * weight, weight)


def temperature(candidates: Candidates, place: Place) -> Candidates:
    """Divide the logits by the temperature, or return only the likeliest candidate at temperature 0."""
    return apply_temperature(candidates, temperature_of(candidates, place.params))


def apply_temperature(candidates: Candidates, value: float) -> Candidates:
    """Divide the logits by the temperature, or return only the likeliest candidate at temperature 0."""
    ids, logits = candidates
    if value <= 0:
        best = int(np.argmax(logits))
        return ids[best : best + 1], logits[best : best + 1]
    return ids, logits / max(value, SMALLEST_TEMPERATURE)


def temperature_of(candidates: Candidates, params: SamplingParams) -> float:
    """Return the temperature for these candidates.

    The dynamic temperature is within `temperature` ± `dynatemp_range`, but at least 0, and grows with the entropy of
    the candidates, divided by the entropy of equally likely candidates, to the power of `dynatemp_exponent`.
    """
    spread = params.dynatemp_range
    _, logits = candidates
    if spread <= 0:
        return params.temperature
    if len(logits) < 2:
        return 1.0
    lowest, highest = max(0.0, params.temperature - spread), params.temperature + spread
    share = softmax(logits).entropy / log(len(logits))
    scaled = exp_of(params.dynatemp_exponent * log(share)) if share > 0 else float(params.dynatemp_exponent == 0)
    return lowest + (highest - lowest) * scaled


def top_n_sigma(candidates: Candidates, place: Place) -> Candidates:
    """Ban the tokens whose logits are more than `top_n_sigma` standard deviations below the largest one.

    Tang et al., "Top-nσ: Not All Logits Are You Need" (2024). Like llama.cpp, this function keeps banned tokens among
    the candidates, with logits of -inf. Banned tokens do not affect the deviation.
    """
    n = place.params.top_n_sigma
    ids, logits = candidates
    if n <= 0 or len(ids) < 2:
        return candidates
    banned = is_banned(logits)
    allowed = logits[~banned] if banned.any() else logits
    if not len(allowed):
        return candidates
    mean = ordered_sum(allowed) / len(allowed)
    deviation = math.sqrt(ordered_sum((allowed - mean) ** 2) / len(allowed))
    return ids, np.where(logits < logits.max() - n * deviation, -np.inf, logits)


def typical_p(candidates: Candidates, place: Place) -> Candidates:
    """Return the smallest set of most typical candidates whose probabilities sum to more than `typical_p`.

    The candidates keep their order. A token is typical if its surprise, which is its negative log-probability, is close
    to the entropy. Meister et al., "Locally Typical Sampling" (2022). Tokens that cannot be drawn are the least
    typical; llama.cpp computes NaN for them.
    """
    p = place.params.typical_p
    if p >= 1:
        return candidates
    ids, logits = candidates
    weights, total, nats = found = softmax(logits)
    order = np.argsort(np.abs(nats - found.entropy), kind="stable")
    n = int(np.searchsorted(np.cumsum(weights[order]), p * total, side="right")) + 1
    kept = np.sort(order[:n])
    return ids[kept], logits[kept]


_SEED = 0x585443  # "XTC"; separates the random numbers of XTC from those of the draws


def xtc(candidates: Candidates, place: Place) -> Candidates:
    """Remove the top choices, but only with probability `xtc_probability`.

    The top choices are the tokens with a probability of at least `xtc_threshold`, except for the least likely one. If
    several tokens are equally unlikely, the last one stays. XTC is from text-generation-webui, pull request 6335.
    """
    params = place.params
    if not uses_xtc(params):
        return candidates
    if uniform(params.seed ^ _SEED, place.position) > params.xtc_probability:
        return candidates
    ids, logits = candidates
    weights = exp(logits - logits.max())
    top = np.flatnonzero((weights >= params.xtc_threshold * ordered_sum(weights)) & (logits > -np.inf))
    if len(top) < 2:
        return candidates
    stays = top[len(top) - 1 - int(np.argmin(logits[top][::-1]))]
    kept = np.ones(len(ids), np.bool_)
    kept[top] = False
    kept[stays] = True
    return ids[kept], logits[kept]


# The constants of the transform in llama.cpp.
_WIDTH = 0.3
_PEAK_LOGIT = 5.0
_SHARPNESS = 10.0


def prefer_target(candidates: Candidates, params: SamplingParams, state: SamplerState) -> Candidates:
    """Replace the logits with new logits, which increase as a token's probability approaches the adapted target.

    The adapted target compensates for the difference between `adaptive_target` and the mean probability of earlier
    tokens.
    """
    ids, logits = candidates
    target = params.adaptive_target
    if state.total_weight:
        target = 2 * target - state.weighted_sum / state.total_weight
    target = min(max(target, 0.0), 1.0)
    weights, total, _ = softmax(logits)
    distance = np.abs(weights / total - target) / _WIDTH
    return ids, np.where(logits == -np.inf, -np.inf, _PEAK_LOGIT - _SHARPNESS * distance * distance / (1 + distance))


def next_state(candidates: Candidates, token: int, params: SamplingParams, state: SamplerState) -> SamplerState:
    """Return the state after `token` has been drawn. `candidates` have the logits before the transform."""
    ids, logits = candidates
    weights, total, _ = softmax(logits)
    probability = float(weights[ids == token][0]) / total
    return state._replace(
        weighted_sum=probability + params.adaptive_decay * state.weighted_sum,
        total_weight=1 + params.adaptive_decay * state.total_weight,
    )


_ESTIMATED = 100  # the number of likeliest tokens from which version 1 estimates the exponent of Zipf's law
_RATIO_LOGS = np.array([log((i + 2) / (i + 1)) for i in range(_ESTIMATED - 1)])


def keep_unsurprising(candidates: Candidates, params: SamplingParams, mu: float, vocabulary: int) -> Candidates:
    """Return the candidates from which Mirostat draws, for the current mu."""
    ids, logits = candidates
    possible = np.flatnonzero(logits > -np.inf)
    if len(possible) < len(ids):
        candidates = ids[possible], logits[possible]
    return _keep_mirostat_1(candidates, mu, vocabulary) if params.mirostat == 1 else _keep_mirostat_2(candidates, mu)


def next_mu(candidates: Candidates, token: int, params: SamplingParams, mu: float) -> float:
    """Return mu after `token` has been drawn from the candidates that were kept."""
    ids, logits = candidates
    surprise = float(softmax(logits).nats[ids == token][0]) / LN2
    return mu - params.mirostat_eta * (surprise - params.mirostat_tau)


def _keep_mirostat_1(candidates: Candidates, mu: float, vocabulary: int) -> Candidates:
    """Keep the k likeliest tokens, where k follows from mu and an estimate of the exponent s of Zipf's law.

    k is ((s - 1) 2^mu / (1 - vocabulary^(1 - s)))^(1/s).
    """
    ids, logits = candidates
    _, top = sampling.top_k(logits, _ESTIMATED)
    order, sorted_logits = sampling.top_k(logits, _mirostat_k(top, mu, vocabulary, len(ids)))
    return ids[order], sorted_logits


def _mirostat_k(top: np.ndarray[tuple[int], np.dtype[np.float64]], mu: float, vocabulary: int, n: int) -> int:
    """Return k, between 1 and n, given the largest logits in sorted order."""
    if n < 2:
        return 1
    logs = _RATIO_LOGS[: len(top) - 1]
    s = ordered_sum(logs * (top[:-1] - top[1:])) / ordered_sum(logs * logs)
    size_log = log(vocabulary)
    shrinking = 1 - exp_of((1 - s) * size_log)
    fraction = (s - 1) / shrinking if shrinking else 1 / size_log  # the limit for s = 1
    # Compute with logarithms, because 2^mu and k may overflow. If s is 0, k is 1 or as large as possible.
    log_k = log(fraction) + mu * LN2 if fraction > 0 else -math.inf
    log_k = log_k / s if s > 0 else math.copysign(math.inf, log_k)
    return n if log_k >= log(n) else max(1, int(exp_of(log_k)))


def _keep_mirostat_2(candidates: Candidates, mu: float) -> Candidates:
    """Keep the tokens whose surprise is at most mu, and always the likeliest token."""
    ids, logits = candidates
    kept = np.flatnonzero(softmax(logits).nats <= mu * LN2)
    if not len(kept):
        kept = np.array([np.argmax(logits)])
    return ids[kept], logits[kept]


_END_WEIGHT: Final = 3.0
_LEAST: Final = 0.2  # the minimum probability of a token that continues the answer
_MOST_JOINED: Final = 128  # candidates; comparing all tokens of a vocabulary with each other takes minutes


def infill(candidates: Candidates, place: Place) -> Candidates:
    """Return the candidates that end the answer, or those that are likely enough to continue it.

    Only the ends are kept if three times their probability, times the number of candidates, exceeds the probability of
    all other tokens. If not, tokens are joined: if the text of one token begins the text of another, the likelier token
    receives both probabilities, and the other token is removed. The ends are then kept. Of the n other tokens with a
    probability of at least 0.2, only those with at least 1 / (n + 1) of the total are kept. If n is 0, the answer ends.
    """
    if place.tokenizer is None:
        return candidates
    ids, logits = candidates
    weights, total, _ = softmax(logits)
    ends = np.isin(ids, [*place.tokenizer.end_of_generation]) & (weights > 0)
    if _END_WEIGHT * _infill_sum(weights[ends]) * len(ids) > _infill_sum(weights[~ends]):
        return ids[ends], logits[ends]
    order = np.argsort(-logits, kind="stable")[:_MOST_JOINED].tolist()
    texts = [place.tokenizer.token_bytes(int(ids[i])) for i in order]
    likely = dict(zip(order, _infill_joined((weights[order] / total).tolist(), texts), strict=True))
    kept = [i for i, p in likely.items() if p >= _LEAST or (ends[i] and p)]
    n_texts = len(kept) - int(ends[kept].sum())
    if not n_texts:
        return _infill_ended(candidates, place)
    least = sum(likely[i] for i in kept) / (n_texts + 1)
    kept = sorted(i for i in kept if likely[i] >= least or ends[i])
    return ids[kept], logits[kept]


def _infill_sum(weights: NDArray[np.float64]) -> float:
    return ordered_sum(weights) if len(weights) else 0.0


def _infill_joined(p: list[float], texts: Sequence[bytes]) -> list[float]:
    """Return the probabilities after joining tokens, with 0 for removed tokens."""
    for i, text in enumerate(texts):
        for j, other in enumerate(texts):
            if not p[i]:
                break
            if i != j and p[j] and text and other.startswith(text):
                into, removed = (j, i) if p[j] > p[i] else (i, j)
                p[into] += p[removed]
                p[removed] = 0.0
    return p


def _infill_ended(candidates: Candidates, place: Place) -> Candidates:
    """Return only the token that ends the answer or, if the answer must go on, the likeliest one."""
    ids, logits = candidates
    best = int(np.argmax(logits))
    if place.end is None:
        return ids[best : best + 1], logits[best : best + 1]
    return np.array([place.end], ids.dtype), np.zeros(1, logits.dtype)


# llama.cpp's limits for DRY's sequence breakers.
_LONGEST_TEXT = 40  # bytes
_LONGEST_TAIL = 20  # tokens

_NONE = np.zeros(0, np.bool_)


class Breakers(Struct, frozen=True, eq=False):
    """The tokens of sequence breakers. A breaker is a single token, or a head followed by the tokens of its tail.

    heads   whether a token begins a breaker, bool[vocabulary]; empty if there are no breakers
    single  whether a token contains a whole breaker, bool[vocabulary]
    tails   head -> its tails
    """

    heads: NDArray[np.bool_]
    single: NDArray[np.bool_]
    tails: Mapping[int, Sequence[tuple[int, ...]]]

    def distance(self, latest_first: NDArray[np.intp]) -> int:
        """Return the number of tokens after the latest breaker, or the number of all tokens if there is none."""
        if not len(self.heads):
            return len(latest_first)
        for i in np.flatnonzero(self.heads[latest_first]).tolist():
            token = int(latest_first[i])
            before = tuple(latest_first[max(0, i - _LONGEST_TAIL) : i][::-1].tolist())
            matching = [len(tail) for tail in self.tails.get(token, ()) if before[: len(tail)] == tail]
            if matching or self.single[token]:
                return int(i) - max(matching, default=0)
        return len(latest_first)


NO_BREAKERS = Breakers(_NONE, _NONE, {})


def find_breakers(texts: Sequence[str], tokenizer: Tokenizer) -> Breakers:
    """Return the tokens of the breakers in a vocabulary. Breakers are cut off after 40 bytes.

    A token that contains a breaker is a whole breaker. If a token ends with the beginning of a breaker, the rest of the
    breaker is its tail.
    """
    if not texts:
        return NO_BREAKERS
    words = [_word(token, tokenizer) for token in range(tokenizer.vocabulary_size)]
    single = np.zeros(len(words), np.bool_)
    tails: dict[int, list[tuple[int, ...]]] = {}
    for breaker in [text.encode()[:_LONGEST_TEXT] for text in texts]:
        found = np.array([breaker in word for word in words])
        single |= found
        for n in range(1, len(breaker)):
            rest = breaker[n:].decode(errors="replace")
            tail = tuple(tokenizer.encode(rest, add_special=False, parse_special=False).tolist()[:_LONGEST_TAIL])
            for token in [token for token, word in enumerate(words) if word.endswith(breaker[:n]) and not found[token]]:
                tails.setdefault(token, []).append(tail)
    heads = single.copy()
    heads[list(tails)] = True
    return Breakers(heads, single, tails)


def _word(token: int, tokenizer: Tokenizer) -> bytes:
    """Return a token's text, even for control tokens, without the space that some tokenizers add to every text.

    For a few vocabularies, llama.cpp also removes the space before a punctuation mark here.
    """
    is_control = not tokenizer.token_bytes(token)
    return tokenizer.token_text(token).encode() if is_control else tokenizer.decode([token])


class Place(Struct, frozen=True):
    """The position in a sequence for which a token is drawn.

    history     all previous tokens, including the prompt
    params      the request's parameters
    position    the position of the token
    vocabulary  the number of tokens of the model
    breakers    the sequence breakers of DRY
    tokenizer   tells the infill sampler the tokens' texts; without one, that sampler does nothing
    end         the likeliest token that ends the answer, or None if none is allowed; only for the infill sampler
    """

    history: Sequence[int]
    params: SamplingParams
    position: int
    vocabulary: int
    breakers: Breakers = NO_BREAKERS
    tokenizer: Tokenizer | None = None
    end: int | None = None


_SHORT = 8  # short repetitions exceed the smallest length of interest by less than this, in tokens
_BLOCK = 64  # tokens in the first comparison; later ones are longer


def suffix_lengths(latest_first: NDArray[np.intp], least: int) -> NDArray[np.int64]:
    """Return how many tokens from each position onward equal the latest tokens, int64[tokens].

    latest_first  tokens, the latest one first
    least         the smallest length of interest, at least 1; shorter ones are reported as 0

    Short repetitions are found for all positions together. Longer repetitions are found with the Z-algorithm, which
    fills whole boxes with a few NumPy operations. A box is a run of tokens that equals the start of the sequence.
    Inside a box, the lengths equal those at the start of the sequence, up to the end of the box.
    """
    lengths = np.zeros(len(latest_first), np.int64)
    known = least + _SHORT
    starts = _find_short(latest_first, lengths, least, known)
    at = 0
    while at < len(starts):
        start = int(starts[at])
        length = known + _common_length(latest_first[start + known :], latest_first[known:])
        lengths[start] = length
        at = int(np.searchsorted(starts, _fill_box(lengths, start, length, known)))
    return lengths


def _fill_box(lengths: NDArray[np.int64], start: int, length: int, least: int) -> int:
    """Set the lengths inside a box where at least `least` tokens are left, and return the first position not set.

    The length at `start + i` is the length at i, or the rest of the box if the rest is shorter. If both are equal, the
    length may be greater, because the box does not include the token after its end. In a box that is longer than
    `start`, the tokens repeat with a period of `start`.
    """
    inside = np.arange(1, length - least + 1)
    rest = length - inside
    at_front = lengths[inside % start]
    at_front[inside % start == 0] = len(lengths)
    open_ended = np.flatnonzero(at_front == rest) if start + length < len(lengths) else inside[:0]
    known = int(open_ended[0]) if len(open_ended) else len(inside)
    lengths[start + 1 : start + 1 + known] = np.minimum(at_front, rest)[:known]
    return start + 1 + known


def _find_short(latest_first: NDArray[np.intp], lengths: NDArray[np.int64], least: int, most: int) -> NDArray[np.intp]:
    """Set the lengths from `least` to `most - 1`, and return the positions of longer ones."""
    found = np.flatnonzero(latest_first[1:] == latest_first[0]) + 1
    for offset in range(1, most):
        if not len(found):
            break
        if offset >= least:
            lengths[found] = offset
        found = found[found < len(latest_first) - offset]
        found = found[latest_first[found + offset] == latest_first[offset]]
    return found


def _common_length(one: NDArray[np.intp], other: NDArray[np.intp]) -> int:
    """Return the number of equal tokens at the start of two arrays. The first array must not be longer."""
    done, block = 0, _BLOCK
    while done < len(one):
        end = min(done + block, len(one))
        different = np.flatnonzero(one[done:end] != other[done:end])
        if len(different):
            return done + int(different[0])
        done, block = end, 4 * block
    return len(one)


_LARGEST_LOG = 88.7228391  # the log of the largest float32; llama.cpp limits the exponents of penalties with it
_SMALLEST_BASE = 1.000001  # smaller bases have no limit


def dry(candidates: Candidates, place: Place) -> Candidates:
    """Penalize the tokens that would continue a repetition of the last tokens, except for single-token breakers.

    If the last n tokens occur earlier, followed by a token, that token's penalty is
    `dry_multiplier * dry_base ** (n - dry_allowed_length)`. Sequences do not extend across a breaker.
    """
    params = place.params
    if not uses_dry(params):
        return candidates
    tokens, lengths = _continued_repetitions(place)
    if not len(tokens):
        return candidates
    ids, logits = candidates
    penalties = np.zeros(place.vocabulary, np.float32)
    penalties[tokens] = _penalties(lengths - params.dry_allowed_length, params)
    chosen = penalties[ids]
    penalized = np.maximum(logits.astype(np.float32) - chosen, -LARGEST)
    return ids, np.where((chosen > 0) & (logits > -np.inf), penalized, logits)


def _continued_repetitions(place: Place) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return the tokens that would continue a repetition, each with the length of its longest repetition."""
    params = place.params
    nothing = np.zeros(0, np.intp), np.zeros(0, np.int64)
    last_n, allowed = params.dry_penalty_last_n, params.dry_allowed_length
    recent = place.history[-last_n:] if last_n > 0 else place.history
    latest_first = np.array(recent, np.intp)[::-1]
    if len(latest_first) <= allowed:
        return nothing
    longest = place.breakers.distance(latest_first)
    if longest < allowed:
        return nothing
    lengths = np.minimum(suffix_lengths(latest_first, max(allowed, 1)), longest)
    ends = np.flatnonzero(lengths[1:] >= allowed)  # lengths[i + 1] tokens are repeated, and latest_first[i] follows
    tokens, lengths = latest_first[ends], lengths[1:][ends]
    by_token = np.lexsort((lengths, tokens))
    is_longest = tokens[by_token] != np.append(tokens[by_token][1:], -1)
    found = by_token[is_longest]
    single = place.breakers.single[tokens[found]] if len(place.breakers.single) else np.zeros(len(found), np.bool_)
    return tokens[found][~single], lengths[found][~single]


def _penalties(exponents: NDArray[np.int64], params: SamplingParams) -> NDArray[np.float32]:
    base = float(np.float32(params.dry_base))
    largest = int(_LARGEST_LOG / log(base)) if base > _SMALLEST_BASE else 0
    if largest:
        exponents = np.minimum(exponents, largest)
    distinct, place = np.unique(exponents, return_inverse=True)
    values = [params.dry_multiplier * integer_power(base, exponent) for exponent in distinct.tolist()]
    with np.errstate(over="ignore"):
        return np.array(values).astype(np.float32)[place]


Sampler = Callable[["Candidates", Place], "Candidates"]


def penalties(candidates: Candidates, place: Place) -> Candidates:
    """Penalize recent tokens, but not banned ones, whose logits stay -inf."""
    ids, logits = candidates
    by_id = np.zeros(place.vocabulary, np.float32)  # `apply_penalties` expects the logits of all tokens
    by_id[ids] = logits
    penalized = sampling.apply_penalties(by_id, place.history, place.params)
    return candidates if penalized is by_id else (ids, np.where(logits > -np.inf, penalized[ids], logits))


def top_k(candidates: Candidates, place: Place) -> Candidates:
    """Return the `top_k` most likely candidates, sorted by probability."""
    if place.params.top_k <= 0:
        return candidates
    ids, logits = candidates
    order, kept = sampling.top_k(logits, place.params.top_k)
    return ids[order], kept


# The samplers by llama.cpp's names. "adaptive_p" is not among them, because it always comes last.
SAMPLERS: dict[str, Sampler] = {
    "penalties": penalties,
    "dry": dry,
    "top_n_sigma": top_n_sigma,
    "top_k": top_k,
    "typ_p": typical_p,
    "top_p": lambda candidates, place: sampling.top_p(candidates, place.params.top_p),
    "min_p": lambda candidates, place: sampling.min_p(candidates, place.params.min_p),
    "xtc": xtc,
    INFILL: infill,
    TEMPERATURE: temperature,
}


def sample(logits: Logits, place: Place, state: SamplerState, mask: Mask | None = None) -> tuple[int, SamplerState]:
    """Draw the next token, and return its id and the state of the samplers after the draw.

    logits  float32[vocabulary], not modified
    mask    the tokens that a constraint allows, uint32[mask_words]; None if it allows all

    Raises the errors of `sampling.sample`.
    """
    params = place.params
    u = sampling.uniform(params.seed, place.position)
    candidates = _all_tokens(logits, params, mask)
    if params.mirostat:
        return _draw_mirostat(apply_temperature(candidates, params.temperature), place, state, u)
    names = [name for name in parse_samplers(params.samplers) if name != ADAPTIVE_P]
    if INFILL in names:
        place = replace(place, end=_likeliest_end(candidates, place))
    if params.adaptive_target >= 0:
        candidates = apply_samplers(candidates, names, place)
        preferred = prefer_target(candidates, params, state)
        token = sampling.draw(preferred, 1.0, u)
        return token, next_state(candidates, token, params, state)
    if names[-1:] != [TEMPERATURE]:
        return sampling.draw(apply_samplers(candidates, names, place), 1.0, u), state
    candidates = apply_samplers(candidates, names[:-1], place)
    value = temperature_of(candidates, params)
    if value <= 0:
        return int(apply_temperature(candidates, value)[0][0]), state
    return sampling.draw(candidates, value, u), state  # rounded as in sampling.py


def apply_samplers(candidates: Candidates, names: Iterable[str], place: Place) -> Candidates:
    """Apply samplers in order."""
    with np.errstate(over="ignore", invalid="ignore"):  # the samplers replace overflows and NaN
        for name in names:
            kept = SAMPLERS[name](candidates, place)
            candidates = kept if len(kept[0]) else candidates  # in unusual orders, rounding may remove all candidates
    return candidates


def _all_tokens(logits: Logits, params: SamplingParams, mask: Mask | None) -> Candidates:
    """Return all tokens with their logits and biases, after the checks of `sampling.sample`."""
    sampling.check_output(float(logits[np.argmax(logits)]))
    with np.errstate(over="ignore", invalid="ignore"):
        biased = sampling.apply_logit_bias(sampling.apply_mask(logits, mask), params.logit_bias)
    sampling.check_any_left(float(biased.max()))
    ids: NDArray[np.intp] = np.arange(len(biased))
    return ids, biased.astype(np.float64)


def _likeliest_end(candidates: Candidates, place: Place) -> int | None:
    """Return the token with the largest logit that ends the answer, or None if all of them are banned."""
    if place.tokenizer is None:
        return None
    logits = candidates[1]  # the logits of all tokens
    ends = sorted(place.tokenizer.end_of_generation)
    best = max(ends, key=lambda token: logits[token], default=None)
    return None if best is None or logits[best] == -np.inf else best


def _draw_mirostat(candidates: Candidates, place: Place, state: SamplerState, u: float) -> tuple[int, SamplerState]:
    params = place.params
    kept = keep_unsurprising(candidates, params, state.mu, place.vocabulary)
    token = sampling.draw(kept, 1.0, u)
    return token, state._replace(mu=next_mu(kept, token, params, state.mu))
