"""Estimates the duration of a step from its size, with a fit to the steps that the engine has run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_KEPT: Final = 0.98  # weight of older steps of the same class after each step: half of the weight is on the last 34
_DRIFT: Final = 0.1  # fraction of a step's relative deviation that is applied to all older times
_FITTED_EVERY: Final = 8  # steps without drafts, which are recorded together; a fit takes up to 0.1 ms
LARGEST_DEVIATION: Final = 2.0  # a step that deviates by a larger factor was disturbed by another program
# The time of an additional row divided by the time of a step of one row, until it has been measured. With 2 threads and
# models of 135M and 1.24B parameters, the second row took 0.06 to 0.2, depending on weight type and instruction set.
ASSUMED_ROW: Final = 0.12
_SMALLEST_ROW: Final = 0.01  # lower bound of this ratio
# The maximum length of the first drafts. Later, it is twice the largest number of draft tokens in a step so far,
# because the time of more rows is unknown.
_FIRST_DRAFT: Final = 3
_POSITIONS: Final = 1024.0  # tokens; the unit of the features below
# The weights of the assumptions about the four costs, in steps with one unit of the feature.
_ASSUMPTIONS: Final = (0.01, 1.0, 0.3, 0.3)

_N: Final = len(_ASSUMPTIONS)
Vector = Sequence[float]


@dataclass(frozen=True, slots=True)
class StepSize:
    """The sizes that decide how long a step takes.

    answers   answers in the step, each of which has at least one row
    rows      rows of all answers, including those of drafts
    cached    tokens in the KV cache of all answers
    attended  the sum over the rows of the tokens in the KV cache that the row attends to
    """

    answers: int
    rows: int
    cached: int
    attended: int


class StepCosts:
    """The duration of a step: c0 + c1 rows + c2 cached + c3 attended.

    c0 is the time that reading the weights takes, c1 is a row's share of the products, c2 is the time to read a cached
    token, which all rows of an answer share, and c3 a row's products with a cached token. The four are fitted by least
    squares.

    The fit handles three problems:

    - Steps without drafts contain no information about c1, and would soon outweigh all steps with drafts. Each step
      therefore reduces only the weight of older steps of its own class.
    - The clock rate and the load of the machine affect all durations. Each step scales the older durations of both
      classes towards its own, so that a slower machine changes the level but not the ratios between the sizes.
    - At first, all steps have about the same size. Until there are other steps, the fit relies on assumptions (ridge
      regression): an additional row takes ASSUMED_ROW of a step, and the depth costs nothing.
    """

    def __init__(self) -> None:
        self._without, self._with = _Sums(), _Sums()  # of steps without drafts, and of steps with drafts
        self._unrecorded: list[tuple[Vector, float]] = []  # features and seconds of the last steps without drafts
        self._costs: Vector = [0.0] * _N
        self.most_drafted = _FIRST_DRAFT  # the largest number of draft tokens whose time is estimated

    @property
    def known(self) -> bool:
        """True once a step has been observed."""
        return self._costs[0] > 0

    def observe(self, size: StepSize, seconds: float) -> None:
        """Record the duration of a step. A call takes 2 us, except for those that fit the costs."""
        features = _features(size)
        if self.known:
            expected = _dot(features, self._costs)
            seconds = min(max(seconds, expected / LARGEST_DEVIATION), LARGEST_DEVIATION * expected)
        if size.rows > size.answers:
            self.most_drafted = max(self.most_drafted, 2 * (size.rows - size.answers))
            self._record_undrafted()
            self._record(self._with, features, seconds, 1)
            self._costs = self._fitted()
        else:
            self._unrecorded.append((features, seconds))
            if len(self._unrecorded) == _FITTED_EVERY or not self.known:
                self._record_undrafted()
                self._costs = self._fitted()

    def _record_undrafted(self) -> None:
        """Record the mean of the last steps without drafts, which have almost the same size."""
        if n := len(self._unrecorded):
            features = [sum(one[i] for one, _ in self._unrecorded) / n for i in range(_N)]
            self._record(self._without, features, sum(seconds for _, seconds in self._unrecorded) / n, n)
            self._unrecorded.clear()

    def _record(self, group: _Sums, features: Vector, seconds: float, n: int) -> None:
        """Record n steps of one size, and scale the durations of older steps towards theirs."""
        if self.known:
            factor = (1 + _DRIFT * (seconds / _dot(features, self._costs) - 1)) ** n
            self._without.scale_seconds(factor)
            self._with.scale_seconds(factor)
        group.add(features, seconds, n)

    def of_step(self, size: StepSize) -> float:
        """Return the expected seconds of a step."""
        return _dot(_features(size), self._costs)

    def of_row(self, size: StepSize, depth: int) -> float:
        """Return the seconds that each draft token adds to a step, in an answer with `depth` tokens in the cache."""
        step = self.of_step(size)
        return min(max(self._costs[1] + self._costs[3] * depth / _POSITIONS, _SMALLEST_ROW * step), step)

    def _fitted(self) -> Vector:
        """Return the four costs. The last two are never negative."""
        one, other = self._without, self._with
        products = [
            [a + b for a, b in zip(*rows, strict=True)] for rows in zip(one.products, other.products, strict=True)
        ]
        seconds = [a + b for a, b in zip(one.seconds, other.seconds, strict=True)]
        level = seconds[0] / ((1 - ASSUMED_ROW) * products[0][0] + ASSUMED_ROW * products[0][1])
        for i, weight in enumerate(_ASSUMPTIONS):
            products[i][i] += weight
        seconds[0] += _ASSUMPTIONS[0] * level * (1 - ASSUMED_ROW)
        seconds[1] += _ASSUMPTIONS[1] * level * ASSUMED_ROW
        used = list(range(_N))
        while True:
            found = _solved([[products[i][j] for j in used] for i in used], [seconds[i] for i in used])
            costs = dict(zip(used, found, strict=True))
            negative = {i for i in costs if i >= 2 and costs[i] < 0}
            if not negative:
                return [costs.get(i, 0.0) for i in range(_N)]
            used = [i for i in used if i not in negative]


class _Sums:
    """Sums over the steps of one class, in which older steps weigh less.

    products  the products of each pair of features, 4 x 4
    seconds   the products of each feature and the duration
    """

    def __init__(self) -> None:
        self.products = [[0.0] * _N for _ in range(_N)]
        self.seconds = [0.0] * _N

    def add(self, features: Vector, seconds: float, n: int) -> None:
        kept = _KEPT**n
        self.products = [
            [kept * total + n * a * b for total, b in zip(row, features, strict=True)]
            for row, a in zip(self.products, features, strict=True)
        ]
        self.seconds = [kept * total + n * a * seconds for total, a in zip(self.seconds, features, strict=True)]

    def scale_seconds(self, factor: float) -> None:
        self.seconds = [factor * total for total in self.seconds]


def _features(size: StepSize) -> Vector:
    return 1.0, float(size.rows), size.cached / _POSITIONS, size.attended / _POSITIONS


def _dot(a: Vector, b: Vector) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a system with a positive definite matrix by Gaussian elimination, in place.

    The whole fit takes a quarter of the time in plain Python that it takes with NumPy (0.4 ms on a busy machine).
    """
    n = len(right)
    for i in range(n):
        for j in range(i + 1, n):
            factor = matrix[j][i] / matrix[i][i]
            for k in range(i, n):
                matrix[j][k] -= factor * matrix[i][k]
            right[j] -= factor * right[i]
    for i in reversed(range(n)):
        right[i] = (right[i] - sum(matrix[i][k] * right[k] for k in range(i + 1, n))) / matrix[i][i]
    return right
