"""Compares two engines that run the same model: position by position on a text, and token by token in an answer.

Engines round differently, so their logits are never equal. Where two tokens are almost equally likely, they may choose
different ones. A correct engine differs by less than a quantization does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llmrun.jobs.evaluation.chunks import Chunk
from llmrun.jobs.evaluation.forward import batch_of, logits_in_slices, rows_at_a_time
from llmrun.jobs.evaluation.measuring import check_finite
from llmrun.jobs.evaluation.scores import Scores, scores_of_two

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import Backend

# The largest mean divergence of two correct engines, in nats. Quantizing an 8B model to Q4_K_M costs about 0.03 and to
# Q8_0 0.0014. Our engine and llama.cpp differ by 0.0044 for SmolLM2 135M in Q4_1, because both quantize activations.
MOST_DIVERGENCE: Final = 0.03
ANSWER_TOKENS: Final = 64  # of the greedy answer


class Difference(NamedTuple):
    """The first position at which two engines prefer different tokens.

    position  the position in the text, or the number of equal tokens in the answers
    tokens    the token that each engine prefers
    margins   by how much each engine prefers its token to the other's, as a difference of logits
    """

    position: int
    tokens: tuple[int, int]
    margins: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The result of comparing two engines.

    scores       the scores of each position of the text; the base is the second engine
    in_text      the first position of the text at which the greedy tokens differ, or None
    answer       the greedy tokens after the text on which both engines agree
    in_answer    where the greedy answers differ, or None if they are the same
    """

    scores: Scores
    in_text: Difference | None
    answer: tuple[int, ...]
    in_answer: Difference | None

    @property
    def agrees(self) -> bool:
        """Whether the divergence is as small as that of two correct engines."""
        return float(self.scores.divergence.mean()) <= MOST_DIVERGENCE


def agreement_of(one: Backend, other: Backend, chunk: Chunk) -> Agreement:
    """Compare two engines on a text, and on the greedy answer that follows it.

    Both contexts must have room for the text and ANSWER_TOKENS. Raises the errors of `Backend.forward`, and LlmrunError
    if an engine computes numbers that are not finite.
    """
    backends = one, other
    batch, most = batch_of(chunk.inputs, 0, 0, 0), rows_at_a_time(one.info.vocabulary_size)
    for backend in backends:
        backend.kv.free(0)
    parts: list[Scores] = []
    in_text, done = None, 0
    for ours, theirs in zip(*(logits_in_slices(backend, batch, most) for backend in backends), strict=True):
        scores = scores_of_two(ours, theirs, chunk.following[done : done + len(ours)])
        differing = np.flatnonzero(~scores.agrees)
        if in_text is None and differing.size:
            row = int(differing[0])
            in_text = _difference(done + row, (ours[row], theirs[row]))
        parts.append(scores)
        done += len(ours)
    scores = Scores.joined(parts)
    for backend, surprise in zip(backends, (scores.surprise, scores.base), strict=True):
        check_finite(backend, surprise, "the text")
    return Agreement(scores, in_text, *_answers(backends, len(chunk.inputs), int(chunk.following[-1])))


def _answers(backends: Sequence[Backend], start: int, token: int) -> tuple[tuple[int, ...], Difference | None]:
    """Continue greedily from `token` at position `start`. Return the tokens that agree, and where the next differs."""
    answer: list[int] = []
    while len(answer) < ANSWER_TOKENS:
        batch = batch_of(np.array([token], np.int32), 0, start + len(answer), 0)
        logits = [backend.forward(batch).logits[0] for backend in backends]
        token = int(logits[0].argmax())
        if token != int(logits[1].argmax()):
            return tuple(answer), _difference(len(answer), logits)
        answer.append(token)
        if token in backends[0].tokenizer.end_of_generation:
            break
    return tuple(answer), None


def _difference(position: int, logits: Sequence[NDArray[np.float32]]) -> Difference:
    """Return the difference between two rows of logits, float32[vocabulary]."""
    ours, theirs = (int(row.argmax()) for row in logits)
    margins = float(logits[0][ours] - logits[0][theirs]), float(logits[1][theirs] - logits[1][ours])
    return Difference(position, (ours, theirs), margins)
