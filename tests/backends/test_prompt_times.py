"""Tests that the costs of steps are kept safely, and that they predict prompts before a model is open."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from llmrun.backends import prompt_times, run_speeds
from llmrun.backends.cpu.speeds import machine, measured
from llmrun.backends.cpu.speeds.machine import Speeds
from llmrun.backends.cpu.speeds.measured import AttentionSpeed, LinearSpeed, RowSpeed
from llmrun.backends.fitting import Resources, fit_of
from llmrun.backends.prompt_times import assumed_costs, predicted_prompt_s
from llmrun.backends.run_speeds import LearntCosts, costs_of, keep_costs, keep_run, kept_costs, kept_runs
from llmrun.backends.scripted import ScriptedBackend
from llmrun.base import folders
from llmrun.base.machine.load import Load
from llmrun.base.types import Adapter, ModelInfo
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.plan.shapes import AttentionShape
from tests.support.gguf.gguf_files import tiny_llama

COSTS = LearntCosts((0.03, 0.004, 0.0, 0.001), (0.02, 0.001, 0.0, 0.0), 256, 256 * 4000, 3)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cache").mkdir()
    for name in ("kernels", "levels"):
        (tmp_path / "cache" / name).symlink_to(folders.cache_folder(name))
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "cache"))
    # The real key needs kernels.
    for module in (run_speeds, measured):
        monkeypatch.setattr(module, "machine_key", lambda threads: ["this machine", threads])
    return tmp_path / "cache" / "speeds"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(1000))
    return path


def info(path: Path, **values: Any) -> ModelInfo:
    found = replace(ScriptedBackend(None).info, path=str(path), file_bytes=1000, backend="cpu", threads=2)
    return replace(found, **values)


# --- the file ---------------------------------------------------------------------------------------------------------


def test_each_file_threads_and_kv_type_has_its_own_costs(model: Path) -> None:
    other = replace(COSTS, rows=128)
    keep_costs(info(model), COSTS)
    for values in ({"threads": 1}, {"kv_type": "q8_0"}, {"backend": "llama"}, {"file_bytes": 7}):
        assert costs_of(info(model, **values)) is None
        keep_costs(info(model, **values), other)
    assert costs_of(info(model)) == COSTS


def test_costs_and_best_speeds_share_a_file(folder: Path, model: Path) -> None:
    keep_run(info(model), 20.0, 100.0)
    keep_costs(info(model), COSTS)
    keep_run(info(model), 30.0, 100.0)
    assert [run.decode for run in kept_runs().values()] == [30.0]
    assert [entry.costs for entry in kept_costs().values()] == [COSTS]
    assert [path.name for path in folder.iterdir()] == ["runs.json"]


def test_costs_with_adapters_are_not_the_models(model: Path) -> None:
    with_adapter = info(model, adapters=(cast("Adapter", "any"),))
    keep_costs(with_adapter, COSTS)
    assert kept_costs() == {}
    keep_costs(info(model), COSTS)
    assert costs_of(with_adapter) is None


@pytest.mark.parametrize(
    "damage",
    [
        {"prompts": [1.0]},
        {"prompts": "abcd"},
        {"prompts": [-1.0, 1.0, 1.0, 1.0]},
        {"prompts": [0.0, 0.0, 1.0, 1.0]},
        {"answers": [1e999, 1.0, 1.0, 1.0]},
        {"answers": [True, 1.0, 1.0, 1.0]},
        {"prompts": None},
        {"rows": -1},
        {"attended": 1 << 60},
        {"drafted": 1.5},
        {"more": 1},
    ],
)
def test_damaged_costs_are_not_believed(folder: Path, model: Path, damage: dict[str, object]) -> None:
    keep_run(info(model), 20.0, 100.0)
    keep_costs(info(model), COSTS)
    body = json.loads((folder / "runs.json").read_text())
    body["costs"][0]["costs"] |= damage
    (folder / "runs.json").write_text(json.dumps(body))
    assert kept_costs() == {}
    assert len(kept_runs()) == 1
    keep_costs(info(model), COSTS)
    assert costs_of(info(model)) == COSTS


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, '{"machine": [], "costs": []}'])
def test_a_damaged_file_has_no_costs(folder: Path, model: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "runs.json").write_text(text)
    assert costs_of(info(model)) is None


def test_costs_of_another_machine_are_not_used(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_costs(info(model), COSTS)
    monkeypatch.setattr(run_speeds, "machine_key", lambda threads: ["another one"])
    assert costs_of(info(model)) is None


# --- predictions ------------------------------------------------------------------------------------------------------


def test_prompts_are_predicted_from_the_last_run(model: Path) -> None:
    keep_costs(info(model), COSTS)
    whole = predicted_prompt_s(model, 2560, threads=2)
    assert whole == pytest.approx(sum(0.03 + 256 * (0.004 + 0.001 * start / 1024) for start in range(0, 2560, 256)))
    rest = predicted_prompt_s(model, 2560, cached=1280, threads=2)
    assert rest == pytest.approx(sum(0.03 + 256 * (0.004 + 0.001 * start / 1024) for start in range(1280, 2560, 256)))
    assert predicted_prompt_s(model, 100, cached=100, threads=2) == pytest.approx(0.034, rel=0.02)


def test_another_model_file_is_not_predicted(model: Path, tmp_path: Path) -> None:
    keep_costs(info(model), COSTS)
    assert predicted_prompt_s(tmp_path / "missing.gguf", 1000, threads=2) is None
    model.write_bytes(bytes(1001))  # another model under the same name, and no GGUF file, so there is no forecast
    assert predicted_prompt_s(model, 1000, threads=2) is None


def test_the_first_shard_stands_for_all(tmp_path: Path) -> None:
    shard = tmp_path / "m-00001-of-00002.gguf"
    shard.write_bytes(bytes(600))
    keep_costs(info(shard), COSTS)
    assert predicted_prompt_s(shard, 1000, threads=2) is not None


def test_nothing_is_measured_for_an_open_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(tmp_path / "tiny.gguf")
    opened = info(model, file_bytes=model.stat().st_size)
    assert assumed_costs(opened, may_forecast=True) is None
    monkeypatch.setattr(prompt_times, "_forecast", lambda *_, **__: COSTS)
    assert assumed_costs(opened, may_forecast=True) == COSTS
    assert assumed_costs(opened, may_forecast=False) is None


class Fixed:
    """A stand-in for OpSpeeds."""

    def __init__(self, n_threads: int) -> None:
        self.load = Load(1)

    def linear(self, packed: str) -> LinearSpeed:
        return LinearSpeed(1e9, 1e-6, (1e9, 1e9, 1e9))

    def rows(self) -> dict[str, RowSpeed]:
        return dict.fromkeys(("rmsnorm", "swiglu", "quantize"), RowSpeed((1e-6,) * 3, (1e-7,) * 3))

    def attention(self, shape: AttentionShape, kv_type: str) -> AttentionSpeed:
        return AttentionSpeed(1e-5, 1e9, 1e8, 1e-9, 1e-9, 1e-5)


@pytest.mark.push
def test_a_model_that_never_ran_is_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(tmp_path / "tiny.gguf")
    monkeypatch.setattr(machine, "OpSpeeds", Fixed)
    monkeypatch.setattr(machine, "disturbance", lambda load, threads: "")
    assert predicted_prompt_s(model, 500, threads=1) is None  # the speeds of this machine are unknown
    assert predicted_prompt_s(model, 500, threads=1, may_measure=True) is not None
    with open_gguf(model) as file:
        for tokens in (512, 2048, 8192):
            fitted = fit_of(file, Resources(None, threads=1, speeds=Speeds.of_this_machine(1)), prompt=tokens)
            assert fitted.forecast is not None
            assert fitted.forecast.prefill_per_second is not None
            predicted = predicted_prompt_s(model, tokens, threads=1)
            assert predicted == pytest.approx(tokens / fitted.forecast.prefill_per_second, rel=0.05)


@pytest.mark.push
def test_predictions_from_runs_do_not_import_numpy(model: Path) -> None:
    keep_costs(info(model), COSTS)
    code = (
        "import sys; from pathlib import Path; from llmrun.backends import run_speeds; "
        "run_speeds.machine_key = lambda threads: ['this machine', threads]; "
        "from llmrun.backends.prompt_times import predicted_prompt_s; "
        f"assert predicted_prompt_s(Path({str(model)!r}), 1000, threads=2); "
        "assert not {'numpy', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
