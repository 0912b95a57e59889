"""Finds the GPUs that llama.cpp can use on this machine. A child process queries llama.cpp, and the answer is cached on
disk. Most commands only need to know whether there is a GPU. Without the cache, each command would spend 0.1 s on
starting llama.cpp.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.backends.registry import Gpus
from llmrun.base.errors import LlmrunError
from llmrun.base.folders import cache_folder, write_whole
from llmrun.base.machine.processor import NVIDIA_DRIVER

if TYPE_CHECKING:
    from llmrun.backends.base import Progress

_LIMIT_S = 20.0  # A GPU driver may hang, but a working driver may need several seconds to wake eight GPUs.
_RETRY_AFTER_S = 600.0  # A failed probe is not repeated for this long, because it may have taken up to its time limit.
LIBRARY_FOLDER = "LLAMA_CPP_LIB_PATH"  # If set, llama-cpp-python loads its libraries from this folder.
_GPU_VARIABLES = (
    "CUDA_",
    "DYLD_",
    "GGML_",
    "GPU_",
    "HIP_",
    "HSA_",
    "LD_LIBRARY_PATH",
    "METAL_",
    "NVIDIA_",
    "ONEAPI_",
    "ROCR_",
    "SYCL_",
    "VK_",
    "ZE_",
    LIBRARY_FOLDER,
)
_GPU_DEVICES = ("nvidia", "kfd", "dxg", "renderD")  # device names used by NVIDIA, AMD, WSL, and all vendors


def is_installed() -> bool:
    """Return whether llama-cpp-python is installed, without importing the package."""
    return _package() is not None


def installed_version() -> str | None:
    """Return the version of llama-cpp-python, or None if the version is not known."""
    from importlib.metadata import PackageNotFoundError, version  # this import takes 20 ms

    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return None


def gpus(progress: Progress | None = None) -> Gpus:
    """Return the GPUs that llama.cpp can offload layers to. Failures are returned as the `reason`, not raised.

    Calls `progress` if the answer is not cached, which is usually the case only on the first run.
    """
    package = _package()
    if package is None:
        return Gpus((), "llama.cpp is not installed")
    memory = cache_folder("llama") / f"gpus-{_state(package)}.json"
    known = _read_cached(memory)
    if known is not None:
        return known
    if progress is not None:
        progress("looking for GPUs (first run only)", 0.0)
    until = None
    try:
        known = _find_gpus()
    except LlmrunError as error:
        known, until = Gpus((), str(error)), time.time() + _RETRY_AFTER_S
    _write_cached(memory, known, until)
    return known


def usable_gpus(progress: Progress | None = None) -> list[dict[str, Any]]:
    """Return the usable GPUs with their currently free memory, in the form that rpc_devices.py returns.

    Returns an empty list if llama.cpp fails.
    """
    if not gpus(progress).names:
        return []
    try:
        return list(_devices()["devices"])
    except LlmrunError:
        return []


def _find_gpus() -> Gpus:
    """Ask llama.cpp for its GPUs. Raises LlmrunError on failure, or if the lack of GPUs may be temporary."""
    answer = _devices()
    if not answer["offloads"]:
        return Gpus((), "this build of llama.cpp has no GPU support")
    if answer["why_none"]:
        raise LlmrunError(f"llama.cpp found no GPU: {answer['why_none']}")
    names = tuple(str(device["description"]) for device in answer["devices"])
    return Gpus(names, "" if names else "llama.cpp found no GPU")


def _devices() -> dict[str, Any]:
    """Ask a new llama.cpp process for its GPUs. Raises LlmrunError."""
    from llmrun.backends.llama.process import LlamaProcess

    with contextlib.closing(LlamaProcess()) as process, process.limited(_LIMIT_S):
        return process.ask("devices", "looking for GPUs")


def _package() -> Path | None:
    """Return the folder of the installed llama-cpp-python, or None."""
    try:
        found = importlib.util.find_spec("llama_cpp")
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None:  # A module spec without an origin is only a folder with that name.
        return None
    return Path(found.origin).parent


def _state(package: Path) -> str:
    """Return a hash of everything that determines which GPUs llama.cpp can use, for the cache file's name.

    The hash covers the installation, the system's GPUs and driver, and the environment variables that hide or select
    GPUs. Several machines may share one home folder, so the cache can hold answers for more than one machine.
    """
    digest = hashlib.sha256(sys.executable.encode(errors="surrogateescape"))
    libraries = Path(os.environ.get(LIBRARY_FOLDER) or package / "lib")
    for file in [package / "__init__.py", *sorted(libraries.glob("*"))]:
        with contextlib.suppress(OSError):
            status = file.stat()
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    for name in sorted(os.environ):
        if name.startswith(_GPU_VARIABLES):
            digest.update(f"{name}={os.environ[name]}\n".encode(errors="surrogateescape"))
    digest.update("\n".join(sorted(_gpu_devices())).encode(errors="surrogateescape"))
    with contextlib.suppress(OSError):
        digest.update(NVIDIA_DRIVER.read_bytes())
    return digest.hexdigest()[:24]


def _gpu_devices() -> Iterator[str]:
    """Yield the names of GPU devices in /dev."""
    for folder in ("/dev", "/dev/dri"):
        with contextlib.suppress(OSError):
            yield from (name for name in os.listdir(folder) if name.startswith(_GPU_DEVICES))  # noqa: PTH208


def _read_cached(path: Path) -> Gpus | None:
    """Return the cached answer, or None if the caller must ask llama.cpp because no valid answer is cached."""
    try:
        body: Any = json.loads(path.read_bytes())
        names, reason, until = body["names"], body["reason"], body["until"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if not (isinstance(reason, str) and isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return None
    if until is not None and not (isinstance(until, float) and 0 < until - time.time() <= _RETRY_AFTER_S):
        return None
    return Gpus(tuple(names), reason)


def _write_cached(path: Path, known: Gpus, until: float | None) -> None:
    """Write the answer to the cache atomically. If writing fails, the next run asks llama.cpp again."""
    body = {"names": known.names, "reason": known.reason, "until": until}
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(body).encode())
