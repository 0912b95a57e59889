"""Tests of encodings on the CPU engine: ending, failing and cancelling them, their progress and their expected time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llmrun.backends.cpu.team import StagedTeam
from llmrun.backends.cpu.vision import CpuEncoding, CpuVision
from llmrun.backends.cpu.vision_costs import AssumedSpeeds, EncoderTimes
from llmrun.base import folders
from llmrun.base.errors import Cancelled, LlmrunError, ModelFileError
from llmrun.model.vision.projector import read_projector
from tests.support.vision.opened import encode
from tests.support.vision.projectors import tiny_projector
from tests.support.vision.prompts import tiles_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.vision.layout import ImageLayout

pytestmark = pytest.mark.push


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_projector(tmp_path_factory.mktemp("projector"), "gemma3")


@pytest.fixture
def vision(path: Path) -> Iterator[CpuVision]:
    opened = CpuVision.loaded(read_projector(path), 2)
    yield opened
    opened.close()


def layout_of(vision: CpuVision) -> ImageLayout:
    return vision.projector.layout(300, 200)


def begin(vision: CpuVision, seed: int = 0) -> CpuEncoding:
    return vision.begin(tiles_of(layout_of(vision), seed), layout_of(vision))


def rows_of(vision: CpuVision, seed: int = 0) -> NDArray[np.float32]:
    return encode(vision, tiles_of(layout_of(vision), seed), layout_of(vision))


def threads() -> int:
    return sum(thread.name.startswith("llmrun-") for thread in threading.enumerate())


def test_no_threads_wait_for_images(vision: CpuVision) -> None:
    before = threads()
    encoding = begin(vision)
    assert encoding.advance(0) is None
    assert threads() == before + 2
    while encoding.advance(0) is None:
        pass
    assert threads() == before


def test_a_cancelled_image_stops_and_the_next_is_right(vision: CpuVision) -> None:
    expected, encoding = rows_of(vision), begin(vision, seed=1)
    assert encoding.advance(0) is None
    encoding.cancel()
    for _ in range(2):
        with pytest.raises(Cancelled):
            encoding.advance(1)
    after = begin(vision)
    encoding.cancel()  # of the earlier image
    while (rows := after.advance(0)) is None:
        pass
    assert np.array_equal(rows, expected)
    after.cancel()
    assert np.array_equal(rows_of(vision), expected)


def test_other_threads_can_stop_a_tile(vision: CpuVision, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = StagedTeam._run_step, []
    encoding = begin(vision)

    def cancelled(team: StagedTeam) -> None:
        calls.append(team)
        canceller = threading.Thread(target=encoding.cancel)
        canceller.start()
        canceller.join()
        run(team)

    monkeypatch.setattr(StagedTeam, "_run_step", cancelled)
    with pytest.raises(Cancelled):
        encoding.advance(60)
    assert len(calls) == 1


def test_a_new_image_ends_the_unfinished_one(vision: CpuVision) -> None:
    expected, first = rows_of(vision), begin(vision, seed=1)
    assert first.advance(0) is None
    assert np.array_equal(rows_of(vision), expected)
    with pytest.raises(Cancelled):
        first.advance(0)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LlmrunError("broken")], ids=["interrupt", "error"])
def test_after_an_error_the_next_image_is_right(
    vision: CpuVision, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    expected, before = rows_of(vision), threads()
    run, calls = StagedTeam._run_step, []

    def failing(team: StagedTeam) -> None:
        calls.append(team)
        if len(calls) == 5:
            raise error
        run(team)

    monkeypatch.setattr(StagedTeam, "_run_step", failing)
    encoding = begin(vision, seed=1)
    with pytest.raises(type(error)):
        encoding.advance(60)
    assert threads() == before
    with pytest.raises(Cancelled):
        encoding.advance(0)
    monkeypatch.undo()
    assert np.array_equal(rows_of(vision), expected)


def test_a_closed_encoder_encodes_nothing(path: Path) -> None:
    before, vision = threads(), CpuVision.loaded(read_projector(path), 2)
    encoding = begin(vision)
    assert encoding.advance(0) is None
    vision.close()
    vision.close()
    assert threads() == before
    with pytest.raises(Cancelled):
        encoding.advance(0)
    with pytest.raises(LlmrunError, match="the engine is closed"):
        begin(vision)


def test_progress_grows_to_one_with_every_tile_of_rows(vision: CpuVision) -> None:
    encoding, seen = begin(vision), []
    while encoding.advance(0) is None:
        seen.append(encoding.progress)
    assert seen == sorted(set(seen))
    assert 0 < seen[0] < 0.1
    assert seen[-1] == pytest.approx(1, abs=0.1)
    assert max(np.diff(seen)) < 0.3


def test_an_image_teaches_the_time_of_the_next(path: Path) -> None:
    vision = CpuVision.loaded(read_projector(path), 1)
    layout = layout_of(vision)
    vars(vision)["times"] = EncoderTimes(vision.encoder, AssumedSpeeds())
    assert vision.expected_seconds(layout) is None
    vision.learn(spent=6.0, predicted=2 * vision.times.layout(layout))
    assert vision.expected_seconds(layout) == pytest.approx(3.0)
    vision.learn(spent=0.1, predicted=1e-3 * vision.times.layout(layout))  # small images hardly matter
    assert vision.expected_seconds(layout) == pytest.approx(3.0, rel=0.05)
    vision.close()


def test_nothing_is_measured_for_a_forecast(vision: CpuVision, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(self: Any) -> None:
        raise AssertionError

    from llmrun.backends.cpu.speeds import machine

    monkeypatch.setattr(folders, "cache_folder", lambda name: tmp_path / name)
    monkeypatch.setattr(machine.OpSpeeds, "__init__", measured)
    assert vision.expected_seconds(layout_of(vision)) is None
    rows_of(vision)
    seconds = vision.expected_seconds(layout_of(vision))
    assert seconds is not None
    assert 0 < seconds < 60


def test_the_first_image_of_later_processes_has_a_forecast(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    projector, found = read_projector(path), []
    monkeypatch.setattr(folders, "cache_folder", lambda name: tmp_path / name)  # no speed was measured
    for _ in range(2):
        with closing(CpuVision.loaded(projector, 2)) as vision:
            found.append(vision.expected_seconds(layout_of(vision)))
            vision.learn(spent=3.0, predicted=vision.times.layout(layout_of(vision)))
    assert found == [None, pytest.approx(3.0)]


def test_a_projector_that_was_replaced_is_refused(tmp_path: Path) -> None:
    file = tiny_projector(tmp_path, "gemma3", image_size=112)
    projector = read_projector(file)
    tiny_projector(tmp_path, "gemma3", image_size=112, seed=1)
    with pytest.raises(ModelFileError, match="the projector changed while it was opened"):
        CpuVision.loaded(projector, 1)
