"""Predicts how long steps and prompts take, from the steps so far.

The predictions decide how many rows of a prompt run beside answers; they never affect a text.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.engine.drafting.costs import StepSize

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Prompt rows in a step beside which no answer waits. They are enough to keep the kernels busy, and few enough that
# other requests, Ctrl-C and the progress bar wait at most a second on a slow machine.
MOST_ROWS: Final = 256
LEAST_ROWS: Final = 8  # prompt rows in any step with prompts, so that prompts always progress
# The initial limits on prompt rows beside running answers, and on the product of rows and depth. Later limits are twice
# the largest values so far, because the time of larger steps is unknown.
_FIRST_ROWS: Final = 32
_FIRST_ATTENDED: Final = 32 * 1024
_SAMPLED: Final = 8  # one in this many steps without prompts is recorded, which saves 1 % of the time of a small model
_FIRST_SAMPLES: Final = 8
_ASSUMED_STEP: Final = 0.05  # seconds, until a step has been observed

_KEPT: Final = 0.98  # weight of older steps after each step: half of the weight is on the last 34
_DRIFT: Final = 0.1  # fraction of a step's relative deviation that is applied to all older times
_LARGEST_DEVIATION: Final = 2.0  # a step that deviates by a larger factor was disturbed by another program
_SHORTEST: Final = 1e-6  # seconds; a coarse clock can measure 0
_POSITIONS: Final = 1024.0  # tokens; the unit of the features `cached` and `attended`
# The costs of a step in units of a row of a prompt, until they have been measured: reading the weights, a row, reading
# 1024 cached tokens, and attending to 1024 tokens. They differ between models and machines by factors of 3 to 10.
_ASSUMED: Final = np.array([8.0, 1.0, 0.5, 0.1])
# Weights of these assumptions: the squared relative noise of a step, 0.1, over the squared error of the assumption.
_TRUST: Final = np.array([0.0003, 0.03, 0.03, 0.5])
_SMALLEST: Final = 0.02  # lower bound of each cost, relative to the assumption

EMPTY: Final = StepSize(0, 0, 0, 0)


def with_chunk(size: StepSize, rows: int, depth: int) -> StepSize:
    """Return the size of a step after a chunk of a prompt is added to it.

    depth  tokens in the cache before the chunk
    """
    return StepSize(size.answers + 1, size.rows + rows, size.cached + depth, size.attended + rows * depth)


class _Costs:
    """The duration of one kind of step: c0 + c1 rows + c2 cached + c3 attended, as in `drafting.costs`.

    That fit is for steps that differ by a few rows, and minimizes absolute errors. Here, sizes differ by a factor of
    100, so relative errors count. And for a long time, all prompts may be deep or all may be shallow, so the costs stay
    near _ASSUMED times the cost of a row as far as the steps do not contradict (ridge regression).
    """

    def __init__(self) -> None:
        self._products = np.zeros((4, 4))  # sums over the steps of the products of features over seconds
        self._features = np.zeros(4)  # sums over the steps of features over seconds
        self._costs: list[float] = []

    @property
    def known(self) -> bool:
        """True once a step has been observed."""
        return bool(self._costs)

    def observe(self, size: StepSize, seconds: float) -> None:
        """Record the duration of a step."""
        seconds = max(seconds, _SHORTEST)
        if self.known:
            expected = self.of_step(size)
            seconds = min(max(seconds, expected / _LARGEST_DEVIATION), _LARGEST_DEVIATION * expected)
            factor = 1 + _DRIFT * (seconds / expected - 1)
            self._products /= factor**2
            self._features /= factor
        features = np.array(_features(size)) / seconds
        self._products = _KEPT * self._products + np.outer(features, features)
        self._features = _KEPT * self._features + features
        self._costs = self._fitted()

    def of_step(self, size: StepSize) -> float:
        """Return the expected seconds of a step."""
        return sum(cost * feature for cost, feature in zip(self._costs, _features(size), strict=True))

    def _fitted(self) -> list[float]:
        """Return the four costs, all of which are positive."""
        row = _ASSUMED @ self._features / (_ASSUMED @ self._products @ _ASSUMED)  # if all assumptions were right
        products = self._products + np.diag(_TRUST) / row**2
        features = self._features + _TRUST * _ASSUMED / row
        lowest = _SMALLEST * _ASSUMED * row
        costs: NDArray[np.float64] = np.linalg.solve(products, features)
        low = costs < lowest
        while (costs < lowest).any():  # rare: solve for the others, with the bounds instead of those that are too low
            low |= costs < lowest
            costs = lowest.copy()
            costs[~low] = np.linalg.solve(products[~low][:, ~low], (features - products @ (lowest * low))[~low])
        return [float(cost) for cost in costs]


def _features(size: StepSize) -> tuple[float, float, float, float]:
    return 1.0, float(size.rows), size.cached / _POSITIONS, size.attended / _POSITIONS


class StepPredictor:
    """The seconds of a step, learnt separately for steps with and without prompt rows.

    The two kinds differ: additional rows are nearly free in small steps, where reading the weights takes most of the
    time, and proportional to the rows in large ones. Each kind is close to a line in the range of sizes that it has.

    Other threads may ask for predictions while one thread calls `observe`, which takes 25 us.
    """

    def __init__(self) -> None:
        self._answers, self._prompts = _Costs(), _Costs()
        self._n_answer_steps = 0
        self._rows_per_answer = self._tokens_per_answer = 1.0  # in steps without prompts, which can have drafts
        self._most_rows, self._most_attended = _FIRST_ROWS, _FIRST_ATTENDED

    def observe(self, size: StepSize, prompt_rows: int, seconds: float) -> None:
        """Record the duration of a step, of whose rows `prompt_rows` belong to prompts."""
        if prompt_rows:
            self._prompts.observe(size, seconds)
            self._most_rows = max(self._most_rows, 2 * prompt_rows)
            self._most_attended = max(self._most_attended, 2 * size.attended)
            return
        # Consecutive steps without prompts have nearly the same size, so a sample of them teaches as much.
        if self._n_answer_steps % _SAMPLED == 0 or self._n_answer_steps < _FIRST_SAMPLES:
            self._answers.observe(size, seconds)
        self._n_answer_steps += 1

    def observe_tokens(self, size: StepSize, tokens: int) -> None:
        """Record how many tokens a step without prompts has generated."""
        self._rows_per_answer += (1 - _KEPT) * (size.rows / size.answers - self._rows_per_answer)
        self._tokens_per_answer += (1 - _KEPT) * (tokens / size.answers - self._tokens_per_answer)

    def per_token(self, size: StepSize) -> float:
        """Return the expected seconds until each answer has one more token, in steps without prompts.

        size  the answers without drafts. As many of the tokens are assumed to be drafted as in the last steps
        """
        rows, attended = (round(self._rows_per_answer * number) for number in (size.rows, size.attended))
        return self.of_step(StepSize(size.answers, rows, size.cached, attended), 0) / self._tokens_per_answer

    def of_step(self, size: StepSize, prompt_rows: int) -> float:
        """Return the expected seconds of a step, of whose rows `prompt_rows` belong to prompts."""
        first, second = (self._prompts, self._answers) if prompt_rows else (self._answers, self._prompts)
        costs = first if first.known else second
        return costs.of_step(size) if costs.known else _ASSUMED_STEP

    @property
    def row_seconds(self) -> float:
        """The seconds of a prompt token in a large step at the beginning of a prompt."""
        return self.of_step(with_chunk(EMPTY, MOST_ROWS, 0), MOST_ROWS) / MOST_ROWS

    def rows_within(self, seconds: float, size: StepSize, depth: int, least: int = LEAST_ROWS) -> int:
        """Return how many rows of a prompt a step can have that should take at most `seconds`.

        seconds  math.inf if no answer waits for the step
        size     the rest of the step
        depth    tokens in the cache before the rows
        least    the smallest result, whatever the rows take; 0 for a prompt that need not progress in this step
        """
        if math.isinf(seconds):
            return MOST_ROWS
        one, most = (self.of_step(with_chunk(size, rows, depth), rows) for rows in (1, MOST_ROWS))
        row = (most - one) / (MOST_ROWS - 1)
        rows = MOST_ROWS if most <= seconds else 1 + (seconds - one) / row if row > 0 else 0
        known = min(self._most_rows, (self._most_attended - size.attended) / max(depth, 1))
        return max(int(min(rows, known, MOST_ROWS)), least)
