"""Tests that LoRA adapters of requests never mix: cached and saved prefixes belong to the adapters that computed them.

The noise of a scripted model depends on the adapters of all tokens so far, so an answer from another adapter's cache
differs from the answer of a fresh engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.errors import InvalidAnswer, ModelFileError, UsageError
from llmrun.base.types import Adapter, Batch, Outputs
from llmrun.engine.adapters import AdaptedTokens, adapted_tokens
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, StatePlace, TokenPrompt
from llmrun.engine.saved_state.budget import Budget
from llmrun.engine.saved_state.chunks import CHUNK, SavedChunks
from tests.support.engine.answers import Gathered, answer_all
from tests.support.tiers import examples

INVOCATION = (7, 8)
ADAPTERS = (
    Adapter("one", "one.gguf", 0.0, (), "1"),
    Adapter("two", "two.gguf", 0.0, (), "2"),
    Adapter("activated", "activated.gguf", 0.0, INVOCATION, "3"),
)
PROMPT = [int(token) for token in np.random.default_rng(0).integers(20, 120, 90)]
CHOICES = st.dictionaries(st.sampled_from(["one", "two", "activated"]), st.sampled_from([0.0, 0.5, 1.0]), max_size=3)


def backend_with_adapters(**options: Any) -> ScriptedBackend:
    return ScriptedBackend(None, adapters=ADAPTERS, **options)


def request_for(prompt: list[int], adapters: Mapping[str, float] | None, max_tokens: int = 6) -> Request:
    request = Request(TokenPrompt(prompt), max_tokens, adapters=adapters)
    return structs.replace(request, sampling=replace(request.sampling, temperature=0.0))


def fresh(request: Request) -> Gathered:
    with Engine(backend_with_adapters()) as engine:
        [gathered] = answer_all(engine, [request])
    return gathered


@pytest.mark.push
@given(data=st.data(), checkpoint=st.sampled_from([None, 16]), together=st.booleans())
@settings(max_examples=examples(40))
def test_answers_do_not_depend_on_earlier_requests(data: st.DataObject, checkpoint: int | None, together: bool) -> None:
    """Requests have common prefixes of all lengths, some of which contain the invocation tokens."""
    requests = []
    for _ in range(data.draw(st.integers(2, 7))):
        prompt = PROMPT[: data.draw(st.integers(1, 90))]
        if data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(prompt)))
            prompt = [*prompt[:at], *INVOCATION, *prompt[at:]]
        requests.append(request_for(prompt, data.draw(CHOICES)))
    with Engine(backend_with_adapters(max_sequences=3, checkpoint=checkpoint)) as engine:
        if together:
            gathered = answer_all(engine, requests)
        else:
            gathered = [each for request in requests for each in answer_all(engine, [request])]
    assert [each.tokens for each in gathered] == [fresh(request).tokens for request in requests]


def test_a_prefix_is_reused_only_with_the_same_scales() -> None:
    """llama.cpp's server reuses the cache of other adapters (its issue 26207)."""
    with Engine(backend_with_adapters(max_sequences=4)) as engine:
        cached = []
        for adapters in (None, {"one": 1.0}, {"one": 0.5}, {"two": 1.0}, {"one": 1.0}, {"one": 0.0}, None):
            [gathered] = answer_all(engine, [request_for(PROMPT, adapters, max_tokens=1)])
            cached.append(gathered.finished.timings.cached_tokens)
    assert cached == [0, 0, 0, 0, 89, 89, 89]


def test_tokens_before_activation_are_shared_with_the_base() -> None:
    prompt = [*PROMPT[:40], *INVOCATION, *PROMPT[40:]]
    request = request_for(prompt, {"activated": 1.0})
    with Engine(backend_with_adapters(max_sequences=2)) as engine:
        answer_all(engine, [request_for(prompt, None)])
        [activated] = answer_all(engine, [request])
        [base] = answer_all(engine, [request_for(prompt, None)])
    assert activated.finished.timings.cached_tokens == 40
    assert base.finished.timings.cached_tokens == len(prompt) - 1
    assert activated.tokens == fresh(request).tokens != base.tokens


def test_the_last_invocation_activates() -> None:
    tokens = [1, 7, 8, 2, 7, 8, 3]
    adapters = adapted_tokens({"activated": 0.5, "one": 2.0}, ADAPTERS, tokens)
    assert adapters is not None
    assert adapters.starts == [0, 0, 4]
    np.testing.assert_array_equal(adapters.rows(3, 6), [[2, 0, 0], [2, 0, 0.5], [2, 0, 0.5]])
    assert adapted_tokens({"activated": 0.5}, ADAPTERS, [7, 9, 8]) is None


