"""What llama.cpp could use on this machine. Asked in a process of its own, and remembered: most commands only want to
know that there is no GPU, and that must not cost them the 0.1 s of starting llama.cpp.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmrun.backends.kind import Gpus
from llmrun.errors import LlmrunError
from llmrun.folders import cache_folder

if TYPE_CHECKING:
    from llmrun.backends.base import Progress

_LIMIT_S = 20.0  # a GPU driver may hang; one that wakes eight GPUs takes seconds
_TROUBLE_S = 600.0  # a probe that failed is not asked again for so long: it may have taken all of its time
_OVERRIDE = "LLAMA_CPP_LIB_PATH"  # where llama-cpp-python takes its libraries from instead of its own folder
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
    _OVERRIDE,
)
_GPU_DEVICES = ("nvidia", "kfd", "dxg", "renderD")  # NVIDIA's, AMD's, Windows' under Linux, anybody's
_DRIVER = Path("/proc/driver/nvidia/version")


def is_installed() -> bool:
    """Whether the extra is there; nothing is imported."""
    return _package() is not None


def gpus(progress: Progress | None = None) -> Gpus:
    """What llama.cpp can offload to. Never fails: what goes wrong is a reason. `progress` is told when this takes
    longer, which is once for an installation."""
    package = _package()
    if package is None:
        return Gpus((), "llama.cpp is not installed")
    memory = cache_folder() / "llama" / f"gpus-{_state(package)}.json"
    known = _remembered(memory)
    if known is not None:
        return known
    if progress is not None:
        progress("looking for GPUs (first run only)", 0.0)
    until = None
    try:
        known = _asked()
    except LlmrunError as error:
        known, until = Gpus((), str(error)), time.time() + _TROUBLE_S
    _remember(memory, known, until)
    return known


def usable_gpus(progress: Progress | None = None) -> list[dict[str, Any]]:
    """Those same GPUs with what is free of them now, as devices.py has them; none where llama.cpp cannot be
    asked."""
    if not gpus(progress).names:
        return []
    try:
        return list(_devices()["devices"])
    except LlmrunError:
        return []


def _asked() -> Gpus:
    answer = _devices()
    if not answer["offloads"]:
        return Gpus((), "this build of llama.cpp has no GPU support")
    names = tuple(str(device["description"]) for device in answer["devices"])
    return Gpus(names, "" if names else "llama.cpp sees no GPU")


def _devices() -> dict[str, Any]:
    """What llama.cpp's process says of GPUs. Raises LlmrunError."""
    from llmrun.backends.llama.process import LlamaProcess

    process = LlamaProcess()
    timer = threading.Timer(_LIMIT_S, process.kill)
    timer.start()
    try:
        return process.ask("devices", "looking for GPUs")
    finally:
        timer.cancel()
        process.close()


def _package() -> Path | None:
    """The folder of llama-cpp-python."""
    try:
        found = importlib.util.find_spec("llama_cpp")
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None:  # without: any folder of that name
        return None
    return Path(found.origin).parent


def _state(package: Path) -> str:
    """Changes with the installation, the GPUs that the system has, and what decides which of them a process sees. A
    home folder may be that of several machines."""
    digest = hashlib.sha256(sys.executable.encode(errors="surrogateescape"))
    libraries = Path(os.environ.get(_OVERRIDE) or package / "lib")
    for file in [package / "__init__.py", *sorted(libraries.glob("*"))]:
        with contextlib.suppress(OSError):
            status = file.stat()
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    for name in sorted(os.environ):
        if name.startswith(_GPU_VARIABLES):
            digest.update(f"{name}={os.environ[name]}\n".encode(errors="surrogateescape"))
    digest.update("\n".join(sorted(_gpu_devices())).encode(errors="surrogateescape"))
    with contextlib.suppress(OSError):
        digest.update(_DRIVER.read_bytes())
    return digest.hexdigest()[:24]


def _gpu_devices() -> Iterator[str]:
    """The names of the system's GPU devices, where it shows them as files."""
    for folder in ("/dev", "/dev/dri"):
        with contextlib.suppress(OSError):
            yield from (name for name in os.listdir(folder) if name.startswith(_GPU_DEVICES))  # noqa: PTH208


def _remembered(path: Path) -> Gpus | None:
    """What was found out before; None when that cannot be read, for whatever reason: asking again mends it."""
    try:
        body: Any = json.loads(path.read_bytes())
        names, reason, until = body["names"], body["reason"], body["until"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if not (isinstance(reason, str) and isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return None
    if until is not None and not (isinstance(until, float) and 0 < until - time.time() <= _TROUBLE_S):
        return None
    return Gpus(tuple(names), reason)


def _remember(path: Path, known: Gpus, until: float | None) -> None:
    """Write it whole or not at all. Where nothing can be written, the next run asks again."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"names": known.names, "reason": known.reason, "until": until}))
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
