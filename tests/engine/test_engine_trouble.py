"""Tests of failing backends, and of the reported statistics of a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from llmrun.backends.scripted import ScriptedBackend, ScriptedTokenizer, scripted_answers
from llmrun.base.errors import LlmrunError, TemplateRefused, UsageError
from llmrun.base.types import Batch, Outputs
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ChatPrompt, Request, TextPrompt
from tests.support.engine.answers import answer_all
from tests.support.engine.scripted_models import GREEDY, noisy, random_request


class Breaking(ScriptedBackend):
    """A backend that fails, or returns logits that are NaN or infinite, in pass number `at`."""

    def __init__(self, at: int, error: BaseException | None = None) -> None:
        super().__init__(None, max_sequences=2)
        self.at, self.error = at, error

    def forward(self, batch: Batch) -> Outputs:
        outputs = super().forward(batch)
        if len(self.batches) == self.at:
            if self.error is not None:
                raise self.error
            outputs.logits[-1, 7] = np.nan
        return outputs


def test_broken_logits_fail_the_one_request_they_are_for() -> None:
    engine = Engine(Breaking(at=4))
    fine, broken = answer_all(engine, [random_request(10, 1), random_request(10, 2)])
    assert "largest logit is nan" in str(broken.failed.error)
    assert len(broken.tokens) == 3
    assert len(fine.tokens) == 20


def test_generate_raises_what_failed() -> None:
    with pytest.raises(LlmrunError, match="largest logit is nan"):
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
    engine._prompts.template = None
    with pytest.raises(TemplateRefused, match="no chat template") as refused:
        engine.submit(Request(ChatPrompt([{"role": "user", "content": "hi"}])))
    assert "--raw" in refused.value.hint


# --- reported statistics


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


@pytest.mark.push
def test_waiting_for_others_counts_in_the_ttft_and_not_in_the_prefill() -> None:
    backend = ScriptedBackend(None, step_seconds=0.01)
    first, second = answer_all(Engine(backend), [random_request(10, seed, max_tokens=40) for seed in range(2)])
    assert second.finished.timings.ttft_s >= first.finished.timings.total_s
    assert second.finished.timings.prefill_s < 0.5 * second.finished.timings.ttft_s


@pytest.mark.parametrize("n", [0, 3])
def test_logprobs_describe_every_token_of_the_answer(n: int) -> None:
    [gathered] = answer_all(Engine(noisy()), [structs.replace(random_request(10), logprobs=n)])
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
    """A tokenizer that adds a space before every text, as SentencePiece vocabularies do, and removes it in `decode`."""

    def decode(self, ids: Sequence[int]) -> bytes:
        return super().decode(ids).removeprefix(b" ")


@pytest.mark.push
@pytest.mark.parametrize(("continued", "text"), [(False, "hello"), (True, " hello")])
def test_a_message_begins_without_the_space_that_begins_every_text(continued: bool, text: str) -> None:
    backend = ScriptedBackend(scripted_answers([("go", " hello")]))
    backend.tokenizer = SpacedTokenizer()
    engine = Engine(backend, chat_template="{{ messages[0].content }}")
    prompt = ChatPrompt([{"role": "user", "content": "go"}], add_generation_prompt=not continued)
    [gathered] = answer_all(engine, [Request(prompt, sampling=GREEDY)])
    assert gathered.text == text
