"""What may be said of repeated measurements: distributions, ratios and the intervals that hold them.

Rounds are measured in turns, A B, B A, A B, ...: round i gives a pair, and the logarithm of its ratio is one number d.

1. Order: the first turn of a round may pay for what ran before it (llama.cpp's prefill: 4 to 7 % in the recordings).
   Half of what lies between the even and the odd rounds is taken out, so that it is neither a difference nor noise.
2. Centre: the mean of d without the 20 % at each end. A burst that hits one turn of a pair does not reach it.
3. Interval: symmetric bootstrap-t, with the winsorized error (Wilcox). Percentile bootstraps are too narrow below 50.
   With 4 to 7 rounds, of large models, by Student's t around the plain mean instead: false claims
   0.3 to 0.5 % there (1500 trials of each number, normal and t3 noise of 5 %).
4. Memory: widened by sqrt((1 + r)/(1 - r)), r the correlation of neighbouring d where it is positive.

False claims in percent at the 99 % level: 1200 to 1500 trials of 12, 24 and 48 rounds with noise of 5 %. `all` is heavy
tails, bursts, drift, memory of the machine and 4 % for order; `own` a memory (0.5) that each of both has for itself;
the last two columns are 300 moving windows of 48 recorded rounds: false claims, and the median width.

                                        all             own memory       recorded   width
    mean, t                        0.2  0.5  0.5     11.9 13.1 12.9        2.0       8.1 %
    median, percentile bootstrap   1.1  1.4  0.9     13.3 10.4  8.2        2.7       6.1 %
    trimmed, pairs of rounds,
      percentile bootstrap         4.7  2.2  1.1     13.0  8.3  6.5        2.7       7.5 %
      bootstrap-t                  0.2  0.6  0.7      0.4  3.7  3.5        2.0       7.8 %
      Hodges-Lehmann               0.0  1.1  0.9      0.0  5.5  5.3        1.3       7.8 %
    trimmed, order taken out,
      bootstrap-t                  1.1  1.1  1.0      7.5  8.8 10.1        1.7       6.2 %
      and widened: this method     0.4  0.5  0.8      3.2  2.2  1.2        1.0       7.0 %
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmrun.bench.documents.document import Distribution

LEVEL = 0.99
LEVEL_ALONE = 0.95  # of a figure by itself, of which no verdict is made
MINIMUM_ROUNDS = 4  # fewer say nothing: each order must have come twice
ENOUGH_ROUNDS = 8  # a bootstrap of fewer is mostly chance

_TRIMMED = 0.2  # of the values, at each end
_RESAMPLES = 1999  # enough for a level of 0.9995: twenty verdicts in a run
_SEED = 20250101  # the same samples give the same verdict
_STRONGEST_MEMORY = 0.9  # of a round for the one before; 1 would never end

Array = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """What was found, and the interval that holds the truth. 0 and infinity: too little is known."""

    ratio: float
    low: float
    high: float


def distribution(values: Sequence[float]) -> Distribution:
    """Percentiles lie on the straight line between the two nearest values. ValueError: no values, or one not finite."""
    numbers = np.asarray(values, np.float64)
    _refuse("distribution", numbers, np.isfinite(numbers), "finite")
    count = numbers.size
    return Distribution(
        count=count,
        median=float(np.median(numbers)),
        mean=float(numbers.mean()),
        stddev=float(numbers.std(ddof=1)) if count > 1 else 0.0,
        p95=float(np.percentile(numbers, 95)) if count >= 20 else None,
        p99=float(np.percentile(numbers, 99)) if count >= 100 else None,
    )


def verdict_level(count: int) -> float:
    """Of each of the `count` verdicts of a run, so that all of them hold together in 99 of 100 runs (Bonferroni)."""
    if count < 1:
        raise ValueError(f"verdict level: a run of one verdict or more, not {count}")
    return 1 - (1 - LEVEL) / count


def paired_ratio(a: Sequence[float], b: Sequence[float], *, is_speed: bool, level: float = LEVEL) -> Interval:
    """Speed of a over speed of b; a[i] and b[i] were measured in round i, their order swapped in every other round.

    `is_speed` False: the values are times, and less is faster. The interval is (0, infinity) for fewer than
    MINIMUM_ROUNDS rounds. ValueError: a value that is not above 0 and finite, or a round without its pair.
    """
    rounds = _logarithms("a", a, is_speed), _logarithms("b", b, is_speed)
    if rounds[0].size != rounds[1].size:
        raise ValueError(f"paired ratio: as many values of each, not {rounds[0].size} and {rounds[1].size}")
    differences = _without_order(rounds[0] - rounds[1])
    # Taking the order's effect out costs one degree of freedom.
    lost = math.sqrt((differences.size - 1) / (differences.size - 2)) if differences.size > 2 else math.inf
    return _interval(_centre(differences), lost * _half_width(differences, level))


def unpaired_ratio(a: Sequence[float], b: Sequence[float], *, is_speed: bool, level: float = LEVEL) -> Interval:
    """Speed of a over speed of b, from two runs, each with a number of values of its own. Errors as paired_ratio.

    It knows the noise within each run and nothing of what changed from one run to the other. On the recorded machine
    an engine's speed moved by 10 % (median; at most 31 %) between sessions minutes apart, and 20 of 40 such comparisons
    of an engine with itself claimed a difference; of two processes measured in the same minutes, none of 20 did.
    """
    logs = _logarithms("a", a, is_speed), _logarithms("b", b, is_speed)
    half = math.hypot(*(_half_width(one, level) for one in logs))
    return _interval(_centre(logs[0]) - _centre(logs[1]), half)


def typical(values: Sequence[float], *, level: float = LEVEL_ALONE) -> Interval:
    """The trimmed mean of one configuration's repetitions, and its interval, in the unit of the values."""
    logs = _logarithms("values", values, is_speed=True)
    return _interval(_centre(logs), _half_width(logs, level))


