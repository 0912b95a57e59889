"""Tests of drafts by a model's own head: which hidden states it is given, with a scripted model as its own head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray

from llmrun.backends.base import OpenOptions
from llmrun.backends.scripted import ScriptedBackend, ScriptedCache, scripted_answers
from llmrun.base.errors import BackendCrashed
from llmrun.base.types import HIDDEN, LOGITS, Batch, Outputs
from llmrun.engine.drafting.base import Kind
from llmrun.engine.drafting.head import HeadSource
from llmrun.engine.drafting.lookup import LookupSource
from llmrun.engine.drafting.sources import open_sources, uses_draft_head
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TextPrompt, TokenPrompt
from tests.support.engine.answers import Gathered, answer_all
from tests.support.engine.eager_speculation import speculate_eagerly
from tests.support.engine.scripted_models import GREEDY, noisy, random_request

ANSWER = "a sentence in which hardly anything is repeated, so that lookup is of little use: 0123456789"
OWN, TRUE, NONE = "own", "true", "none"  # whose hidden state a row was given: the head's, the model's or nobody's


class ScriptedHead:
    """A head that predicts as `model` does, which must be another instance of the target model.

    states   for each sequence, whose hidden state each of its rows was given
    skipped  the tokens before those that the head gets

    Its own hidden states are -1. All other states that it is given are compared with those of the model.
    """

    def __init__(self, model: ScriptedBackend) -> None:
        self._model = model
        self.info, self.kv = model.info, model.kv
        self.drafted_tokens = model.info.vocabulary_size
        self.states: list[list[str]] = [[] for _ in range(model.info.max_sequences)]
        self.passes: list[list[str]] = []
        self.skipped: Sequence[int] = ()

    def forward(self, batch: Batch, hidden: NDArray[np.float32]) -> Outputs:
        assert len(hidden) == len(batch.tokens) <= 256
        outputs = self._model.forward(replace(batch, want=np.bitwise_or(batch.want, np.uint8(HIDDEN))))
        self.passes.append([])
        for seq, position, state in zip(batch.seq.tolist(), batch.pos.tolist(), hidden, strict=True):
            whose = self._whose(seq, position, state)
            self.states[seq] = [*self.states[seq][:position], whose]
            self.passes[-1].append(whose)
        wanted = batch.want & HIDDEN != 0
        return Outputs(outputs.logits, np.full_like(outputs.hidden[wanted], -1))

    def _whose(self, seq: int, position: int, state: NDArray[np.float32]) -> str:
        if (state == -1).all():
            return OWN
        if not state.any():
            return NONE
        before = [*self.skipped, *self.kv.sequences[seq][:position]]
        expected = np.bincount(np.array(before) % len(state), minlength=len(state))
        np.testing.assert_array_equal(state, expected)
        return TRUE

    def cancel(self) -> None:
        self._model.cancel()


def says(answer: str) -> ScriptedBackend:
    return ScriptedBackend(scripted_answers([("go", answer)]))


def always(kinds: Sequence[Kind]) -> bool:
    return True


def answers(target: ScriptedBackend, head: ScriptedHead | None, requests: Sequence[Request]) -> list[Gathered]:
    with Engine(target, share_prefixes=True) as engine:
        if head is not None:
            speculate_eagerly(engine, [HeadSource(head)])
        gathered = answer_all(engine, requests)
        assert engine.draft_error == ""
        return gathered


def hidden_rows(target: ScriptedBackend) -> int:
    return sum(int(np.count_nonzero(batch.want & HIDDEN)) for batch in target.batches)


# --- drafts


def test_a_right_head_is_accepted() -> None:
    head = ScriptedHead(says(ANSWER))
    [gathered] = answers(says(ANSWER), head, [Request(TextPrompt("go"), None, (), GREEDY)])
    assert gathered.text == ANSWER
    assert gathered.finished.timings.steps == 1 + math.ceil(len(ANSWER) / 16)  # the prompt's step, then 16 tokens each


@pytest.mark.push
def test_a_wrong_head_changes_nothing() -> None:
    [gathered] = answers(says(ANSWER), ScriptedHead(says(ANSWER[::-1])), [Request(TextPrompt("go"), None, (), GREEDY)])
    assert gathered.text == ANSWER
    assert gathered.finished.timings.accepted_tokens < gathered.finished.timings.drafted_tokens


@pytest.mark.night
@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 300), min_size=1, max_size=3),
    seeds=st.integers(0, 5),
    together=st.integers(1, 3),
    right=st.booleans(),
)
def test_answers_stay_and_states_are_those_of_the_model(
    lengths: list[int], seeds: int, together: int, right: bool
) -> None:
    """Rows of the head's own states are computed again after each step, so only the last ones have any."""
    requests = [random_request(n, seed=n + seeds, max_tokens=30) for n in lengths]
    alone = [answers(noisy(), None, [request])[0].tokens for request in requests]
    head = ScriptedHead(ScriptedBackend(None if right else lambda tokens: 97, max_sequences=together))
    found = answers(noisy(max_sequences=together), head, requests)
    assert [gathered.tokens for gathered in found] == alone
    if right:
        assert all(one.finished.timings.accepted_tokens == one.finished.timings.drafted_tokens for one in found)


