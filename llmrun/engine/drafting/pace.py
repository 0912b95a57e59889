"""Chooses how many draft tokens a step runs, so that even wrong drafts hardly make an answer slower.

The choice depends on the duration of a step of a given size (costs.py) and on how often draft tokens are right
(acceptance.py). Both are estimates, so there is also a limit on the time that an answer may lose to drafts. These
choices affect only the speed, never the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from operator import mul, truediv
from typing import Final

from llmrun.engine.drafting.acceptance import Acceptance, Rates
from llmrun.engine.drafting.base import ANY, Draft, Drafter, Kind
from llmrun.engine.drafting.costs import LARGEST_DEVIATION, StepCosts, StepSize

_PROBE_AFTER: Final = 32  # tokens without a draft until one token is tried again
_MARGIN: Final = 1.02  # smallest expected gain that is worth the risk that the estimates are wrong
_LEAST_RISK: Final = 0.4  # lower bound of the probability that a draft is wrong, whatever the estimates say
_LEAST_PROBABILITY: Final = 0.02  # drafts end before a less probable token, which gains less than its row costs
_PROMISED: Final = 8  # longest draft considered when deciding whether to ask a draft model
# The allowance of an answer, in units of the time that a token takes without drafts.
_FIRST_ALLOWANCE: Final = 0.75
_ALLOWANCE_PER_TOKEN: Final = 0.01
_LARGEST_ALLOWANCE: Final = 16.0
_SMALLEST_ALLOWANCE: Final = -0.3


class AnswerPace:
    """The gains and losses of one answer through drafts.

    acceptance  the rates of its drafts, with those of all answers as a prior
    allowance   the time that its drafts may still lose; every token increases it a little, a right draft token by 1
    undrafted   tokens generated since the last step with a draft
    """

    def __init__(self, assumed: Rates) -> None:
        self.acceptance = Acceptance(assumed)
        self.allowance = _FIRST_ALLOWANCE
        self.undrafted = 0

    def probabilities(self, kinds: Sequence[Kind]) -> Iterator[float]:
        """Yield, for each token of a draft, the probability that it and all draft tokens before it are right."""
        return accumulate(map(self.acceptance.rate, kinds), mul)

    def observe_tokens(self, n_drafted: int, n_right: int, n_accepted: int) -> None:
        """Record a step in which `n_accepted` tokens were generated."""
        self.undrafted = 0 if n_drafted else self.undrafted + n_accepted
        self.allowance = min(self.allowance + _ALLOWANCE_PER_TOKEN * n_accepted + n_right, _LARGEST_ALLOWANCE)

    def observe_loss(self, loss: float) -> None:
        """Record how long the draft of a step and its rows took (`StepPlan.loss`)."""
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

    def may_draft(self, pace: AnswerPace, depth: int) -> bool:
        """Return whether an answer's allowance is enough for the row of a single draft token."""
        return _LEAST_RISK * self._costs.of_rows(self._size, 1, depth) <= self._affordable(pace)

    def best_length(self, kinds: Sequence[Kind], pace: AnswerPace, depth: int) -> tuple[int, float]:
        """Return how many tokens of a draft to run, and the expected tokens per second of the step with them.

        depth  tokens in the cache of the draft's answer

        A draft is shortened if the time that it is expected to lose exceeds the allowance.
        """
        without = best = self._tokens / self._seconds
        length, tokens, risk = 0, self._tokens, 0.0
        for index, probability in enumerate(pace.probabilities(kinds), 1):
            risk = risk or max(1 - probability, _LEAST_RISK)
            tokens += probability
            more = self._costs.of_rows(self._size, index, depth)
            too_risky = risk * more > self._affordable(pace) or index > self._costs.most_drafted
            if too_risky or probability < _LEAST_PROBABILITY:
                break
            speed = tokens / (self._seconds + more)
            if speed > best and speed > _MARGIN * without:
                length, best = index, speed
        return length, best

    def promises(self, drafter: Drafter, speed: float, pace: AnswerPace, depth: int) -> bool:
        """Return whether a drafter whose tokens take time will probably exceed a speed, in tokens per second."""
        cost = self._costs.of_rows(self._size, 1, depth) + drafter.token_seconds
        kind = drafter.name, ANY
        if (1 - pace.acceptance.rate(kind)) * cost > self._affordable(pace):
            return False
        gained = accumulate(pace.probabilities([kind] * _PROMISED), initial=self._tokens)
        spent = accumulate(repeat(cost, _PROMISED), initial=self._seconds)
        best: float = max(map(truediv, gained, spent))
        return best > _MARGIN * speed

    def worth(self, drafter: Drafter, pace: AnswerPace, depth: int, kinds: Sequence[Kind]) -> bool:
        """Return whether a drafter should spend time on another token, after tokens of these kinds.

        The answer is always yes for the first token, because `promises` has decided about it.
        """
        *before, probability = pace.probabilities([*kinds, (drafter.name, ANY)])
        cost = self._costs.of_rows(self._size, 1, depth) + drafter.token_seconds
        tokens, seconds = self._tokens + sum(before), self._seconds + len(before) * cost
        return not kinds or probability * seconds > _MARGIN * cost * tokens

    def may_probe(self, pace: AnswerPace, depth: int, token_seconds: float) -> bool:
        """Return whether one token may be tried although it is not worth it, to find out whether that has changed."""
        cost = self._costs.of_rows(self._size, 1, depth) + token_seconds
        return pace.undrafted >= _PROBE_AFTER and cost <= self._affordable(pace)

    def spend(self, seconds: float) -> None:
        """Count the time that was spent on drafting as part of the step."""
        self._seconds += seconds

    def add(self, draft: Draft, pace: AnswerPace, depth: int) -> None:
        """Count the rows of a draft as part of the step."""
        self._tokens += sum(pace.probabilities(draft.kinds))
        self._seconds += self._costs.of_rows(self._size, len(draft.tokens), depth)

    def loss(self, draft: Draft, share: float, seconds: float) -> float:
        """Return how long one of the drafts and its rows took, in units of the time of a token without drafts.

        share    the draft's share of the tokens of all drafts in the step
        seconds  how long the step took; time beyond LARGEST_DEVIATION is blamed on other programs and not counted
        """
        without = self._token_seconds * self._size.rows
        more = max(min(seconds, LARGEST_DEVIATION * self._seconds) - without, 0.0)
        return (share * more + draft.seconds) / self._token_seconds

    def _affordable(self, pace: AnswerPace) -> float:
        """Return the seconds that an answer may lose."""
        return max(pace.allowance, 0.0) * self._token_seconds
