"""Decides how many rows of a prompt a step takes, for the scheduler and for predictions of what it will do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from llmrun.engine.costs import EFFICIENT_ROWS, StepCosts

if TYPE_CHECKING:
    from llmrun.engine.costs import StepSize

# The longest step with prompts while answers are in progress: 0.1 s or 2.5 steps without prompts, whichever is longer.
# Longer steps make those answers stutter; shorter steps delay the first tokens of other answers.
_SECONDS_BESIDE_ANSWERS: Final = 0.1
_STEPS_BESIDE_ANSWERS: Final = 2.5
# The longest steps without answers in progress: for a single request, and with several requests. Requests that arrive
# during a step wait until the step ends. At a depth of 30,000 tokens, MOST_ROWS rows of a 1.5B model take 4 to 10 s on
# two cores.
_SECONDS_ALONE: Final = 2.0
_SECONDS_WITHOUT_ANSWERS: Final = 1.0
# Large chunks of a single prompt have a multiple of this number of rows, so that the tiles of kernels are full. With
# several prompts, this rounding would leave a few rows for the next prompt, which would then wait for its next turn.
_TILE_ROWS: Final = 16


class ChunkRule(NamedTuple):
    """The rule for the sizes of chunks. The fields are those of Scheduler."""

    costs: StepCosts
    rows_per_step: int
    by_seconds: bool

    def budget(self, answers: StepSize) -> float:
        """Return the seconds that a step with prompts may take while these answers are in progress."""
        if not answers.answers:
            return _SECONDS_WITHOUT_ANSWERS
        return max(_SECONDS_BESIDE_ANSWERS, _STEPS_BESIDE_ANSWERS * self.costs.of_step(answers))

    def seconds(self, answers: StepSize, *, is_alone: bool) -> float:
        """Return the same as `budget`, or more for the step of a prompt that no other request has to wait for.

        is_alone  True if there is only one prompt and no request waits
        """
        return _SECONDS_ALONE if is_alone and not answers.answers else self.budget(answers)

    def rows(
        self,
        most: int,
        seconds: float,
        size: StepSize,
        depth: int,
        least: int,
        *,
        beside_answers: bool,
        is_single: bool,
        cautious: bool = True,
    ) -> int:
        """Return how many of the next `most` rows of a prompt run in a step of `seconds`.

        size       the rest of the step
        is_single  True if no other prompt is running
        The other parameters are those of `StepCosts.rows_within`.
        """
        if not self.by_seconds:
            return most
        if beside_answers:
            allowed = self.costs.rows_within(seconds, size, depth, least, cautious=cautious)
        else:
            allowed = self.costs.rows_alone(seconds, size, depth, least)
        if allowed >= most:
            return most
        return allowed - allowed % _TILE_ROWS if is_single and allowed >= EFFICIENT_ROWS else allowed
