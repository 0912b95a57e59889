"""Run for seconds what scripts/soak_serve runs for hours: real servers whose engines run the scripted backend."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.soak.serving.cancelling import LeavingSoak
from tests.soak.serving.crowd import run_crowd
from tests.soak.serving.hostile import Siege
from tests.soak.serving.killing import run_kills
from tests.soak.serving.requests import random_requests
from tests.soak.serving.same import SameSoak
from tests.soak.serving.swapping import run_swaps
from tests.soak.serving.upstreams import run_upstream_kills
from tests.support.models.downloads import smollm2
from tests.support.serving.served import scripted_arguments

pytestmark = [
    pytest.mark.push,
    pytest.mark.skipif(sys.platform == "win32", reason="kills processes and resets connections as POSIX does"),
]

CONTEXT = 2048


def test_answers_are_the_same_under_all_conditions(tmp_path: Path) -> None:
    asked = random_requests(1, 24, with_tools=True)
    found = SameSoak(
        scripted_arguments(tmp_path, step_seconds=0.001), asked, tmp_path, context=CONTEXT, per_fresh=24
    ).run()
    assert found.problems == []
    evidence = {one.name: one.evidence for one in found.conditions}
    assert evidence["preempted"]["preemptions"] > 0
    assert evidence["prefixes cached"]["cached tokens"] > evidence["at once"]["cached tokens"]
    assert evidence["engine killed"]["restarts"] == evidence["engine killed"]["kills"] == 1
    assert evidence["engine killed"]["in progress at a kill"] > 0


def test_a_crowd_fits_in_a_small_cache(tmp_path: Path) -> None:
    found = run_crowd(scripted_arguments(tmp_path, step_seconds=0.001), tmp_path, count=80, seed=1, scale=0.2)
    assert found.problems == []
    assert (found.answers, found.preemptions, found.restarts) == (80, 0, 0)
    assert found.tight > 0


def test_clients_that_leave_cost_one_step(tmp_path: Path) -> None:
    found = LeavingSoak(scripted_arguments(tmp_path, step_seconds=0.02), tmp_path, seed=1).run(2)
    assert found.clients == 16
    assert found.too_late == 0, found.described


def test_killed_engines_change_no_answer(tmp_path: Path) -> None:
    asked = random_requests(1, 24, with_tools=False)
    model = scripted_arguments(tmp_path, step_seconds=0.001)
    found = run_kills(model, asked, tmp_path, kills=2, per_server=2, seed=1, context=CONTEXT)
    assert found.problems == []
    assert found.restarts == 2
    assert found.hit > 0


def test_killed_upstreams_lose_no_request(tmp_path: Path) -> None:
    asked = random_requests(1, 24, with_tools=False)
    model = scripted_arguments(tmp_path, step_seconds=0.02)
    found = run_upstream_kills(model, asked, tmp_path, kills=3, seed=1, context=CONTEXT)
    assert found.problems == []
    assert (found.kills, found.failed, found.different) == (3, 0, 0)
    assert found.moved > 0, found.described
    assert found.resumed > 0, found.described


def test_hostile_clients_harm_nobody(tmp_path: Path) -> None:
    model = scripted_arguments(tmp_path, step_seconds=0.005)
    found = Siege(model, tmp_path, seed=1, attack_s=5.0, quiet_s=1.0, idle=100, context=4 * CONTEXT).run(0.0)
    assert found.unexpected == []
    assert (found.crashes, found.traces, found.leaks) == (0, 0, [])
    assert (found.alone.harmed, found.beside.harmed) == (0, 0), found.described
    assert found.beside.answers > 0


def test_swapping_models_fails_no_request(tmp_path: Path) -> None:
    found = run_swaps(smollm2(), tmp_path, limit=750_000_000, swaps=4, seed=1)
    assert found.problems == []
    assert found.swaps >= 4
    assert found.peak < found.limit
