"""Run for a minute what scripts/soak_chat runs for an hour: a complete chat in a terminal, inside a shell."""

from __future__ import annotations

import random
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.soak.chat_soak import (
    ACTIONS,
    MOMENTS,
    ask_in_lines,
    fill,
    interrupt,
    interrupt_at,
    kill,
    regenerate,
    suspend,
)
from tests.support.cli.chat_person import Findings, Person
from tests.support.cli.commands import LLMRUN, script_file
from tests.support.cli.shells import PtyShell
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.push

ANSWER = "a long answer of *many* words, " * 5


@contextmanager
def chatting(data: Path, *arguments: str, seed: int = 1, answer_seconds: float = 0.4) -> Iterator[Person]:
    environment = {"LLMRUN_DATA_DIR": str(data)}
    command = shlex.join([*LLMRUN, "chat", *arguments])
    shell = PtyShell(data, environment)
    person = Person(shell, data, command, Findings(), random.Random(seed), answer_seconds=answer_seconds)
    try:
        person.begin()
        yield person
        person.leave()
    finally:
        shell.close()


def scripted(folder: Path, context: int) -> tuple[str, ...]:
    script = script_file(folder, [("assistant\n", ANSWER)], step_seconds=0.002)
    # With speculation, a repeated answer would end before anyone could stop it.
    return ("--backend", "scripted", script, "-c", str(context), "--speculate", "off")


def test_everything_that_can_be_done_in_a_chat(tmp_path: Path) -> None:
    with chatting(tmp_path, *scripted(tmp_path, 32_768)) as person:
        person.ask()
        for action, _ in ACTIONS.values():
            action(person)
        for moment in [*MOMENTS, "answer", "answer", "answer"]:
            interrupt_at(person, moment)
            person.resize()
            person.settle()
        person.leave()
        person.begin("--continue")
        person.ask()
    assert len(person.findings.stops) >= 3  # at the prompt, while typing, and in prefill, in decode or after the answer


def test_nothing_is_lost_when_it_is_killed(tmp_path: Path) -> None:
    with chatting(tmp_path, *scripted(tmp_path, 8192), seed=2) as person:
        for _ in range(3):
            person.ask()
            kill(person)


def test_a_full_context_says_so_and_goes_on(tmp_path: Path) -> None:
    with chatting(tmp_path, *scripted(tmp_path, 1000), seed=3) as person:
        fill(person, 1000)


def test_the_real_model(tmp_path: Path) -> None:
    with chatting(tmp_path, str(smollm2()), "-c", "2048", "-n", "100", seed=4, answer_seconds=1.0) as person:
        ask_in_lines(person)
        for _ in range(3):
            interrupt(person)
        suspend(person)
        kill(person)
        regenerate(person)
