"""Learns to predict the duration of steps from their sizes.

The predictions determine how many rows of a prompt run beside answers, how long drafts are, and the waiting times that
servers report. The predictions affect only the speed, never the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.run_speeds import LearntCosts

    Vector = NDArray[np.float64]

MOST_ROWS: Final = 256  # prompt rows in a step: enough to keep the kernels busy
LEAST_ROWS: Final = 8  # prompt rows in any step with prompts, so that prompts always progress
# While no answer is in progress, a step with this many rows may take twice its intended time. In smaller steps, each
# row takes longer: the attention of up to 32 rows stores partial results (SPLIT_ROWS in layouts/kv.py), and fewer rows
# share the time to read the weights and the cache.
EFFICIENT_ROWS: Final = 48
# The initial limits on draft tokens in a step, on prompt rows beside running answers, and on the product of rows and
# depth. Later limits are twice the largest values so far, because the time of larger steps is unknown.
_FIRST_DRAFT: Final = 3
_FIRST_ROWS: Final = 32
_FIRST_ATTENDED: Final = 32 * 1024

_KEPT: Final = 0.98  # weight of older steps of the same class after each step: the last 34 have half of the weight
_DRIFT: Final = 0.1  # fraction of a step's relative deviation that is applied to all older times
LARGEST_DEVIATION: Final = 2.0  # a step that deviates by a larger factor was disturbed by another program
# Costs from another process count as much as this many steps of each representative size. Because the machine may now
# be faster or slower, the mean deviation of the first steps corrects the level of these costs.
_ASSUMED_STEPS: Final = 2.0
_ASSUMED_DEPTH: Final = 4096  # tokens; a typical depth of answers
_SHORTEST: Final = 1e-6  # seconds; a coarse clock can measure 0
_RECORDED_TOGETHER: Final = 8  # steps without prompts or drafts, which have almost the same size
_SMALLEST: Final = 0.02  # lower bound of each cost, relative to the assumed cost
_FITTED_FIRST: Final = 16  # records
_FITTED_EVERY: Final = 4  # records between later fits, because a fit takes longer than a record
_FIRST_STEP, _FIRST_ROW = 0.05, 0.003  # the assumed seconds of a step and of each row, until a step has been observed
_POSITIONS: Final = 1024.0  # tokens; the unit of the features `cached` and `attended`

# The assumed time of an additional row divided by the time of a step of one row, for use before any measurement. With 2
# threads and models of 135M and 1.24B parameters, the second row took 0.06 to 0.2, depending on weight type and
# instruction set.
ASSUMED_ROW: Final = 0.12
_SMALLEST_ROW: Final = 0.01  # lower bound of this ratio


class StepSize(NamedTuple):
    """The sizes that determine how long a step takes.

    answers   requests in the step, each of which has at least one row
    rows      rows of all requests, including those of drafts
    cached    tokens in the KV cache of all requests
    attended  the sum over the rows of the tokens in the KV cache that the row attends to
    """

    answers: int
    rows: int
    cached: int
    attended: int

    def with_chunk(self, rows: int, depth: int) -> StepSize:
        """Return the size of a step after a chunk of a prompt is added to it.

        depth  tokens in the cache before the chunk
        """
        return StepSize(self.answers + 1, self.rows + rows, self.cached + depth, self.attended + rows * depth)


EMPTY: Final = StepSize(0, 0, 0, 0)


def _features(size: tuple[float, ...], seconds: float) -> Vector:
    """Return the features of a step, followed by its seconds, all divided by these seconds."""
    _, rows, cached, attended = size
    return np.array((1.0, rows, cached / _POSITIONS, attended / _POSITIONS, seconds)) / seconds


class _Fit:
    """The duration of one kind of step: c0 + c1 rows + c2 cached + c3 attended.

    c0 is the time to read the weights, c1 is the time of a row's products, c2 is the time to read 1024 cached tokens,
    which all rows of a request share, and c3 is the time of a row's products with these tokens. The fit minimizes the
    sum of the squared relative errors, because sizes differ by a factor of 100.

    assumed  the four costs before any measurement, in a common unit, which is fitted, too. For a long time, all steps
             may have about the same size, so the costs stay near the assumed ones unless steps contradict them (ridge
             regression)
    trust    the weights of these assumptions, in steps with one unit of the feature
    classes  the number of classes of steps. Each step reduces only the weight of older steps of its own class, so that
             frequent classes do not outweigh rare ones, which alone reveal some of the costs
    """

    def __init__(self, assumed: tuple[float, ...], trust: tuple[float, ...], classes: int) -> None:
        self._assumed, self._trust = np.array(assumed), np.diag(trust)
        # With x = features / seconds, these are the sums of x x^T and of x over the steps of each class.
        self._sums = np.zeros((classes, 4, 5))
        self.n_recorded = 0
        self._is_assumed = False  # True if the costs began with those of another process
        self.costs: list[float] = []  # empty until a step has been observed or costs are assumed

    def assume(self, costs: Sequence[float], sizes: Iterable[tuple[StepSize, int]]) -> None:
        """Begin with costs from another process. `sizes` are the sizes and classes of steps that represent them."""
        self.costs, self._is_assumed = list(costs), True
        for size, kind in sizes:
            features = _features(size, self.of_step(size))
            self._sums[kind] += _ASSUMED_STEPS * features[:4, None] * features
        self.costs = self._fitted()

    def of_step(self, size: StepSize) -> float:
        """Return the expected seconds of a step."""
        c0, c1, c2, c3 = self.costs
        return c0 + c1 * size.rows + (c2 * size.cached + c3 * size.attended) / _POSITIONS

    def plausible(self, size: StepSize, seconds: float) -> float:
        """Return the duration of a step, limited to a deviation of LARGEST_DEVIATION from the expected duration."""
        seconds = max(seconds, _SHORTEST)
        if not self.costs:
            return seconds
        expected = self.of_step(size)
        return min(max(seconds, expected / LARGEST_DEVIATION), LARGEST_DEVIATION * expected)

    def record(self, steps: list[tuple[StepSize, float]], kind: int = 0) -> None:
        """Record plausible durations of steps of one class, counting each step as one of mean size and mean duration.

        The clock rate and the load of the machine affect all durations. Each step therefore scales the older durations
        of all classes towards its own, so that a slower machine changes the level but not the ratios of the costs.
        """
        n = len(steps)
        size = tuple(sum(column) / n for column in zip(*(size for size, _ in steps), strict=True))
        features = _features(size, sum(seconds for _, seconds in steps) / n)
        if self.costs:
            drift = max(_DRIFT, 1 / (self.n_recorded + 2)) if self._is_assumed else _DRIFT
            factor = 1 + drift * (1 / float(features[:4] @ self.costs) - 1)
            self._sums /= (factor**2, factor**2, factor**2, factor**2, factor)
        self._sums[kind] *= _KEPT**n
        self._sums[kind] += n * features[:4, None] * features
        self.n_recorded += 1
        if self.n_recorded < _FITTED_FIRST or self.n_recorded % _FITTED_EVERY == 0:
            self.costs = self._fitted()

    def _fitted(self) -> list[float]:
        """Return the four costs, each of which is at least _SMALLEST times the assumed cost."""
        sums, assumed = self._sums.sum(0), self._assumed
        products, features = sums[:, :4], sums[:, 4]
        unit = assumed @ features / (assumed @ products @ assumed)  # the unit if all assumed costs were right
        products += self._trust / unit**2
        features += self._trust @ assumed / unit
        lowest = _SMALLEST * assumed * unit
        costs: Vector = np.linalg.solve(products, features)
        low = costs < lowest
        while (costs < lowest).any():  # rare: set costs that are too low to their bounds, and solve for the rest
            low |= costs < lowest
            costs = lowest.copy()
            costs[~low] = np.linalg.solve(products[~low][:, ~low], (features - products @ (lowest * low))[~low])
        return [float(cost) for cost in costs]


_PLAIN, _DRAFTED = 0, 1  # classes of steps without prompts


class StepCosts:
    """The seconds of a step, learnt separately for steps with and without prompt rows.

    Steps with and without prompt rows differ: in small steps, additional rows are nearly free, because reading the
    weights dominates; in large steps, the time is proportional to the rows. The time of each kind of step is nearly
    linear.

    Other threads may ask for predictions while one thread calls `observe`. A call of `observe` takes 2 us, or 30 to
    70 us for steps with prompts or drafts and for every eighth other step (on a slow Zen 3).

    most_drafted  the largest number of draft tokens in a step whose time is estimated
    """

    def __init__(self) -> None:
        self._answers, self._prompts = self._new_answers(), self._new_prompts()
        self._unrecorded: list[tuple[StepSize, float]] = []  # the last steps without prompts and drafts
        self.most_drafted = _FIRST_DRAFT
        self._most_rows, self._most_attended = _FIRST_ROWS, _FIRST_ATTENDED

    @staticmethod
    def _new_answers() -> _Fit:
        # In small steps, a row is assumed to take ASSUMED_ROW of a step's time, and the depth to take no time.
        return _Fit((1 - ASSUMED_ROW, ASSUMED_ROW, 0.0, 0.0), (0.01, 1.0, 0.3, 0.3), 2)

    @staticmethod
    def _new_prompts() -> _Fit:
        # The unit is the time of a prompt row. The costs differ between models and machines by factors of 3 to 10. The
        # trust is the squared relative noise of a step, 0.1, divided by the squared error of the assumption.
        return _Fit((8.0, 1.0, 0.5, 0.1), (0.0003, 0.03, 0.03, 0.5), 1)

    @property
    def known(self) -> bool:
        """True once a step without prompts has been observed, or its costs are assumed."""
        return bool(self._answers.costs)

    @property
    def knows_prompts(self) -> bool:
        """True once a step with prompts has been observed, or its costs are assumed."""
        return bool(self._prompts.costs)

    @property
    def n_observed(self) -> int:
        """The number of steps with prompts that have been observed."""
        return self._prompts.n_recorded

    def assume(self, learnt: LearntCosts) -> None:
        """Begin with the costs that another process has learnt, unless steps have been observed. Thread-safe.

        A step that is observed at the same time may be lost.
        """
        if learnt.prompts and not self.knows_prompts:
            depths = (0, learnt.attended // MOST_ROWS)
            sizes = [(EMPTY.with_chunk(rows, depth), 0) for rows in (EFFICIENT_ROWS, MOST_ROWS) for depth in depths]
            fit = self._new_prompts()
            fit.assume(learnt.prompts, sizes)
            self._most_rows = max(self._most_rows, 2 * learnt.rows)
            self._most_attended = max(self._most_attended, 2 * learnt.attended)
            self._prompts = fit
        if learnt.answers and not self.known:
            runs = ((1, _PLAIN), (1 + max(learnt.drafted, _FIRST_DRAFT), _DRAFTED))
            sizes = [(EMPTY.with_chunk(rows, depth), kind) for rows, kind in runs for depth in (0, _ASSUMED_DEPTH)]
            fit = self._new_answers()
            fit.assume(learnt.answers, sizes)
            self.most_drafted = max(self.most_drafted, 2 * learnt.drafted)
            self._answers = fit

    def learnt(self) -> LearntCosts:
        """Return the costs for later processes."""
        from llmrun.backends.run_speeds import LearntCosts

        rows, attended, drafted = self._most_rows // 2, self._most_attended // 2, self.most_drafted // 2
        return LearntCosts(tuple(self._prompts.costs), tuple(self._answers.costs), rows, attended, drafted)

    def observe(self, size: StepSize, prompt_rows: int, seconds: float) -> None:
        """Record the duration of a step with `prompt_rows` rows of prompts."""
        if prompt_rows:
            self._prompts.record([(size, self._prompts.plausible(size, seconds))])
            self._most_rows = max(self._most_rows, 2 * prompt_rows)
            self._most_attended = max(self._most_attended, 2 * size.attended)
            return
        step = size, self._answers.plausible(size, seconds)
        if size.rows > size.answers:
            self.most_drafted = max(self.most_drafted, 2 * (size.rows - size.answers))
            self._answers.record([step], _DRAFTED)
            return
        self._unrecorded.append(step)
        if len(self._unrecorded) == _RECORDED_TOGETHER or not self.known:
            self._answers.record(self._unrecorded, _PLAIN)
            self._unrecorded = []

    def of_step(self, size: StepSize, prompt_rows: int = 0) -> float:
        """Return the expected seconds of a step with `prompt_rows` rows of prompts."""
        fit, other = (self._prompts, self._answers) if prompt_rows else (self._answers, self._prompts)
        if fit.costs or other.costs:
            return (fit if fit.costs else other).of_step(size)
        return _FIRST_STEP + _FIRST_ROW * size.rows

    def of_row(self, size: StepSize, depth: int) -> float:
        """Return the seconds that each draft token adds to a step, in an answer with `depth` tokens in the cache."""
        step, (_, row, _, attended) = self.of_step(size), self._answers.costs
        return min(max(row + attended * depth / _POSITIONS, _SMALLEST_ROW * step), step)

    @property
    def row_seconds(self) -> float:
        """The seconds of a prompt token in a large step at the beginning of a prompt."""
        return self.of_step(EMPTY.with_chunk(MOST_ROWS, 0), MOST_ROWS) / MOST_ROWS

    def rows_within(
        self, seconds: float, size: StepSize, depth: int, least: int = LEAST_ROWS, *, cautious: bool = True
    ) -> int:
        """Return how many rows of a prompt fit in a step of at most `seconds` while answers are in progress.

        size     the rest of the step
        depth    tokens in the cache before the rows
        least    the smallest result, regardless of the time; 0 for a prompt that need not progress in this step
        cautious limit the step to twice the largest step so far
        """
        rows = self._rows_in(seconds, size, depth)
        if cautious:
            rows = min(rows, self._most_rows, (self._most_attended - size.attended) / max(depth, 1))
        return max(int(rows), least)

    def rows_alone(self, seconds: float, size: StepSize, depth: int, least: int) -> int:
        """Return how many rows of a prompt fit in a step of `seconds` while no answer is in progress.

        The step may be larger than all earlier steps, although its duration is then unknown. If `least` is not 0, up to
        EFFICIENT_ROWS rows may take twice as long. The parameters are the same as in `rows_within`.
        """
        rows = self._rows_in(seconds, size, depth)
        if rows < EFFICIENT_ROWS and least:
            rows = min(self._rows_in(2 * seconds, size, depth), EFFICIENT_ROWS)
        return max(int(rows), least)

    def _rows_in(self, seconds: float, size: StepSize, depth: int) -> float:
        one, most = (
            self.of_step(size.with_chunk(1, depth), 1),
            self.of_step(size.with_chunk(MOST_ROWS, depth), MOST_ROWS),
        )
        row = (most - one) / (MOST_ROWS - 1)
        return MOST_ROWS if most <= seconds else 1 + (seconds - one) / row if row > 0 else 0
