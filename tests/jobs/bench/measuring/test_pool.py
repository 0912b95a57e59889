"""Tests that engines stay open while memory allows, and otherwise close in least-recently-used order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import DoesNotFit
from llmrun.jobs.bench.measuring import pool as pool_module
from llmrun.jobs.bench.measuring.pool import BenchReporter, Pool, WorkerProcess, rooms
from llmrun.jobs.bench.measuring.workload import BenchTarget, Configuration, Room, chats, synthetic
from tests.support.bench.scripts import SHORT, Notes, configuration_of, target_of


class Opened:
    """A log of the pool's actions: each target that it opened, and those still open."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.open: list[str] = []


class FakeWorker:
    """A worker without a process, to test only the pool's rules."""

    def __init__(self, target: BenchTarget, opened: Opened, *, fits_beside: int, compiles: bool) -> None:
        self._target, self._opened, self._fits_beside, self._compiles = target, opened, fits_beside, compiles

    def open(self, target: BenchTarget, room: Room) -> dict[str, Any]:
        if len(self._opened.open) > self._fits_beside:
            raise DoesNotFit("too much")
        first = self._target.model not in self._opened.order
        self._opened.order.append(self._target.model)
        self._opened.open.append(self._target.model)
        return {"load_s": 5.0 if first and self._compiles else 0.5, "compiled": first and self._compiles}

    def peak_memory(self) -> int:
        return 1000

    def close(self) -> None:
        self._opened.open.remove(self._target.model)

    def kill(self) -> None:
        if self._target.model in self._opened.open:
            self.close()


def pool_of(targets: list[BenchTarget], opened: Opened, *, fits_beside: int = 99, compiles: bool = False) -> Pool:
    def start(target: BenchTarget, reporter: BenchReporter) -> WorkerProcess:
        return FakeWorker(target, opened, fits_beside=fits_beside, compiles=compiles)  # type: ignore[return-value]

    return Pool([configuration_of(target) for target in targets], Notes(), start)


@pytest.fixture
def three(tmp_path: Path) -> list[BenchTarget]:
    return [target_of(tmp_path, name) for name in "abc"]


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "free_memory", lambda: 100 << 20)


def test_an_engine_is_opened_once_while_there_is_memory(three: list[BenchTarget]) -> None:
    opened = Opened()
    pool = pool_of(three, opened)
    news = [pool.worker(target)[1] for target in [*three, *three]]
    assert news == [True, True, True, False, False, False]
    pool.close()
    assert opened.open == []
    assert [pool.opened[target].peak_memory for target in three] == [1000] * 3


def test_the_one_used_longest_ago_goes_when_memory_is_short(three: list[BenchTarget], short_of_memory: None) -> None:
    opened = Opened()
    pool = pool_of(three, opened)
    for target in three:
        pool.worker(target)
    assert opened.open == ["c"]
    assert pool.opened[three[0]].peak_memory == 1000


def test_one_that_does_not_fit_beside_the_others_is_tried_alone(three: list[BenchTarget]) -> None:
    opened = Opened()
    pool = pool_of(three, opened, fits_beside=1)
    for target in three:
        pool.worker(target)
    assert opened.open == ["c"]


def test_one_that_fits_nowhere_says_so(three: list[BenchTarget]) -> None:
    pool = pool_of(three, Opened(), fits_beside=-1)
    with pytest.raises(DoesNotFit):
        pool.worker(three[0])


def test_a_load_that_compiled_kernels_is_not_the_load_time(three: list[BenchTarget]) -> None:
    opened = Opened()
    pool = pool_of(three[:1], opened, compiles=True)
    pool.worker(three[0])
    assert pool.opened[three[0]].loads == [0.5]
    assert opened.order == ["a", "a"]
    assert opened.open == ["a"]


def test_an_engine_has_room_for_all_that_it_will_be_asked(three: list[BenchTarget]) -> None:
    asked = [SHORT, synthetic(100, 20, 50, 1), synthetic(10, 1, 0, 4)]
    found = rooms([configuration_of(three[0], workload) for workload in asked])
    assert found == {three[0]: Room(171, 4, True)}
    assert rooms([configuration_of(three[1], chats(2)[0])])[three[1]].context_size == 4096


@pytest.mark.night
def test_a_context_longer_than_the_model_was_trained_for_is_told_once(tmp_path: Path) -> None:
    notes = Notes()
    target = target_of(tmp_path, train_context=12)
    for workload, said in ((SHORT, 1), (synthetic(4, 4, 0, 1), 0)):
        notes.said.clear()
        pool = Pool([Configuration("", target, workload)], notes, lambda target, reporter: WorkerProcess(reporter))
        pool.worker(target)
        pool.drop(target)
        pool.worker(target)
        pool.kill()
        assert len(notes.said) == said
        assert all(words.startswith("13 tokens of context: model was trained for 12, and") for words in notes.said)
