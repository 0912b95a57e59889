"""Tests of the commands with llama.cpp's own RPC servers on the loopback interface. scripts/test_rpc runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

if sys.platform == "win32":
    pytest.skip("needs a POSIX terminal", allow_module_level=True)

from tests.support.cli.commands import LLMRUN, ROOT, TIMEOUT_S, llmrun
from tests.support.cli.dying_llama import errors_of_a_chat
from tests.support.cli.served import status_of, status_within
from tests.support.models.downloads import smollm2
from tests.support.servers.rpc_server import RealServer, real_server

pytestmark = pytest.mark.rpc

GREEDY = ("--temp", "0", "-t", "1", "-c", "2048")
HINT = "hint: check that ggml-rpc-server runs on each machine, then try again"


@pytest.fixture
def server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running


def lost(server: RealServer, doing: str = "running") -> str:
    return f"the connection to the RPC server {server.name} was lost while {doing} {smollm2()}"


def test_the_answer_is_that_of_this_machine(server: RealServer) -> None:
    """Greedy text may differ after many tokens, because the servers' CPUs do not repack the weights."""
    command = ("generate", "-m", str(smollm2()), *GREEDY, "-n", "8", "--json", "-q", "Name the days of the week.")
    remote = json.loads(llmrun(*command, "--rpc", server.name).stdout)
    local = json.loads(llmrun(*command, "--backend", "llama", "--gpu-layers", "0").stdout)
    assert remote["choices"][0]["message"] == local["choices"][0]["message"]
    assert (remote["run"]["backend"], remote["run"]["gpu_layers"]) == ("llama", "31/31")


def test_a_setting_selects_the_servers(server: RealServer) -> None:
    env = {**os.environ, "LLMRUN_RPC": server.name}
    done = llmrun("generate", "-v", "-m", str(smollm2()), *GREEDY, "-n", "2", "--raw", "a", env=env)
    assert done.returncode == 0
    assert f"backend    llama: 31/31 layers on {server.name}, 1 thread" in done.stderr.decode()


def test_generate_ends_in_one_line_when_a_server_is_killed(server: RealServer) -> None:
    options = [*GREEDY, "-n", "1900", "-q", "--raw", "Once upon a time", "--rpc", server.name]
    terminal, stdout = os.openpty()  # a terminal gets each word, and a pipe only whole lines
    process = subprocess.Popen(
        [*LLMRUN, "generate", "-m", str(smollm2()), *options], stdout=stdout, stderr=subprocess.PIPE, cwd=ROOT
    )
    os.close(stdout)
    os.read(terminal, 5)
    server.kill()
    killed = time.monotonic()
    _, error = process.communicate(timeout=TIMEOUT_S)
    os.close(terminal)
    assert time.monotonic() - killed < 20
    assert process.returncode == 3
    assert error.decode().splitlines() == [f"error: {lost(server)}", HINT]


def test_a_chat_ends_in_one_line_when_a_server_is_killed(server: RealServer) -> None:
    lines = errors_of_a_chat(*GREEDY, "--rpc", server.name, kill=lambda _: server.kill())
    assert f"error: {lost(server)}" in lines
    assert "Traceback" not in "".join(lines)


def test_serve_restarts_when_the_server_is_back(server: RealServer) -> None:
    """Until then, it tries again and again, with pauses of up to half a minute."""
    command = [*LLMRUN, "serve", str(smollm2()), "--port", "0", "--parallel", "2", "--rpc", server.name, "-t", "1"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = next(line for line in process.stderr if line.startswith("ready: ")).split()[1]
            assert status_of(url) == 200
            server.kill()
            assert status_within(TIMEOUT_S, url, 503)
            with real_server(server.port):
                assert status_within(TIMEOUT_S, url, 200)
                process.send_signal(signal.SIGINT)
                said = process.stderr.read()
            assert process.wait(TIMEOUT_S) == 0
            assert f"note: the engine's process ended ({lost(server)}); restarting it" in said
            refused = f"cannot connect to the RPC server {server.name}: Connection refused"
            assert f"note: cannot reopen the model, trying again: {refused}" in said
            assert "Traceback" not in said
        finally:
            if process.poll() is None:
                process.kill()


def test_a_draft_model_runs_on_this_machine(server: RealServer) -> None:
    model = str(smollm2())
    command = ("generate", "-v", "-m", model, *GREEDY, "-n", "20", "--raw", "Once", "--speculate", model)
    done = llmrun(*command, "--rpc", server.name)
    assert done.returncode == 0, done.stderr.decode()
    assert f"31/31 layers on {server.name}" in done.stderr.decode()


def test_fit_counts_the_memory_of_the_servers(server: RealServer) -> None:
    done = llmrun("fit", str(smollm2()), "--rpc", server.name, "--json")
    found = json.loads(done.stdout)
    assert [gpu["description"] for gpu in found["machine"]["gpus"]] == [server.name]
    (model,) = found["models"][0]["quantizations"]
    assert (model["backend"], model["gpu_layers"], model["layers"]) == ("llama", 31, 31)


def test_the_doctor_lists_the_servers_in_the_settings(server: RealServer) -> None:
    done = llmrun("doctor", "--json", env={**os.environ, "LLMRUN_RPC": server.name})
    (found,) = (check for check in json.loads(done.stdout)["checks"] if check["name"] == "rpc_servers")
    assert found["status"] == "ok"
    assert found["words"].startswith(f"with the RPC servers, llama.cpp can use {server.name} (")
