"""Tests of the commands on a machine with a real NVIDIA GPU. scripts/test_gpu runs them."""

from __future__ import annotations

import json
import os

import pytest

from llmrun.backends.llama import probe
from tests.support.cli.commands import llmrun
from tests.support.cli.gpu_commands import GREEDY, GpuCommands, benched
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def name() -> str:
    """Return the names of all GPUs as llmrun shows them."""
    found = probe.gpus()
    assert found.names, f"{found.reason}; run scripts/test_gpu on a machine with an NVIDIA GPU"
    return " and ".join(found.names)


class TestCommands(GpuCommands):
    pass


def test_the_gpu_is_used_without_any_flag(name: str) -> None:
    done = llmrun("generate", "-v", "-m", str(smollm2()), *GREEDY, "-n", "2", "--raw", "a")
    assert done.returncode == 0
    assert f"backend    llama: 31/31 layers on {name}, " in done.stderr.decode()


def test_the_cpu_engine_runs_where_gpus_are_hidden() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = llmrun("generate", "-v", "-m", str(smollm2()), *GREEDY, "-n", "2", "--raw", "a", env=hidden)
    assert done.returncode == 0
    assert "backend    cpu: " in done.stderr.decode()
    assert "llama.cpp found no GPU" in done.stderr.decode()


def test_doctor_names_the_gpu_and_llama_cpp(name: str) -> None:
    checks = {check["name"]: check for check in json.loads(llmrun("doctor", "--json").stdout)["checks"]}
    assert checks["gpu_0"]["status"] == checks["llama_cpp"]["status"] == "ok"
    assert checks["gpu_0"]["facts"]["gpu"] in name
    assert " free" in checks["gpu_0"]["words"]
    assert checks["llama_cpp"]["words"].endswith(f" works and can use {name}")


def test_fit_counts_the_layers_on_the_gpu(name: str) -> None:
    found = json.loads(llmrun("fit", str(smollm2()), "--json").stdout)
    assert " and ".join(gpu["description"] for gpu in found["machine"]["gpus"]) == name
    (model,) = found["models"][0]["quantizations"]
    assert (model["backend"], model["gpu_layers"], model["layers"]) == ("llama", 31, 31)
    assert "fits the GPU" in llmrun("fit", str(smollm2())).stdout.decode()


def test_bench_measures_the_gpu() -> None:
    rows = benched()
    assert rows[31, "decode"]["avg_ts"] > 0
    assert rows[0, "decode"]["avg_ts"] > 0