# --- states


def test_only_the_first_token_lacks_its_state() -> None:
    """The states of a long prompt are used as soon as there are enough for a pass."""
    head = ScriptedHead(noisy())
    answers(noisy(), head, [random_request(700, max_tokens=30)])
    assert [len(states) for states in head.passes[:2]] == [256, 256]
    assert head.states[0][:700] == [NONE, *[TRUE] * 699]
    assert NONE not in head.states[0][1:]


def test_tokens_of_a_draft_are_run_again_with_their_true_states() -> None:
    head = ScriptedHead(noisy())
    drafter = HeadSource(head).drafter(Request(TokenPrompt([1, 2, 3]), sampling=GREEDY))
    drafter.observe_hidden([1, 2, 3], 0, states_of([1, 2, 3]))
    draft = drafter.draft([1, 2, 3], 4, always).tokens
    assert head.passes == [[NONE, TRUE], [TRUE], [OWN], [OWN], [OWN]]
    known = [1, 2, 3, *draft[:2], (draft[2] + 1) % 256]
    drafter.observe_hidden([1, 2, 3], 2, states_of([1, 2, 3, *draft])[2:])
    drafter.draft(known, 1, always)
    assert head.passes[5:] == [[TRUE, TRUE, TRUE]]
    assert head.kv.sequences[0] == known


def test_a_repeated_draft_is_the_same() -> None:
    """A step that was cancelled leaves the answer as it was."""
    drafter = HeadSource(ScriptedHead(noisy())).drafter(Request(TokenPrompt([1, 2, 3]), sampling=GREEDY))
    drafter.observe_hidden([1, 2, 3], 0, states_of([1, 2, 3]))
    first = drafter.draft([1, 2, 3], 4, always).tokens
    assert drafter.draft([1, 2, 3], 4, always).tokens == first


def test_cached_prefixes_are_run_without_states_if_the_head_lacks_them() -> None:
    head, first = ScriptedHead(noisy()), random_request(100)
    assert isinstance(first.prompt, TokenPrompt)
    longer = structs.replace(first, prompt=TokenPrompt([*first.prompt.tokens, 1, 2, 3]))
    with Engine(noisy()) as engine:
        answer_all(engine, [first])
        speculate_eagerly(engine, [HeadSource(head)])
        [found] = answer_all(engine, [longer])
    cached = found.finished.timings.cached_tokens
    assert cached >= 100
    assert head.passes[0][: cached + 1] == [NONE] * (cached + 1)
    assert found.tokens == answers(noisy(), None, [longer])[0].tokens


def counting() -> ScriptedBackend:
    """Return a model whose predictions depend on the last token only, but whose hidden states depend on all."""
    return ScriptedBackend(lambda text: 100 + (ord(text[-1]) + 1) % 100)


@pytest.mark.push
def test_heads_get_only_the_end_of_long_prefixes_without_states() -> None:
    """The next turns continue from there."""
    head, first = ScriptedHead(counting()), random_request(900)
    assert isinstance(first.prompt, TokenPrompt)
    longer = structs.replace(first, prompt=TokenPrompt([*first.prompt.tokens, 1, 2, 3]), max_tokens=40)
    with Engine(counting()) as engine:
        [expected] = answer_all(engine, [longer])
        engine.forget()
        answer_all(engine, [first])
        speculate_eagerly(engine, [HeadSource(head)])
        cached = first.prompt.tokens[:900]
        head.skipped = cached[:-512]
        [found] = answer_all(engine, [longer])
    timings = found.finished.timings
    assert timings.cached_tokens == 900
    assert head.states[0][:513] == [NONE] * 513
    assert set(head.states[0][513:-16]) == {TRUE}
    assert found.tokens == expected.tokens
    assert timings.accepted_tokens == timings.drafted_tokens > 30


