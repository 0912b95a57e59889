"""Tests of draft models, as a second scripted backend and as a second model on the CPU engine."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.registry import open_backend
from llmrun.backends.scripted import ScriptedBackend, ScriptedTokenizer, scripted_answers
from llmrun.base.errors import BackendCrashed, DoesNotFit, UsageError
from llmrun.base.types import Batch, Outputs
from llmrun.engine.drafting.base import Kind
from llmrun.engine.drafting.model import ModelSource, check_same_vocabulary, open_draft_model
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TextPrompt, TokenPrompt
from llmrun.options.sampling_params import SamplingParams
from tests.support.engine.answers import Gathered, answer_all
from tests.support.engine.eager_speculation import speculate_eagerly
from tests.support.engine.scripted_models import DRAWN, GREEDY, noisy, random_request
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.models.downloads import smollm2

ANSWER = "a sentence in which hardly anything is repeated, so that lookup is of little use: 0123456789"


def always(kinds: Sequence[Kind]) -> bool:
    return True


def says(answer: str, **options: int) -> ScriptedBackend:
    return ScriptedBackend(scripted_answers([("go", answer)]), **options)  # type: ignore[arg-type]


def answers(target: ScriptedBackend, draft: ScriptedBackend | None, requests: Sequence[Request]) -> list[Gathered]:
    engine = Engine(target)
    if draft is not None:
        speculate_eagerly(engine, [ModelSource(draft, target.info.vocabulary_size)])
    try:
        return answer_all(engine, requests)
    finally:
        engine.close()


def drafted(source: ModelSource, tokens: Sequence[int], most: int, params: SamplingParams = GREEDY) -> tuple[int, ...]:
    drafter = source.drafter(Request(TokenPrompt(tokens), sampling=params))
    return drafter.draft(tokens, most, always).tokens


# --- what is drafted


def test_a_right_draft_model_is_accepted() -> None:
    [gathered] = answers(says(ANSWER), says(ANSWER), [Request(TextPrompt("go"), None, (), GREEDY)])
    timings = gathered.finished.timings
    assert gathered.text == ANSWER
    assert timings.steps == 1 + math.ceil(len(ANSWER) / 16)  # the prompt's step, then 16 tokens each


@pytest.mark.push
def test_a_wrong_draft_model_changes_nothing() -> None:
    [gathered] = answers(says(ANSWER), says(ANSWER.upper()), [Request(TextPrompt("go"), None, (), GREEDY)])
    timings = gathered.finished.timings
    assert gathered.text == ANSWER
    assert timings.accepted_tokens <= sum(not letter.isalpha() for letter in ANSWER)


def test_drafts_are_drawn_as_the_model_draws() -> None:
    """A copy of the model drafts exactly its answer at any temperature: a draw is a hash of (seed, position)."""
    request = random_request(20, seed=3)
    [gathered] = answers(noisy(), None, [request])
    source = ModelSource(noisy(), noisy().info.vocabulary_size)
    assert isinstance(request.prompt, TokenPrompt)
    assert drafted(source, request.prompt.tokens, 15, request.sampling) == tuple(gathered.tokens[:15])


def test_drafting_continues_after_wrong_tokens() -> None:
    """The draft model's cache is cut back to the answer, and the scripted backend checks each position."""
    source = ModelSource(noisy(), 260)
    drafter = source.drafter(Request(TokenPrompt([1, 2, 3]), sampling=GREEDY))
    first = drafter.draft([1, 2, 3], 6, always).tokens
    other = [1, 2, 3, *first[:2], (first[2] + 1) % 256]
    assert drafter.draft(other, 4, always).tokens == drafted(ModelSource(noisy(), 260), other, 4)


def test_drafting_stops_when_a_token_is_not_worth_it() -> None:
    source = ModelSource(noisy(), 260)
    drafter = source.drafter(Request(TokenPrompt([1]), sampling=GREEDY))
    assert len(drafter.draft([1], 15, lambda kinds: len(kinds) < 3).tokens) == 3


def test_tokens_beyond_the_vocabulary_are_not_drafted() -> None:
    longer = noisy(vocabulary_size=4000)
    source = ModelSource(longer, 260)
    params = SamplingParams(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0)
    assert max(drafted(source, [1, 2, 3], 15, params)) < 260


