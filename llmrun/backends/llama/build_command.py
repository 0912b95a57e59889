"""Builds the commands that install llama-cpp-python, compile it with GPU or RPC support, or rebuild a broken one.

PyPI has only the source of llama-cpp-python, so pip compiles it. The llama-cpp-python project has indexes of wheels.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from llmrun import DISTRIBUTION
from llmrun.base.machine.gpus import Gpu
from llmrun.base.machine.processor import text_of
from llmrun.base.machine.shell import with_variable, words

RPC_FLAG = "-DGGML_RPC=on"
VULKAN_FLAG = "-DGGML_VULKAN=on"

COMPILES = "pip compiles llama.cpp, which takes a quarter of an hour or more and needs a C++ compiler"

_PACKAGE = "llama-cpp-python"
_WHEELS = "https://abetlen.github.io/llama-cpp-python/whl"
# The folder of _WHEELS for each of the CMake flags. A driver for CUDA 12.4 or later can run the wheels in cu124.
_FOLDERS = {
    "": "cpu",
    "-DGGML_CUDA=on": "cu124",
    "-DGGML_METAL=on": "metal",
    "-DGGML_HIP=on": "rocm72",
    VULKAN_FLAG: "vulkan",
}
_ROCM = Path("/opt/rocm")
_HEADERS = Path("/usr/include")
_CUDA = Path("/usr/local/cuda/bin/nvcc")
_NO_TILES = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
# GCC 12 miscompiles AMX code: the tile configuration is lost, and the first matmul crashes.
WITHOUT_AMX = f"-DCMAKE_C_FLAGS='{_NO_TILES}' -DCMAKE_CXX_FLAGS='{_NO_TILES}'"


def build_flags(gpus: Sequence[Gpu]) -> tuple[str, str]:
    """Return the CMake flags for the best supported GPU, and the SDK that must be installed first.

    Both strings are "" if there is no supported GPU. The SDK is "" if it is already installed or not required.
    """
    makers = [gpu.maker for gpu in gpus if gpu.is_usable]
    if "NVIDIA" in makers:
        has_compiler = shutil.which("nvcc") is not None or _CUDA.exists()
        return "-DGGML_CUDA=on", "" if has_compiler else "the CUDA toolkit (nvcc)"
    if "Apple" in makers:
        return "-DGGML_METAL=on", ""
    if "AMD" in makers and (shutil.which("hipcc") is not None or _ROCM.exists()):
        return "-DGGML_HIP=on", ""
    if makers:
        sdk = "the Vulkan SDK 1.3.272 or later (glslc, vulkan.hpp, spirv.hpp)"
        return VULKAN_FLAG, "" if _has_vulkan_sdk() else sdk
    return "", ""


def _has_vulkan_sdk() -> bool:
    """Return whether llama.cpp can be compiled for Vulkan. On Linux, packages of the distribution also count.

    llama.cpp uses an extension of Vulkan 1.3.272. Debian 12 includes glslc, but its Vulkan headers are older.
    """
    if shutil.which("glslc") is None:
        return False
    if sys.platform != "linux" or "VULKAN_SDK" in os.environ:
        return True
    headers = text_of(_HEADERS / "vulkan/vulkan_core.h") or ""
    return "VK_EXT_layer_settings" in headers and (_HEADERS / "spirv/unified1/spirv.hpp").exists()


def build_command(flags: str) -> str:
    """Return the shell command that installs llama-cpp-python.

    `--no-cache-dir` prevents pip from reusing a wheel that was built with other flags.
    """
    return _pip(flags, ["--no-cache-dir"])


def rebuild_command(flags: str) -> str:
    """Return the shell command that rebuilds an installed llama-cpp-python.

    `--no-deps` leaves the dependencies unchanged, because a NumPy version too new for Numba would break our own engine.
    """
    return _pip(flags, ["--force-reinstall", "--no-deps", "--no-cache-dir"])


def _pip(flags: str, options: Sequence[str]) -> str:
    wanted = llama_requirement()
    what = wanted if wanted.startswith(_PACKAGE) else _PACKAGE
    pip = [sys.executable, "-m", "pip", "install", *options, what]
    return with_variable("CMAKE_ARGS", flags, pip) if flags else words(pip)


def install_command() -> str:
    """Return the shell command that installs llama.cpp for the processor from a wheel, without compiling."""
    return words([sys.executable, "-m", "pip", "install", *wheel_options(), llama_requirement()])


def wheel_options(flags: str = "") -> list[str]:
    """Return pip's options for a wheel of llama-cpp-python with the features of these CMake flags.

    Without `--only-binary`, pip would compile a version on PyPI if it is newer than the wheels.
    """
    return ["--only-binary", _PACKAGE, "--extra-index-url", f"{_WHEELS}/{_FOLDERS[flags]}"]


def llama_requirement() -> str:
    """Return the pip requirement for llama.cpp, read from the metadata of the installed package.

    The metadata is correct whether llmrun was installed from a clone, a wheel or an index. In a clone that was never
    installed, the result refers to the clone's own `llama` extra.
    """
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires(DISTRIBUTION) or ()
    except PackageNotFoundError:
        lines = ()
    for line in lines:
        wanted, _, condition = line.partition(";")
        if condition.strip() in ("extra == 'llama'", 'extra == "llama"'):
            return wanted.strip()
    return ".[llama]"
