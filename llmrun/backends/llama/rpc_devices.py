"""Lists the devices that llama.cpp would use, and adds RPC servers to them, by calling llama.cpp's own library.

llama.cpp waits for a lost RPC server without a time limit, so the system checks the connections of its process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import socket
import stat
from dataclasses import dataclass
from typing import Any

from llmrun.backends.base import MOST_DEVICES
from llmrun.backends.llama.build_command import COMPILES, RPC_FLAG, build_command, build_flags, rebuild_command
from llmrun.backends.llama.probe import is_installed
from llmrun.backends.llama.process import LlamaProcess
from llmrun.backends.llama.rpc_servers import SERVER_PROGRAM, RpcServer, find_servers
from llmrun.base.errors import BackendCrashed, NetworkError, UsageError
from llmrun.base.machine.gpus import gpus

# Probe a connection after 15 s of silence, four times in 20 s. Sent data must be acknowledged within 35 s.
_OPTIONS = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 35_000}


def keep_connections_alive() -> None:
    """Enable TCP keepalive for all open connections of this process.

    If a server's machine vanishes, waiting for the server fails after about half a minute. A server that computes for a
    long time is not affected, because its operating system answers the probes.
    """
    try:
        descriptors = [int(name) for name in os.listdir("/dev/fd")]  # noqa: PTH208
    except OSError:  # systems such as Windows have no /dev/fd
        return
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # the descriptor of the directory listing itself is already closed
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    _keep_alive(connection)


def _keep_alive(connection: socket.socket) -> None:
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _OPTIONS.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


_ANSWER_S = 10.0  # An idle server answers within milliseconds.
_OTHER_VERSION = re.compile(r"RPC server version mismatch: ([\d.]+)")


@dataclass(frozen=True, slots=True)
class BuildProblem:
    """Why the installed llama.cpp cannot use RPC servers, and the shell command that fixes it.

    verb  what the command does: "install it" or "rebuild it"
    """

    words: str
    verb: str
    command: str


def build_problem(process: LlamaProcess | None = None) -> BuildProblem | None:
    """Return why llama.cpp cannot use RPC servers, or None if it can. Raises LlmrunError.

    process  llama.cpp's process, or None to start a temporary process
    """
    if not is_installed():
        return BuildProblem("llama.cpp is not installed", "install it", build_command(_rpc_flags()))
    if process is None:
        with contextlib.closing(LlamaProcess()) as started:
            return build_problem(started)
    if process.ask("describe", "starting")["rpc"]:
        return None
    words = "the installed llama.cpp was built without RPC"
    return BuildProblem(words, "rebuild it", rebuild_command(_rpc_flags()))


def _rpc_flags() -> str:
    """Return the CMake flags for RPC and for the best GPU of this machine."""
    return f"{build_flags(gpus())[0]} {RPC_FLAG}".strip()


def check_servers(text: str, *, anyway: bool) -> None:
    """Check that llama.cpp supports RPC and that all servers can be reached, without a model.

    anyway  allow addresses that are not private
    Raises the errors of `use_servers`.
    """
    find_servers(text, anyway=anyway)
    _raise_problem(build_problem())


def devices_with(text: str, *, anyway: bool) -> list[dict[str, Any]]:
    """Return the devices that llama.cpp would use with a list of servers. Raises the errors of `use_servers`."""
    with contextlib.closing(LlamaProcess()) as process:
        return use_servers(process, text, anyway=anyway)


def use_servers(process: LlamaProcess, text: str, *, anyway: bool) -> list[dict[str, Any]]:
    """Connect llama.cpp to RPC servers, and return all devices that it now uses, in the form of `usable_gpus`.

    Raises UsageError if no llama.cpp with RPC is installed, or if there are too many devices. Raises NetworkError if a
    server cannot be used, and the errors of `find_servers`.
    """
    servers = find_servers(text, anyway=anyway)
    _raise_problem(build_problem(process))
    for server in servers:
        _add_server(process, server)
    process.rpc_servers = servers
    who = f"the RPC server{'s' if len(servers) > 1 else ''} {' and '.join(server.name for server in servers)}"
    devices: list[dict[str, Any]] = _ask(process, who, "devices", "asking for the memory of RPC servers")["devices"]
    if len(devices) > MOST_DEVICES:
        raise UsageError(f"--rpc: {len(devices)} devices, but llama.cpp can use at most {MOST_DEVICES}")
    return devices


def _raise_problem(problem: BuildProblem | None) -> None:
    if problem is not None:
        raise UsageError(f"--rpc: {problem.words}", hint=f"{problem.verb} ({COMPILES}): {problem.command}")


def _add_server(process: LlamaProcess, server: RpcServer) -> None:
    who = f"the RPC server {server.name}"
    if not _ask(process, who, "add_rpc_server", f"connecting to {who}", address=server.address)["devices"]:
        raise NetworkError(f"{who} offers no devices")


def _ask(process: LlamaProcess, who: str, operation: str, doing: str, **fields: Any) -> dict[str, Any]:
    """Send a request that idle servers answer immediately. Raises NetworkError if there is no answer.

    who  the servers that llama.cpp will ask
    """
    with process.limited(_ANSWER_S) as late:
        try:
            return process.ask(operation, doing, **fields)
        except BackendCrashed as crash:
            if late.is_set():
                raise NetworkError(
                    f"{who} did not answer within {_ANSWER_S:g} s",
                    hint=f"a server has only one client at a time; also check that it is {SERVER_PROGRAM}",
                ) from crash
            raise _refused(process, who, crash) from crash


def _refused(process: LlamaProcess, who: str, crash: BackendCrashed) -> NetworkError:
    """Return the error for servers that llama.cpp could not use, based on the end of llama.cpp's output."""
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


