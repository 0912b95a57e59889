"""Makes llama.cpp's process use the devices of RPC servers."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Any

from llmrun.backends.device_lists import MOST_DEVICES
from llmrun.backends.llama.build_command import build_command, build_flags, rebuild_command, with_rpc
from llmrun.backends.llama.probe import is_installed
from llmrun.backends.llama.process import LlamaProcess
from llmrun.backends.llama.rpc.servers import SERVER_PROGRAM, RpcServer, find_servers
from llmrun.base.errors import BackendCrashed, NetworkError, UsageError
from llmrun.base.machine.gpus import gpus

_ANSWER_S = 10.0  # A server that is idle answers within milliseconds.
_OTHER_VERSION = re.compile(r"RPC server version mismatch: ([\d.]+)")


@dataclass(frozen=True, slots=True)
class BuildProblem:
    """Why the installed llama.cpp cannot use RPC servers, and the shell command that fixes it.

    verb  what the command does: "install it" or "rebuild it"
    """

    words: str
    verb: str
    command: str


def build_problem() -> BuildProblem | None:
    """Return why there is no llama.cpp that can use RPC servers, or None if there is one. Raises LlmrunError."""
    if not is_installed():
        return _not_installed()
    process = LlamaProcess()
    try:
        return _problem_of(process)
    finally:
        process.close()


def check_servers(text: str, *, anyway: bool) -> None:
    """Check that llama.cpp supports RPC and that all servers can be reached, without a model.

    anyway  allow addresses that are not private
    Raises the errors of `use_servers`.
    """
    find_servers(text, anyway=anyway)
    _raise_problem(build_problem())


def devices_with(text: str, *, anyway: bool) -> list[dict[str, Any]]:
    """Return the devices that llama.cpp would use with a list of servers. Raises the errors of `use_servers`."""
    process = LlamaProcess()
    try:
        return use_servers(process, text, anyway=anyway)
    finally:
        process.close()


def use_servers(process: LlamaProcess, text: str, *, anyway: bool) -> list[dict[str, Any]]:
    """Connect llama.cpp to RPC servers. Returns all devices that it now uses, in the form that devices.py returns.

    Raises UsageError if there is no llama.cpp with RPC, or if it gets too many devices. Raises NetworkError if a server
    cannot be used, and the errors of `find_servers`.
    """
    servers = find_servers(text, anyway=anyway)
    _raise_problem(_problem_of(process) if is_installed() else _not_installed())
    for server in servers:
        _add_server(process, server)
    process.rpc_servers = servers
    who = f"the RPC server{'s' if len(servers) > 1 else ''} {' and '.join(server.name for server in servers)}"
    devices: list[dict[str, Any]] = _ask(process, who, "devices", "asking for the memory of RPC servers")["devices"]
    if len(devices) > MOST_DEVICES:
        raise UsageError(f"--rpc: {len(devices)} devices, but llama.cpp can use at most {MOST_DEVICES}")
    return devices


def _problem_of(process: LlamaProcess) -> BuildProblem | None:
    if process.ask("describe", "starting")["rpc"]:
        return None
    command = rebuild_command(with_rpc(build_flags(gpus())[0]))
    return BuildProblem("the installed llama.cpp was built without RPC", "rebuild it", command)


def _not_installed() -> BuildProblem:
    command = build_command(with_rpc(build_flags(gpus())[0]))
    return BuildProblem("llama.cpp is not installed", "install it", command)


def _raise_problem(problem: BuildProblem | None) -> None:
    if problem is not None:
        raise UsageError(f"--rpc: {problem.words}", hint=f"{problem.verb}: {problem.command}")


def _add_server(process: LlamaProcess, server: RpcServer) -> None:
    who = f"the RPC server {server.name}"
    if not _ask(process, who, "add_rpc_server", f"connecting to {who}", address=server.address)["devices"]:
        raise NetworkError(f"{who} offers no devices")


def _ask(process: LlamaProcess, who: str, operation: str, doing: str, **fields: Any) -> dict[str, Any]:
    """Send a request that idle servers answer at once. Raises NetworkError if they do not.

    who  the servers that llama.cpp will ask
    """
    late = threading.Event()

    def give_up() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(_ANSWER_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        return process.ask(operation, doing, **fields)
    except BackendCrashed as crash:
        if late.is_set():
            raise NetworkError(
                f"{who} did not answer within {_ANSWER_S:g} s",
                hint=f"a server has only one client at a time; also check that it is {SERVER_PROGRAM}",
            ) from crash
        raise _refused(process, who, crash) from crash
    finally:
        timer.cancel()


def _refused(process: LlamaProcess, who: str, crash: BackendCrashed) -> NetworkError:
    """Return the error for servers with which llama.cpp could not work, based on its last words."""
    words = process.last_words
    version = _OTHER_VERSION.search(words)
    if version:
        return NetworkError(
            f"{who} has another version of llama.cpp: its RPC protocol is {version[1]}",
            hint="use the same version of llama.cpp on all machines",
        )
    if "Failed to connect" in words:
        return NetworkError(f"{who} stopped accepting connections", hint=f"check that {SERVER_PROGRAM} runs there")
    if "malformed response" in words:
        return NetworkError(
            f"{who} did not answer like a {SERVER_PROGRAM} of this version of llama.cpp",
            hint="check the port, and use the same version of llama.cpp on all machines",
        )
    return NetworkError(str(crash))
