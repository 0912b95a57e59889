"""Tests of connecting llama.cpp to RPC servers, with a child process whose answers are made up.

test_real_servers.py has the tests that need a build with RPC.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from llmrun.backends.llama import rpc_devices
from llmrun.backends.llama.build_command import COMPILES
from llmrun.backends.llama.process import LlamaProcess
from llmrun.backends.llama.rpc_devices import build_problem, check_servers, devices_with, use_servers
from llmrun.backends.llama.rpc_servers import RpcServer
from llmrun.base.errors import BackendCrashed, LlmrunError, NetworkError, UsageError
from llmrun.base.machine.gpus import Gpu

SERVERS = [RpcServer("box:50052", "10.0.0.2:50052"), RpcServer("10.0.0.3:1", "10.0.0.3:1")]
NAMES = "box:50052,10.0.0.3:1"
DEVICES = [{"description": server.address, "free": 8, "total": 9} for server in SERVERS]
PIP = f"{sys.executable} -m pip install"


@dataclass
class Worker:
    """The answers of llama.cpp's process, and the requests that it got.

    dies  the last words of the process when it gets a request, by the name of the request
    """

    rpc: bool = True
    devices: list[dict[str, Any]] = field(default_factory=lambda: DEVICES)
    per_server: int = 1
    dies: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def answer(self, process: LlamaProcess, operation: str, doing: str, **fields: Any) -> dict[str, Any]:
        self.asked.append((operation, fields.get("address", "")))
        if operation in self.dies:
            process._child._stderr.tail = self.dies[operation]
            raise BackendCrashed(f"llama.cpp died while {doing}: SIGABRT")
        if operation == "add_rpc_server":
            return {"devices": self.per_server}
        return {"rpc": self.rpc, "devices": self.devices}


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    made = Worker()
    monkeypatch.setattr(LlamaProcess, "ask", lambda process, *asked, **fields: made.answer(process, *asked, **fields))
    monkeypatch.setattr(rpc_devices, "find_servers", lambda text, *, anyway: SERVERS)
    monkeypatch.setattr(rpc_devices, "is_installed", lambda: True)
    monkeypatch.setattr(rpc_devices, "gpus", lambda: ())
    return made


@pytest.fixture
def process() -> Iterator[LlamaProcess]:
    started = LlamaProcess()
    yield started
    started.close()


def refusal(process: LlamaProcess) -> LlmrunError:
    with pytest.raises(LlmrunError) as caught:
        use_servers(process, NAMES, anyway=False)
    return caught.value


def test_each_server_is_added_and_then_the_devices_are_listed(worker: Worker, process: LlamaProcess) -> None:
    assert use_servers(process, NAMES, anyway=False) == DEVICES
    assert worker.asked == [
        ("describe", ""),
        ("add_rpc_server", "10.0.0.2:50052"),
        ("add_rpc_server", "10.0.0.3:1"),
        ("devices", ""),
    ]
    assert process.rpc_servers == SERVERS


@pytest.mark.push
@pytest.mark.parametrize(
    ("gpus", "flags"),
    [((), "-DGGML_RPC=on"), ((Gpu("Apple", "Apple M4", "Metal"),), "-DGGML_METAL=on -DGGML_RPC=on")],
)
def test_a_build_without_rpc_gets_the_command_that_rebuilds_it(
    gpus: tuple[Gpu, ...], flags: str, worker: Worker, process: LlamaProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command also keeps the support for the GPUs of this machine."""
    worker.rpc = False
    monkeypatch.setattr(rpc_devices, "gpus", lambda: gpus)
    error = refusal(process)
    assert isinstance(error, UsageError)
    assert str(error) == "--rpc: the installed llama.cpp was built without RPC"
    rebuild = f'rebuild it ({COMPILES}): CMAKE_ARGS="{flags}" {PIP} --force-reinstall --no-deps --no-cache-dir '
    assert error.hint.startswith(rebuild)
    assert error.hint.removeprefix(rebuild).strip("'").startswith("llama-cpp-python")
    assert worker.asked == [("describe", "")]