def test_the_next_turn_reuses_the_cache_of_the_head() -> None:
    target, head, first = noisy(), ScriptedHead(noisy()), random_request(400)
    with Engine(target) as engine:
        speculate_eagerly(engine, [HeadSource(head)])
        [found] = answer_all(engine, [first])
        assert isinstance(first.prompt, TokenPrompt)
        history = [*first.prompt.tokens, *found.tokens]
        n = len(head.passes)
        answer_all(engine, [structs.replace(first, prompt=TokenPrompt([*history, 1, 2, 3]))])
    assert len(head.passes[n]) <= 20
    assert head.states[0][:400] == [NONE, *[TRUE] * 399]


def test_states_are_requested_only_while_a_head_drafts() -> None:
    plain, drafted = noisy(), noisy()
    answers(plain, None, [random_request(50)])
    assert hidden_rows(plain) == 0
    answers(drafted, ScriptedHead(noisy()), [random_request(50)])
    assert hidden_rows(drafted) == sum(len(batch.tokens) for batch in drafted.batches)


# --- trouble


class Failing(ScriptedHead):
    """Raises an error in each pass after the first three."""

    def forward(self, batch: Batch, hidden: NDArray[np.float32]) -> Outputs:
        if len(self.passes) >= 3:
            raise BackendCrashed("out of order")
        return super().forward(batch, hidden)


def test_an_error_of_the_head_is_reported_and_harmless() -> None:
    target = says(ANSWER)
    with Engine(target) as engine:
        speculate_eagerly(engine, [HeadSource(Failing(says(ANSWER)))])
        for _ in range(2):
            [gathered] = answer_all(engine, [Request(TextPrompt("go"), None, (), GREEDY)])
            assert gathered.text == ANSWER
        assert engine.draft_error == "draft head stopped: scripted: out of order"
    last = target.batches[-1]
    assert not (last.want & HIDDEN).any()


def test_cancelling_stops_a_draft() -> None:
    source = HeadSource(ScriptedHead(noisy()))
    drafter = source.drafter(Request(TokenPrompt([1, 2, 3]), sampling=GREEDY))
    source.cancel()
    assert drafter.draft([1, 2, 3], 4, always).tokens == ()
    assert len(drafter.draft([1, 2, 3], 4, always).tokens) == 4
    assert source.error == ""


def test_tokens_beyond_the_drafted_ones_do_no_harm() -> None:
    """The head has logits of the first 64 tokens only, and the prompt has others, with a penalty."""

    class Trimmed(ScriptedHead):
        def forward(self, batch: Batch, hidden: NDArray[np.float32]) -> Outputs:
            outputs = super().forward(batch, hidden)
            return Outputs(outputs.logits[:, :64], outputs.hidden)

    head = Trimmed(noisy())
    head.drafted_tokens = 64
    sampling = replace(GREEDY, repeat_penalty=1.5, logit_bias={200: 3.0, 5: -1.0})
    drafter = HeadSource(head).drafter(Request(TokenPrompt([1, 200, 3]), sampling=sampling))
    tokens = drafter.draft([1, 200, 3], 8, always).tokens
    assert len(tokens) == 8
    assert max(tokens) < 64


# --- sources


class WithHead(ScriptedBackend):
    """A scripted model with a head."""

    @property
    def draft_head(self) -> ScriptedHead:  # type: ignore[override]
        return ScriptedHead(noisy())


@pytest.mark.parametrize(
    ("speculate", "draft", "expected"),
    [(None, None, True), (True, None, True), (False, None, False), (None, Path("draft.gguf"), False)],
)
def test_the_head_is_loaded_unless_something_else_was_asked(
    speculate: bool | None, draft: Path | None, expected: bool
) -> None:
    assert uses_draft_head(speculate, draft) == expected


def test_the_head_drafts_after_lookup() -> None:
    options = OpenOptions()
    assert [type(source) for source in open_sources(None, None, options, WithHead(None))] == [LookupSource, HeadSource]
    assert [type(source) for source in open_sources(None, None, options, noisy())] == [LookupSource]
    assert open_sources(False, None, options, WithHead(None)) == []


def test_the_memory_of_the_heads_cache_is_returned_too() -> None:
    with mock.patch.object(ScriptedCache, "return_free_memory") as returned, Engine(WithHead(None)) as engine:
        engine.release_idle_memory()
    assert returned.call_count == 2


def states_of(tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the hidden states of the scripted model."""
    model, n = noisy(), len(tokens)
    positions = np.arange(n, dtype=np.int32)
    batch = Batch(np.array(tokens, np.int32), np.zeros(n, np.int32), positions, np.full(n, LOGITS | HIDDEN, np.uint8))
    return model.forward(batch).hidden