def test_unknown_tokens_end_the_drafts() -> None:
    source = ModelSource(noisy(), 4000)
    assert drafted(source, [1, 2, 3999], 4) == ()
    assert source.error == ""


def test_bias_of_unknown_tokens_is_ignored() -> None:
    source = ModelSource(noisy(), 4000)
    assert len(drafted(source, [1, 2], 4, SamplingParams(temperature=0, logit_bias={3999: 5.0}))) == 4


def test_a_draft_ends_at_the_draft_models_context() -> None:
    source = ModelSource(noisy(context_size=10), 260)
    assert len(drafted(source, list(range(8)), 15)) == 2
    assert drafted(source, list(range(12)), 15) == ()


# --- sequences


@pytest.mark.push
def test_each_answer_has_its_own_sequence() -> None:
    requests = [random_request(10 + seed, seed, max_tokens=40) for seed in range(6)]
    alone = [answers(noisy(), None, [request])[0].tokens for request in requests]
    together = answers(noisy(max_sequences=3), noisy(max_sequences=3), requests)
    assert [gathered.tokens for gathered in together] == alone


def test_the_next_turn_reuses_the_cached_prefix() -> None:
    draft = noisy()
    source = ModelSource(draft, 260)
    history = list(range(100))
    drafter = source.drafter(Request(TokenPrompt(history), sampling=GREEDY))
    drafter.draft(history, 1, always)
    drafter.release()
    rows = sum(len(batch.tokens) for batch in draft.batches)
    drafted(source, [*history, 7, 8, 9], 1)
    assert sum(len(batch.tokens) for batch in draft.batches) - rows == 3


def test_a_long_prompt_is_read_in_chunks() -> None:
    draft = noisy()
    drafted(ModelSource(draft, 260), [token % 256 for token in range(1000)], 2)
    assert max(len(batch.tokens) for batch in draft.batches) <= 256


# --- trouble


class Failing(ScriptedBackend):
    """Raises an error in each pass after the first `passes`."""

    passes = 3

    def forward(self, batch: Batch) -> Outputs:
        if len(self.batches) >= self.passes:
            raise BackendCrashed("the worker died")
        return super().forward(batch)


def test_an_error_is_reported_and_harmless() -> None:
    draft = Failing(scripted_answers([("go", ANSWER)]))
    target = says(ANSWER)
    engine = Engine(target)
    speculate_eagerly(engine, [ModelSource(draft, target.info.vocabulary_size)])
    for _ in range(2):
        [gathered] = answer_all(engine, [Request(TextPrompt("go"), None, (), GREEDY)])
        assert gathered.text == ANSWER
    assert engine.draft_error == "draft model stopped: scripted: the worker died"
    assert len(draft.batches) == Failing.passes
    engine.forget()
    engine.close()


@pytest.mark.push
def test_a_full_cache_is_harmless() -> None:
    requests = [random_request(30, seed, max_tokens=60) for seed in range(4)]
    alone = [answers(noisy(), None, [request])[0].tokens for request in requests]
    small = noisy(max_sequences=2, capacity=100)
    together = answers(noisy(max_sequences=2), small, requests)
    assert [gathered.tokens for gathered in together] == alone


def test_a_recurrent_draft_model_is_given_up() -> None:
    source = ModelSource(noisy(checkpoint=16), 260)
    drafter = source.drafter(Request(TokenPrompt([1, 2, 3]), sampling=GREEDY))
    first = drafter.draft([1, 2, 3], 6, always).tokens
    assert drafter.draft([1, 2, 3, (first[0] + 1) % 256], 4, always).tokens == ()
    assert "recurrent" in source.error


@pytest.mark.push
def test_each_model_has_its_own_default_cache(tmp_path: Path) -> None:
    path, small = (tiny_llama(tmp_path / f"{kind}.gguf", weight_type=kind) for kind in ("Q8_0", "F16"))
    options = OpenOptions("cpu", context_size=64, threads=1)
    with closing(open_backend(path, options)) as target, closing(open_draft_model(small, options, target)) as draft:
        assert (target.info.kv_type, draft.info.kv_type) == ("q8_0", "f16")


