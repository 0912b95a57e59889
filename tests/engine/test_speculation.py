"""Tests that answers with drafts equal those without, whatever is drafted, on the scripted backend.

tests/support/engine/speculation_contract.py has the tests that hold for all backends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from llmrun.backends.scripted import ScriptedBackend, scripted_answers
from llmrun.base.types import Batch, FinishReason, Outputs
from llmrun.engine.drafting.lookup import LookupSource
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ChatPrompt, Request, TextPrompt, TokenPrompt
from llmrun.options.sampling_params import SamplingParams
from tests.support.engine.answers import Gathered, answer_all, run_to_the_end
from tests.support.engine.contract import assert_books_agree, forget_all
from tests.support.engine.drafts import (
    PROPOSALS,
    Plain,
    adversary,
    answer_plainly,
    assert_counts_add_up,
    assert_same,
    drafting_engine,
)
from tests.support.engine.scripted_models import DRAWN, GREEDY, noisy, random_prompt, random_request
from tests.support.engine.thinking_models import CHANNEL_TOKENS, CHANNELS, OPENED, SWITCHED, thinking_backend
from tests.support.tiers import examples

pytestmark = pytest.mark.usefixtures("shared_processes")

EVERY = pytest.mark.parametrize("name", PROPOSALS)
SOME = pytest.mark.parametrize("name", ["right", "right, then wrong", "past the end", "mixed"])
SPOKEN = "Naïve 🙂🙃 text, then more text, then 🙂 more."


def speaker(answer: str = SPOKEN) -> ScriptedBackend:
    return ScriptedBackend(scripted_answers([("go", answer)]))


def drafted(backend: ScriptedBackend, name: str, known: Sequence[Plain], **options: int) -> list[Gathered]:
    """Answer the known requests, all at once, with an empty cache and drafts."""
    forget_all(backend)
    engine = drafting_engine(backend, adversary(backend, PROPOSALS[name], known), **options)
    gathered = answer_all(engine, [plain.request for plain in known])
    assert_books_agree(engine)
    return gathered


def check(backend: ScriptedBackend, name: str, *requests: Request, **options: int) -> list[Gathered]:
    """Check that the answers to the requests, all run at once, equal those of each request run alone without drafts."""
    known = []
    for request in requests:
        forget_all(backend)
        known += answer_plainly(Engine(backend), [request])
    found = drafted(backend, name, known, **options)
    for plain, gathered in zip(known, found, strict=True):
        assert_same(gathered, plain.gathered)
    return found


# --- ends


@pytest.mark.push
@EVERY
def test_an_answer_ends_with_its_last_token(name: str) -> None:
    [gathered] = check(speaker(), name, Request(TextPrompt("go"), sampling=GREEDY, logprobs=2))
    assert (gathered.text, gathered.finished.reason) == (SPOKEN, FinishReason.STOP)


@pytest.mark.push
@EVERY
def test_max_tokens_end_an_answer_inside_a_draft(name: str) -> None:
    for most in (1, 2, 16, 17, 18, 33):
        [gathered] = check(speaker(), name, Request(TextPrompt("go"), most, sampling=GREEDY))
        assert len(gathered.tokens) == most


@EVERY
def test_the_context_ends_an_answer_inside_a_draft(name: str) -> None:
    for context in (11, 12, 13, 26, 27):
        backend = noisy(context_size=context)
        [gathered] = check(backend, name, structs.replace(random_request(10, max_tokens=None), sampling=GREEDY))
        assert gathered.finished.context_used == context
        assert gathered.finished.reason is FinishReason.LENGTH


@pytest.mark.push
@SOME
@pytest.mark.parametrize("length", [1, 9])
def test_a_stop_string_ends_an_answer_inside_a_draft(name: str, length: int) -> None:
    for start in range(length, len(SPOKEN) - length + 1, 8):
        stops = (SPOKEN[start : start + length], SPOKEN[start:] + "\0never")
        [gathered] = check(speaker(), name, Request(TextPrompt("go"), None, stops, GREEDY))
        assert gathered.finished.stop == stops[0]


@pytest.mark.push
def test_right_drafts_save_steps_and_wrong_ones_cost_none() -> None:
    request = random_request(10, max_tokens=33)
    steps = {name: check(noisy(), name, request)[0].finished.timings.steps for name in PROPOSALS}
    assert steps["nothing"] == steps["wrong"] == steps["noise"] == 33
    assert steps["right"] == steps["too long"] == 1 + 2  # the prompt's step, then 16 tokens each
    assert steps["one right token"] == 1 + 16
    assert 3 < steps["right, then wrong"] < 33


def test_steps_with_prompts_do_not_count_as_measured() -> None:
    """Their rows cost less than those of a draft, so they would make drafts look cheap."""
    engine = Engine(noisy(), drafts=[LookupSource()])
    engine.submit(random_request(10))
    engine.step()
    assert not engine._speculation._costs.known
    engine.step()
    assert engine._speculation._costs.known


# --- thinking


@pytest.mark.push
@pytest.mark.parametrize("name", ["right, then wrong", "past the end"])
@pytest.mark.parametrize("template", [SWITCHED, OPENED])
def test_thinking_budgets_hold_inside_a_draft(name: str, template: str | None) -> None:
    """The tokens that close a thinking block are drafted too."""
    backend = thinking_backend(template)
    requests = [
        Request(ChatPrompt([{"role": "user", "content": "Is it so?"}]), 80, sampling=GREEDY, think_budget=budget)
        for budget in (None, 0, 1, 13)
    ]
    check(backend, name, *requests)


@pytest.mark.parametrize("name", ["right, then wrong", "mixed"])
def test_channels_are_told_apart_inside_a_draft(name: str) -> None:
    answer = "<|channel|>analysis<|message|>Hm 🙂.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|im_end|>"
    script = [("so?<|end|><|start|>assistant", answer)]
    backend = thinking_backend(CHANNELS, control_tokens=CHANNEL_TOKENS, script=script)
    question = ChatPrompt([{"role": "user", "content": "Is it so?"}])
    [gathered, _] = check(
        backend,
        name,
        Request(question, 120, sampling=GREEDY),
        Request(question, 120, ("es",), GREEDY, think_budget=4),
    )
    assert (gathered.reasoning, gathered.text) == ("Hm 🙂.", "Yes.")


@pytest.mark.parametrize("logprobs", [None, 2])
def test_forced_tokens_take_one_step(logprobs: int | None) -> None:
    """The tokens that close a thinking block are run in one step, which changes nothing else."""
    backend = thinking_backend(OPENED)
    question = ChatPrompt([{"role": "user", "content": "Is it so?"}])
    request = Request(question, 80, sampling=GREEDY, think_budget=5, logprobs=logprobs)
    [together] = answer_all(Engine(backend), [request])
    forget_all(backend)
    [one_by_one] = answer_all(Engine(backend, rows_per_step=1), [request])
    assert_same(together, one_by_one)
    assert together.finished.timings.steps < one_by_one.finished.timings.steps - 5


# --- several requests, small caches, cancellation and errors


@pytest.mark.cover(1)
@EVERY
@pytest.mark.parametrize(
    ("checkpoint", "capacity", "rows_per_step"), [(None, None, 6), (7, None, 256), (None, 60, 256), (16, 90, 1)]
)
@pytest.mark.push
def test_company_and_small_caches_change_nothing(
    name: str, checkpoint: int | None, capacity: int | None, rows_per_step: int
) -> None:
    backend = ScriptedBackend(None, max_sequences=3, context_size=64, capacity=capacity, checkpoint=checkpoint)
    requests = [random_request(8 + 5 * seed, seed, max_tokens=8 + 9 * seed) for seed in range(4)]
    check(backend, name, *requests, rows_per_step=rows_per_step)


def test_a_full_cache_leaves_out_drafts() -> None:
    """Two requests fill the cache exactly, so there is never room for the drafts of their last steps."""
    backend = ScriptedBackend(None, max_sequences=2, context_size=64, capacity=60)
    requests = [random_request(10, seed, max_tokens=21) for seed in range(2)]
    found = check(backend, "wrong", *requests)
    assert max(len(batch.tokens) for batch in backend.batches) > 20
    assert all(gathered.finished.timings.steps == 21 for gathered in found)


@SOME
@pytest.mark.parametrize("checkpoint", [None, 7])
def test_the_next_turn_is_that_of_a_fresh_engine(name: str, checkpoint: int | None) -> None:
    backend = ScriptedBackend(None, checkpoint=checkpoint)
    first = random_request(12, max_tokens=25)
    [plain] = answer_plainly(Engine(backend), [first])
    second = structs.replace(first, prompt=TokenPrompt([*plain.sequence, *random_prompt(9, seed=5).tokens]))
    forget_all(backend)
    [fresh] = answer_plainly(Engine(backend), [second])
    forget_all(backend)
    engine = drafting_engine(backend, adversary(backend, PROPOSALS[name], [plain, fresh]))
    for known in (plain, fresh):
        [gathered] = answer_all(engine, [known.request])
        assert_same(gathered, known.gathered)
        assert_books_agree(engine)
    kept = len(plain.sequence) - 1
    assert gathered.finished.timings.cached_tokens >= (kept if checkpoint is None else kept - kept % checkpoint)


class Poisoned(ScriptedBackend):
    """A backend whose logits are NaN at and after a position, and after each token that is not in `right`."""

    def __init__(self, position: int) -> None:
        super().__init__(None)
        self.position = position
        self.right: list[int] | None = None

    def _logits(self, tokens: list[int]) -> np.typing.NDArray[np.float32]:
        logits = super()._logits(tokens)
        if len(tokens) >= self.position or (self.right is not None and self.right[: len(tokens)] != tokens):
            logits[:] = np.nan
        return logits


@pytest.mark.push
@EVERY
def test_invalid_logits_count_only_where_the_draft_is_right(name: str) -> None:
    for position in (11, 12, 29):
        backend = Poisoned(position)
        [plain] = answer_plainly(Engine(backend), [random_request(10)])
        assert "largest logit is nan" in str(plain.gathered.failed.error)
        assert len(plain.gathered.tokens) == position - 10
        whole = answer_plainly(Engine(noisy()), [plain.request])[0].sequence
        backend.right = whole
        [gathered] = drafted(backend, name, [replace(plain, sequence=whole)])
        assert_same(gathered, plain.gathered)


class Failing(ScriptedBackend):
    """A backend that fails after pass number `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(None, max_sequences=2)
        self.at = at

    def forward(self, batch: Batch) -> Outputs:
        outputs = super().forward(batch)
        if len(self.batches) == self.at:
            raise RuntimeError("a worker died")
        return outputs


@EVERY
def test_a_backend_that_fails_in_a_drafted_step_leaves_the_engine_usable(name: str) -> None:
    requests = [random_request(10, seed) for seed in range(2)]
    known = [answer_plainly(Engine(noisy()), [request])[0] for request in requests]
    backend = Failing(at=3)
    engine = drafting_engine(backend, adversary(backend, PROPOSALS[name], known))
    with pytest.raises(RuntimeError, match="a worker died"):
        answer_all(engine, requests)
    assert engine.idle
    for plain, gathered in zip(known, answer_all(engine, requests), strict=True):
        assert_same(gathered, plain.gathered)


@pytest.mark.push
@SOME
@pytest.mark.parametrize("checkpoint", [None, 7])
def test_cancelling_between_steps_keeps_what_was_right(name: str, checkpoint: int | None) -> None:
    backend = ScriptedBackend(None, max_sequences=2, checkpoint=checkpoint)
    requests = [random_request(10, seed, max_tokens=40) for seed in range(2)]
    known = [answer_plainly(Engine(noisy()), [request])[0] for request in requests]
    for steps in (1, 2, 3):
        forget_all(backend)
        engine = drafting_engine(backend, adversary(backend, PROPOSALS[name], known))
        ids = [engine.submit(request) for request in requests]
        events = [event for _ in range(steps) for event in engine.step()]
        if engine.idle:
            break
        engine.cancel(ids[0])
        backend.cancel()
        cancelled, other = run_to_the_end(engine, ids, events=events)
        assert cancelled.finished.reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
        assert cancelled.tokens == known[0].gathered.tokens[: len(cancelled.tokens)]
        assert_counts_add_up(cancelled.finished.timings)
        assert_same(other, known[1].gathered)
        assert_books_agree(engine)
        [again] = answer_all(engine, requests[:1])
        assert_same(again, known[0].gathered)


# --- lookup


def paced_engine(backend: ScriptedBackend, source: LookupSource) -> Engine:
    return Engine(backend, drafts=[source])


@pytest.mark.push
@pytest.mark.parametrize("make", [drafting_engine, paced_engine])
def test_lookup_changes_no_answer_of_a_conversation(make: Callable[..., Engine]) -> None:
    """The scripted model repeats its prompt, so most tokens that lookup finds are right."""
    plain_engine, engine = Engine(ScriptedBackend()), make(ScriptedBackend(), LookupSource())
    messages: list[dict[str, str]] = []
    for said in (SPOKEN, "More 🙂 of: " + SPOKEN, SPOKEN + " Again."):
        messages.append({"role": "user", "content": said})
        request = Request(ChatPrompt(list(messages)), sampling=DRAWN, logprobs=1)
        [plain] = answer_plainly(plain_engine, [request])
        [gathered] = answer_all(engine, [request])
        assert_same(gathered, plain.gathered)
        messages.append({"role": "assistant", "content": gathered.text})
        if make is drafting_engine:
            assert gathered.finished.timings.tokens_per_step > 3


# --- anything


@st.composite
def requests_of(draw: st.DrawFn, backend: ScriptedBackend, room: int) -> Request:
    """Return a request with random parameters, and with stop strings that occur in its answer without them."""
    prompt = draw(st.lists(st.integers(0, 40), min_size=1, max_size=room - 1))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.8, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 5, 40])),
        top_p=draw(st.sampled_from([0.5, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
        repeat_penalty=draw(st.sampled_from([1.0, 1.4])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.7])),
        repeat_last_n=draw(st.sampled_from([-1, 0, 1, 5, 64])),
        seed=draw(st.integers(0, 3)),
        logit_bias=draw(
            st.dictionaries(st.integers(0, 259), st.sampled_from([-math.inf, -3.0, 3.0, 30.0]), max_size=9)
        ),
    )
    logprobs = draw(st.sampled_from([None, 0, 3]))
    request = Request(TokenPrompt(prompt), draw(st.integers(1, 40)), (), sampling, logprobs)
    if not draw(st.booleans()):
        return request
    forget_all(backend)
    [whole] = answer_all(Engine(backend), [request])
    starts = draw(st.lists(st.integers(0, 60), min_size=1, max_size=3))
    stops = {whole.text[start : start + draw(st.integers(1, 5))] for start in starts} - {""}
    return structs.replace(request, stop=tuple(sorted(stops)))


@pytest.mark.push
@given(data=st.data())
@settings(max_examples=examples(40))
def test_any_drafts_change_no_answer(data: st.DataObject) -> None:
    backend = ScriptedBackend(
        data.draw(st.sampled_from([None, scripted_answers([("\n", SPOKEN)])])),
        max_sequences=data.draw(st.integers(1, 3)),
        context_size=data.draw(st.integers(20, 70)),
        capacity=data.draw(st.sampled_from([None, 40, 75])),
        checkpoint=data.draw(st.sampled_from([None, 1, 5])),
    )
    room = min(backend.info.context_size, backend.kv.capacity)
    requests = [data.draw(requests_of(backend, room)) for _ in range(data.draw(st.integers(1, 4)))]
    name = data.draw(st.sampled_from(sorted(PROPOSALS)))
    check(backend, name, *requests, rows_per_step=data.draw(st.sampled_from([1, 5, 256])))