def test_marked_tokens_are_unique_and_fit_files() -> None:
    """The numbers are the same for any division of the tokens into steps."""
    seen: set[int] = set()
    for scales in ((1.0, 0.0), (0.5, 0.0), (0.0, 1.0), (1.0, 1.0)):
        adapters = AdaptedTokens(ADAPTERS[:2], scales, (0, 0))
        marked = adapters.marked(range(1000), 0)
        assert [*adapters.marked(range(300), 0), *adapters.marked(range(300, 1000), 300)] == marked
        assert min(marked) > 1 << 24
        assert max(marked) < 1 << 63
        seen.update(marked)
    assert len(seen) == 4000


def test_numbers_of_other_adapters_differ_even_if_their_marks_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token with new adapters has 62 bits of its own, and all later prefixes contain it."""
    monkeypatch.setattr("llmrun.engine.adapters._NUMBER_BITS", 24 + 8)  # marks of 8 bits, of which many are equal
    for start in (0, 3):
        found = [AdaptedTokens(ADAPTERS[:1], (scale / 64,), (start,)).marked(range(9), 0) for scale in range(1, 401)]
        marks = {tuple(numbers[start + 1 :]) for numbers in found}
        assert len(marks) <= 256
        assert len({numbers[start] for numbers in found}) == 400
        assert all(numbers[:start] == [*range(start)] for numbers in found)


def test_default_scales_apply_to_requests_without_adapters() -> None:
    adapters = (replace(ADAPTERS[0], scale=0.5), ADAPTERS[1])
    chosen = adapted_tokens(None, adapters, [1])
    assert chosen is not None
    assert chosen.scales == [0.5, 0.0]
    assert adapted_tokens({}, adapters, [1]) is None


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        ({"three": 1.0}, "no such adapter"),
        ({"one": float("nan")}, "the scale of one is nan, not -1000 to 1000"),
        ({"one": 1e300}, "the scale of one is 1e\\+300, not -1000 to 1000"),
    ],
)
def test_wrong_adapters_are_refused(adapters: dict[str, float], words: str) -> None:
    with Engine(backend_with_adapters()) as engine, pytest.raises(UsageError, match=words):
        engine.submit(request_for(PROMPT, adapters))


class Exploding(ScriptedBackend):
    """A backend whose logits are NaN in rows with adapters."""

    def forward(self, batch: Batch) -> Outputs:
        outputs = super().forward(batch)
        if batch.scales is not None:
            outputs.logits[batch.scales[batch.want > 0].any(1)] = np.nan
        return outputs


def test_scales_that_break_a_model_are_not_its_fault() -> None:
    """Clients would repeat requests that the server seems to be to blame for."""
    requests = [request_for(PROMPT, adapters) for adapters in ({"one": 1000.0}, None, {"two": 0.0})]
    with Engine(Exploding(None, adapters=ADAPTERS, max_sequences=3)) as engine:
        broken, *others = answer_all(engine, requests)
        assert isinstance(broken.failed.error, InvalidAnswer)
        assert [each.tokens for each in others] == [fresh(request).tokens for request in requests[1:]]
    with Engine(Exploding(None, adapters=(replace(ADAPTERS[0], scale=1.0),))) as engine:
        [broken] = answer_all(engine, [request_for(PROMPT, None)])
    assert isinstance(broken.failed.error, ModelFileError)


@pytest.mark.push
@pytest.mark.parametrize("in_chunks", [True, False])
def test_saved_prefixes_belong_to_their_adapters(tmp_path: Path, in_chunks: bool) -> None:
    prompt = [int(token) for token in np.random.default_rng(1).integers(20, 120, 2 * CHUNK + 60)]
    cached = []
    for adapters in ({"one": 1.0}, {"one": 1.0}, {"two": 1.0}, None, {"one": 0.5}, {"one": 1.0}):
        request = request_for(prompt, adapters, max_tokens=3)
        with Engine(backend_with_adapters()) as engine:
            if in_chunks:
                engine.use_saved(SavedChunks(tmp_path, engine.state_key, Budget([tmp_path], 1 << 30), pytest.fail))
            else:
                engine.use_state(StatePlace(str(tmp_path / "state")), pytest.fail)
            [gathered] = answer_all(engine, [request])
            while engine.save_prefix():
                pass
        assert gathered.tokens == fresh(request).tokens
        cached.append(gathered.finished.timings.cached_tokens)
    if in_chunks:
        assert cached == [0, len(prompt) - 1, 0, 0, 0, len(prompt) - 1]
    else:  # the file has the state of the last request
        assert cached == [0, len(prompt) - 1, 0, 0, 0, 0]
