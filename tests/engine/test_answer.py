"""Tests of the tokens that an answer takes from the rows of a step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from llmrun.backends.scripted import ScriptedTokenizer
from llmrun.engine.answer import Answer
from llmrun.engine.costs import StepCosts
from llmrun.engine.requests import Failed, Request, TokenPrompt
from llmrun.engine.sampler import Sampler
from llmrun.engine.scheduling.scheduler import Speculation
from llmrun.engine.thinking import ThinkingDecoder
from llmrun.options.sampling_params import SamplingParams

LOGITS = np.eye(4, 300, 70, dtype=np.float32)  # the likeliest tokens of the rows are 70, 71, 72 and 73


def begun_answer() -> Answer:
    request = Request(TokenPrompt((65, 66)), sampling=SamplingParams(temperature=0))
    tokenizer, decoder = ScriptedTokenizer(), ThinkingDecoder(())
    speculation = Speculation([], StepCosts()).begin(request)
    return Answer(0, request, tokenizer, [65, 66], decoder, (), 100, 0.0, 0.0, 0, Sampler(), *speculation)


def test_certain_tokens_come_before_the_draw() -> None:
    answer = begun_answer()
    answer.forced.extend([80, 81, 82])
    answer.add_certain(LOGITS[:0], [80, 81, 82])
    answer.accept(LOGITS[:1], (), answer.sampler.sample_rows([answer.rows_to_draw(LOGITS[:1], ())])[0])
    assert answer.tokens == [65, 66, 80, 81, 82, 70]
    assert not answer.forced


@pytest.mark.parametrize("known_before", [True, False])
def test_rows_after_forced_tokens_are_drawn(known_before: bool) -> None:
    """The draft predicts the forced tokens, which become known before the rows are drawn or in the middle of them."""
    answer, draft = begun_answer(), [80, 81, 72]
    answer.add_certain(LOGITS[:0], ())
    if known_before:
        answer.forced.extend([80, 81])
    drawn = answer.rows_to_draw(LOGITS, draft)
    results = answer.sampler.sample_rows([drawn])[0]
    if not known_before:
        answer.forced.extend([80, 81])
    answer.accept(LOGITS, draft, results)
    assert answer.tokens == [65, 66, 80, 81, 72, 73]


def test_draws_stop_where_the_draft_is_wrong() -> None:
    answer, draft = begun_answer(), [70, 99, 72]
    answer.add_certain(LOGITS[:0], ())
    answer.accept(LOGITS, draft, answer.sampler.sample_rows([answer.rows_to_draw(LOGITS, draft)])[0])
    assert answer.tokens == [65, 66, 70, 71]


def test_a_broken_row_fails_after_the_rows_before_it() -> None:
    answer, draft, logits = begun_answer(), [70, 71, 72], LOGITS.copy()
    answer.add_certain(LOGITS[:0], ())
    logits[1, 3] = math.nan
    events = answer.accept(logits, draft, answer.sampler.sample_rows([answer.rows_to_draw(logits, draft)])[0])
    assert answer.tokens == [65, 66, 70]
    assert isinstance(events[-1], Failed)
