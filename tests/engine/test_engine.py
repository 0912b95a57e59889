"""The engine on the scripted backend, which also polices every batch it is given."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.backends.scripted import ScriptedBackend, scripted_answers
from llmrun.backends.scripted_tokenizer import IM_END
from llmrun.engine.engine import Engine
from llmrun.engine.requests import (
    ChatPrompt,
    Finished,
    PrefillProgress,
    Request,
    TextDelta,
    TextPrompt,
    TokenPrompt,
)
from llmrun.errors import ContextExceeded, LlmrunError, TemplateRefused, UsageError
from llmrun.types import Batch, FinishReason, SamplingParams
from tests.support.answers import Gathered, answer_all, run_to_the_end

GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(seed=42)


def noisy(**options: int) -> ScriptedBackend:
    """A model that says anything at all, but never ends by itself (see `endless`)."""
    return ScriptedBackend(None, **options)  # type: ignore[arg-type]


def endless(request: Request) -> Request:
    """The request with the end-of-generation tokens banned."""
    return replace(request, sampling=replace(request.sampling, logit_bias={257: -math.inf, IM_END: -math.inf}))


def random_prompt(length: int, seed: int = 0) -> TokenPrompt:
    return TokenPrompt(np.random.default_rng(seed).integers(0, 256, length).tolist())


def random_request(length: int, seed: int = 0, *, max_tokens: int | None = 20) -> Request:
    return endless(Request(random_prompt(length, seed), max_tokens, sampling=replace(DRAWN, seed=seed)))


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


@pytest.mark.parametrize("length", [30, 31, 500])
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(length: int) -> None:
    with pytest.raises(ContextExceeded, match=rf"\b{length} tokens.*limit 30"):
        Engine(noisy(context_size=30)).submit(random_request(length))


def test_the_longest_prompt_that_fits_gets_one_token() -> None:
    [gathered] = answer_all(Engine(noisy(context_size=30)), [random_request(29, max_tokens=None)])
    assert len(gathered.tokens) == 1


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (Request(TextPrompt("a"), max_tokens=0), "max_tokens: 0"),
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


# --- the order of work changes nothing


@pytest.mark.parametrize("rows_per_step", [1, 7, 32, 256])
def test_the_prefill_chunk_changes_nothing(rows_per_step: int) -> None:
    request = random_request(100)
    [whole] = answer_all(Engine(noisy()), [request])
    backend = noisy()
    [chunked] = answer_all(Engine(backend, rows_per_step=rows_per_step), [request])
    assert chunked.tokens == whole.tokens
    assert max(len(batch.tokens) for batch in backend.batches) == min(rows_per_step, 100)
    assert [event.done for event in chunked.progress] == [
        *range(rows_per_step, 100, rows_per_step),
        100,
    ]
    assert {event.total for event in chunked.progress} == {100}


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    max_sequences=st.integers(1, 8),
    rows_per_step=st.sampled_from([1, 3, 16, 256]),
    capacity=st.sampled_from([None, 90, 130]),
    checkpoint=st.sampled_from([None, 1, 8, 1000]),
)
def test_strangers_a_full_cache_and_lost_prefixes_change_nothing(
    lengths: list[int], max_sequences: int, rows_per_step: int, capacity: int | None, checkpoint: int | None
) -> None:
    requests = [random_request(length, seed, max_tokens=15) for seed, length in enumerate(lengths)]
    alone = [answer_all(Engine(noisy(context_size=100)), [request])[0].tokens for request in requests]
    backend = ScriptedBackend(
        None, context_size=90, max_sequences=max_sequences, capacity=capacity, checkpoint=checkpoint
    )
    together = answer_all(Engine(backend, rows_per_step=rows_per_step), requests)
    assert [gathered.tokens for gathered in together] == alone
    assert {gathered.finished.reason for gathered in together} == {FinishReason.LENGTH}


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
    [other] = answer_all(Engine(noisy()), [replace(request, sampling=replace(request.sampling, seed=43))])
    assert same[0] == same[1] != other.tokens


def test_penalties_reach_the_prompt_and_the_answer() -> None:
    letters = list(b"abc")
    sampling = SamplingParams(
        temperature=0, presence_penalty=100, logit_bias={i: -1000.0 for i in range(260) if i not in range(97, 103)}
    )
    [gathered] = answer_all(Engine(noisy()), [Request(TokenPrompt(letters), 3, sampling=sampling)])
    assert sorted(gathered.text) == ["d", "e", "f"]


# --- a prefix that is known


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
    known = first.finished.context_used - 1  # the end-of-generation token was drawn, but never run
    assert second.finished.timings.cached_tokens == known
    assert sum(len(batch.tokens) for batch in backend.batches) == second.finished.context_used - 1


def test_the_same_prompt_again_runs_its_last_token_only() -> None:
    backend = noisy()
    engine = Engine(backend)
    first, second = (answer_all(engine, [random_request(50)])[0] for _ in range(2))
    assert second.tokens == first.tokens
    assert second.finished.timings.cached_tokens == 49
    assert second.progress == [PrefillProgress(1, 50, 50)]


def test_what_the_cache_did_not_keep_is_run_again() -> None:
    backend = ScriptedBackend(None, checkpoint=16)
    engine = Engine(backend)
    first, second = (answer_all(engine, [random_request(50)])[0] for _ in range(2))
    assert second.tokens == first.tokens
    assert second.finished.timings.cached_tokens == 48


def test_two_conversations_with_one_beginning_share_it_and_keep_their_own() -> None:
    backend = noisy(max_sequences=3)
    engine = Engine(backend)
    system = random_prompt(40, 1).tokens
    left, right = [*system, *random_prompt(60, 2).tokens], [*system, *random_prompt(60, 3).tokens]

    def cached(tokens: list[int]) -> int:
        [gathered] = answer_all(engine, [endless(Request(TokenPrompt(tokens), 1, sampling=DRAWN))])
        return gathered.finished.timings.cached_tokens

    assert [cached(tokens) for tokens in (left, right, left, right)] == [0, 40, 99, 99]


def test_a_prefix_of_a_running_request_is_copied() -> None:
    engine = Engine(noisy(max_sequences=2))
    running = engine.submit(random_request(30, 1, max_tokens=50))
    [_, first] = engine.step()
    second = engine.submit(random_request(30, 1, max_tokens=5))
    gathered = run_to_the_end(engine, [running, second])
    assert isinstance(first, TextDelta)
    assert gathered[1].finished.timings.cached_tokens == 29
    assert gathered[1].tokens == [*first.tokens, *gathered[0].tokens[:4]]


# --- a cache that is full


def test_the_youngest_request_waits_when_the_cache_is_full_and_loses_nothing() -> None:
    requests = [random_request(30, seed, max_tokens=30) for seed in range(3)]
    alone = [answer_all(Engine(noisy()), [request])[0] for request in requests]
    backend = noisy(context_size=100, max_sequences=3, capacity=100)
    together = answer_all(Engine(backend), requests)
    assert [gathered.tokens for gathered in together] == [gathered.tokens for gathered in alone]
    assert [gathered.text for gathered in together] == [gathered.text for gathered in alone]
    assert together[2].finished.timings.total_s > together[0].finished.timings.total_s


def test_kept_prefixes_make_room_before_anyone_waits() -> None:
    backend = noisy(context_size=100, max_sequences=4, capacity=100)
    engine = Engine(backend)
    for seed in range(6):
        [gathered] = answer_all(engine, [random_request(60, seed)])
        assert gathered.finished.reason is FinishReason.LENGTH
        assert len(gathered.tokens) == 20


class Overstated(ScriptedBackend):
    """A backend whose cache holds less than it says, as one that works in blocks may."""

    def __init__(self, room: int) -> None:
        super().__init__(None, context_size=100)
        self.room = room

    def forward(self, batch: Batch) -> np.typing.NDArray[np.float32]:
        self.kv._capacity, said = self.room, self.kv._capacity
        try:
            return super().forward(batch)
        finally:
            self.kv._capacity = said


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


# --- cancelling


def cancelled_after(engine: Engine, cancel: Callable[[], None], *, deltas: int) -> tuple[str, Finished]:
    text, seen = "", 0
    for event in engine.generate(random_request(10, max_tokens=None)):
        if isinstance(event, TextDelta):
            text += event.text
            seen += 1
            if seen == deltas:
                cancel()
        if isinstance(event, Finished):
            return text, event
    raise AssertionError("no Finished event")


def test_a_cancelled_answer_keeps_its_text_and_the_engine_goes_on() -> None:
    engine = Engine(noisy())
    [whole] = answer_all(engine, [random_request(10)])
    text, finished = cancelled_after(engine, engine.cancel_current, deltas=5)
    assert finished.reason is FinishReason.CANCELLED
    assert text == bytes(whole.tokens[:5]).decode("utf-8", "replace")
    assert answer_all(engine, [random_request(10)])[0].tokens == whole.tokens


def test_a_prefill_is_cancelled_in_the_middle_of_a_step() -> None:
    backend = ScriptedBackend(None, step_seconds=30)
    engine = Engine(backend)
    timer = threading.Timer(0.05, engine.cancel_current)
    timer.start()
    [gathered] = answer_all(engine, [random_request(50)])
    timer.join()
    assert gathered.finished.reason is FinishReason.CANCELLED
    assert (gathered.text, gathered.finished.timings.ttft_s) == ("", 0)
    backend._step_seconds = 0
    assert len(answer_all(engine, [random_request(50)])[0].tokens) == 20


def test_one_request_is_cancelled_and_its_neighbours_are_not() -> None:
    requests = [random_request(10, seed) for seed in range(3)]
    alone = [answer_all(Engine(noisy()), [request])[0].tokens for request in requests]
    engine = Engine(noisy(max_sequences=2))
    ids = [engine.submit(request) for request in requests]
    engine.cancel(ids[1])
    engine.cancel(99)
    gathered = run_to_the_end(engine, ids)
    assert gathered[1].finished.reason is FinishReason.CANCELLED
    assert [gathered[0].tokens, gathered[2].tokens] == [alone[0], alone[2]]


def test_a_waiting_request_can_be_cancelled() -> None:
    engine = Engine(noisy())
    ids = [engine.submit(random_request(10, seed)) for seed in range(2)]
    engine.step()
    engine.cancel(ids[1])
    assert [event.request_id for event in engine.step() if isinstance(event, Finished)] == [ids[1]]


def test_a_pass_stopped_for_nobody_is_run_again() -> None:
    backend = ScriptedBackend(None, step_seconds=0.2)
    engine = Engine(backend)
    timer = threading.Timer(0.05, backend.cancel)
    timer.start()
    [gathered] = answer_all(engine, [random_request(10, max_tokens=1)])
    assert gathered.finished.reason is FinishReason.LENGTH


def test_closing_the_iterator_drops_the_request() -> None:
    engine = Engine(noisy())
    events = engine.generate(random_request(10, max_tokens=None))
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert engine.idle
    assert len(answer_all(engine, [random_request(10)])[0].tokens) == 20


# --- what goes wrong


class Breaking(ScriptedBackend):
    """Fails, or gives logits that are not numbers, in the pass whose number is `at`."""

    def __init__(self, at: int, error: BaseException | None = None) -> None:
        super().__init__(None, max_sequences=2)
        self.at, self.error = at, error

    def forward(self, batch: Batch) -> np.typing.NDArray[np.float32]:
        logits = super().forward(batch)
        if len(self.batches) == self.at:
            if self.error is not None:
                raise self.error
            logits[-1, 7] = np.nan
        return logits


def test_broken_logits_fail_the_one_request_they_are_for() -> None:
    engine = Engine(Breaking(at=4))
    fine, broken = answer_all(engine, [random_request(10, 1), random_request(10, 2)])
    assert "largest is nan" in str(broken.failed.error)
    assert len(broken.tokens) == 3
    assert len(fine.tokens) == 20


def test_generate_raises_what_failed() -> None:
    with pytest.raises(LlmrunError, match="largest is nan"):
        list(Engine(Breaking(at=2)).generate(random_request(10)))


@pytest.mark.parametrize("error", [RuntimeError("a worker died"), KeyboardInterrupt()])
def test_a_backend_that_fails_leaves_the_engine_usable(error: BaseException) -> None:
    engine = Engine(Breaking(at=3, error=error))
    with pytest.raises(type(error)):
        list(engine.generate(random_request(10)))
    assert engine.idle
    [gathered] = answer_all(engine, [random_request(10)])
    assert gathered.finished.timings.cached_tokens == 0
    assert gathered.tokens == answer_all(Engine(noisy()), [random_request(10)])[0].tokens


def test_generate_runs_one_request_alone() -> None:
    engine = Engine(noisy())
    engine.submit(random_request(10))
    with pytest.raises(UsageError, match="submit and step"):
        next(engine.generate(random_request(10)))


def test_a_chat_without_a_template_is_refused_with_the_way_out() -> None:
    engine = Engine(noisy())
    engine.template = None
    with pytest.raises(TemplateRefused, match="no chat template") as refused:
        engine.submit(Request(ChatPrompt([{"role": "user", "content": "hi"}])))
    assert "--raw" in refused.value.hint


# --- what is reported


def test_timings_add_up() -> None:
    engine = Engine(noisy(), load_s=1.5)
    finished = answer_all(engine, [random_request(30)])[0].finished
    timings = finished.timings
    assert (timings.load_s, timings.prompt_tokens, timings.generated_tokens) == (1.5, 30, 20)
    assert finished.context_used == 50
    assert len(timings.gaps_s) == 19
    assert math.isclose(sum(timings.gaps_s), timings.decode_s)
    assert math.isclose(timings.ttft_s + timings.decode_s, timings.total_s)
    assert 0 < timings.prefill_s <= timings.ttft_s


def test_waiting_for_others_counts_in_the_ttft_and_not_in_the_prefill() -> None:
    backend = ScriptedBackend(None, step_seconds=0.01)
    first, second = answer_all(Engine(backend), [random_request(10, seed, max_tokens=10) for seed in range(2)])
    assert second.finished.timings.ttft_s >= first.finished.timings.total_s
    assert second.finished.timings.prefill_s < 0.5 * second.finished.timings.ttft_s


@pytest.mark.parametrize("n", [0, 3])
def test_logprobs_describe_every_token_of_the_answer(n: int) -> None:
    [gathered] = answer_all(Engine(noisy()), [replace(random_request(10), logprobs=n)])
    assert [entry.chosen.token_id for entry in gathered.logprobs] == gathered.tokens
    assert b"".join(entry.chosen.text for entry in gathered.logprobs) == bytes(gathered.tokens)
    for entry in gathered.logprobs:
        assert len(entry.top) == n
        assert all(entry.chosen.logprob <= 0 and token.logprob >= entry.top[-1].logprob for token in entry.top)


def test_logprobs_are_those_of_the_model_not_of_the_sampler() -> None:
    request = Request(TextPrompt("go"), max_tokens=1, logprobs=1, sampling=replace(GREEDY, logit_bias={65: 99}))
    [gathered] = answer_all(Engine(ScriptedBackend(scripted_answers([("go", "x")]))), [request])
    [entry] = gathered.logprobs
    assert (entry.chosen.token_id, entry.top[0].token_id) == (65, ord("x"))
    assert entry.chosen.logprob < -10 < -0.1 < entry.top[0].logprob


def test_close_may_be_called_twice_and_by_with() -> None:
    backend = noisy()
    with Engine(backend) as engine:
        engine.submit(random_request(10))
    engine.close()
    assert engine.idle
    assert backend._closed
