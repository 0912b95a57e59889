"""Tests of the commands with Vulkan, on lavapipe, a software driver. scripts/test_vulkan runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

if sys.platform == "win32":
    pytest.skip("needs Linux's Mesa", allow_module_level=True)

from llmrun.backends.llama import probe
from tests.support.cli.commands import LLMRUN, ROOT, TIMEOUT_S, llmrun
from tests.support.cli.dying_llama import errors_of_a_chat, worker_of
from tests.support.cli.gpu_commands import GREEDY, GpuCommands, answer_of, benched
from tests.support.cli.served import status_within
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.vulkan


@pytest.fixture(scope="module", autouse=True)
def name() -> str:
    """Return the name of the device, which must be lavapipe."""
    found = probe.gpus()
    assert found.are_software, f"{found.reason or found.names}; run scripts/test_vulkan"
    return " and ".join(found.names)


class TestCommands(GpuCommands):
    pass


def test_without_flags_our_own_engine_runs(name: str) -> None:
    done = llmrun("generate", "-v", "-m", str(smollm2()), *GREEDY, "-n", "2", "--raw", "a")
    assert done.returncode == 0
    said = done.stderr.decode()
    assert "backend    cpu: " in said
    assert f"auto chose cpu: {name} is not a GPU but a software driver" in said


def test_llama_uses_the_device_if_it_is_named(name: str) -> None:
    assert answer_of("--backend", "llama")["run"]["device"].startswith(f"31/31 layers on {name}, ")


def test_layers_can_be_divided(name: str) -> None:
    env = {**os.environ, "GGML_VK_VISIBLE_DEVICES": "0,0"}
    options = ("--gpu-layers", "all", "--tensor-split", "3,1", "-v", "-n", "2", "--raw", "a")
    done = llmrun("generate", "-m", str(smollm2()), *GREEDY, *options, env=env)
    assert done.returncode == 0
    assert f"31/31 layers on {name} and {name}, " in done.stderr.decode()


def test_doctor_names_the_software_driver(name: str) -> None:
    checks = {check["name"]: check for check in json.loads(llmrun("doctor", "--json").stdout)["checks"]}
    assert checks["llama_cpp"]["status"] == "ok"
    assert checks["llama_cpp"]["words"].endswith(f" works and can use {name}, a software driver")
    assert checks["llama_cpp"]["facts"]["gpus"] == [name]
    assert "gpu_0" not in checks


def test_fit_leaves_the_device_alone() -> None:
    found = json.loads(llmrun("fit", str(smollm2()), "--json").stdout)
    assert found["machine"]["gpus"] == []
    (model,) = found["models"][0]["quantizations"]
    assert (model["backend"], model["gpu_layers"], model["layers"]) == ("cpu", 0, 0)


def test_bench_measures_the_device() -> None:
    assert all(row["avg_ts"] > 0 for row in benched().values())


def test_a_device_that_is_not_there_is_explained() -> None:
    env = {**os.environ, "GGML_VK_VISIBLE_DEVICES": "7"}
    done = llmrun(
        "generate", "-v", "-m", str(smollm2()), *GREEDY, "-n", "2", "--raw", "a", "--backend", "llama", env=env
    )
    assert done.returncode == 0
    missing = "Vulkan has no driver for these devices: the variable GGML_VK_VISIBLE_DEVICES is '7'"
    assert f"not using GPUs: llama.cpp found no GPU: {missing}" in done.stderr.decode()


def test_a_chat_ends_in_one_line_when_llama_cpp_dies() -> None:
    lines = errors_of_a_chat(
        *GREEDY, "--gpu-layers", "all", kill=lambda process: os.kill(worker_of(process), signal.SIGKILL)
    )
    assert f"error: llama.cpp died while running {smollm2()}: SIGKILL" in lines
    assert "Traceback" not in "".join(lines)


def test_serve_reopens_the_model_when_llama_cpp_dies() -> None:
    command = [*LLMRUN, "serve", str(smollm2()), "--port", "0", "--parallel", "2", "--gpu-layers", "all", "-t", "1"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = next(line for line in process.stderr if line.startswith("ready: ")).split()[1]
            assert status_within(TIMEOUT_S, url, 200)
            [worker] = [
                child
                for child in psutil.Process(process.pid).children(recursive=True)
                if any("llama.worker" in word for word in child.cmdline())
            ]
            worker.kill()
            assert status_within(TIMEOUT_S, url, 200)
            process.send_signal(signal.SIGINT)
            said = process.stderr.read()
            assert process.wait(TIMEOUT_S) == 0
            assert f"llama.cpp died while running {smollm2()}: SIGKILL" in said
            assert "Traceback" not in said
        finally:
            if process.poll() is None:
                process.kill()
