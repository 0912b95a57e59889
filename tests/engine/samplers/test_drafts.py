"""Tests that drafts change no answer, whatever the sampler, on the scripted backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.backends.scripted import ScriptedBackend, ScriptedTokenizer
from llmrun.engine import samplers
from llmrun.engine.answer import Answer
from llmrun.engine.costs import StepCosts
from llmrun.engine.drafting.lookup import LookupSource
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ChatPrompt, Request, TokenPrompt
from llmrun.engine.sampler import Sampler
from llmrun.engine.samplers import Place, SamplerState, initial_state
from llmrun.engine.scheduling.scheduler import Speculation
from llmrun.engine.thinking import ThinkingDecoder
from llmrun.options.sampling_params import SamplingParams
from tests.support.engine.answers import answer_all
from tests.support.engine.contract import forget_all
from tests.support.engine.drafts import PROPOSALS, adversary, answer_plainly, assert_same, drafting_engine
from tests.support.engine.scripted_models import endless, noisy
from tests.support.engine.thinking_models import SWITCHED, thinking_backend
from tests.support.tiers import examples

pytestmark = [pytest.mark.push, pytest.mark.usefixtures("shared_processes")]

WIDE = SamplingParams(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=3)
PARAMS = {
    "dry": replace(WIDE, dry_multiplier=2.0, dry_allowed_length=1, dry_penalty_last_n=-1),
    "top-n-sigma": replace(WIDE, top_n_sigma=1.5),
    "typical": replace(WIDE, typical_p=0.7),
    "xtc": replace(WIDE, xtc_probability=0.5, xtc_threshold=0.005),
    "dynamic temperature": replace(WIDE, dynatemp_range=1.0),
    "mirostat 1": replace(WIDE, mirostat=1, mirostat_tau=4.0, mirostat_eta=0.5),
    "mirostat 2": replace(WIDE, mirostat=2, mirostat_tau=4.0, mirostat_eta=0.5),
    "adaptive": replace(WIDE, adaptive_target=0.1, adaptive_decay=0.7),
    "order": replace(WIDE, samplers="temperature;top_k;xtc", top_k=9),
    "infill": replace(WIDE, samplers="top_k;infill", top_k=9),
}
EACH = pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)


@pytest.mark.cover(1)
@EACH
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_no_draft_changes_an_answer(params: SamplingParams, proposal: str) -> None:
    backend = noisy()
    prompt = np.random.default_rng(0).integers(0, 256, 12).tolist() * 2
    requests = [
        endless(Request(TokenPrompt(prompt), 30, sampling=replace(params, seed=seed), logprobs=1)) for seed in range(2)
    ]
    known = []
    for request in requests:
        forget_all(backend)
        known += answer_plainly(Engine(backend), [request])
    forget_all(backend)
    gathered = answer_all(drafting_engine(backend, adversary(backend, PROPOSALS[proposal], known)), requests)
    for plain, drafted in zip(known, gathered, strict=True):
        assert_same(drafted, plain.gathered)
    if proposal == "right":
        assert all(drafted.finished.timings.accepted_tokens > 20 for drafted in gathered)


@pytest.mark.cover(1)
@EACH
@pytest.mark.parametrize("budget", [3, 7])
def test_forced_tokens_and_drafts_do_not_disturb_a_state(params: SamplingParams, budget: int) -> None:
    """The thinking budget ends in the middle of a draft, which may even predict the closing tag."""
    backend = thinking_backend(SWITCHED)
    question = ChatPrompt([{"role": "user", "content": "Is it so?"}])
    request = Request(question, 60, sampling=params, think_budget=budget)
    known = answer_plainly(Engine(backend), [request])
    for proposal in PROPOSALS:
        forget_all(backend)
        [drafted] = answer_all(drafting_engine(backend, adversary(backend, PROPOSALS[proposal], known)), [request])
        assert_same(drafted, known[0].gathered)


@given(
    name=st.sampled_from(sorted(PARAMS)),
    proposal=st.sampled_from(sorted(PROPOSALS)),
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=3),
    others=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 3.0]),
            "top_k": st.sampled_from([0, 3, 40]),
            "repeat_penalty": st.sampled_from([1.0, 1.5]),
            "dry_multiplier": st.sampled_from([0.0, 1.0]),
            "mirostat": st.sampled_from([0, 0, 2]),
            "adaptive_target": st.sampled_from([-1.0, 0.2]),
            "dry_sequence_breakers": st.sampled_from(["none", "e", '["a", "bc"]']),
        }
    ),
)
@settings(max_examples=examples(30))
def test_any_combination_has_the_same_answers_with_drafts(
    name: str, proposal: str, seeds: list[int], others: dict[str, float]
) -> None:
    backend = ScriptedBackend(None, max_sequences=2)
    params = replace(PARAMS[name], **others)  # type: ignore[arg-type]
    requests = [
        Request(TokenPrompt([seed % 7, 65, 66, 65, 66]), 25, sampling=replace(params, seed=seed)) for seed in set(seeds)
    ]
    known = []
    for request in requests:
        forget_all(backend)
        known += answer_plainly(Engine(backend), [request])
    forget_all(backend)
    engine = drafting_engine(backend, adversary(backend, PROPOSALS[proposal], known), LookupSource())
    for plain, drafted in zip(known, answer_all(engine, requests), strict=True):
        assert_same(drafted, plain.gathered)


def begun_answer(params: SamplingParams) -> Answer:
    request, tokenizer = Request(TokenPrompt((65, 66)), sampling=params), ScriptedTokenizer()
    speculation = Speculation([], StepCosts()).begin(request)
    return Answer(
        0,
        request,
        tokenizer,
        [65, 66],
        ThinkingDecoder(()),
        (),
        100,
        0.0,
        0.0,
        0,
        Sampler(),
        *speculation,
    )


def test_a_row_after_a_forced_token_is_drawn_with_the_state_before_it() -> None:
    """The draft predicts the token that becomes forced, so that its row was drawn, and changed the state."""
    params = PARAMS["mirostat 2"]
    logits = np.random.default_rng(1).normal(0, 2, (3, 300)).astype(np.float32)
    answer = begun_answer(params)
    answer.add_certain(logits[:0], ())
    first, state = _drawn(logits[0], [65, 66], params, initial_state(params))
    second, _ = _drawn(logits[1], [65, 66, first], params, state)
    drawn = answer.sampler.sample_rows([answer.rows_to_draw(logits, [first, second])])[0]
    assert len(drawn.tokens) == 3
    answer.forced.append(first)
    answer.accept(logits, [first, second], drawn)
    after, state = _drawn(logits[1], [65, 66, first], params, initial_state(params))
    expected = [first, after]
    if after == second:
        last, state = _drawn(logits[2], [65, 66, first, after], params, state)
        expected.append(last)
    assert answer.tokens[2:] == expected
    assert answer.sampler_state == state != drawn.states[-1]


def _drawn(
    logits: np.ndarray[tuple[int], np.dtype[np.float32]], known: list[int], params: SamplingParams, state: SamplerState
) -> tuple[int, SamplerState]:
    return samplers.sample(logits, Place(known, params, len(known), len(logits)), state)
