"""Tests of prompts that are returned before their answers, with or without log-probabilities.

Tests that hold for all backends are in test_engine_backends.py.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec import structs

from llmrun.backends.scripted import ScriptedBackend, scripted_answers
from llmrun.base.types import LOGITS, Batch, FinishReason, Outputs
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TextPrompt, TokenPrompt
from tests.support.engine.answers import answer_all
from tests.support.engine.scripted_models import GREEDY, noisy, random_request


@pytest.mark.parametrize("echo", [False, True])
def test_the_end_token_is_described_for_evaluators(echo: bool) -> None:
    """Evaluators skip the last entry, which belongs to the generated token, so this entry must exist."""
    engine = Engine(ScriptedBackend(scripted_answers([("go", "x")])))
    [gathered] = answer_all(engine, [Request(TextPrompt("go"), logprobs=1, sampling=GREEDY, echo=echo)])
    assert [entry.chosen.text for entry in gathered.logprobs] == [b"x", b"<|im_end|>"][: 1 + echo]
    assert (gathered.text, gathered.finished.reason) == ("x", FinishReason.STOP)
    assert gathered.finished.timings.generated_tokens == 2


def test_control_tokens_have_their_text_in_logprobs() -> None:
    engine = Engine(ScriptedBackend(scripted_answers([("go", "")])))
    [gathered] = answer_all(engine, [Request(TextPrompt("<|im_start|>go"), 1, (), GREEDY, logprobs=1, echo=True)])
    [prompt] = gathered.prompt
    assert prompt.text == "<|im_start|>go"
    assert [entry.chosen.text for entry in prompt.logprobs] == [b"<|bos|>", b"<|im_start|>", b"g", b"o"]
    assert gathered.logprobs[0].top[0].text == b"<|im_end|>"


@pytest.mark.parametrize("logprobs", [None, 0])
def test_prompts_of_tokens_are_repeated_as_text(logprobs: int | None) -> None:
    requests = [Request(TokenPrompt([256, *b"go"]), 0, (), GREEDY, logprobs, echo=True)] * 2
    for gathered in answer_all(Engine(noisy()), requests):
        assert "".join(piece.text for piece in gathered.prompt) == "<|bos|>go"
        assert sum(len(piece.logprobs) for piece in gathered.prompt) == (0 if logprobs is None else 3)


def test_a_prompt_is_described_once_if_its_request_starts_again() -> None:
    engine = Engine(noisy(capacity=160, max_sequences=4, context_size=150), overcommit=True, rows_per_step=40)
    requests = [structs.replace(random_request(70, seed, max_tokens=50), logprobs=1, echo=True) for seed in range(4)]
    together = answer_all(engine, requests)
    assert engine.status().preemptions > 0
    for request, gathered in zip(requests, together, strict=True):
        [alone] = answer_all(Engine(noisy()), [request])
        assert (gathered.prompt, gathered.tokens) == (
            [structs.replace(piece, request_id=gathered.finished.request_id) for piece in alone.prompt],
            alone.tokens,
        )


@pytest.mark.parametrize("max_sequences", [1, 8])
def test_logits_of_prompts_are_bounded(max_sequences: int) -> None:
    backend = noisy(max_sequences=max_sequences, context_size=600)
    requests = [structs.replace(random_request(300, seed, max_tokens=1), logprobs=0, echo=True) for seed in range(3)]
    answer_all(Engine(backend), requests)
    wanted = [int(np.count_nonzero(batch.want & LOGITS)) for batch in backend.batches]
    assert sum(wanted) == 3 * 300
    assert max(wanted) <= min(64, 16 * max_sequences) + 3


def test_a_prompt_with_broken_logits_fails() -> None:
    class Broken(ScriptedBackend):
        def forward(self, batch: Batch) -> Outputs:
            outputs = super().forward(batch)
            outputs.logits[:1] = math.nan
            return outputs

    [gathered] = answer_all(Engine(Broken(None)), [Request(TextPrompt("go"), 1, (), GREEDY, logprobs=0, echo=True)])
    assert "invalid model output" in str(gathered.failed.error)
