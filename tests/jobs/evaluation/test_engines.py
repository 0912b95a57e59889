"""Tests of comparing two engines, with stand-ins that differ in known ways."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.scripted import ScriptedBackend, scripted_answers
from llmrun.base.errors import LlmrunError
from llmrun.base.types import Batch, Outputs
from llmrun.jobs.evaluation.measuring import (
    ANSWER_TOKENS,
    MOST_DIVERGENCE,
    Agreement,
    agreement_of,
    one_chunk,
    tokens_of,
)

TEXT = "The harbour of the old town"


class Changed(ScriptedBackend):
    """Adds `change` to the logits of each row from position `start` on."""

    def __init__(self, change: NDArray[np.float32], start: int) -> None:
        super().__init__(None)
        self._change, self._start = change, start

    def forward(self, batch: Batch) -> Outputs:
        outputs = super().forward(batch)
        outputs.logits[batch.pos[batch.want != 0] >= self._start] += self._change
        return outputs


def changed(token: int, amount: float, start: int) -> Changed:
    change = np.zeros(260, np.float32)
    change[token] = amount
    return Changed(change, start)


def compared(one: ScriptedBackend, other: ScriptedBackend) -> Agreement:
    return agreement_of(one, other, one_chunk(tokens_of(TEXT, one.tokenizer)))


def test_equal_engines_agree_everywhere() -> None:
    found = compared(ScriptedBackend(None), ScriptedBackend(None))
    assert found.scores.divergence.tolist() == [0] * len(TEXT)  # BOS takes the place of the last letter
    assert (found.in_text, found.in_answer) == (None, None)
    assert 40 < len(found.answer) <= ANSWER_TOKENS
    assert found.agrees


def test_the_first_difference_in_the_text_is_found() -> None:
    found = compared(ScriptedBackend(None), changed(token=65, amount=20, start=9))
    assert found.in_text is not None
    assert (found.in_text.position, found.in_text.tokens[1]) == (9, 65)
    assert 0 < found.in_text.margins[0] < 8
    assert sum(found.in_text.margins) == pytest.approx(20)
    assert found.scores.divergence.mean() > MOST_DIVERGENCE
    assert not found.agrees


def test_the_first_difference_in_the_answer_is_found() -> None:
    length = len(tokens_of(TEXT, ScriptedBackend().tokenizer))
    found = compared(ScriptedBackend(None), changed(token=65, amount=20, start=length + 5))
    assert found.agrees
    assert found.in_text is None
    assert found.in_answer is not None
    assert (found.in_answer.position, found.in_answer.tokens[1]) == (6, 65)
    assert len(found.answer) == 6


def test_an_answer_ends_with_its_last_token() -> None:
    engines = [ScriptedBackend(scripted_answers([("town", " sleeps")])) for _ in range(2)]
    found = compared(*engines)
    assert engines[0].tokenizer.decode(found.answer) == b" sleeps"
    assert found.in_answer is None


def test_a_small_difference_is_not_an_error() -> None:
    found = compared(ScriptedBackend(None), changed(token=65, amount=0.01, start=0))
    assert 0 < found.scores.divergence.mean() < 1e-4
    assert found.agrees


def test_nan_is_an_error() -> None:
    with pytest.raises(LlmrunError, match="the text: the model computed logits that are not finite"):
        compared(ScriptedBackend(None), changed(token=65, amount=float("nan"), start=3))
