"""Tests of the doctor's check of the RPC servers in the settings."""

from __future__ import annotations

from typing import Any

import pytest

from llmrun.backends.llama.rpc_devices import BuildProblem
from llmrun.base.errors import NetworkError
from llmrun.jobs.doctor import graphics
from llmrun.jobs.doctor.examine import NOTE, OK, Finding, Machine
from llmrun.jobs.doctor.graphics import look_at_rpc

SERVERS = "10.0.0.2:50052,box:1"
WITHOUT_RPC = BuildProblem("the installed llama.cpp was built without RPC", "rebuild it", "CMAKE_ARGS=... pip install")
DEVICES = [{"description": "10.0.0.2:50052", "free": 8 * 10**9, "total": 9 * 10**9}]


@pytest.fixture(autouse=True)
def _sound_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphics, "build_problem", lambda: None)
    monkeypatch.setattr(graphics, "devices_with", lambda text, *, anyway: DEVICES)


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_RPC", SERVERS)


def found(*, offline: bool = False) -> Finding:
    (one,) = look_at_rpc(Machine(offline))
    assert (one.section, one.name) == ("llama.cpp", "rpc_servers")
    assert one.facts["servers"] == ["10.0.0.2:50052", "box:1"]
    return one


@pytest.mark.parametrize("setting", ["", "off"])
def test_without_servers_there_is_nothing_to_say(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_RPC", setting)
    monkeypatch.setattr(graphics, "build_problem", lambda: WITHOUT_RPC)
    assert list(look_at_rpc(Machine())) == []


@pytest.mark.usefixtures("named")
def test_a_build_without_rpc_gets_the_command_that_rebuilds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphics, "build_problem", lambda: WITHOUT_RPC)
    one = found()
    assert (one.status, one.command) == (NOTE, "CMAKE_ARGS=... pip install")
    assert one.words == "RPC servers cannot be used: the installed llama.cpp was built without RPC"
    assert one.advice.startswith(
        "To use the RPC servers in the settings, rebuild it; pip compiles llama.cpp, which takes "
    )


@pytest.mark.usefixtures("named")
def test_servers_that_answer_are_listed_with_their_memory() -> None:
    one = found()
    assert (one.status, one.advice) == (OK, "")
    assert one.words == "with the RPC servers, llama.cpp can use 10.0.0.2:50052 (8.00 GB free)"


@pytest.mark.usefixtures("named")
def test_a_server_that_does_not_answer_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str, *, anyway: bool) -> list[dict[str, Any]]:
        raise NetworkError("cannot connect to the RPC server box:1: Connection refused", hint="start it there")

    monkeypatch.setattr(graphics, "devices_with", refuse)
    one = found()
    assert (one.status, one.words) == (NOTE, "cannot connect to the RPC server box:1: Connection refused")
    assert one.advice == "Start it there."


@pytest.mark.usefixtures("named")
def test_offline_no_server_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str, *, anyway: bool) -> list[dict[str, Any]]:
        raise AssertionError("the network was used")

    monkeypatch.setattr(graphics, "devices_with", refuse)
    one = found(offline=True)
    assert (one.status, one.words) == (OK, "llama.cpp was built with RPC; offline: the RPC servers were not tried")
