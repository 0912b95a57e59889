"""The tests of the commands with layers on a GPU, for each API through which llama.cpp uses GPUs.

Each API's test file subclasses the class. It has the fixture `name`, which returns the names of all devices as llmrun
shows them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

from tests.support.cli.commands import LLMRUN, ROOT, TIMEOUT_S, llmrun
from tests.support.cli.dying_llama import assert_ends_in_one_line
from tests.support.models.downloads import smollm2

GREEDY = ("--temp", "0", "-c", "2048")

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)


def answer_of(*arguments: str) -> dict[str, Any]:
    done = llmrun("generate", "-m", str(smollm2()), *GREEDY, "-n", "8", "--json", "-q", *arguments, "Name two days.")
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def benched() -> dict[tuple[int, str], dict[str, Any]]:
    """Measure a model without and with GPU layers, and return the rows by (GPU layers, phase)."""
    options = ("--backend", "llama", "--gpu-layers", "0,all", "-p", "32", "-n", "4", "-r", "2", "--seconds", "1")
    done = llmrun("bench", "-m", str(smollm2()), *options, "--json")
    assert done.returncode == 0, done.stderr.decode()
    found = {(row["n_gpu_layers"], row["phase"]): row for row in json.loads(done.stdout)}
    assert set(found) == {(layers, phase) for layers in (0, 31) for phase in ("prefill", "decode")}
    on_the_gpu = found[31, "decode"]
    assert (on_the_gpu["gpu_layers"], on_the_gpu["backends"]) == ("31/31", "GPU")
    assert on_the_gpu["avg_ts"] > 0
    return found


class GpuCommands:
    """Tests of commands whose flags ask for GPU layers."""

    def test_the_answer_matches_the_cpu(self, name: str) -> None:
        on_the_gpu, on_the_cpu = answer_of("--gpu-layers", "all"), answer_of("--backend", "llama", "--gpu-layers", "0")
        assert on_the_gpu["choices"][0]["message"] == on_the_cpu["choices"][0]["message"]
        assert (on_the_gpu["run"]["backend"], on_the_gpu["run"]["gpu_layers"]) == ("llama", "31/31")
        assert on_the_gpu["run"]["device"].startswith(f"31/31 layers on {name}, ")
        assert on_the_cpu["run"]["gpu_layers"] is None

    def test_gpu_layers_sets_the_number_of_layers(self) -> None:
        assert answer_of("--gpu-layers", "10")["run"]["gpu_layers"] == "10/31"

    @pytest.mark.parametrize("doing", ["loading", "running"])
    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
    def test_generate_ends_in_one_line(self, number: signal.Signals, doing: str) -> None:
        assert_ends_in_one_line(number, doing, "all")

    def test_two_processes_share_the_gpu(self) -> None:
        command = [*LLMRUN, "generate", "-m", str(smollm2()), *GREEDY, "-n", "16", "-q", "--raw", "Once"]
        command += ["--gpu-layers", "all"]
        both = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
        one, other = (process.communicate(timeout=TIMEOUT_S) for process in both)
        assert [process.returncode for process in both] == [0, 0]
        assert one == other
        assert one[1] == b""

    def test_serve_answers_from_the_gpu(self, name: str) -> None:
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
