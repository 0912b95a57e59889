"""Tests of how answers end, what is computed of a prompt and when, and what is refused.

The scripted backend checks every batch it is given. Tests that hold for all backends are in test_engine_backends.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from msgspec import structs

from llmrun.backends.scripted import IM_END, ScriptedBackend, scripted_answers
from llmrun.base.errors import ContextExceeded, UsageError
from llmrun.base.types import Batch, FinishReason, Outputs
from llmrun.engine.costs import EMPTY
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ChatPrompt, Request, TextDelta, TextPrompt, TokenPrompt
from llmrun.options.sampling_params import SamplingParams
from tests.support.engine.answers import Gathered, answer_all
from tests.support.engine.scripted_models import GREEDY, noisy, random_request


def says(answer: str, *, stop: tuple[str, ...] = (), max_tokens: int | None = None) -> Gathered:
    engine = Engine(ScriptedBackend(scripted_answers([("go", answer)])))
    [gathered] = answer_all(engine, [Request(TextPrompt("go"), max_tokens, stop, GREEDY)])
    return gathered


# --- how an answer ends


def test_an_answer_ends_with_the_end_of_generation_token() -> None:
    gathered = says("hello 🙂")
    assert gathered.text == "hello 🙂"
    assert gathered.finished.reason is FinishReason.STOP
    assert gathered.finished.stop is None
    assert IM_END not in gathered.tokens
    assert gathered.finished.timings.generated_tokens == len("hello 🙂".encode()) + 1


def test_an_answer_ends_at_max_tokens() -> None:
    gathered = says("hello", max_tokens=3)
    assert (gathered.text, gathered.finished.reason) == ("hel", FinishReason.LENGTH)
    assert gathered.finished.timings.generated_tokens == 3


def test_a_cut_character_is_replaced_at_the_end() -> None:
    assert says("a🙂", max_tokens=3).text == "a�"


def test_tokens_that_the_model_is_never_to_write_are_not_drawn_whatever_a_request_says() -> None:
    backend = ScriptedBackend(scripted_answers([("go", "hello")]))
    backend.info = replace(backend.info, suppressed_tokens=(ord("l"),))
    for bias in ({}, {ord("l"): 50.0}):
        request = Request(TextPrompt("go"), 8, sampling=replace(GREEDY, logit_bias=bias))
        [gathered] = answer_all(Engine(backend), [request])
        assert gathered.tokens[:2] == [ord("h"), ord("e")]
        assert ord("l") not in gathered.tokens


def test_an_answer_ends_before_a_stop_string() -> None:
    gathered = says("one two three", stop=("thr", " two th"))
    assert (gathered.text, gathered.finished.reason, gathered.finished.stop) == ("one", FinishReason.STOP, " two th")


def test_what_might_have_become_a_stop_string_is_released_at_the_end() -> None:
    gathered = says("one tw", stop=("two",))
    assert (gathered.text, gathered.finished.reason) == ("one tw", FinishReason.STOP)
    assert says("one two", stop=("two!",), max_tokens=7).text == "one two"


def test_an_answer_ends_when_the_context_is_full() -> None:
    engine = Engine(noisy(context_size=30))
    [gathered] = answer_all(engine, [random_request(20, max_tokens=None)])
    assert gathered.finished.reason is FinishReason.LENGTH
    assert gathered.finished.context_used == 30
    assert len(gathered.tokens) == 10


@pytest.mark.push
def test_the_tokens_of_a_prompt_are_counted_without_running_it() -> None:
    backend = ScriptedBackend(scripted_answers([("go", "yes")]), context_size=20)
    engine = Engine(backend)
    assert engine.prompt_tokens(Request(TokenPrompt(list(range(30))))) == 30
    chat = Request(ChatPrompt([{"role": "user", "content": "go"}]), 1, (), GREEDY)
    counted = engine.prompt_tokens(chat)
    assert backend.batches == []
    roomy = Engine(ScriptedBackend(scripted_answers([("go", "yes")])))
    [gathered] = answer_all(roomy, [chat])
    assert gathered.finished.timings.prompt_tokens == counted


@pytest.mark.parametrize("length", [30, 31, 500])
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(length: int) -> None:
    with pytest.raises(ContextExceeded, match=rf"^prompt does not fit in the context: {length} tokens.*limit of 30"):
        Engine(noisy(context_size=30)).submit(random_request(length))


def test_the_longest_prompt_that_fits_gets_one_token() -> None:
    [gathered] = answer_all(Engine(noisy(context_size=30)), [random_request(29, max_tokens=None)])
    assert len(gathered.tokens) == 1


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Request(TextPrompt("a"), max_tokens=-1), "max_tokens: -1"),
        (Request(TextPrompt("a"), stop=("x", "")), "stop"),
        (Request(TextPrompt("a"), logprobs=-1), "logprobs: -1"),
        (Request(TextPrompt("a"), logprobs=261), "logprobs: 261"),
        (Request(TokenPrompt([])), "empty prompt"),
        (Request(TokenPrompt([5, 260])), "id 260"),
        (Request(TokenPrompt([-1])), "id -1"),
        (Request(TextPrompt("a"), sampling=SamplingParams(logit_bias={260: 1})), "logit_bias: id 260"),
        (Request(TextPrompt("a"), sampling=SamplingParams(logit_bias={2: math.nan})), "logit_bias of token 2"),
        (Request(TextPrompt("a"), sampling=SamplingParams(temperature=math.nan)), "temperature: nan"),
        (Request(TextPrompt("a"), sampling=SamplingParams(temperature=-1)), "temperature: -1"),
        (Request(TextPrompt("a"), sampling=SamplingParams(top_p=1.5)), "top_p: 1.5"),
        (Request(TextPrompt("a"), sampling=SamplingParams(min_p=-0.1)), "min_p: -0.1"),
        (Request(TextPrompt("a"), sampling=SamplingParams(repeat_penalty=0)), "repeat_penalty: 0"),
        (Request(TextPrompt("a"), sampling=SamplingParams(frequency_penalty=math.inf)), "frequency_penalty: inf"),
    ],
)
def test_a_request_that_cannot_be_meant_is_refused_by_name(request_: Request, named: str) -> None:
    engine = Engine(noisy())
    with pytest.raises(UsageError, match=named):
        engine.submit(request_)
    assert engine.idle


# --- the order of work


@pytest.mark.parametrize("rows_per_step", [1, 7, 32, 256])
def test_a_long_prompt_is_run_in_pieces_and_tells_how_far_it_is(rows_per_step: int) -> None:
    backend = noisy()
    [gathered] = answer_all(Engine(backend, rows_per_step=rows_per_step), [random_request(100)])
    assert max(len(batch.tokens) for batch in backend.batches) == min(rows_per_step, 100)
    assert [event.done for event in gathered.progress] == [*range(rows_per_step, 100, rows_per_step), 100]
    assert {event.total for event in gathered.progress} == {100}


def test_a_running_step_has_expected_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock, seen = Clock(), []

    class Slow(ScriptedBackend):
        def forward(self, batch: Batch) -> Outputs:
            for clock.now in (5.0, 5.0, 6.0, 7.0, 9.0):
                seen.append([(event.done, event.total) for event in engine.prefill_progress()])
            clock.now = 5.0
            return super().forward(batch)

    clock.now = 5.0
    monkeypatch.setattr("llmrun.engine.engine.time", clock)
    engine = Engine(Slow(None))
    engine._scheduler.costs.observe(EMPTY.with_chunk(256, 0), 256, 2.0)
    engine.submit(random_request(300))
    assert engine.prefill_progress() == []
    engine.step()
    assert seen == [[(done, 300)] for done in (0, 0, 128, 256, 256)]
    assert engine.prefill_progress() == []


def test_answers_under_way_go_on_while_a_prompt_is_read() -> None:
    backend = noisy(max_sequences=2)
    engine = Engine(backend, rows_per_step=10)
    first = engine.submit(random_request(5, 1, max_tokens=None))
    for _ in range(3):
        engine.step()
    engine.submit(random_request(40, 2))
    for _ in range(4):
        events = engine.step()
        assert [event.tokens for event in events if isinstance(event, TextDelta) and event.request_id == first]
        assert len(backend.batches[-1].tokens) == 10
        assert backend.batches[-1].seq[0] == 0


def test_logits_are_asked_for_only_where_a_token_is_drawn() -> None:
    backend = noisy()
    answer_all(Engine(backend, rows_per_step=8), [random_request(20, max_tokens=3)])
    assert [batch.want.sum() for batch in backend.batches] == [0, 0, 1, 1, 1]


def test_the_seed_decides() -> None:
    request = random_request(10)
    same = [answer_all(Engine(noisy()), [request])[0].tokens for _ in range(2)]
    [other] = answer_all(Engine(noisy()), [structs.replace(request, sampling=replace(request.sampling, seed=43))])
    assert same[0] == same[1] != other.tokens


def test_penalties_reach_the_prompt_and_the_answer() -> None:
    letters = list(b"abc")
    sampling = SamplingParams(
        temperature=0, presence_penalty=100, logit_bias={i: -1000.0 for i in range(260) if i not in range(97, 103)}
    )
    [gathered] = answer_all(Engine(noisy()), [Request(TokenPrompt(letters), 3, sampling=sampling)])
    assert sorted(gathered.text) == ["d", "e", "f"]


# --- a known prefix


def conversation(engine: Engine, *turns: str) -> list[Gathered]:
    messages: list[dict[str, str]] = []
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        answers += answer_all(engine, [Request(ChatPrompt(list(messages)), sampling=GREEDY)])
        messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


def test_the_next_turn_runs_only_what_is_new() -> None:
    backend = ScriptedBackend()
    first, second = conversation(Engine(backend), "Grüße!", "Noch was?")
    assert first.text == "You said: Grüße!"
    assert second.text == "You said: Noch was?"
    known = first.finished.context_used - 1  # the end-of-generation token was sampled, but never run
    assert second.finished.timings.cached_tokens == known
    assert sum(len(batch.tokens) for batch in backend.batches) == second.finished.context_used - 1


# --- a full cache


class Overstated(ScriptedBackend):
    """A backend whose cache holds less than it reports, as a block-based cache may."""

    def __init__(self, room: int) -> None:
        super().__init__(None, context_size=100)
        self.room = room

    def forward(self, batch: Batch) -> Outputs:
        self.kv.capacity, said = self.room, self.kv.capacity
        try:
            return super().forward(batch)
        finally:
            self.kv.capacity = said


def test_a_lone_answer_ends_when_the_cache_is_full() -> None:
    [gathered] = answer_all(Engine(Overstated(room=50)), [random_request(40, max_tokens=None)])
    assert gathered.finished.reason is FinishReason.LENGTH
    assert len(gathered.tokens) == 11


def test_a_lone_prompt_fails_when_the_cache_is_full() -> None:
    engine = Engine(Overstated(room=50), rows_per_step=20)
    [gathered] = answer_all(engine, [random_request(60)])
    assert isinstance(gathered.failed.error, ContextExceeded)
    assert "60 tokens" in str(gathered.failed.error)
    [after] = answer_all(engine, [random_request(10)])
    assert len(after.tokens) == 20
