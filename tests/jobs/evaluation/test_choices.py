"""Tests of scoring choices, against a model that reads each prompt and choice from the beginning."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.errors import UsageError
from llmrun.jobs.evaluation.choices import Answered, ChoiceScorer, Question, accuracy_of, context_for
from llmrun.jobs.evaluation.measuring import batch_of, tokens_of

texts = st.text("ab ", min_size=1, max_size=6)
questions = st.builds(
    lambda prompt, endings: question(f"Q{prompt}", *endings), texts, st.lists(texts, min_size=2, max_size=7)
)


def question(prompt: str, *endings: str, answer: int = 0, line: int = 1) -> Question:
    return Question(line, prompt, tuple(f" {one}" for one in endings), tuple(map(len, endings)), answer)


def expected_score(prompt: str, ending: str) -> float:
    """Return the sum of log probabilities by the definition, from a pass over the whole text."""
    backend = ScriptedBackend(None)
    tokens = tokens_of(prompt + ending, backend.tokenizer)
    logits = backend.forward(batch_of(tokens, 0, 0, 0)).logits.astype(np.float64)
    start = len(tokens_of(prompt, backend.tokenizer))
    chances = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return float(sum(chances[position - 1, tokens[position]] for position in range(start, len(tokens))))


@pytest.mark.push
@given(st.lists(questions, min_size=1, max_size=4), st.integers(2, 5), st.sampled_from([None, 4]))
def test_scores_are_those_of_each_text_alone(asked: list[Question], sequences: int, checkpoint: int | None) -> None:
    """Neither shared prefixes nor the number of sequences change the scores.

    A recurrent model can only go back to its last checkpoint.
    """
    scorer = ChoiceScorer(ScriptedBackend(None, max_sequences=sequences, checkpoint=checkpoint))
    for one in asked:
        expected = [expected_score(one.prompt, ending) for ending in one.endings]
        assert scorer.answer(one).scores == pytest.approx(expected, rel=1e-9)


def test_what_prompts_share_is_computed_once() -> None:
    backend = ScriptedBackend(None, max_sequences=4)
    scorer = ChoiceScorer(backend)
    examples = "Example: 1 + 1 = 2. " * 20
    scorer.answer(question(f"{examples}2 + 2 =", "4", "5", "22"))
    before = sum(len(batch.tokens) for batch in backend.batches)
    scorer.answer(question(f"{examples}3 + 3 =", "6", "7", "33"))
    assert before > len(examples)
    assert sum(len(batch.tokens) for batch in backend.batches) - before < 30


def test_long_choices_are_unlikely_unless_their_length_counts() -> None:
    found = Answered(question("Q", "no", "certainly not", answer=1), (-3.0, -6.0))
    assert (found.chosen, found.is_right, found.is_right_by_length) == (0, False, True)
    accuracy = accuracy_of([found, Answered(question("Q", "no", "yes"), (-1.0, -9.0))])
    assert (accuracy.accuracy.estimate, accuracy.by_length.estimate) == (0.5, 1.0)
    assert accuracy.accuracy.low < 0.5 < accuracy.accuracy.high


def test_the_context_holds_the_longest_question() -> None:
    asked = [question("é" * 10, "a", "b"), question("e" * 10, "aaaa", "b")]
    assert context_for(asked) == 20 + 4 + 4


def test_a_question_longer_than_the_context_is_named() -> None:
    scorer = ChoiceScorer(ScriptedBackend(None, max_sequences=3, context_size=20))
    with pytest.raises(UsageError, match="line 7: 26 tokens exceed the context of 20"):
        scorer.answer(question("a" * 20, "bbbb", "c", line=7))
