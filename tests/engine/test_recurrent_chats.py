"""Tests of the engine with recurrent models: chats compute little more than new tokens, and drafts continue."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.engine.constraint.base import FormatKind, ResponseFormat
from llmrun.engine.drafting.lookup import LookupSource
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TokenPrompt
from llmrun.formats.gguf.reader import open_gguf
from tests.support.engine.answers import answer_all
from tests.support.engine.eager_speculation import speculate_eagerly
from tests.support.engine.long_chat import tokens_computed
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.templates.own_templates import DROPS_THINKING

pytestmark = pytest.mark.push


@pytest.mark.night
@pytest.mark.parametrize("name", ["qwen35", "granitehybrid", "jamba"])
def test_a_turn_computes_little_more_than_its_own_tokens(tmp_path: Path, name: str) -> None:
    """Each turn adds about 230 tokens. Few more are computed: those after the checkpoint of the previous turn."""
    with open_gguf(tiny_architecture(tmp_path, name)) as file:
        backend = CpuBackend(file, OpenOptions(context_size=8192, threads=2))
    with Engine(backend, chat_template=DROPS_THINKING) as engine:
        found = tokens_computed(engine, 10, context=4000, thinking=300, answer=120)
    prompt, computed = found[-1]
    assert prompt >= 3900
    assert computed <= 300
    sizes = [prompt for prompt, _ in found]
    added = [later - earlier for earlier, later in pairwise(sizes)]
    assert all(computed <= new + 40 for new, (_, computed) in zip(added, found[1:], strict=True))


def test_a_stop_string_inside_forced_tokens_does_not_end_speculation(tmp_path: Path) -> None:
    """The state has passed the stop string, so that the cache cannot be cut there. Nothing has been drafted."""
    with open_gguf(tiny_architecture(tmp_path, "qwen35")) as file:
        backend = CpuBackend(file, OpenOptions(context_size=256, threads=1))
    forced = ResponseFormat(FormatKind.REGEX, "the quick brown fox jumps over it[ab]")
    with Engine(backend, drafts=[LookupSource()]) as engine:
        [answer] = answer_all(engine, [Request(TokenPrompt([5, 6, 7]), stop=("ck b",), response_format=forced)])
        assert answer.text == "the qui"
        assert answer.finished.timings.forced_tokens > 0
        assert not engine._speculation._stopped


def test_a_recurrent_model_drafts_for_another(tmp_path: Path) -> None:
    """Most of its tokens are wrong, because both models have random weights. It goes on, and the answer is the same."""
    target = tiny_architecture(tmp_path, "granitehybrid")
    with open_gguf(target) as file:
        plain = CpuBackend(file, OpenOptions(context_size=256, threads=1))
    request = Request(TokenPrompt([5, 6, 7]), max_tokens=60)
    with Engine(plain) as engine:
        [expected] = answer_all(engine, [request])
    with Engine.open(
        target, OpenOptions(context_size=256, threads=1, backend="cpu"), draft=tiny_architecture(tmp_path, "qwen35")
    ) as engine:
        speculate_eagerly(engine, engine._speculation._sources)
        [answer] = answer_all(engine, [request])
        assert engine.draft_error == ""
    assert answer.tokens == expected.tokens
    assert answer.finished.timings.drafted_tokens > 20
