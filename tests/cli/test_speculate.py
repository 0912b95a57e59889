"""Tests of --speculate, with the real process on the scripted backend."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.commands import llmrun

pytestmark = pytest.mark.push

QUESTION = "once more, once more, once more, once more"


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Return a model that repeats the question, and whose steps take so long that drafts are worth it."""
    path = tmp_path / "slow.json"
    path.write_text(json.dumps({"step_seconds": 0.004}))
    return str(path)


def answered(model: str, *arguments: str, **environment: str) -> dict[str, Any]:
    command = ("generate", "-m", model, "--backend", "scripted", "--seed", "1", "-q", "--json", *arguments, QUESTION)
    done = llmrun(*command, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr.decode()
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def test_speculation_changes_the_steps_and_not_the_answer(model: str) -> None:
    plain, drafting = answered(model, "--speculate", "off"), answered(model)
    assert drafting["choices"] == plain["choices"]
    assert drafting["usage"] == plain["usage"]
    assert (plain["timings"]["tokens_per_step"], plain["timings"]["drafted_tokens"]) == (1.0, 0)
    assert drafting["timings"]["tokens_per_step"] > 1
    assert drafting["timings"]["steps"] < plain["timings"]["steps"]
    assert 0 < drafting["timings"]["accepted_tokens"] <= drafting["timings"]["drafted_tokens"]


def test_a_draft_model_is_named_like_any_model(model: str) -> None:
    drafting = answered(model, "--speculate", model)
    assert drafting["choices"] == answered(model, "--speculate", "off")["choices"]
    assert drafting["timings"]["accepted_tokens"] > 0


def test_a_flag_overrides_the_environment(model: str) -> None:
    assert answered(model, LLMRUN_SPECULATE="off")["timings"]["drafted_tokens"] == 0
    assert answered(model, "--speculate", "auto", LLMRUN_SPECULATE="off")["timings"]["drafted_tokens"] > 0


def test_the_closing_line_tells_tokens_per_step(model: str) -> None:
    done = llmrun("generate", "--stats", "-m", model, "--backend", "scripted", QUESTION)
    assert "/step" in done.stderr.decode()
    assert "% accepted" in done.stderr.decode()
