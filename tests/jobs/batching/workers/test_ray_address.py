"""Tests of Ray's address on the command line, and of what is checked before Ray is started."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path

import pytest

from llmrun.base.errors import LlmrunError, NetworkError, UsageError
from llmrun.jobs.batching.workers.ray_address import check_ray, check_token, find_address, host_of, is_loopback, is_ray
from llmrun.jobs.batching.workers.ray_cluster import RayCluster, RayProcess

VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "TMPDIR")


@pytest.fixture(autouse=True)
def no_cluster_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("name", ["ray", "ray:10.0.0.5:6379", "ray:head.example.org:1", "ray:[fd00::1]:6379"])
def test_addresses_are_understood(name: str) -> None:
    assert is_ray(name)
    check_ray(name)


@pytest.mark.parametrize("name", ["ray:", "ray:10.0.0.5", "ray:10.0.0.5:0", "ray:10.0.0.5:65536", "ray:ray://h:1"])
def test_other_addresses_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a Ray cluster"):
        check_ray(name)


def test_other_workers_are_not_ray() -> None:
    assert not any(map(is_ray, ("local", "http://ray:1", "rays")))


def test_a_missing_ray_has_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="Ray is not installed") as raised:
        check_ray("ray")
    assert raised.value.hint.startswith(f'install it: {sys.executable} -m pip install "ray')
    assert ">=2.52" in raised.value.hint


def test_windows_has_no_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(UsageError, match="do not run on Windows"):
        check_ray("ray")


def test_the_cluster_of_this_machine_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(NetworkError, match="no cluster was started on this machine") as raised:
        find_address("ray")
    assert "ray start --head" in raised.value.hint
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.5:6379\n")
    assert find_address("ray") == "10.0.0.5:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.6:6379")
    assert find_address("ray") == "10.0.0.6:6379"
    assert find_address("ray:10.0.0.7:1") == "10.0.0.7:1"


@pytest.mark.parametrize(
    ("address", "alone"),
    [("127.0.0.1:1", True), ("localhost:1", True), ("[::1]:1", True), ("10.0.0.5:1", False), ("example.org:1", False)],
)
def test_loopback_addresses(address: str, alone: bool) -> None:
    assert is_loopback(host_of(address)) is alone


def test_networks_need_a_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_token("127.0.0.1")
    with pytest.raises(UsageError, match="must authenticate with a token") as raised:
        check_token("10.0.0.5")
    assert "ray get-auth-token --generate" in raised.value.hint
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(UsageError, match="there is no token"):
        check_token("10.0.0.5")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    check_token("10.0.0.5")


def test_an_address_without_a_cluster_fails_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(NetworkError, match=f"ray:{address}: cannot be reached: Connection refused"):
        RayProcess.connected(address)


@pytest.mark.push
def test_a_silent_server_fails_within_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(NetworkError, match=r"no connection within 0\.5 s") as raised:
            RayProcess.connected(address, connect_s=0.5)
    assert "ray start --address" in raised.value.hint


class Connected:
    """A process that is connected to a cluster with one node."""

    def __init__(self, host: str) -> None:
        self.nodes = [{"id": "a1b2c3", "host": host, "cpus": 4.0, "gpus": 0.0}] if host else []
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize(("host", "words"), [("10.0.0.5", "must authenticate with a token"), ("", "no node has a CPU")])
def test_loopback_does_not_hide_a_network(host: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head of a cluster on a network also listens on 127.0.0.1."""
    process = Connected(host)
    monkeypatch.setattr(RayProcess, "connected", lambda address, connect_s: process)
    with pytest.raises(LlmrunError, match=words):
        RayCluster.connect("ray:127.0.0.1:6379")
    assert process.is_killed


def test_clusters_on_a_network_are_refused_offline() -> None:
    with pytest.raises(NetworkError, match="not available offline"):
        RayCluster.connect("ray:10.0.0.5:6379", offline=True)