def is_narrow(interval: Interval, precision: float) -> bool:
    """The upper end lies at most `precision` (0.05: 5 %) above the lower one."""
    return interval.high <= interval.low * (1 + precision)


def _logarithms(name: str, values: Sequence[float], is_speed: bool) -> Array:
    numbers = np.asarray(values, np.float64)
    _refuse(name, numbers, np.isfinite(numbers) & (numbers > 0), "above 0 and finite")
    return np.log(numbers) if is_speed else -np.log(numbers)


def _refuse(name: str, numbers: Array, good: npt.NDArray[np.bool_], words: str) -> None:
    if not numbers.size:
        raise ValueError(f"{name}: no values")
    if not good.all():
        raise ValueError(f"{name}: a value is {words}: {numbers[~good][0]:g}")


def _interval(centre: float, half: float) -> Interval:
    with np.errstate(over="ignore"):  # the interval of few, wild rounds may end at infinity
        ratio, low, high = np.exp((centre, centre - half, centre + half)).tolist()
    return Interval(ratio, low, high)


def _without_order(differences: Array) -> Array:
    """Less what it does to be first in a round: half of what lies between even and odd rounds."""
    if differences.size < 2:
        return differences
    effect = (_centre(differences[0::2]) - _centre(differences[1::2])) / 2
    return differences - np.where(np.arange(differences.size) % 2 == 0, effect, -effect)


def _centre(values: Array) -> float:
    return float(_trimmed(values)[0])


def _trimmed(values: Array) -> tuple[Array, Array]:
    """The trimmed mean of each row, and its standard error by the winsorized variance (Yuen)."""
    count = values.shape[-1]
    cut = int(_TRIMMED * count) if count >= ENOUGH_ROUNDS else 0
    kept = count - 2 * cut
    ordered = np.sort(values, axis=-1)
    middle = ordered[..., cut : count - cut]
    mean = middle.mean(axis=-1)
    ends = middle[..., 0], middle[..., -1]
    winsorized = (middle.sum(axis=-1) + cut * (ends[0] + ends[1])) / count
    squares = ((middle - winsorized[..., None]) ** 2).sum(axis=-1)
    squares += cut * sum((end - winsorized) ** 2 for end in ends)
    return mean, np.sqrt(squares / (kept * max(kept - 1, 1)))


def _half_width(values: Array, level: float) -> float:
    """Of the interval around the trimmed mean: by a symmetric bootstrap-t, or Student's t, widened for what rounds
    remember."""
    count = values.size
    if count < MINIMUM_ROUNDS:
        return math.inf
    if np.ptp(values) < 1e-12:  # the rounding of the logarithms
        return 0.0
    mean, error = _trimmed(values)
    if count < ENOUGH_ROUNDS:
        return student_quantile(level, count - 2) * float(error) * _widening(values)
    random = np.random.default_rng(_SEED)
    means, errors = _trimmed(values[random.integers(0, count, (_RESAMPLES, count))])
    # A resample of one value alone has no error: it tells nothing, and counts as far away.
    far = np.divide(np.abs(means - mean), errors, out=np.full(_RESAMPLES, np.inf), where=errors > 0)
    rank = min(math.ceil(level * (_RESAMPLES + 1)), _RESAMPLES)
    return float(np.partition(far, rank - 1)[rank - 1] * error) * _widening(values)


def student_quantile(level: float, freedom: int) -> float:
    """t with P(|T| < t) = level for Student's T of so many degrees of freedom (Abramowitz and Stegun, 26.7.3 and 4)."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _student_share(angle, freedom) < level else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _student_share(angle: float, freedom: int) -> float:
    """P(|T| < t) for t = sqrt(freedom) * tan(angle)."""
    squared = math.cos(angle) ** 2
    is_odd = freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for power in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= squared * (power - 1) / power
    share = math.sin(angle) * total
    return 2 / math.pi * (angle + share) if is_odd else share


def _widening(values: Array) -> float:
    """How much wider than independent rounds make it, from the correlation of neighbours.

    Only a positive correlation counts. Estimated from few rounds it comes out too small: the second term makes up.
    """
    count = values.size
    near = np.clip(values, *np.quantile(values, (0.1, 0.9)))
    near = near - near.mean()
    memory = float(near[1:] @ near[:-1]) / max(float(near @ near), 1e-300)
    memory += (1 + 3 * memory) / count
    memory = min(max(memory, 0.0), _STRONGEST_MEMORY)
    return math.sqrt((1 + memory) / (1 - memory))
