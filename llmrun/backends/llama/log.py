"""Reads llama.cpp's log: why a model failed to load, where its layers run, and what is wrong with a GPU.

The process that runs llama.cpp also imports this module, so the module has few imports of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from llmrun.base.amounts import counted
from llmrun.base.errors import DoesNotFit, LlmrunError, ModelFileError, UnsupportedModel, UsageError, shown
from llmrun.base.machine.processor import NVIDIA_DRIVER

_OFFLOADED = re.compile(r"offloaded (\d+/\d+) layers to GPU")
_LOG_PREFIX = re.compile(r"^(llama_\w+: |error loading model: )+")
_DEVICE = re.compile(r"using device \S+ \((.*)\) \([^()]*\) - (\d+) MiB free")


def refusal(path: str, reason: str, log: Sequence[str]) -> LlmrunError:
    """Return the error for a model that llama.cpp failed to load, based on the reported reason and the log."""
    reason = _LOG_PREFIX.sub("", reason)
    sentence = f"llama.cpp cannot load this model: {path}: {shown(reason, 200)}"
    if "unknown model architecture" in reason or "unknown pre-tokenizer" in reason:
        from llmrun.backends.llama.build_command import COMPILES

        hint = f"a newer llama-cpp-python may support it ({COMPILES}): pip install -U llama-cpp-python"
        return UnsupportedModel(sentence, hint=hint)
    if "does not support split buffers" in reason:
        return UsageError(f"--split-mode row: {shown(reason, 200)}", hint="use --split-mode layer, the default")
    if "allocat" in reason or "out of memory" in reason:
        free = [f"{shown(name)} {int(megabytes):,} MiB" for name, megabytes in _DEVICE.findall("\n".join(log))]
        if free:
            return DoesNotFit(
                f"{sentence}; free GPU memory: {', '.join(free)}",
                hint="try --gpu-layers auto to offload only the layers that fit, or a smaller --ctx-size",
            )
        return DoesNotFit(sentence, hint="try a smaller --ctx-size, or a smaller model")
    return ModelFileError(sentence)


def placement_words(log: Sequence[str], threads: int) -> str:
    """Return where the layers run according to llama.cpp's log, such as "31/31 layers on NVIDIA H200, 2 threads"."""
    layers = offloaded(log)
    if not layers:
        return counted(threads, "thread")
    devices = " and ".join(shown(name) for name, _ in _DEVICE.findall("\n".join(log))) or "GPU"
    return f"{layers} layers on {devices}, {counted(threads, 'thread')}"


def offloaded(log: Sequence[str]) -> str:
    """Return the number of offloaded layers and the total, such as "31/31", or "" if no layer is on a GPU."""
    layers = _OFFLOADED.search("\n".join(log))
    return layers[1] if layers and not layers[1].startswith("0/") else ""


REBUILD = "this build of llama.cpp is for other GPUs: `llmrun doctor` prints the command that builds it for this one"

# llama.cpp first logs the cause of a GPU error, and then aborts with a message that names no cause.
_CAUSE = re.compile(r"^(?:CUDA|ROCm|MUSA) error: (.+)$", re.MULTILINE)
_VULKAN_CAUSE = re.compile(r"what\(\): +(vk::.+: Error\w+)$", re.MULTILINE)  # the message of an uncaught exception
_INITIALIZING = re.compile(r"failed to initialize (?:CUDA|ROCm|MUSA): (.+)$", re.MULTILINE)
_NO_DEVICE = "no CUDA-capable device"
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_HIDE_ALL = ("", "-1")
_HIDING_FROM_VULKAN = "GGML_VK_VISIBLE_DEVICES"
_UNSET = "unset the variable to use the GPU"
_OUT_OF_VULKAN_MEMORY = re.compile("OutOf(?:Device|Host)Memory")

