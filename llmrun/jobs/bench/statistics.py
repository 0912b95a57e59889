"""Statistics of repeated measurements: distributions, ratios and confidence intervals.

Two functions decide when warm-up is over and when there are enough measurements. All functions are pure.

The order of the configurations alternates between rounds: A B, B A, A B, ... Each round yields one pair of values. The
logarithm of the ratio of the two values is called d.

1. Order effect: the first turn of a round may be slowed down by whatever ran before it (4 to 7 % for llama.cpp's
   prefill in the recordings). Half of the difference between even and odd rounds is subtracted, so that the effect
   counts neither as a difference nor as noise.
2. Centre: the trimmed mean of d, which ignores the lowest and the highest 20 %. The trimmed mean is robust against
bursts that affect one turn of a pair.
3. Interval: a symmetric bootstrap-t with the winsorized standard error (Wilcox). Percentile bootstraps are too narrow
   for fewer than 50 rounds. With 4 to 7 rounds, as for large models, Student's t around the plain mean is used instead.
   The false-positive rate is then 0.3 to 0.5 % (1500 trials for each number of rounds, normal and t3 noise of 5 %).
4. Autocorrelation: if the correlation r of neighbouring values of d is positive, the interval is widened by
   sqrt((1 + r)/(1 - r)).

The table shows false-positive rates in percent at the 99 % level. The three numbers in a cell are for 12, 24 and 48
rounds, each from 1200 to 1500 trials with 5 % noise. The noise in `all` has heavy tails, bursts, drift, autocorrelation
of the machine and an order effect of 4 %. In `autocorrelated`, each of the two configurations has an independent
autocorrelation of 0.5. The last two columns show the false-positive rate and the median interval width over 300 moving
windows of 48 recorded rounds.

                                        all             autocorrelated   recorded   width
    mean, t                        0.2  0.5  0.5     11.9 13.1 12.9        2.0       8.1 %
    median, percentile bootstrap   1.1  1.4  0.9     13.3 10.4  8.2        2.7       6.1 %
    trimmed, pairs of rounds,
      percentile bootstrap         4.7  2.2  1.1     13.0  8.3  6.5        2.7       7.5 %
      bootstrap-t                  0.2  0.6  0.7      0.4  3.7  3.5        2.0       7.8 %
      Hodges-Lehmann               0.0  1.1  0.9      0.0  5.5  5.3        1.3       7.8 %
    trimmed, no order effect,
      bootstrap-t                  1.1  1.1  1.0      7.5  8.8 10.1        1.7       6.2 %
      and widened (this method)    0.4  0.5  0.8      3.2  2.2  1.2        1.0       7.0 %
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from llmrun.jobs.bench.documents.document import Distribution

LEVEL = 0.99
LEVEL_ALONE = 0.95  # The confidence level for the result of a single configuration, outside of verdicts.
MINIMUM_ROUNDS = 4  # A verdict needs at least two rounds in each order.
ENOUGH_ROUNDS = 8  # With fewer rounds than this, a bootstrap is unreliable.

_TRIMMED = 0.2  # The fraction of values that is trimmed at each end.
_RESAMPLES = 1999  # Enough bootstrap resamples for a level of 0.9995, which 20 verdicts in a run require.
_SEED = 20250101  # The seed is fixed, so that the same samples always produce the same verdict.
_STRONGEST_MEMORY = 0.9  # Autocorrelations are capped here, because a value of 1 would make the interval infinite.

Array = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """An estimate with its confidence interval, which is (0, infinity) if there is too little data."""

    ratio: float
    low: float
    high: float


def distribution(values: Sequence[float]) -> Distribution:
    """Summarize values. Percentiles are interpolated linearly.

    Raises ValueError if there are no values, or if a value is not finite.
    """
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
    """Return the confidence level at which `count` verdicts all hold in 99 % of runs (Bonferroni correction)."""
    if count < 1:
        raise ValueError(f"verdict level: a run has at least one verdict, not {count}")
    return 1 - (1 - LEVEL) / count


def paired_ratio(a: Sequence[float], b: Sequence[float], *, is_speed: bool, level: float = LEVEL) -> Interval:
    """Return the ratio of a's speed to b's speed.

    a[i] and b[i] were measured in round i, and their order alternates between rounds. If `is_speed` is False, the
    values are times, so smaller values are faster. The interval is (0, infinity) for fewer than MINIMUM_ROUNDS rounds.
    Raises ValueError if a value is not positive and finite, or if a and b differ in length.
    """
    rounds = _logarithms("a", a, is_speed), _logarithms("b", b, is_speed)
    if rounds[0].size != rounds[1].size:
        raise ValueError(
            f"paired ratio: both sides need the same number of values, not {rounds[0].size} and {rounds[1].size}"
        )
    differences = _without_order(rounds[0] - rounds[1])
    # Removing the order effect costs one degree of freedom.
    lost = math.sqrt((differences.size - 1) / (differences.size - 2)) if differences.size > 2 else math.inf
    return _interval(_centre(differences), lost * _half_width(differences, level))


def unpaired_ratio(a: Sequence[float], b: Sequence[float], *, is_speed: bool, level: float = LEVEL) -> Interval:
    """Return the ratio of a's speed to b's speed for samples from different runs. The samples may differ in length.

    The interval reflects the noise within each run, but not changes in the machine between the runs. On the recorded
    machine, an engine's speed changed by 10 % (median; at most 31 %) between sessions a few minutes apart. Of 40
    comparisons of an engine with itself across sessions, 20 reported a difference. Of 20 comparisons of two processes
    measured in the same minutes, none reported a difference. Raises ValueError if a value is not positive and finite.
    """
    logs = _logarithms("a", a, is_speed), _logarithms("b", b, is_speed)
    half = math.hypot(*(_half_width(one, level) for one in logs))
    return _interval(_centre(logs[0]) - _centre(logs[1]), half)


def typical(values: Sequence[float], *, level: float = LEVEL_ALONE) -> Interval:
    """Return the trimmed mean of one configuration's values with its confidence interval, in the values' unit."""
    logs = _logarithms("values", values, is_speed=True)
    return _interval(_centre(logs), _half_width(logs, level))


def is_narrow(interval: Interval, precision: float) -> bool:
    """Return whether the upper end is at most `precision` above the lower end (0.05 means 5 %)."""
    return interval.high <= interval.low * (1 + precision)


def _logarithms(name: str, values: Sequence[float], is_speed: bool) -> Array:
    numbers = np.asarray(values, np.float64)
    _refuse(name, numbers, np.isfinite(numbers) & (numbers > 0), "above 0 and finite")
    return np.log(numbers) if is_speed else -np.log(numbers)


def _refuse(name: str, numbers: Array, good: npt.NDArray[np.bool_], words: str) -> None:
    if not numbers.size:
        raise ValueError(f"{name}: no values")
    if not good.all():
        raise ValueError(f"{name}: a value is not {words}: {numbers[~good][0]:g}")


def _interval(centre: float, half: float) -> Interval:
    with np.errstate(over="ignore"):  # With a few very noisy rounds, the upper end may overflow to infinity.
        ratio, low, high = np.exp((centre, centre - half, centre + half)).tolist()
    return Interval(ratio, low, high)


def _without_order(differences: Array) -> Array:
    """Subtract the order effect, which is half of the difference between even and odd rounds."""
    if differences.size < 2:
        return differences
    effect = (_centre(differences[0::2]) - _centre(differences[1::2])) / 2
    return differences - np.where(np.arange(differences.size) % 2 == 0, effect, -effect)


def _centre(values: Array) -> float:
    return float(_trimmed(values)[0])


def _trimmed(values: Array) -> tuple[Array, Array]:
    """Return the trimmed mean of each row, and its standard error from the winsorized variance (Yuen)."""
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
    """Return half the width of the interval around the trimmed mean.

    The interval is a symmetric bootstrap-t, or Student's t for few rounds, widened for autocorrelation.
    """
    count = values.size
    if count < MINIMUM_ROUNDS:
        return math.inf
    if np.ptp(values) < 1e-12:  # The values differ only by the rounding errors of the logarithms.
        return 0.0
    mean, error = _trimmed(values)
    if count < ENOUGH_ROUNDS:
        return student_quantile(level, count - 2) * float(error) * widening(values)
    random = np.random.default_rng(_SEED)
    means, errors = _trimmed(values[random.integers(0, count, (_RESAMPLES, count))])
    # A resample that repeats a single value has a standard error of 0, so its distance from the sample's mean, measured
    # in standard errors, is treated as infinite unless both means are equal.
    distances = np.abs(means - mean)
    far = np.divide(distances, errors, out=np.where(distances > 0, np.inf, 0.0), where=errors > 0)
    rank = min(math.ceil(level * (_RESAMPLES + 1)), _RESAMPLES)
    reach = float(np.partition(far, rank - 1)[rank - 1])
    return reach * float(error) * widening(values) if math.isfinite(reach) else math.inf


def student_quantile(level: float, freedom: int) -> float:
    """Return the t with P(|T| < t) = level, where T is t-distributed with `freedom` degrees of freedom.

    The formulas are 26.7.3 and 26.7.4 in Abramowitz and Stegun.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _student_share(angle, freedom) < level else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def _student_share(angle: float, freedom: int) -> float:
    """Return P(|T| < t) for t = sqrt(freedom) * tan(angle)."""
    squared = math.cos(angle) ** 2
    is_odd = freedom % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for power in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= squared * (power - 1) / power
    share = math.sin(angle) * total
    return 2 / math.pi * (angle + share) if is_odd else share


