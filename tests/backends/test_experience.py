"""Tests that speeds of real runs are stored safely, replace predictions, and correct those that are far off."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from llmrun.backends import experience, run_speeds
from llmrun.backends.cpu.speeds.forecast import REQUEST_S, Forecast
from llmrun.backends.cpu.speeds.machine import Speeds
from llmrun.backends.experience import CORRECTED, PREDICTED, RUNS, Experience
from llmrun.backends.run_speeds import CONFIRMED, Run, keep_run, kept_runs, run_key
from llmrun.backends.scripted import ScriptedBackend, scripted_answers
from llmrun.base.types import Adapter, ModelInfo
from tests.support.gguf.gguf_files import tiny_llama

PREDICTION = Forecast(10.0, 100.0, 5.122)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "speeds"


def info(path: Path, **values: Any) -> ModelInfo:
    found = ScriptedBackend(scripted_answers([])).info
    return replace(found, path=str(path), file_bytes=1000, backend="cpu", threads=2, **values)


def key(path: Path, threads: int = 2) -> run_speeds.RunKey:
    return run_key(path, 1000, "cpu", "", threads)


def run_of(path: Path) -> Run:
    return kept_runs()[key(path)]


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_best_speeds_are_kept(folder: Path, tmp_path: Path) -> None:
    for decode, prefill in ((20.0, 0.0), (87.0, 500.0), (50.0, 400.0)):
        keep_run(info(tmp_path / "m"), decode, prefill)
    assert (run_of(tmp_path / "m").decode, run_of(tmp_path / "m").prefill) == (87.0, 500.0)
    assert [path.name for path in folder.iterdir()] == ["runs.json"]


def test_each_file_and_number_of_threads_has_its_own_speeds(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "m")
    keep_run(info(tmp_path / "link"), 20.0, 0.0)
    keep_run(replace(info(tmp_path / "m"), threads=1), 11.0, 0.0)
    keep_run(replace(info(tmp_path / "m"), gpu_layers="9/9"), 99.0, 0.0)
    assert [run.decode for run in kept_runs().values()] == [20.0, 11.0, 99.0]
    assert run_of(tmp_path / "m").decode == 20.0
    assert run_key(tmp_path / "m", 1000, "cpu", "9/9", 5) in kept_runs()  # with a GPU, threads do not matter


def test_speeds_with_adapters_are_not_the_models(folder: Path, tmp_path: Path) -> None:
    keep_run(info(tmp_path / "m", adapters=(cast("Adapter", "any"),)), 20.0, 0.0)
    assert not folder.exists()


def test_a_known_speed_is_not_written_again(folder: Path, tmp_path: Path) -> None:
    for _ in range(CONFIRMED):
        keep_run(info(tmp_path / "m"), 20.0, 0.0)
    before = (folder / "runs.json").stat().st_ino
    keep_run(info(tmp_path / "m"), 19.0, 0.0)
    assert (folder / "runs.json").stat().st_ino == before


def test_a_confirmed_speed_stays_young(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(CONFIRMED):
        keep_run(info(tmp_path / "m"), 20.0, 0.0)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 20 * 24 * 3600)
    keep_run(info(tmp_path / "m"), 19.0, 0.0)
    monkeypatch.setattr(time, "time", lambda: now + 40 * 24 * 3600)
    assert run_of(tmp_path / "m").decode == 20.0
    monkeypatch.setattr(time, "time", lambda: now + 60 * 24 * 3600)
    assert kept_runs() == {}


def test_the_file_stays_small(folder: Path, tmp_path: Path) -> None:
    for number in range(70):
        keep_run(info(tmp_path / f"m{number}"), 20.0, 0.0)
    assert len(kept_runs()) == 64
    assert key(tmp_path / "m69") in kept_runs()
    assert key(tmp_path / "m0") not in kept_runs()


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, " " * (2 << 20), '{"machine": [], "runs": []}'])
def test_a_damaged_file_counts_as_empty(folder: Path, tmp_path: Path, text: str) -> None:
    keep_run(info(tmp_path / "m"), 20.0, 0.0)
    (folder / "runs.json").write_text(text)
    assert kept_runs() == {}
    keep_run(info(tmp_path / "m"), 21.0, 0.0)
    assert run_of(tmp_path / "m").decode == 21.0


@pytest.mark.parametrize("values", [{"decode": -1.0}, {"decode": "x"}, {"count": True}, {"more": 1}, {"decode": 1e999}])
def test_a_damaged_entry_is_not_believed(folder: Path, tmp_path: Path, values: dict[str, object]) -> None:
    keep_run(info(tmp_path / "m"), 20.0, 0.0)
    body = json.loads((folder / "runs.json").read_text())
    body["runs"][0] |= values
    (folder / "runs.json").write_text(json.dumps(body))
    assert kept_runs() == {}


def test_a_folder_that_cannot_be_written_is_left_alone(folder: Path, tmp_path: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("in the way")
    keep_run(info(tmp_path / "m"), 20.0, 0.0)
    assert folder.read_text() == "in the way"


# --- predictions ------------------------------------------------------------------------------------------------------


class Nothing:
    """Speeds that are all unknown."""

    @contextmanager
    def only_known(self) -> Iterator[None]:
        yield


def after(*runs: Run, threads: int = 2) -> Experience:
    return Experience(threads, cast("Speeds", Nothing()), {run.key: run for run in runs})


def test_real_speeds_replace_predictions(tmp_path: Path) -> None:
    seen = after(Run(*key(tmp_path), decode=87.0, prefill=512.0))
    found, *origins = seen.adjusted(key(tmp_path), PREDICTION, 512)
    assert found == Forecast(87.0, 512.0, REQUEST_S + 1)
    assert origins == [RUNS, RUNS]
    other = seen.adjusted(key(tmp_path / "other"), PREDICTION, 512)
    assert other == (PREDICTION, PREDICTED, PREDICTED)
    assert seen.adjusted(key(tmp_path, threads=1), PREDICTION, 512)[1] == PREDICTED


def test_without_a_forecast_only_real_speeds_are_known(tmp_path: Path) -> None:
    seen = after(Run(*key(tmp_path), decode=87.0))
    assert seen.adjusted(key(tmp_path), None, 512) == (Forecast(87.0, None, None), RUNS, "")
    assert seen.adjusted(key(tmp_path / "other"), None, 512) == (None, "", "")


@pytest.mark.parametrize(
    ("real", "count", "expected"), [(4.0, 1, 10.0), (4.0, CONFIRMED, 4.0), (7.0, 1, 7.0), (40.0, 1, 40.0)]
)
def test_much_slower_runs_count_once_confirmed(tmp_path: Path, real: float, count: int, expected: float) -> None:
    found, *_ = after(Run(*key(tmp_path), decode=real, count=count)).adjusted(key(tmp_path), PREDICTION, 512)
    assert found is not None
    assert found.decode_per_second == expected


@pytest.mark.parametrize(
    ("real", "count", "factor"), [(87.0, 1, 8.7), (14.0, 1, 1.0), (8.0, 1, 1.0), (2.0, 1, 1.0), (2.0, CONFIRMED, 0.2)]
)
def test_predictions_that_are_far_off_are_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real: float, count: int, factor: float
) -> None:
    """The prediction for another model is ten tokens per second."""
    monkeypatch.setattr(experience, "backend_named", lambda name: Entry())
    path = tiny_llama(tmp_path / "ran.gguf")
    seen = after(Run(*key(path), decode=real, count=count))
    found, decode, prefill = seen.adjusted(key(tmp_path / "other"), PREDICTION, 512)
    assert found is not None
    assert found.decode_per_second == pytest.approx(10 * factor)
    assert found.ttft_s == PREDICTION.ttft_s
    assert (decode, prefill) == (PREDICTED if factor == 1 else CORRECTED, PREDICTED)
    path.unlink()
    assert after(Run(*key(path), decode=real, count=count)).factors() == (1.0, 1.0)


class Entry:
    """A backend whose forecast is always the same."""

    def kind(self) -> Entry:
        return self

    def forecast(self, *_: object) -> Forecast:
        return PREDICTION