# CUDA's descriptions of errors, in order of precedence, with the advice for each error.
_ADVICE = (
    (r"no kernel image|device kernel image is invalid|unsupported toolchain", REBUILD),
    (
        r"driver version is insufficient|unsupported display driver|forward compatibility",
        "update NVIDIA's driver and restart the machine, or rebuild llama.cpp with an older CUDA toolkit",
    ),
    (
        r"CUDA.*out of memory|^out of memory|: out of memory",
        "check with nvidia-smi which programs use the GPU's memory; try fewer --gpu-layers, or a smaller --ctx-size",
    ),
    (r"busy or unavailable", "check with nvidia-smi which program uses the GPU; until it ends, use --backend cpu"),
    (
        r"launch failure|illegal|misaligned|ECC|NVLink|hardware|timed out|unknown error|unable to determine",
        "the GPU may have failed: look for Xid in the kernel's log; until the GPU works again, use --backend cpu",
    ),
    (
        r"libcuda\.so\S* cannot open",
        "install NVIDIA's driver, or rebuild llama.cpp with -DGGML_CUDA_NO_VMM=on to use it without a driver",
    ),
    (
        r"libcu(?:blas|blasLt|dart)\.so\S* cannot open",
        "install cuBLAS and the CUDA runtime of this version, or add their folder to LD_LIBRARY_PATH",
    ),
)


class GpuProblem(NamedTuple):
    """The reason why llama.cpp cannot use a GPU, and advice for the user. Fields with unknown values are empty."""

    cause: str = ""
    advice: str = ""


def gpu_error(output: str) -> GpuProblem:
    """Return the last GPU error in llama.cpp's output."""
    if causes := _CAUSE.findall(output):
        cause = causes[-1].strip()
        return GpuProblem(cause, advice_for(cause))
    if causes := _VULKAN_CAUSE.findall(output):
        if _OUT_OF_VULKAN_MEMORY.search(causes[-1]):
            advice = "close other programs that use the GPU; try fewer --gpu-layers, or a smaller --ctx-size"
        else:
            advice = "the GPU or its driver may have failed: check the kernel's log, or use --backend cpu"
        return GpuProblem(f"Vulkan: {causes[-1].strip()}", advice)
    return GpuProblem()


def advice_for(cause: str) -> str:
    """Return advice about a CUDA error or a missing CUDA library, or "" for other errors."""
    return next((advice for pattern, advice in _ADVICE if re.search(pattern, cause)), "")


_NO_VULKAN_DRIVER = GpuProblem(
    "Vulkan has no driver", "install a Vulkan driver, such as mesa-vulkan-drivers on Debian and Ubuntu"
)
_NO_VULKAN_GPU = GpuProblem(
    "Vulkan's drivers found no GPU",
    "check with `vulkaninfo --summary` which drivers work; on Linux, your user may have to be in the group render",
)


def why_no_gpu(log: str, vulkan: bool | None = None) -> GpuProblem:
    """Return why a build with GPU support found no GPU, given llama.cpp's log.

    Without a driver, CUDA reports that the driver is too old. CUDA's misleading reason is not returned.

    vulkan  whether Vulkan started, or None if this build of llama.cpp does not use it
    """
    from llmrun.base.machine.gpus import nvidia_cards  # llama.cpp's process starts faster without this import

    failed = _INITIALIZING.search(log)
    has_driver = NVIDIA_DRIVER.exists() or bool(nvidia_cards())
    if failed is not None and has_driver and _NO_DEVICE not in failed[1]:
        cause = failed[1].strip()
        return GpuProblem(cause, advice_for(cause))
    if vulkan is not None:
        numbers = os.environ.get(_HIDING_FROM_VULKAN)
        if numbers is None:
            return _NO_VULKAN_GPU if vulkan else _NO_VULKAN_DRIVER
        hiding = f"the variable {_HIDING_FROM_VULKAN} is '{numbers}'"
        if vulkan:
            return GpuProblem(hiding, _UNSET)
        advice = "list the devices with `vulkaninfo --summary`; they are numbered from 0"
        return GpuProblem(f"Vulkan has no driver for these devices: {hiding}", advice)
    for name in _HIDING:
        value = os.environ.get(name)
        if value is not None and (has_driver or value in _HIDE_ALL):
            return GpuProblem(f"the variable {name} is '{value}'", _UNSET)
    return GpuProblem()