def widening(values: Array) -> float:
    """Return the factor by which autocorrelation widens the interval, compared with independent rounds.

    Only a positive correlation between neighbouring rounds counts. The estimate is too small for few rounds, so a
    correction is added.
    """
    count = values.size
    near = np.clip(values, *np.quantile(values, (0.1, 0.9)))
    near = near - near.mean()
    memory = float(near[1:] @ near[:-1]) / max(float(near @ near), 1e-300)
    memory += (1 + 3 * memory) / count
    memory = min(max(memory, 0.0), _STRONGEST_MEMORY)
    return math.sqrt((1 + memory) / (1 - memory))


WINDOW = 4  # Warm-up is over when this many recent warm-ups are stable.
MAXIMUM_WARMUPS = 12  # Measuring starts after this many warm-ups, even on an unstable machine.

_TOLERANCE = 0.02  # A relative trend below this limit counts as stable, even without scatter.

# The maximum relative width of a comparison's confidence interval: its upper end divided by its lower end, minus 1.
# With 0.06, a true difference of 5 % was detected in both prefill and decode, in all of 160 replayed recordings and 100
# synthetic runs. With 0.07, this difference was detected in 91 to 96 % of the runs, and with 0.08 in 85 to 86 %.
_PRECISION = 0.06
# The maximum relative width of the 95 % interval of a configuration that is not compared with another configuration.
# This limit is larger than the limit for comparisons, because this interval also includes the machine's drift: 38 of 40
# recorded series reached 0.10 (after 8 to 182 rounds), but only 18 reached 0.06.
_PRECISION_ALONE = 0.10


