"""Tests of what the engine's process tells about a model: its sampling and its fingerprint."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.types import Adapter, ModelInfo
from llmrun.engine.child.messages import TO_CHILD, Loading, Note, Open
from llmrun.engine.child.opening import describe, fingerprint, open_engine

INFO: ModelInfo = replace(ScriptedBackend().info, device="2 threads, avx2")


def test_options_survive_the_journey() -> None:
    options = OpenOptions(
        "cpu", 512, max_sequences=3, threads=2, kv_type="q8_0", gpu_layers="all", adapters=("a.gguf",)
    )
    message = Open("m.gguf", "m", options.portable(), thinking_tags=("<a>", "</a>"), speculate=False)
    back = TO_CHILD.decode(TO_CHILD.encode(message))
    assert back == message
    assert OpenOptions(**message.options).portable() == options.portable()


def test_settings_take_precedence_over_the_catalogue() -> None:
    asked = Open(
        "model", options={"backend": "scripted"}, catalogue={"temperature": 0.25, "top_k": 3}, sampling={"top_k": 7}
    )
    told: list[Loading | Note] = []
    with closing(open_engine(asked, told.append, lambda ids: None)) as engine:
        facts = describe(engine, asked)
    sampling = facts.default_sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.25, 7, 0.95, 0)


@pytest.mark.parametrize(
    "other",
    [
        fingerprint(INFO, "e", answering=None),
        fingerprint(replace(INFO, kv_type="q8_0"), "d", answering=None),
        fingerprint(INFO, "d", answering=["a template", None]),
        fingerprint(replace(INFO, batch_invariant=False), "d", answering=None),
        fingerprint(replace(INFO, adapters=(Adapter("a", "a.gguf", 1.0, (), "1"),)), "d", answering=None),
    ],
)
def test_a_fingerprint_depends_on_what_changes_answers(other: str) -> None:
    assert other != fingerprint(INFO, "d", answering=None)


def test_a_fingerprint_depends_on_the_numerics(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(INFO, "d", answering=None)
    monkeypatch.setattr("llmrun.engine.child.opening.NUMERICS", 999)
    assert fingerprint(INFO, "d", answering=None) != before


def test_a_fingerprint_depends_on_the_machine_only_if_answers_do() -> None:
    here, there = INFO, replace(INFO, device="8 threads, portable", max_sequences=16)
    assert fingerprint(here, "d", answering=None) == fingerprint(there, "d", answering=None)
    here, there = replace(here, batch_invariant=False), replace(there, batch_invariant=False)
    assert fingerprint(here, "d", answering=None) != fingerprint(there, "d", answering=None)