def test_without_llama_cpp_the_hint_installs_it_with_rpc(
    worker: Worker, process: LlamaProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_devices, "is_installed", lambda: False)
    error = refusal(process)
    assert str(error) == "--rpc: llama.cpp is not installed"
    assert error.hint.startswith(f'install it ({COMPILES}): CMAKE_ARGS="-DGGML_RPC=on" {PIP} --no-cache-dir ')
    problem = build_problem()
    assert problem is not None
    assert problem.words == "llama.cpp is not installed"
    with pytest.raises(UsageError, match=r"--rpc: llama\.cpp is not installed"):
        check_servers(NAMES, anyway=False)
    assert worker.asked == []


@pytest.mark.push
def test_checking_a_build_with_rpc_connects_to_nothing(worker: Worker) -> None:
    check_servers(NAMES, anyway=False)
    assert build_problem() is None
    assert worker.asked == [("describe", "")] * 2


def test_devices_can_be_listed_without_a_model(worker: Worker) -> None:
    assert devices_with(NAMES, anyway=False) == DEVICES


@pytest.mark.push
@pytest.mark.parametrize(
    ("words", "sentence", "hint"),
    [
        (
            b"RPC server version mismatch: 6.1.0\nggml-rpc.cpp:550: RPC handshake failed for 10.0.0.2:50052\n",
            "the RPC server box:50052 has another version of llama.cpp: its RPC protocol is 6.1.0",
            "use the same version of llama.cpp on all machines",
        ),
        (
            b"ggml-rpc.cpp:547: Failed to connect to 10.0.0.2:50052\n",
            "the RPC server box:50052 stopped accepting connections",
            "check that ggml-rpc-server runs there",
        ),
        (
            b"ggml-rpc.cpp:359: Remote RPC server crashed or returned malformed response\n",
            "the RPC server box:50052 did not answer like a ggml-rpc-server of this version of llama.cpp",
            "check the port, and use the same version of llama.cpp on all machines",
        ),
        (b"", "llama.cpp died while connecting to the RPC server box:50052: SIGABRT", ""),
    ],
)
def test_a_server_that_llama_cpp_cannot_use_is_a_network_error(
    words: bytes, sentence: str, hint: str, worker: Worker, process: LlamaProcess
) -> None:
    worker.dies["add_rpc_server"] = words
    error = refusal(process)
    assert isinstance(error, NetworkError)
    assert (str(error), error.hint) == (sentence, hint)


def test_servers_that_are_lost_while_their_memory_is_asked_for(worker: Worker, process: LlamaProcess) -> None:
    worker.dies["devices"] = b"ggml-rpc.cpp:547: Failed to connect to 10.0.0.3:1\n"
    assert str(refusal(process)) == "the RPC servers box:50052 and 10.0.0.3:1 stopped accepting connections"


def test_a_server_that_does_not_answer_is_given_up(
    worker: Worker, process: LlamaProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp waits without a time limit, so its process is killed."""
    killed = threading.Event()

    def hang(process: LlamaProcess, operation: str, doing: str, **fields: Any) -> dict[str, Any]:
        if operation == "describe":
            return {"rpc": True}
        assert killed.wait(20)
        raise BackendCrashed(f"llama.cpp died while {doing}: SIGKILL")

    monkeypatch.setattr(LlamaProcess, "ask", hang)
    monkeypatch.setattr(LlamaProcess, "kill", lambda process: killed.set())
    monkeypatch.setattr(rpc_devices, "_ANSWER_S", 0.05)
    error = refusal(process)
    assert isinstance(error, NetworkError)
    assert str(error) == "the RPC server box:50052 did not answer within 0.05 s"
    assert "only one client" in error.hint


def test_a_server_without_devices_is_a_network_error(worker: Worker, process: LlamaProcess) -> None:
    worker.per_server = 0
    assert str(refusal(process)) == "the RPC server box:50052 offers no devices"


def test_more_devices_than_llama_cpp_can_use_are_refused(worker: Worker, process: LlamaProcess) -> None:
    worker.devices = DEVICES * 8
    assert str(refusal(process)) == "--rpc: 16 devices, but llama.cpp can use at most 15"
