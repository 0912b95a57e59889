"""Tests of the engine with draft heads on the CPU: exact ones, and random ones that are nearly always wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from llmrun.backends.base import OpenOptions
from llmrun.engine.drafting.head import HeadSource
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, StatePlace, TokenPrompt
from llmrun.options.sampling_params import SamplingParams
from tests.support.engine.answers import Gathered, answer_all
from tests.support.engine.eager_speculation import speculate_eagerly
from tests.support.models.exact_head import exact_head
from tests.support.models.tiny_adapters import tiny_adapter
from tests.support.models.tiny_architectures import tiny_architecture

pytestmark = pytest.mark.push

HEADS = (
    "qwen35 layers by name, with a layer ahead",
    "qwen35moe fused, with a layer ahead",
    "glm4moe",
    "deepseek2 GLM-4.7-Flash, fused, with a layer ahead",
)


def random_requests(n: int, *, longest: int = 400) -> list[Request]:
    """Return requests of which the later ones begin like the first one."""
    random, requests = np.random.default_rng(7), []
    common = random.integers(3, 290, 120).tolist()
    for number in range(n):
        prompt = common[: random.integers(120)] + random.integers(3, 290, random.integers(1, longest)).tolist()
        sampling = SamplingParams(
            temperature=(0.0, 0.8)[number % 2], seed=number, repeat_penalty=(1.0, 1.2)[number % 2]
        )
        requests.append(Request(TokenPrompt(prompt), max_tokens=int(random.integers(2, 60)), sampling=sampling))
    return requests


def opened(
    path: Path, *, threads: int = 2, max_sequences: int = 1, drafts: bool = True, adapters: Sequence[str] = ()
) -> Engine:
    options = OpenOptions(
        context_size=1024, threads=threads, max_sequences=max_sequences, backend="cpu", adapters=adapters
    )
    engine = Engine.open(path, options, speculate=None if drafts else False)
    if drafts:
        speculate_eagerly(engine, [one for one in engine._speculation._sources if isinstance(one, HeadSource)])
    return engine


def answers(engine: Engine, requests: Sequence[Request]) -> list[Gathered]:
    found = answer_all(engine, requests)
    assert engine.draft_error == ""
    return found


@pytest.mark.parametrize("knows", ["token", "state"])
def test_all_drafts_of_an_exact_head_are_accepted(tmp_path: Path, knows: str) -> None:
    """Prompts of one pass and of several, drawn greedily and at random."""
    requests = [structs.replace(request, max_tokens=100) for request in random_requests(6)]
    with opened(exact_head(tmp_path, knows=knows)) as engine:
        assert engine.has_draft_head
        for request in requests:
            [found] = answers(engine, [structs.replace(request, sampling=SamplingParams(temperature=0))])
            timings = found.finished.timings
            assert timings.generated_tokens == 100
            assert timings.accepted_tokens == timings.drafted_tokens
            assert timings.steps <= 2 + 100 // 16 + timings.prompt_tokens // 256


@pytest.mark.night
@pytest.mark.parametrize("name", HEADS)
def test_heads_change_no_answer(tmp_path: Path, name: str) -> None:
    """Random requests, one after another and together, with different threads. Most draft tokens are wrong."""
    path, requests = tiny_architecture(tmp_path, name), random_requests(4, longest=300)
    with opened(path, drafts=False) as engine:
        expected = [answers(engine, [request])[0].tokens for request in requests]
    for threads, max_sequences in ((1, 1), (3, 3)):
        with opened(path, threads=threads, max_sequences=max_sequences) as engine:
            found = answers(engine, requests)
            again = answers(engine, requests[::-1])[::-1]
        assert [one.tokens for one in found] == expected
        assert [one.tokens for one in again] == expected
        assert sum(one.finished.timings.drafted_tokens for one in found) > 100


def test_automatic_speculation_uses_an_exact_head(tmp_path: Path) -> None:
    """The cost model finds that the head pays: a draft takes less than a step."""
    with Engine.open(
        exact_head(tmp_path, knows="state"), OpenOptions(context_size=1024, threads=1, backend="cpu")
    ) as engine:
        request = Request(TokenPrompt([5, 6, 7]), max_tokens=200, sampling=SamplingParams(temperature=0))
        [found] = answer_all(engine, [request])
    timings = found.finished.timings
    assert timings.accepted_tokens == timings.drafted_tokens > 50


def restored(path: Path, state: Path, request: Request, *, saves: bool, adapters: Sequence[str] = ()) -> Gathered:
    """Return the answer of an engine that has the prefix from a file, or writes it."""
    options = OpenOptions(context_size=1024, threads=2, backend="cpu", saves_state=True, adapters=adapters)
    with Engine.open(path, options) as engine:
        speculate_eagerly(engine, [one for one in engine._speculation._sources if isinstance(one, HeadSource)])
        engine.use_state(StatePlace(str(state)), pytest.fail)
        [found] = answers(engine, [request])
        while saves and engine.save_prefix():
            pass
    return found


@pytest.mark.parametrize("knows", ["token", "state"])
@pytest.mark.parametrize("length", [200, 800])
def test_exact_heads_draft_after_restored_prefixes(tmp_path: Path, knows: str, length: int) -> None:
    """Draws at random, which needs the position of each token, although the head gets only the end of 800 tokens."""
    path = exact_head(tmp_path, knows=knows)
    prompt = np.random.default_rng(3).integers(3, 290, length).tolist()
    request = Request(TokenPrompt(prompt), max_tokens=100, sampling=SamplingParams(temperature=2.0, seed=1))
    with opened(path, drafts=False) as engine:
        [expected] = answers(engine, [request])
    restored(path, tmp_path / "state", structs.replace(request, max_tokens=1), saves=True)
    found = restored(path, tmp_path / "state", request, saves=False)
    timings = found.finished.timings
    assert timings.cached_tokens >= length - 16
    assert found.tokens == expected.tokens
    assert timings.accepted_tokens == timings.drafted_tokens > 50


@pytest.mark.night
def test_adapters_change_no_draft_into_an_answer(tmp_path: Path) -> None:
    """The head knows nothing of adapters. Answers are those without drafts, also after a restored prefix."""
    path = tiny_architecture(tmp_path, HEADS[0])
    adapter = f"a={tiny_adapter(tmp_path / 'a.gguf', path)}:0.5"
    prompt = TokenPrompt(np.random.default_rng(3).integers(3, 290, 700).tolist())
    unlike = [*random_requests(3), Request(prompt, max_tokens=60, sampling=SamplingParams(temperature=0))]
    requests = [structs.replace(request, adapters={"a": scale}) for request in unlike for scale in (0.0, 0.5)]
    with opened(path, drafts=False, adapters=[adapter]) as engine:
        expected = [answers(engine, [request])[0].tokens for request in requests]
    with opened(path, max_sequences=3, adapters=[adapter]) as engine:
        found = answers(engine, requests)
    restored(path, tmp_path / "state", structs.replace(requests[-1], max_tokens=1), saves=True, adapters=[adapter])
    again = restored(path, tmp_path / "state", requests[-1], saves=False, adapters=[adapter])
    assert [one.tokens for one in found] == expected
    assert again.tokens == expected[-1]
    assert again.finished.timings.cached_tokens >= 684
    assert again.finished.timings.drafted_tokens > 0
    assert sum(one.finished.timings.drafted_tokens for one in found) > 100
    assert expected[0::2] != expected[1::2]
