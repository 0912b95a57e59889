"""Tests of the commands on a machine with a real NVIDIA GPU. scripts/test_gpu runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from typing import Any

import pytest

from llmrun.backends.llama import probe
from llmrun.machine.energy import nvml_sources
from tests.support.cli.commands import LLMRUN, ROOT, TIMEOUT_S, llmrun
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.gpu

GREEDY = ("--temp", "0", "-c", "2048")


@pytest.fixture(scope="module", autouse=True)
def name() -> str:
    """Return the names of all GPUs as llmrun shows them."""
    found = probe.gpus()
    assert found.names, f"{found.reason}; run scripts/test_gpu on a machine with an NVIDIA GPU"
    return " and ".join(found.names)


def answer_of(*arguments: str) -> dict[str, Any]:
    done = llmrun("generate", "-m", str(smollm2()), *GREEDY, "-n", "8", "--json", "-q", *arguments, "Name two days.")
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_answer_matches_the_cpu(name: str) -> None:
    on_the_gpu, on_the_cpu = answer_of("--gpu-layers", "all"), answer_of("--backend", "llama", "--gpu-layers", "0")
    assert on_the_gpu["choices"][0]["message"] == on_the_cpu["choices"][0]["message"]
    assert (on_the_gpu["run"]["backend"], on_the_gpu["run"]["gpu_layers"]) == ("llama", "31/31")
    assert on_the_gpu["run"]["device"].startswith(f"31/31 layers on {name}, ")
    assert on_the_cpu["run"]["gpu_layers"] is None


def test_the_gpu_is_used_without_any_flag(name: str) -> None:
    done = llmrun("generate", "-v", "-m", str(smollm2()), *GREEDY, "-n", "2", "--raw", "a")
    assert done.returncode == 0
    assert f"backend    llama: 31/31 layers on {name}, " in done.stderr.decode()


def test_gpu_layers_sets_the_number_of_layers() -> None:
    assert answer_of("--gpu-layers", "10")["run"]["gpu_layers"] == "10/31"


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


def test_bench_measures_the_gpu_and_its_energy() -> None:
    options = ("--backend", "llama", "--gpu-layers", "0,all", "-p", "64", "-n", "16", "-r", "3", "--seconds", "2")
    done = llmrun("bench", "-m", str(smollm2()), *options, "--json")
    assert done.returncode == 0, done.stderr.decode()
    rows = {(row["n_gpu_layers"], row["phase"]): row for row in json.loads(done.stdout)}
    assert set(rows) == {(layers, phase) for layers in (0, 31) for phase in ("prefill", "decode")}
    on_the_gpu = rows[31, "decode"]
    assert on_the_gpu["gpu_layers"] == "31/31"
    assert on_the_gpu["backends"] == "GPU"
    assert on_the_gpu["avg_ts"] > 0
    if nvml_sources():
        assert "NVML" in on_the_gpu["energy_source"]
        assert on_the_gpu["joules_per_token"] > 0
        assert "NVML" not in (rows[0, "decode"]["energy_source"] or "")


def test_serve_answers_from_the_gpu(name: str) -> None:
    command = [*LLMRUN, "serve", str(smollm2()), "--port", "0", "--parallel", "4", "--gpu-layers", "all", "-v"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = []
            for line in process.stderr:
                said.append(line)
                if line.startswith("ready: "):
                    break
            body = json.dumps({"prompt": "Once upon a time", "max_tokens": 4}).encode()
            url = f"{said[-1].split()[1]}/completions"
            asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] == 4
            process.send_signal(signal.SIGINT)
            said += process.stderr.readlines()
            assert process.wait(TIMEOUT_S) == 0
            assert f"31/31 layers on {name}" in "".join(said)
        finally:
            if process.poll() is None:
                process.kill()
