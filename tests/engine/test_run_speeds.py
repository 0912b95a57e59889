"""Tests that an engine records the speeds of its answers once, when it closes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llmrun.backends import run_speeds
from llmrun.backends.scripted import ScriptedBackend, scripted_answers
from llmrun.base.types import Timings
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TextPrompt
from tests.support.engine.answers import answer_all
from tests.support.engine.scripted_models import GREEDY


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    return tmp_path / "speeds"


def run(prompt: str, answer: str, *, backend: str = "cpu", times: int = 1) -> Engine:
    model = ScriptedBackend(scripted_answers([("go", answer)]), context_size=2000)
    model.info = replace(model.info, backend=backend, path="/m.gguf")
    engine = Engine(model)
    for _ in range(times):
        answer_all(engine, [Request(TextPrompt(prompt), None, (), GREEDY)])
    return engine


def test_an_answer_is_recorded_when_the_engine_closes(folder: Path) -> None:
    engine = run("go", "a" * 50, times=2)
    assert not folder.exists()
    engine.close()
    engine.close()
    [found] = run_speeds.kept_runs().values()
    assert found.decode > 0
    assert (found.prefill, found.count, found.file) == (0.0, 1, "/m.gguf")


def test_a_long_prompt_is_recorded(folder: Path) -> None:
    run("go" * 200, "a").close()
    [found] = run_speeds.kept_runs().values()
    assert (found.decode, found.prefill > 0) == (0.0, True)


def test_short_answers_are_not_recorded(folder: Path) -> None:
    run("go", "a" * 10).close()
    assert not folder.exists()


def test_accepted_drafts_do_not_make_a_model_look_faster() -> None:
    model = ScriptedBackend(scripted_answers([]))
    engine = Engine(model)
    engine._observe_speed(Timings(0, 1, 0, 101, 1.0, 1.0, 10.0, 11.0, steps=51, drafted_tokens=60, accepted_tokens=50))
    assert engine._best_decode == 5.0
    engine._observe_speed(Timings(0, 1, 0, 101, 1.0, 1.0, 10.0, 11.0, steps=20, accepted_tokens=81))
    assert engine._best_decode == 5.0
    engine.close()


def test_a_stand_in_for_a_model_is_not_recorded(folder: Path) -> None:
    run("go", "a" * 50, backend="scripted").close()
    assert not folder.exists()


def test_the_next_engine_begins_with_the_learnt_costs() -> None:
    engine = run("go" * 600, "a")
    learnt = engine._scheduler.costs.learnt()
    engine.close()
    [entry] = run_speeds.kept_costs().values()
    assert entry.costs == learnt
    later = run("", "a", times=0)
    answer = later.prepare(Request(TextPrompt("go"), None, (), GREEDY))
    predicted = later.predicted(answer).first_token_s
    assert predicted is not None
    assert predicted > 0
    later.close()


def test_short_prompts_of_one_process_look_for_no_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `generate` would otherwise read a file and import modules that it does not need."""
    engine = run("go", "a", times=0)
    monkeypatch.setattr("llmrun.backends.prompt_times.assumed_costs", lambda *_, **__: pytest.fail("not needed"))
    answer_all(engine, [Request(TextPrompt("go"), None, (), GREEDY)])
    engine.close()


def test_costs_of_few_steps_are_not_kept(folder: Path) -> None:
    run("go", "a").close()
    assert not folder.exists()