_RPC = b"RPC"
_GPU, _INTEGRATED = 1, 2  # ggml device types
_WITHOUT_GPUS = frozenset({"CPU", "BLAS", "RPC", "ZenDNN", "zDNN"})  # ggml backends without GPUs of this machine


def usable_gpus(ggml: Any) -> list[dict[str, Any]]:
    """Return the `description`, `free` bytes and `total` bytes of each GPU that llama.cpp would use, in order.

    Devices of RPC servers count as GPUs and are listed first, with the server's address as the description.

    ggml  a ctypes library with ggml's functions

    The list follows llama.cpp's rules: integrated GPUs are used only if there are no other GPUs, and a device that is
    listed by two ggml backends (such as CUDA and Vulkan) counts once. llama.cpp recognizes such a device by its bus
    address. We compare descriptions instead of bus addresses, which is simpler, but may omit a device.
    """
    ggml.ggml_backend_dev_count.restype = ctypes.c_size_t
    for name in ("ggml_backend_dev_get", "ggml_backend_dev_backend_reg"):
        getattr(ggml, name).restype = ctypes.c_void_p
    ggml.ggml_backend_dev_description.restype = ctypes.c_char_p
    ggml.ggml_backend_reg_name.restype = ctypes.c_char_p
    remote: list[dict[str, Any]] = []
    found: dict[int, list[tuple[int, dict[str, Any]]]] = {_GPU: [], _INTEGRATED: []}
    for index in range(ggml.ggml_backend_dev_count()):
        device = ctypes.c_void_p(ggml.ggml_backend_dev_get(ctypes.c_size_t(index)))
        kind = ggml.ggml_backend_dev_type(device)
        if kind not in found:
            continue
        backend = ggml.ggml_backend_dev_backend_reg(device)
        description = ggml.ggml_backend_dev_description(device).decode(errors="replace")
        is_remote = ggml.ggml_backend_reg_name(ctypes.c_void_p(backend)) == _RPC
        if not is_remote and any(
            other != backend and known["description"] == description for other, known in found[kind]
        ):
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        ggml.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
        gpu = {"description": description, "free": free.value, "total": total.value}
        if is_remote:
            remote.append(gpu)
        else:
            found[kind].append((backend, gpu))
    chosen = found[_GPU] or [pair for pair in found[_INTEGRATED] if pair[0] == found[_INTEGRATED][0][0]]
    return [*remote, *(gpu for _, gpu in chosen)]


def supports_gpus(ggml: Any) -> bool:
    """Return whether this build of llama.cpp can use GPUs, even if this machine has none or hides its GPUs.

    llama.cpp's own answer, `llama_supports_gpu_offload`, is true only if a GPU is found or the build supports RPC.
    """
    if vulkan_starts(ggml) is not None:
        return True
    ggml.ggml_backend_reg_count.restype = ctypes.c_size_t
    ggml.ggml_backend_reg_get.restype = ctypes.c_void_p
    ggml.ggml_backend_reg_name.restype = ctypes.c_char_p
    for index in range(ggml.ggml_backend_reg_count()):
        backend = ctypes.c_void_p(ggml.ggml_backend_reg_get(ctypes.c_size_t(index)))
        if ggml.ggml_backend_reg_name(backend).decode(errors="replace") not in _WITHOUT_GPUS:
            return True
    return False


def vulkan_starts(ggml: Any) -> bool | None:
    """Return whether Vulkan works on this machine, or None if this build of llama.cpp does not use Vulkan.

    If there is no driver, llama.cpp does not list its Vulkan backend, but the library still contains the functions. If
    the backend is a separate file that was loaded at run time, the library does not contain them.
    """
    ggml.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    if ggml.ggml_backend_reg_by_name(b"Vulkan") is not None:
        return True
    return False if hasattr(ggml, "ggml_backend_vk_reg") else None


def supports_rpc(ggml: Any) -> bool:
    """Return whether this build of llama.cpp can use RPC servers."""
    ggml.ggml_backend_reg_by_name.restype = ctypes.c_void_p
    return ggml.ggml_backend_reg_by_name(_RPC) is not None


def add_rpc_server(ggml: Any, address: str) -> int:
    """Connect to an RPC server, and return the number of devices that llama.cpp will use there from now on.

    The process aborts if there is no server or if the server has another version. The wait has no time limit.
    """
    for name in ("ggml_backend_reg_by_name", "ggml_backend_reg_get_proc_address"):
        getattr(ggml, name).restype = ctypes.c_void_p
    backend = ctypes.c_void_p(ggml.ggml_backend_reg_by_name(_RPC))
    function = ggml.ggml_backend_reg_get_proc_address(backend, b"ggml_backend_rpc_add_server")
    added = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(function)(address.encode())
    if added is None:
        return 0
    ggml.ggml_backend_register(ctypes.c_void_p(added))
    ggml.ggml_backend_reg_dev_count.restype = ctypes.c_size_t
    count: int = ggml.ggml_backend_reg_dev_count(ctypes.c_void_p(added))
    return count
