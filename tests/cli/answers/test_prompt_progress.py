"""Tests of the progress line of a prompt, which also moves during a step."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from llmrun.backends.scripted import ScriptedBackend
from llmrun.cli.answers.answering import answer
from llmrun.cli.answers.samples import answer_samples
from llmrun.cli.arguments.generating import SamplesWanted
from llmrun.cli.console import output, progress
from llmrun.engine.base import Answering
from llmrun.engine.costs import EMPTY
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request
from llmrun.options.settings import Settings
from tests.support.cli.chats import session
from tests.support.engine.scripted_models import random_prompt

pytestmark = pytest.mark.push

STEP_S = 0.3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def shown(self) -> list[int]:
        """Return the numbers of processed tokens that were shown, without repetitions."""
        return list(dict.fromkeys(int(done) for done in re.findall(r"prefill (\d+)/", self.getvalue())))


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output, "_SHOW_AFTER_S", 0.0)
    monkeypatch.setattr(output, "_REDRAW_S", 0.0)
    monkeypatch.setattr(progress, "_REDRAW_S", STEP_S / 20)
    return terminal


def slow_engine() -> Engine:
    engine = Engine(ScriptedBackend(step_seconds=STEP_S))
    teach(engine)
    return engine


def teach(engine: Answering) -> None:
    """Teach an engine that its steps take STEP_S."""
    assert isinstance(engine, Engine)
    for rows in (1, 256) * 20:
        engine._scheduler.costs.observe(EMPTY.with_chunk(rows, 0), rows, STEP_S)


@pytest.mark.parametrize("samples", [None, 1])
def test_the_progress_moves_within_a_step(monkeypatch: pytest.MonkeyPatch, samples: int | None) -> None:
    terminal = use_terminal(monkeypatch)
    request = Request(random_prompt(200), 1)
    with slow_engine() as engine:
        if samples is None:
            answer(engine, request, model="m", as_json=False)
        else:
            wanted = SamplesWanted(samples, best_of=None, null=False)
            answer_samples(engine, request, wanted, model="m", as_json=False, hide_thinking=False, log=None)
    assert len(terminal.shown()) >= 3
    assert terminal.shown() == sorted(terminal.shown())
    assert re.search(r"\r +\r", terminal.getvalue())  # the line was erased


def test_the_progress_of_a_chat_moves_within_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = use_terminal(monkeypatch)
    with session(tmp_path, backend=ScriptedBackend(step_seconds=STEP_S), settings=Settings(max_tokens=1)) as found:
        teach(found.chat.engine)
        found.run("one")
    assert len(terminal.shown()) >= 3
