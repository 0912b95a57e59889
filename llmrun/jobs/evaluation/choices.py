"""Scores the choices of questions by their probability, as lm-evaluation-harness does for multiple choice.

A choice's score is the sum of the log probabilities of its tokens after the prompt. The accuracy `acc` takes the choice
with the highest score. `acc_norm` divides the score by the length of the choice in characters first, because longer
texts are less probable.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.errors import UsageError
from llmrun.engine.prefix_tree import common_prefix
from llmrun.jobs.bench.analysis.intervals import Interval, proportion
from llmrun.jobs.evaluation.chunks import tokens_of
from llmrun.jobs.evaluation.forward import adapted, batch_of, joined, logits_in_slices, rows_at_a_time
from llmrun.jobs.evaluation.measuring import check_finite
from llmrun.jobs.evaluation.scores import scores_of

if TYPE_CHECKING:
    from llmrun.backends.base import Backend
    from llmrun.jobs.evaluation.questions import Question


@dataclass(frozen=True, slots=True)
class Ending:
    """A prompt and one of its endings as tokens.

    start   the index of the first token whose probability counts; at least 1
    """

    tokens: list[int]
    start: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The scores of a question's choices in nats, and the indices of the choices with the best scores."""

    question: Question
    scores: tuple[float, ...]

    @property
    def is_right(self) -> bool:
        """Whether the choice with the highest score is the answer."""
        return self._best(self.scores) == self.question.answer

    @property
    def is_right_by_length(self) -> bool:
        """Whether the choice with the highest score per character is the answer."""
        by_length = [score / length for score, length in zip(self.scores, self.question.lengths, strict=True)]
        return self._best(by_length) == self.question.answer

    @property
    def chosen(self) -> int:
        """The index of the choice with the highest score; of several, the first."""
        return self._best(self.scores)

    @staticmethod
    def _best(scores: Sequence[float]) -> int:
        return int(np.argmax(scores))


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The proportions of questions that a model answers correctly, with intervals. `by_length` is acc_norm."""

    accuracy: Interval
    by_length: Interval


def accuracy_of(answers: Sequence[Answered]) -> Accuracy:
    """Return the accuracy of at least one answer."""
    return Accuracy(
        proportion([answered.is_right for answered in answers], 1),
        proportion([answered.is_right_by_length for answered in answers], 1),
    )


def context_for(questions: Sequence[Question]) -> int:
    """Return a context size in tokens that surely holds each question with all of its choices.

    A token has at least one byte, apart from BOS and a space that some tokenizers add.
    """
    return max(
        len(question.prompt.encode()) + sum(len(ending.encode()) + 2 for ending in question.endings)
        for question in questions
    )


class ChoiceScorer:
    """Scores questions on a backend. Sequence 0 holds the prompt, which the others copy.

    A prompt also keeps the tokens that it shares with the previous one, such as the examples of a few-shot prompt.
    """

    def __init__(self, backend: Backend) -> None:
        """Use a backend with at least two sequences, which are free."""
        self._backend = backend
        self._most = rows_at_a_time(backend.info.vocabulary_size)
        self._slots = backend.info.max_sequences - 1
        self._prompt: list[int] = []  # the tokens of sequence 0

    def answer(self, question: Question) -> Answered:
        """Score the choices of a question. Raises UsageError if it is too long, and the errors of `forward`."""
        endings = [self._encoded(question, ending) for ending in question.endings]
        shared = min(ending.start for ending in endings)
        for ending in endings[1:]:
            shared = min(shared, common_prefix(endings[0].tokens, ending.tokens))
        # The last shared token is computed for each choice, because its logits are needed for all of them.
        self._hold(endings[0].tokens[: max(0, shared - 1)])
        scores: list[float] = []
        for first in range(0, len(endings), self._slots):
            scores += self._scores(endings[first : first + self._slots])
        check_finite(self._backend, np.array(scores), f"line {question.line} of the questions")
        return Answered(question, tuple(scores))

    def _encoded(self, question: Question, ending: str) -> Ending:
        tokenizer = self._backend.tokenizer
        tokens = tokens_of(question.prompt + ending, tokenizer).tolist()
        limit = self._backend.info.context_size
        if len(tokens) > limit:
            raise UsageError(
                f"--choices: line {question.line}: {len(tokens):,} tokens exceed the context of {limit:,}",
                hint="shorten the question, or raise --context",
            )
        start = min(len(tokens_of(question.prompt, tokenizer)), len(tokens) - 1)
        return Ending(tokens, max(1, start))

    def _hold(self, tokens: list[int]) -> None:
        """Make sequence 0 hold exactly these tokens, and compute only those that it does not have."""
        kept = self._backend.kv.truncate(0, common_prefix(self._prompt, tokens))
        self._prompt = tokens[:kept]  # if the pass fails
        if kept < len(tokens):
            batch = batch_of(np.array(tokens[kept:], np.int32), 0, kept, len(tokens))
            self._backend.forward(adapted(self._backend, batch))
        self._prompt = tokens

    def _scores(self, endings: Sequence[Ending]) -> Iterator[float]:
        """Return the score of each ending, after one pass over the rows that are not in sequence 0."""
        kv = self._backend.kv
        kept = [kv.copy(0, number, len(self._prompt)) for number, _ in enumerate(endings, 1)]
        batch = joined(
            [
                batch_of(np.array(ending.tokens[begun:-1], np.int32), number, begun, ending.start - 1)
                for number, (ending, begun) in enumerate(zip(endings, kept, strict=True), 1)
            ]
        )
        following = np.array([token for ending in endings for token in ending.tokens[ending.start :]], np.int32)
        surprises, done = [], 0
        for logits in logits_in_slices(self._backend, batch, self._most):
            surprises.append(scores_of(logits, following[done : done + len(logits)]).surprise)
            done += len(logits)
        for number, _ in enumerate(endings, 1):
            kv.free(number)
        ends = np.cumsum([len(ending.tokens) - ending.start for ending in endings])
        return (-float(part.sum()) for part in np.split(np.concatenate(surprises), ends[:-1]))
