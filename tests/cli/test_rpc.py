"""Tests of --rpc and the flags for several devices on the command line, without a build that has RPC."""

from __future__ import annotations

import os
import time

import pytest

from tests.support.cli.commands import llmrun
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.servers.rpc_server import closed_port

pytestmark = pytest.mark.push

COMMANDS = [("generate", "--raw", "a"), ("chat",), ("serve", "--port", "0")]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf"))


def refused(*arguments: str, **environment: str) -> tuple[int, str, float]:
    """Run a command that fails with one line. Returns its exit code, that line, and the seconds it took."""
    started = time.monotonic()
    done = llmrun(*arguments, env={**os.environ, **environment})
    assert done.stdout == b""
    first, *hint = done.stderr.decode().splitlines()
    assert all(line.startswith("hint: ") for line in hint)
    assert len(hint) <= 1
    return done.returncode, first, time.monotonic() - started


@each_command
def test_a_closed_port_is_one_line(command: tuple[str, ...], model: str) -> None:
    server = f"127.0.0.1:{closed_port()}"
    code, line, seconds = refused(*command, "-m", model, "--rpc", server)
    assert (code, line) == (5, f"error: cannot connect to the RPC server {server}: Connection refused")
    assert seconds < 20


@pytest.mark.parametrize("command", [COMMANDS[0], COMMANDS[2]], ids=lambda command: command[0])
def test_servers_are_checked_before_a_model_is_looked_for(command: tuple[str, ...]) -> None:
    """The model may have to be downloaded, which may take hours."""
    server = f"127.0.0.1:{closed_port()}"
    code, line, _ = refused(*command, "-m", "no-such-model", "--rpc", server)
    assert (code, line) == (5, f"error: cannot connect to the RPC server {server}: Connection refused")


@each_command
def test_a_public_address_is_refused(command: tuple[str, ...], model: str) -> None:
    code, line, _ = refused(*command, "-m", model, "--rpc", "203.0.113.7:50052")
    assert code == 2
    assert line.startswith("error: --rpc: 203.0.113.7 is not private, ")


def test_fit_refuses_a_server_that_is_not_there(model: str) -> None:
    server = f"127.0.0.1:{closed_port()}"
    code, line, _ = refused("fit", model, "--rpc", server)
    assert (code, line) == (5, f"error: cannot connect to the RPC server {server}: Connection refused")


def test_servers_can_be_a_setting() -> None:
    server = f"127.0.0.1:{closed_port()}"
    code, line, _ = refused("generate", "-m", "no-such-model", "a", LLMRUN_RPC=server)
    assert (code, line) == (5, f"error: cannot connect to the RPC server {server}: Connection refused")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--rpc", "box"), "flag: --rpc: 'box' is not off or a list of servers, as in 10.0.0.2:50052,10.0.0.3:50052"),
        (("--tensor-split", "3,x"), "flag: --tensor-split: '3,x' is not a list of proportions, as in 3,1"),
        (("--split-mode", "rows"), "flag: --split-mode: 'rows' is not one of layer, row, none"),
        (("--main-gpu", "15"), "flag: --main-gpu: 15 is not an integer from 0 to 14"),
        (("--main-gpu", "1"), "--main-gpu: works only with --split-mode none"),
        (("--rpc", "127.0.0.1:1", "--backend", "cpu"), "--rpc: works only with --backend llama, not with cpu"),
    ],
)
@each_command
def test_invalid_flags_are_usage_errors(
    command: tuple[str, ...], flags: tuple[str, ...], line: str, model: str
) -> None:
    assert refused(*command, "-m", model, *flags)[:2] == (2, f"error: {line}")


@pytest.mark.parametrize(
    "flags", [("--rpc", "127.0.0.1:1"), ("--rpc-anyway",), ("--tensor-split", "1,1"), ("--main-gpu", "0")]
)
def test_models_on_a_server_take_none_of_these_flags(flags: tuple[str, ...]) -> None:
    code, line, _ = refused("generate", "-m", "http://127.0.0.1:1/v1#m", *flags, "a")
    assert code == 2
    assert line == f"error: {flags[0]}: not supported for models on a server, which controls this setting"


def test_a_flag_turns_the_setting_off(model: str) -> None:
    env = {**os.environ, "LLMRUN_RPC": f"127.0.0.1:{closed_port()}"}
    done = llmrun("generate", "-q", "--rpc", "off", "--backend", "cpu", "--raw", "-m", model, "-n", "3", "a", env=env)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("flags", [("--tensor-split", "1,1"), ("--split-mode", "row")])
def test_a_split_without_a_gpu_is_a_note(model: str, flags: tuple[str, ...]) -> None:
    done = llmrun("generate", *flags, "--backend", "cpu", "--raw", "-m", model, "-n", "3", "a")
    assert done.returncode == 0
    assert done.stderr.decode().startswith(f"note: {flags[0]}: no layer of this model runs on a GPU")
