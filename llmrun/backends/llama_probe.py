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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrun.errors import LlmrunError
from llmrun.settings import cache_folder

_LIMIT_S = 20.0  # a GPU driver may hang
_GPU_VARIABLES = ("CUDA_", "HIP_", "ROCR_", "GGML_", "VK_", "SYCL_", "ONEAPI_", "ZE_", "METAL_", "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that llama.cpp can run layers on, by name. When there are none, `reason` says why."""

    names: tuple[str, ...]
    reason: str = ""


def is_installed() -> bool:
    """Whether the extra is there; nothing is imported."""
    return _package() is not None


def gpus() -> Gpus:
    """What llama.cpp can offload to. Never fails: what goes wrong is a reason."""
    package = _package()
    if package is None:
        return Gpus((), "llama.cpp is not installed")
    state = _state(package)
    memory = cache_folder() / "llama" / f"gpus-{state}.json"
    known = _remembered(memory)
    if known is None:
        try:
            known = _asked()
        except LlmrunError as error:  # it may go better next time: not remembered
            return Gpus((), str(error))
        _remember(memory, known)
    return known


def _asked() -> Gpus:
    from llmrun.backends.llama_process import LlamaProcess

    process = LlamaProcess()
    timer = threading.Timer(_LIMIT_S, process.kill)
    timer.start()
    try:
        answer = process.ask("devices", "looking for GPUs")
    finally:
        timer.cancel()
        process.close()
    if not answer["offloads"]:
        return Gpus((), "this build of llama.cpp has no GPU support")
    names = tuple(str(device["description"]) for device in answer["devices"])
    return Gpus(names, "" if names else "llama.cpp sees no GPU")


def _package() -> Path | None:
    """The folder of llama-cpp-python."""
    try:
        found = importlib.util.find_spec("llama_cpp")
    except (ImportError, ValueError):
        return None
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places))) if places else None


def _state(package: Path) -> str:
    """Changes with the installation, and with what decides which GPUs a process sees."""
    digest = hashlib.sha256(sys.executable.encode(errors="surrogateescape"))
    for file in [package / "__init__.py", *sorted(package.glob("lib/*"))]:
        with contextlib.suppress(OSError):
            status = file.stat()
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode(errors="surrogateescape"))
    for name in sorted(os.environ):
        if name.startswith(_GPU_VARIABLES):
            digest.update(f"{name}={os.environ[name]}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:24]


def _remembered(path: Path) -> Gpus | None:
    """What was found out before; None when that cannot be read, for whatever reason: asking again mends it."""
    try:
        body: Any = json.loads(path.read_bytes())
        names, reason = body["names"], body["reason"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if not (isinstance(reason, str) and isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return None
    return Gpus(tuple(names), reason)


def _remember(path: Path, known: Gpus) -> None:
    """Write it whole or not at all. Where nothing can be written, the next run asks again."""
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"names": known.names, "reason": known.reason}))
        partial.replace(path)
