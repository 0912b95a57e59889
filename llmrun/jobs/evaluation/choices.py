"""Scores the choices of questions by their probability, as lm-evaluation-harness does for multiple choice.

Questions are read from JSON Lines. Any problem raises a UsageError that names the invalid line.

A choice's score is the sum of the log probabilities of its tokens after the prompt. For the accuracy `acc`, the model's
answer is the choice with the highest score. `acc_norm` first divides the score by the length of the choice in
characters, because longer texts are less probable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llmrun.base.errors import UsageError
from llmrun.base.folders import refuse_utf_16
from llmrun.engine.slots import common_prefix
from llmrun.jobs.bench.intervals import Interval, proportion
from llmrun.jobs.evaluation.measuring import (
    adapted,
    batch_of,
    check_finite,
    joined,
    logits_in_slices,
    rows_at_a_time,
    scores_of,
    tokens_of,
)

if TYPE_CHECKING:
    from llmrun.backends.base import Backend

MOST_CHOICES: Final = 26  # so that every choice has a letter
_MOST_FILE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose answer is one of several texts.

    line     the number of the question's line in the file
    prompt   the text before the answer, without white space at its end
    endings  the texts that may follow the prompt, beginning with the white space between prompt and choice
    lengths  the length of each choice in characters, without the white space before the choice
    answer   the index of the right choice
    """

    line: int
    prompt: str
    endings: tuple[str, ...]
    lengths: tuple[int, ...]
    answer: int


def read_questions(path: Path) -> list[Question]:
    """Read the questions of a file, one JSON object per line. docs/evaluation.md describes the fields."""
    try:
        size = path.stat().st_size
        if size > _MOST_FILE_BYTES:
            raise UsageError(f"--choices: {path}: too large: {size:,} bytes, limit {_MOST_FILE_BYTES:,}")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--choices: {path}: cannot be read: {error.strerror or error}") from error
    refuse_utf_16(data, f"--choices: {path}")
    questions = [_question(line, number, path) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not questions:
        example = '{"prompt": "2 + 2 =", "choices": ["4", "5"], "answer": 0}'
        raise UsageError(f"--choices: {path}: no questions", hint=f"write one JSON object per line: {example}")
    return questions


def _question(line: bytes, number: int, path: Path) -> Question:
    where = f"--choices: {path}: line {number}"
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise UsageError(f"{where}: not a JSON object")
    if ("prompt" in body) == ("question" in body):
        raise UsageError(f'{where}: must have either "prompt" or "question"')
    text = _text(body.get("prompt", body.get("question")), f"{where}: prompt")
    choices = _choices(body, where)
    prompt = text.rstrip()
    between = text[len(prompt) :]
    return Question(
        number,
        prompt,
        tuple(f"{between or ('' if choice[0].isspace() else ' ')}{choice}" for choice in choices),
        tuple(len(choice) for choice in choices),
        _answer(body.get("answer"), choices, where),
    )


def _choices(body: Mapping[str, Any], where: str) -> list[str]:
    choices = body.get("choices")
    if not isinstance(choices, list) or not 2 <= len(choices) <= MOST_CHOICES:
        raise UsageError(f"{where}: choices: must be a list of 2 to {MOST_CHOICES} strings")
    return [_text(choice, f"{where}: choices") for choice in choices]


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: must be a non-empty string")
    return value


def _answer(value: object, choices: list[str], where: str) -> int:
    """Return the index of the right choice, which is specified by its index, by a letter from A, or by its text."""
    letters = [chr(ord("A") + index) for index in range(len(choices))]
    if type(value) is int and 0 <= value < len(choices):
        return value
    if isinstance(value, str) and choices.count(value) == 1:
        return choices.index(value)
    if isinstance(value, str) and value in letters:
        return letters.index(value)
    raise UsageError(
        f"{where}: answer: {value!r:.60} is not an index from 0 to {len(choices) - 1}, a letter from A to "
        f"{letters[-1]}, or one of the choices"
    )


@dataclass(frozen=True, slots=True)
class Ending:
    """A prompt and one of the prompt's endings as tokens.

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
        """True if the choice with the highest score is the answer."""
        return self._best(self.scores) == self.question.answer

    @property
    def is_right_by_length(self) -> bool:
        """True if the choice with the highest score per character is the answer."""
        by_length = [score / length for score, length in zip(self.scores, self.question.lengths, strict=True)]
        return self._best(by_length) == self.question.answer

    @property
    def chosen(self) -> int:
        """The index of the first choice with the highest score."""
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
    """Return the accuracy over a non-empty sequence of answers."""
    return Accuracy(
        proportion([answered.is_right for answered in answers], 1),
        proportion([answered.is_right_by_length for answered in answers], 1),
    )


def context_for(questions: Sequence[Question]) -> int:
    """Return a context size in tokens that is always sufficient for each question with all of its choices.

    A token has at least one byte, apart from BOS and from a space that some tokenizers add.
    """
    return max(
        len(question.prompt.encode()) + sum(len(ending.encode()) + 2 for ending in question.endings)
        for question in questions
    )


class ChoiceScorer:
    """Scores questions on a backend. Sequence 0 contains the prompt, which the other sequences copy.

    The cache keeps the tokens that a prompt shares with the previous prompt, such as the examples of a few-shot prompt.
    """

    def __init__(self, backend: Backend) -> None:
        """Use a backend that has at least two sequences, all of them free."""
        self._backend = backend
        self._most = rows_at_a_time(backend.info.vocabulary_size)
        self._slots = backend.info.max_sequences - 1
        self._prompt: list[int] = []  # the tokens in sequence 0

    def answer(self, question: Question) -> Answered:
        """Score the choices of a question. Raises UsageError for an overlong question, and the errors of `forward`."""
        endings = [self._encoded(question, ending) for ending in question.endings]
        shared = min(ending.start for ending in endings)
        for ending in endings[1:]:
            shared = min(shared, common_prefix(endings[0].tokens, ending.tokens))
        # The last shared token is computed for each choice, because every choice requires that token's logits.
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
        """Fill sequence 0 with exactly these tokens. Only the tokens that the sequence lacks are computed."""
        kept = self._backend.kv.truncate(0, common_prefix(self._prompt, tokens))
        self._prompt = tokens[:kept]  # the contents of sequence 0 if the pass fails
        if kept < len(tokens):
            batch = batch_of(np.array(tokens[kept:], np.int32), 0, kept, len(tokens))
            self._backend.forward(adapted(self._backend, batch))
        self._prompt = tokens

    def _scores(self, endings: Sequence[Ending]) -> Iterator[float]:
        """Return an iterator over the endings' scores, after one pass over the rows that are not in sequence 0."""
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