def test_cancelling_stops_a_draft() -> None:
    source = ModelSource(noisy(), 260)
    source.cancel()
    drafter = source.drafter(Request(TokenPrompt([1, 2, 3]), sampling=GREEDY))
    assert drafter.draft([1, 2, 3], 4, always).tokens == ()
    assert len(drafter.draft([1, 2, 3], 4, always).tokens) == 4
    assert source.error == ""


def test_cancelling_the_engine_cancels_the_draft_model() -> None:
    draft = noisy()
    engine = Engine(noisy(), drafts=[ModelSource(draft, 260)])
    engine.cancel_current()
    assert drafted(ModelSource(draft, 260), [1, 2, 3], 4) == ()


# --- vocabularies


def test_equal_vocabularies_of_different_lengths_fit() -> None:
    check_same_vocabulary(noisy(), noisy(vocabulary_size=4000))
    check_same_vocabulary(noisy(vocabulary_size=4000), noisy())


def test_another_token_is_refused_with_both_files() -> None:
    target = ScriptedBackend(None, path=Path("big.gguf"), vocabulary_size=300)
    draft = ScriptedBackend(None, path=Path("small.gguf"), control_tokens=["<think>"])
    with pytest.raises(UsageError) as refused:
        check_same_vocabulary(draft, target)
    assert str(refused.value) == (
        "draft model has a different vocabulary: small.gguf: token 260 is '<think>' (control token), "
        "but ' w0' in big.gguf"
    )


def test_another_end_of_generation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(ScriptedTokenizer):
        end_of_generation = frozenset({257})

    target, draft = noisy(), noisy()
    monkeypatch.setattr(draft, "tokenizer", Endless())
    with pytest.raises(UsageError, match=r"token 259 is '<\|im_end\|>'.*, but '<\|im_end\|>' \(ends an answer\)"):
        check_same_vocabulary(draft, target)


# --- opening


def test_an_engine_opens_with_a_draft_model(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"answers": [["go", ANSWER]]}))
    with Engine.open(script, OpenOptions(backend="scripted"), draft=script) as engine:
        [gathered] = answer_all(engine, [Request(TextPrompt("go"), None, (), GREEDY)])
    assert gathered.text == ANSWER
    assert gathered.finished.timings.accepted_tokens > 0


def test_draft_models_get_no_projector(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text("{}")
    options = OpenOptions(backend="scripted", mmproj="mmproj.gguf")
    with closing(open_backend(script, options)) as target, closing(open_draft_model(script, options, target)) as source:
        assert target.vision is not None
        assert source.backend.vision is None


def test_opening_refuses_another_vocabulary(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"control_tokens": ["<think>"], "vocabulary_size": 300}))
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"vocabulary_size": 300}))
    with pytest.raises(UsageError, match="a different vocabulary"):
        Engine.open(script, OpenOptions(backend="scripted"), draft=other)


def test_the_cache_of_the_model_is_left_to_it() -> None:
    """The CPU engine allocates its cache, but the system counts it as free until it is used."""
    target = noisy()
    target.info = replace(target.info, backend="cpu", kv_bytes=1 << 60)
    with pytest.raises(DoesNotFit):
        open_draft_model(smollm2(), OpenOptions(), target)


@pytest.mark.night
def test_smollm2_drafts_for_itself_at_any_temperature() -> None:
    prompt = TextPrompt("Write about the sea.\n\n")
    options = OpenOptions(backend="cpu", context_size=256, threads=1)
    requests = [Request(prompt, 40, (), params) for params in (GREEDY, DRAWN)]
    with Engine.open(smollm2(), options, speculate=False) as engine:
        plain = [answer_all(engine, [request])[0] for request in requests]
    with Engine.open(smollm2(), options, draft=smollm2()) as engine:
        assert engine.draft_error == ""
        source = engine._speculation._sources[1]
        for request, expected in zip(requests, plain, strict=True):
            tokens = engine._prompts.read(request).tokens
            drafter = source.drafter(request)
            assert drafter.draft(tokens, 15, always).tokens == tuple(expected.tokens[:15])
            drafter.release()
            assert answer_all(engine, [request])[0].tokens == expected.tokens