def is_stable(values: Sequence[float]) -> bool:
    """Return whether warm-up is over.

    Warm-up is over when the trend of the last WINDOW warm-ups is within their scatter, or after MAXIMUM_WARMUPS.
    `values` contains one time or one speed per warm-up. Raises ValueError if a value is not positive and finite.
    """
    numbers = np.asarray(values, np.float64)
    if not (np.isfinite(numbers) & (numbers > 0)).all():
        raise ValueError("warm-up: every value must be positive and finite")
    if numbers.size >= MAXIMUM_WARMUPS:
        return True
    if numbers.size < WINDOW:
        return False
    last = np.log(numbers[-WINDOW:])
    later, earlier = np.triu_indices(WINDOW, 1)[::-1]
    # Use the median of all slopes (Theil-Sen), so that a single disturbed warm-up neither causes nor hides a trend.
    slope = np.median((last[later] - last[earlier]) / (later - earlier))
    rest = last - slope * np.arange(WINDOW)
    scatter = np.abs(rest - np.median(rest)).mean()
    return bool(abs(slope) * (WINDOW - 1) <= _TOLERANCE + 2 * scatter)


def are_narrow(
    samples: Sequence[Mapping[str, Sequence[float]]], pairs: Sequence[tuple[int, int]], metrics: Sequence[str]
) -> bool:
    """Return whether the intervals are narrow enough to stop measuring. Call this function after every round.

    The decision depends only on the widths of the intervals, never on the measured values.

    samples  for each configuration, the values of each metric, one per round (Result.samples)
    pairs    the index pairs of configurations that are compared; if empty, each configuration's own interval counts
    metrics  the metrics that the verdicts compare
    """
    rounds = min(len(one[metric]) for one in samples for metric in metrics)
    # After an odd number of rounds, the last round does not yet have a counterpart in the reverse order.
    if rounds < ENOUGH_ROUNDS or rounds % 2:
        return False
    level = verdict_level(max(1, len(pairs)) * len(metrics))
    for metric in metrics:
        compared = (
            paired_ratio(samples[of][metric], samples[against][metric], is_speed=True, level=level)
            for of, against in pairs
        )
        alone = () if pairs else (typical(one[metric]) for one in samples)
        if not all(is_narrow(interval, _PRECISION) for interval in compared):
            return False
        if not all(is_narrow(interval, _PRECISION_ALONE) for interval in alone):
            return False
    return True
