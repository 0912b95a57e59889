"""Chooses how many draft tokens a step runs, so that even wrong drafts hardly make an answer slower.

The choice depends on the duration of a step of a given size (`StepCosts`) and on how often draft tokens of each kind
are right (`Acceptance`). Both values are estimates, so there is also a limit on the time that an answer may lose to
drafts. Drafts affect only the speed of answers, never the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import mul, truediv
from typing import Final

from llmrun.engine.costs import LARGEST_DEVIATION, StepCosts, StepSize
from llmrun.engine.drafting.base import ANY, Draft, Drafter, Kind

_KEPT: Final = 0.98  # weight of older counts of a kind after each new count
_ASSUMED_COUNT: Final = 4.0  # weight of the assumed rates, in draft tokens


# Returns the probability that a token of a kind is right if all draft tokens before it are right.
Rates = Callable[[Kind], float]


class Acceptance:
    """The fraction of right draft tokens of each kind, with a prior that counts as much as _ASSUMED_COUNT tokens.

    An engine counts the tokens of all answers. Each answer also has its own counts, with the engine's rates as their
    prior. If a request to tell a story follows a request to copy a text, the rates therefore fall after a few errors.
    """

    def __init__(self, assumed: Rates) -> None:
        self._assumed = assumed
        self._right: dict[Kind, float] = {}
        self._tried: dict[Kind, float] = {}

    def observe(self, draft: Draft, n_right: int, *, found_wrong: bool) -> None:
        """Record that the first `n_right` tokens of a draft were right, and whether the next one was wrong."""
        for index, kind in enumerate(draft.kinds[: n_right + found_wrong]):
            for counted in (kind, (kind[0], ANY)):
                self._right[counted] = self._right.get(counted, 0.0) * _KEPT + (index < n_right)
                self._tried[counted] = self._tried.get(counted, 0.0) * _KEPT + 1

    def rate(self, kind: Kind) -> float:
        right = self._right.get(kind, 0.0) + _ASSUMED_COUNT * self._assumed(kind)
        return right / (self._tried.get(kind, 0.0) + _ASSUMED_COUNT)


_ASK_AFTER: Final = 32  # tokens until a draft model that was not worth its time is asked again
_MARGIN: Final = 1.02  # smallest expected gain that is worth the risk that the estimates are wrong
_LEAST_RISK: Final = 0.4  # lower bound of the probability that a draft is wrong, regardless of the estimates
_LEAST_PROBABILITY: Final = 0.02  # drafts end before a less probable token, which gains less than its row costs
_PROMISED: Final = 8  # longest draft considered when deciding whether to ask a draft model
# The allowance of an answer, in units of the time that a token takes without drafts.
_FIRST_ALLOWANCE: Final = 0.75
_ALLOWANCE_PER_TOKEN: Final = 0.01
_ALLOWANCE_PER_MISSED: Final = 0.25  # added for a right token that was found but not run
_LARGEST_ALLOWANCE: Final = 16.0
_SMALLEST_ALLOWANCE: Final = -0.3


class AnswerPace:
    """The gains and losses of one answer through drafts.

    acceptance  the rates of its drafts, with those of all answers as a prior
    allowance   the time that its drafts may still lose; tokens increase it a little, right draft tokens more
    unasked     tokens generated since a draft model was last asked
    """

    def __init__(self, assumed: Rates) -> None:
        self.acceptance = Acceptance(assumed)
        self.allowance = _FIRST_ALLOWANCE
        self.unasked = 0

    def probabilities(self, kinds: Sequence[Kind]) -> Iterator[float]:
        """Yield, for each token of a draft, the probability that the draft is right up to and including this token."""
        rates = {kind: self.acceptance.rate(kind) for kind in set(kinds)}
        return accumulate(map(rates.__getitem__, kinds), mul)

    def observe_tokens(self, n_accepted: int, n_right: int, n_missed: int) -> None:
        """Record a step in which `n_accepted` tokens were generated.

        n_right   right draft tokens that were run
        n_missed  right draft tokens that were found but not run, 0 or 1
        """
        self.unasked += n_accepted
        gained = _ALLOWANCE_PER_TOKEN * n_accepted + n_right + _ALLOWANCE_PER_MISSED * n_missed
        self.allowance = min(self.allowance + gained, _LARGEST_ALLOWANCE)

    def observe_loss(self, loss: float) -> None:
        """Record how long a draft and its rows in a step took (`StepPlan.loss`)."""
        self.allowance = max(self.allowance - loss, _SMALLEST_ALLOWANCE)


class StepPlan:
    """Adds drafts to one step as long as they increase its expected tokens per second.

    size  the size of the step without drafts, in which each row yields a token
    """

    def __init__(self, costs: StepCosts, size: StepSize) -> None:
        self._costs = costs
        self._size = size
        self._tokens = float(size.rows)
        self._seconds = costs.of_step(size)
        self._token_seconds = self._seconds / size.rows  # the unit of the allowance

    def best_length(self, kinds: Sequence[Kind], pace: AnswerPace, depth: int) -> tuple[int, float]:
        """Return how many tokens of a draft to run, and the expected tokens per second of the resulting step.

        depth  tokens in the cache of the draft's answer

        A draft is shortened if the time that it is expected to lose exceeds the allowance.
        """
        without = best = self._tokens / self._seconds
        row, affordable = self._costs.of_row(self._size, depth), self._affordable(pace)
        length, tokens, risk = 0, self._tokens, 0.0
        for index, probability in enumerate(pace.probabilities(kinds[: self._costs.most_drafted]), 1):
            risk = risk or max(1 - probability, _LEAST_RISK)
            tokens += probability
            more = index * row
            if risk * more > affordable or probability < _LEAST_PROBABILITY:
                break
            speed = tokens / (self._seconds + more)
            if speed > best and speed > _MARGIN * without:
                length, best = index, speed
        return length, best

    def promises(self, drafter: Drafter, speed: float, pace: AnswerPace, depth: int) -> bool:
        """Return whether a drafter whose tokens take time will probably exceed a speed, in tokens per second."""
        cost = self._costs.of_row(self._size, depth) + drafter.token_seconds
        kind = drafter.name, ANY
        if (1 - pace.acceptance.rate(kind)) * cost > self._affordable(pace):
            return False
        gained = accumulate(pace.probabilities([kind] * _PROMISED), initial=self._tokens)
        spent = accumulate(repeat(cost, _PROMISED), initial=self._seconds)
        best: float = max(map(truediv, gained, spent))
        return best > _MARGIN * speed

    def worth(self, drafter: Drafter, pace: AnswerPace, depth: int, kinds: Sequence[Kind]) -> bool:
        """Return whether a drafter should spend time on another token, after tokens of these kinds.

        The result is always True for the first token, because `promises` has already decided about this token.
        """
        *before, probability = pace.probabilities([*kinds, (drafter.name, ANY)])
        cost = self._costs.of_row(self._size, depth) + drafter.token_seconds
        tokens, seconds = self._tokens + sum(before), self._seconds + len(before) * cost
        return not kinds or probability * seconds > _MARGIN * cost * tokens

    def may_ask(self, drafter: Drafter, pace: AnswerPace) -> bool:
        """Return whether to ask a drafter again even though its last drafts were not worth the time."""
        return pace.unasked >= _ASK_AFTER and drafter.token_seconds <= self._affordable(pace)

    def spend(self, seconds: float) -> None:
        """Count the time that was spent on drafting as part of the step."""
        self._seconds += seconds

    def add(self, draft: Draft, pace: AnswerPace, depth: int) -> None:
        """Count the rows of a draft as part of the step."""
        self._tokens += sum(pace.probabilities(draft.kinds))
        self._seconds += len(draft.tokens) * self._costs.of_row(self._size, depth)

    def loss(self, draft: Draft, share: float, seconds: float) -> float:
        """Return how long one of the drafts and its rows took, in units of the time of a token without drafts.

        share    the draft's share of the tokens of all drafts in the step
        seconds  how long the step took; time beyond LARGEST_DEVIATION is blamed on other programs and not counted
        """
        without = self._token_seconds * self._size.rows
        more = max(min(seconds, LARGEST_DEVIATION * self._seconds) - without, 0.0)
        return (share * more + draft.seconds) / self._token_seconds

    def _affordable(self, pace: AnswerPace) -> float:
        """Return the seconds that an answer may lose to drafts."""
        return max(pace.allowance, 0.0) * self._token_seconds
