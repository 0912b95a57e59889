"""Tests of the runner: targets take turns, one failure does not stop the others, and Ctrl-C keeps earlier results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import BackendCrashed, DoesNotFit, LlmrunError
from llmrun.jobs.bench.measuring.asking import Sample
from llmrun.jobs.bench.measuring.pool import BenchReporter, WorkerProcess
from llmrun.jobs.bench.measuring.runner import Effort, Runner, Trial
from llmrun.jobs.bench.measuring.workload import BenchTarget, Room, Workload
from tests.support.bench.scripts import Notes, configuration_of, target_of


def never(trials: Sequence[Trial]) -> bool:
    return False


def rounds(count: int) -> Effort:
    return Effort(seconds=1.0, repetitions=count, enough=never)


class Turns:
    """A log of turns and their seeds; `before` may raise."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, int]] = []
        self.killed: list[str] = []
        self.facts: dict[str, int] = {}
        self.gpu_layers: dict[str, str] = {}  # by target
        self.warm_ups: list[float] = []  # time limit of each, in seconds
        self.outlasts_warm_ups = False

    def before(self, name: str) -> None:
        """Run when a turn begins; tests replace it."""


class FakeWorker:
    def __init__(self, name: str, turns: Turns) -> None:
        self._name, self._turns = name, turns

    def open(self, target: BenchTarget, room: Room) -> dict[str, Any]:
        layers = self._turns.gpu_layers.get(self._name, "")
        return {"load_s": 0.1, "backend": "scripted", "gpu_layers": layers, **self._turns.facts}

    def run(self, workload: Workload, seed: int) -> Sample:
        self._turns.before(self._name)
        self._turns.taken.append((self._name, seed))
        return Sample((), 1.0)

    def warm(self, workload: Workload, seed: int, seconds: float) -> float | None:
        self._turns.warm_ups.append(seconds)
        if self._turns.outlasts_warm_ups:
            return None
        return self.run(workload, seed).seconds

    def limits(self, threads: int, memory_bytes: int) -> tuple[float, float]:
        return 1e10, 1e12

    def peak_memory(self) -> int:
        return 5

    def close(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._turns.killed.append(self._name)


def runner_of(names: str, turns: Turns, effort: Effort, folder: Path, notes: Notes | None = None) -> Runner:
    def start(target: BenchTarget, reporter: BenchReporter) -> WorkerProcess:
        return FakeWorker(target.model, turns)  # type: ignore[return-value]

    configurations = [configuration_of(target_of(folder, name)) for name in names]
    return Runner(configurations, effort, notes or Notes(), start)


def test_configurations_alternate_and_each_round_has_the_same_tokens(tmp_path: Path) -> None:
    turns = Turns()
    outcome = runner_of("ab", turns, rounds(4), tmp_path).run()
    measured = turns.taken[-8:]
    assert "".join(name for name, _ in measured) == "abbaabba"
    for first, second in zip(measured[::2], measured[1::2], strict=True):
        assert first[1] == second[1]
    assert len({seed for _, seed in measured}) == 4
    assert [len(trial.samples) for trial in outcome.trials] == [4, 4]


def test_warming_up_is_not_measured(tmp_path: Path) -> None:
    turns = Turns()
    outcome = runner_of("a", turns, rounds(2), tmp_path).run()
    assert len(turns.taken) > 2
    assert len(outcome.trials[0].samples) == 2


def test_rounds_go_on_until_it_is_enough(tmp_path: Path) -> None:
    def six(trials: Sequence[Trial]) -> bool:
        return len(trials[0].samples) == 6

    outcome = runner_of("ab", Turns(), Effort(1000.0, None, six), tmp_path).run()
    assert [len(trial.samples) for trial in outcome.trials] == [6, 6]


def test_rounds_end_when_the_time_is_over_but_there_is_always_one(tmp_path: Path) -> None:
    outcome = runner_of("a", Turns(), Effort(1e-9, None, never), tmp_path).run()
    assert len(outcome.trials[0].samples) == 1


def test_a_warm_up_that_takes_too_long_is_cancelled_once(tmp_path: Path) -> None:
    turns = Turns()
    turns.outlasts_warm_ups = True
    outcome = runner_of("ab", turns, Effort(2.0, 1, never), tmp_path).run()
    assert turns.warm_ups == [pytest.approx(0.4)] * 2
    assert "".join(name for name, _ in turns.taken) == "ab"
    assert [len(trial.samples) for trial in outcome.trials] == [1, 1]


@pytest.mark.push
def test_a_round_that_would_end_too_late_does_not_begin(tmp_path: Path) -> None:
    turns = Turns()
    turns.outlasts_warm_ups = True
    turns.before = lambda name: time.sleep(0.4)  # type: ignore[method-assign]
    notes = Notes()
    started = time.perf_counter()
    outcome = runner_of("a", turns, Effort(1.0, None, never), tmp_path, notes).run()
    assert time.perf_counter() - started < 1.0
    assert len(outcome.trials[0].samples) == 2
    assert notes.said == []


@pytest.mark.night
def test_measuring_the_machine_does_not_make_rounds_look_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first measurement starts a process, which takes a second on a busy machine."""

    def slow(process: WorkerProcess, threads: int, memory_bytes: int) -> tuple[float, float]:
        time.sleep(1.2)
        return 1e10, 1e12

    monkeypatch.setattr(WorkerProcess, "limits", slow)
    turns = Turns()
    turns.facts = {"weight_bytes": 1}
    turns.before = lambda name: time.sleep(0.01)  # type: ignore[method-assign]
    notes = Notes()
    outcome = runner_of("a", turns, Effort(2.0, None, never), tmp_path, notes).run()
    assert len(outcome.trials[0].samples) > 5
    assert notes.said == []


@pytest.mark.push
def test_a_first_round_longer_than_the_limit_is_told(tmp_path: Path) -> None:
    turns = Turns()
    turns.outlasts_warm_ups = True
    turns.before = lambda name: time.sleep(0.3)  # type: ignore[method-assign]
    notes = Notes()
    outcome = runner_of("a", turns, Effort(0.1, None, never), tmp_path, notes).run()
    assert len(outcome.trials[0].samples) == 1
    (said,) = notes.said
    assert said.startswith("one round took 3")
    assert said.endswith("ms, longer than --seconds allows: each figure is a single measurement")


@pytest.mark.push
def test_progress_never_claims_that_no_time_is_left(tmp_path: Path) -> None:
    turns = Turns()
    notes = Notes()
    told: list[tuple[str, float | None]] = []

    def look(name: str) -> None:
        if not notes.watched:  # still warming up
            return
        told.append(notes.watched[-1]())
        time.sleep(0.35)
        told.append(notes.watched[-1]())

    turns.before = look  # type: ignore[method-assign]
    runner_of("a", turns, Effort(0.3, None, never), tmp_path, notes).run()
    (before, share), after = told
    assert before.startswith("round 1, at most 0:01 left")
    assert share is not None
    assert after == ("time is up, but the first measurement is still running  a  8 in, 4 out", None)


def test_what_fails_ends_alone(tmp_path: Path) -> None:
    turns = Turns()

    def fail(name: str) -> None:
        if name == "b" and len(turns.taken) > 12:
            raise BackendCrashed("it died")

    turns.before = fail  # type: ignore[method-assign]
    outcome = runner_of("abc", turns, rounds(20), tmp_path).run()
    first, second, third = outcome.trials
    assert isinstance(second.failure, BackendCrashed)
    assert (first.failure, third.failure) == (None, None)
    assert len(first.samples) == len(third.samples) == 20
    assert "b" in turns.killed


def test_an_interruption_leaves_what_there_is_and_no_process(tmp_path: Path) -> None:
    turns = Turns()

    def interrupt(name: str) -> None:
        if len(turns.taken) == 30:
            raise KeyboardInterrupt

    turns.before = interrupt  # type: ignore[method-assign]
    outcome = runner_of("ab", turns, rounds(1000), tmp_path).run()
    assert outcome.interrupted
    assert all(trial.samples for trial in outcome.trials)
    assert set(turns.killed) == {"a", "b"}


def test_a_machine_that_cannot_be_measured_costs_its_limits_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(process: WorkerProcess, threads: int, memory_bytes: int) -> tuple[float, float]:
        raise DoesNotFit("memory to measure its speed: none is left")

    monkeypatch.setattr(WorkerProcess, "limits", no_memory)
    notes = Notes()
    turns = Turns()
    turns.facts = {"weight_bytes": 1}
    outcome = runner_of("a", turns, rounds(3), tmp_path, notes).run()
    assert len(outcome.trials[0].samples) == 3
    assert outcome.bandwidths == []
    assert notes.said == ["cannot measure the machine's limits: memory to measure its speed: none is left"]


@pytest.mark.night
def test_real_processes_are_measured_and_a_slower_one_is_slower(tmp_path: Path) -> None:
    targets = [target_of(tmp_path, "quick", step_seconds=0.002), target_of(tmp_path, "slow", step_seconds=0.02)]
    outcome = Runner([configuration_of(target) for target in targets], rounds(3), Notes()).run()
    quick, slow = ([sample.value("decode") for sample in trial.samples] for trial in outcome.trials)
    assert len(quick) == len(slow) == 3
    assert min(value for value in quick if value) > max(value for value in slow if value)
    assert all(outcome.opened[target].peak_memory > 10 << 20 for target in targets)


@pytest.mark.push
def test_a_target_that_cannot_be_opened_is_a_failure_with_its_reason(tmp_path: Path) -> None:
    missing = BenchTarget("gone", str(tmp_path / "gone.json"), backend="scripted")
    outcome = Runner([configuration_of(missing)], rounds(1), Notes()).run()
    assert isinstance(outcome.trials[0].failure, LlmrunError)
    assert "gone.json" in str(outcome.trials[0].failure)


@pytest.mark.night
@pytest.mark.parametrize("step_seconds", [0.0, 0.3])
def test_a_turn_is_long_enough_to_be_told_from_noise(tmp_path: Path, step_seconds: float) -> None:
    target = target_of(tmp_path, step_seconds=step_seconds)
    outcome = Runner([configuration_of(target)], rounds(1), Notes()).run()
    (sample,) = outcome.trials[0].samples
    assert sample.seconds >= 0.1
    assert (len(sample.requests) == 1) == (step_seconds == 0.3)
