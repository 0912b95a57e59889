"""Tests with llama.cpp's own RPC servers on the loopback interface. scripts/test_rpc runs them.

The layers that run on a server use the same llama.cpp, but not the repacked weights of the local CPU backend, so the
logits agree only within the tolerance of the llama backend.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)

from llmrun.backends.base import AUTO, Backend
from llmrun.backends.llama import process as llama_process
from llmrun.backends.llama import rpc_devices
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.gpu_check import try_llama
from llmrun.backends.llama.rpc_devices import build_problem, devices_with
from llmrun.base.errors import BackendCrashed, NetworkError, UsageError
from tests.support.backends.offloading import assert_agree, assert_usable_after_a_stop, logits_of_smollm2, open_llama
from tests.support.backends.seam_contract import FullCacheContract, SeamContract, batch_of, rows
from tests.support.models.downloads import smollm2
from tests.support.models.tiny_models import tiny_model
from tests.support.servers.rpc_server import (
    RealServer,
    fake_server,
    hangs_up,
    other_version,
    real_server,
    silent,
)

pytestmark = pytest.mark.rpc


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as running:
        yield running


@pytest.fixture(scope="module")
def other() -> Iterator[RealServer]:
    with real_server() as running:
        yield running


class TestSeam(SeamContract, FullCacheContract):
    """A model whose layers are all on a server keeps the contract of the backends."""

    exact = False

    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path, server: RealServer) -> None:
        self.path = tiny_model(tmp_path, "F32")
        self.server = server.name

    def open_backend(self, *, context_size: int, max_sequences: int) -> Backend:
        return open_llama(self.path, context_size=context_size, max_sequences=max_sequences, rpc=self.server)

    def open_with_capacity(self, capacity: int, *, context_size: int, max_sequences: int) -> Backend:
        return open_llama(self.path, context_size=256, kv_tokens=256, max_sequences=max_sequences, rpc=self.server)


@pytest.mark.parametrize(
    ("count", "options", "placed"),
    [
        (1, {}, "31/31"),
        (2, {}, "31/31"),
        (2, {"tensor_split": "3,1"}, "31/31"),
        (2, {"tensor_split": "0,1"}, "31/31"),
        (2, {"split_mode": "none", "main_gpu": 1}, "31/31"),
        (1, {"gpu_layers": 12}, "12/31"),
        (2, {"kv_type": "q8_0"}, "31/31"),
    ],
    ids=["one", "two", "3 to 1", "only the second", "main GPU", "12 layers", "8-bit cache"],
)
def test_logits_are_those_of_this_machine(
    count: int, options: dict[str, Any], placed: str, server: RealServer, other: RealServer
) -> None:
    names = [running.name for running in (server, other)][:count]
    actual, device = logits_of_smollm2(rpc=",".join(names), **options)
    local = {name: value for name, value in options.items() if name == "kv_type"}
    expected, _ = logits_of_smollm2(gpu_layers=0, **local)
    assert_agree(actual, expected)
    used = [names[1]] if "main_gpu" in options else names
    assert device.startswith(f"{placed} layers on {' and '.join(used)}, ")


def test_servers_report_their_memory(server: RealServer, other: RealServer) -> None:
    devices = devices_with(f"{server.name},{other.name}", anyway=False)
    assert [device["description"] for device in devices] == [server.name, other.name]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert [device["free"] for device in devices] == [total] * 2  # what ggml reports for a CPU


def test_a_split_for_another_number_of_devices_is_refused(server: RealServer) -> None:
    with pytest.raises(UsageError, match=f"--tensor-split: 2 numbers for 1 device: {server.name}"):
        open_llama(smollm2(), rpc=server.name, tensor_split="1,1")


def test_rows_cannot_be_split_over_servers(server: RealServer) -> None:
    with pytest.raises(UsageError, match="--split-mode row: device RPC0 does not support split buffers"):
        open_llama(smollm2(), rpc=server.name, split_mode="row")


def test_this_build_has_rpc_but_no_gpus() -> None:
    """llama.cpp itself says that a build with RPC supports GPUs."""
    assert build_problem() is None
    trial = try_llama()
    assert trial is not None
    assert (trial.failure, trial.rpc, trial.offloads) == ("", True, False)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_is_killed_between_two_steps(tmp_path: Path, other: RealServer, number: signal.Signals) -> None:
    with real_server() as victim:
        backend = open_llama(tiny_model(tmp_path, "F32"), rpc=f"{victim.name},{other.name}")
        try:
            backend.forward(batch_of(rows(0, 0, [5, 6, 7])))
            victim.process.send_signal(number)
            victim.process.wait()
            assert_lost(backend, victim, rows(0, 3, [8]))
        finally:
            backend.close()


def test_a_server_that_is_killed_in_the_middle_of_a_step(other: RealServer) -> None:
    """The step takes a second or more, and the server dies after a third of one."""
    with real_server() as victim:
        backend = open_llama(smollm2(), context_size=1024, rpc=f"{other.name},{victim.name}")
        try:
            timer = threading.Timer(0.3, victim.process.kill)
            timer.start()
            assert_lost(backend, victim, rows(0, 0, np.random.default_rng(0).integers(5, 40_000, 1000).tolist()))
            timer.join()
        finally:
            backend.close()


def test_a_server_that_is_stuck_is_given_up_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_process, "_STOP_S", 1.0)
    with real_server() as stuck:
        backend = open_llama(smollm2(), rpc=stuck.name)
        try:
            stuck.process.send_signal(signal.SIGSTOP)
            timer = threading.Timer(0.5, backend.cancel)
            timer.start()
            with pytest.raises(BackendCrashed) as caught:
                backend.forward(batch_of(rows(0, 0, [5, 6])))
            timer.join()
        finally:
            backend.close()
    assert str(caught.value) == f"gave up waiting for the RPC server {stuck.name} while running {smollm2()}"


def assert_lost(backend: LlamaBackend, victim: RealServer, batch: list[Any]) -> None:
    """Check that the next step soon ends with an error that names the server, and that later steps do too."""
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(BackendCrashed) as caught:
            backend.forward(batch_of(batch))
        assert str(caught.value) == (
            f"the connection to the RPC server {victim.name} was lost while running {backend.info.path}"
        )
    assert time.monotonic() - started < 20


def test_a_server_takes_the_next_client_after_one_that_was_killed(tmp_path: Path, server: RealServer) -> None:
    path = tiny_model(tmp_path, "F32")
    for _ in range(3):
        backend = open_llama(path, rpc=server.name)
        backend.forward(batch_of(rows(0, 0, [5])))
        backend._process.kill()
        with pytest.raises(BackendCrashed, match="SIGKILL"):
            backend.forward(batch_of(rows(0, 1, [6])))
        backend.close()


def test_a_second_client_is_told_that_a_server_has_only_one(
    tmp_path: Path, server: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc_devices, "_ANSWER_S", 1.0)
    path = tiny_model(tmp_path, "F32")
    first = open_llama(path, rpc=server.name)
    try:
        with pytest.raises(NetworkError, match=f"the RPC server {server.name} did not answer within 1 s") as caught:
            open_llama(path, rpc=server.name)
        assert "only one client" in caught.value.hint
        first.forward(batch_of(rows(0, 0, [5])))
    finally:
        first.close()


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_devices, "_ANSWER_S", 1.0)
    with fake_server(silent) as name, pytest.raises(NetworkError, match=f"{name} did not answer within 1 s"):
        open_llama(tiny_model(tmp_path, "F32"), rpc=name)


def test_a_server_with_another_protocol_is_named_with_its_version(tmp_path: Path) -> None:
    with fake_server(other_version) as name, pytest.raises(NetworkError) as caught:
        open_llama(tiny_model(tmp_path, "F32"), rpc=name)
    assert str(caught.value) == f"the RPC server {name} has another version of llama.cpp: its RPC protocol is 6.1.0"


def test_a_server_that_hangs_up_is_not_one_of_this_version(tmp_path: Path) -> None:
    with fake_server(hangs_up) as name, pytest.raises(NetworkError) as caught:
        open_llama(tiny_model(tmp_path, "F32"), rpc=name)
    assert str(caught.value) == (
        f"the RPC server {name} did not answer like a ggml-rpc-server of this version of llama.cpp"
    )


def test_another_kind_of_server_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An HTTP server waits for the end of a line that never comes."""
    monkeypatch.setattr(rpc_devices, "_ANSWER_S", 1.0)

    def http(connection: Any) -> None:
        line = b""
        while b"\n" not in line and (more := connection.recv(1)):
            line += more
        connection.sendall(b"HTTP/1.0 400 Bad Request\r\n\r\n")

    with fake_server(http) as name, pytest.raises(NetworkError, match=f"{name} did not answer within 1 s"):
        open_llama(tiny_model(tmp_path, "F32"), rpc=name)


def test_the_system_watches_the_connection(tmp_path: Path, server: RealServer) -> None:
    """Without it, a step would wait forever for a machine that has lost its power."""
    backend = open_llama(tiny_model(tmp_path, "F32"), rpc=server.name)
    try:
        listed = subprocess.run(
            ["ss", "--tcp", "--numeric", "--options", "--no-header", "state", "established"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        ours = [line for line in listed.splitlines() if line.split()[3] == server.name]
        assert len(ours) == 1
        assert "timer:(keepalive" in ours[0]
    finally:
        backend.close()


def test_a_stopped_step_leaves_the_servers_usable(server: RealServer) -> None:
    backend = open_llama(smollm2(), context_size=1024, rpc=server.name)
    try:
        assert_usable_after_a_stop(backend, n_tokens=1000)
    finally:
        backend.close()


def test_auto_counts_the_memory_of_the_servers(tmp_path: Path, server: RealServer) -> None:
    backend = open_llama(tiny_model(tmp_path, "F32"), rpc=server.name, gpu_layers=AUTO)
    backend.close()
    on_the_server, of_the_model = backend.info.gpu_layers.split("/")
    assert on_the_server == of_the_model
