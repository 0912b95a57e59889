"""The command that installs llama-cpp-python so that it uses this machine's GPU, or works on its processor at all."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from llmrun.backends.llama.kind import llama_requirement
from llmrun.doctor.shell import with_variable, words
from llmrun.machine.gpus import Gpu

_PACKAGE = "llama-cpp-python"
_ROCM = Path("/opt/rocm")
_CUDA = Path("/usr/local/cuda/bin/nvcc")
_NO_TILES = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
# A build for AMX by GCC 12 loses the setting of the tiles, and dies at the first product.
WITHOUT_AMX = f"-DCMAKE_C_FLAGS='{_NO_TILES}' -DCMAKE_CXX_FLAGS='{_NO_TILES}'"


def build_flags(gpus: Sequence[Gpu]) -> tuple[str, str]:
    """(flags for CMake, what must be there to build with them): for the GPU that is used best. Empty: no GPU."""
    makers = [gpu.maker for gpu in gpus if gpu.driver]
    if "NVIDIA" in makers:
        has_compiler = shutil.which("nvcc") is not None or _CUDA.exists()
        return "-DGGML_CUDA=on", "" if has_compiler else "the CUDA toolkit (nvcc), which was not found"
    if "Apple" in makers:
        return "-DGGML_METAL=on", ""
    if "AMD" in makers and (shutil.which("hipcc") is not None or _ROCM.exists()):
        return "-DGGML_HIP=on", ""
    if makers:
        has_compiler = shutil.which("glslc") is not None
        return "-DGGML_VULKAN=on", "" if has_compiler else "the Vulkan SDK (glslc), which was not found"
    return "", ""


def build_command(flags: str) -> str:
    """What installs it where it is not, to be pasted into a shell. What pip built before with other flags is not taken
    from its cache."""
    return _pip(flags, ["--no-cache-dir"])


def rebuild_command(flags: str) -> str:
    """What installs it in place of the one that is there. What it stands on is left alone: a newer NumPy than Numba
    takes would stop our own engine."""
    return _pip(flags, ["--force-reinstall", "--no-deps", "--no-cache-dir"])


def _pip(flags: str, options: Sequence[str]) -> str:
    wanted = llama_requirement()
    what = wanted if wanted.startswith(_PACKAGE) else _PACKAGE
    pip = [sys.executable, "-m", "pip", "install", *options, what]
    return with_variable("CMAKE_ARGS", flags, pip) if flags else words(pip)
