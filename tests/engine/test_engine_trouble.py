"""Cancelling, failing backends, and what is reported of a request."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from llmrun.backends.scripted import ScriptedBackend, scripted_answers
from llmrun.backends.scripted_tokenizer import ScriptedTokenizer
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ChatPrompt, Finished, Request, TextDelta, TextPrompt
from llmrun.errors import LlmrunError, TemplateRefused, UsageError
from llmrun.types import Batch, FinishReason
from tests.support.answers import answer_all, run_to_the_end
from tests.support.scripted_models import GREEDY, noisy, random_request

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


def test_a_request_is_cancelled_while_its_prompt_is_tokenized() -> None:
    backend = noisy()
    engine = Engine(backend)

    class Interrupted(ScriptedTokenizer):
        def encode(self, text: str, *, add_special: bool, parse_special: bool) -> np.typing.NDArray[np.int32]:
            engine.cancel_current()  # as a signal handler would, in the middle of it
            return super().encode(text, add_special=add_special, parse_special=parse_special)

    backend.tokenizer = Interrupted()
    [gathered] = answer_all(engine, [Request(TextPrompt("a long text"))])
    assert gathered.finished.reason is FinishReason.CANCELLED
    assert backend.batches == []


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


class SpacedTokenizer(ScriptedTokenizer):
    """Puts a space before every text, as SentencePiece vocabularies do, and takes it off in `decode`."""

    def decode(self, ids: Sequence[int]) -> bytes:
        return super().decode(ids).removeprefix(b" ")


@pytest.mark.parametrize(("continued", "text"), [(False, "hello"), (True, " hello")])
def test_a_message_begins_without_the_space_that_begins_every_text(continued: bool, text: str) -> None:
    backend = ScriptedBackend(scripted_answers([("go", " hello")]))
    backend.tokenizer = SpacedTokenizer()
    engine = Engine(backend, chat_template="{{ messages[0].content }}")
    prompt = ChatPrompt([{"role": "user", "content": "go"}], add_generation_prompt=not continued)
    [gathered] = answer_all(engine, [Request(prompt, sampling=GREEDY)])
    assert gathered.text == text
