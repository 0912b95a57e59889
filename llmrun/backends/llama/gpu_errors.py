"""Finds the cause of GPU errors in llama.cpp's output, and says what to do about them."""

from __future__ import annotations

import os
import re

from llmrun.base.machine.system_files import NVIDIA_DRIVER

REBUILD = "this build of llama.cpp is for other GPUs: `llmrun doctor` prints the command that builds it for this one"

# llama.cpp logs the cause of a GPU's error first. It then aborts with a message that names no cause.
_CAUSE = re.compile(r"^(?:CUDA|ROCm|MUSA) error: (.+)$", re.MULTILINE)
_VULKAN_CAUSE = re.compile(r"what\(\): +(vk::.+: Error\w+)$", re.MULTILINE)  # an uncaught exception
_INITIALIZING = re.compile(r"failed to initialize (?:CUDA|ROCm|MUSA): (.+)$", re.MULTILINE)
_NO_DEVICE = "no CUDA-capable device"
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_HIDE_ALL = ("", "-1")
_HIDING_FROM_VULKAN = "GGML_VK_VISIBLE_DEVICES"

# CUDA's descriptions of errors, in order of precedence, with the advice for each.
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
    (r"^the variable ", "unset the variable to use the GPU"),
    (r"^Vulkan has no driver for", "list the devices with `vulkaninfo --summary`; they are numbered from 0"),
    (r"^Vulkan has no driver", "install a Vulkan driver, such as mesa-vulkan-drivers on Debian and Ubuntu"),
    (
        r"^Vulkan's drivers found no GPU",
        "check with `vulkaninfo --summary` which drivers work; on Linux, your user may have to be in the group render",
    ),
    (
        r"^Vulkan: .*OutOf(?:Device|Host)Memory",
        "close other programs that use the GPU; try fewer --gpu-layers, or a smaller --ctx-size",
    ),
    (r"^Vulkan: ", "the GPU or its driver may have failed: check the kernel's log, or use --backend cpu"),
    (
        r"libcuda\.so\S* cannot open",
        "install NVIDIA's driver, or rebuild llama.cpp with -DGGML_CUDA_NO_VMM=on to use it without a driver",
    ),
    (
        r"libcu(?:blas|blasLt|dart)\.so\S* cannot open",
        "install cuBLAS and the CUDA runtime of this version, or add their folder to LD_LIBRARY_PATH",
    ),
)


def gpu_error(output: str) -> str:
    """Return the cause of the last GPU error in llama.cpp's output, or "" if there is none."""
    causes = _CAUSE.findall(output) or [f"Vulkan: {what}" for what in _VULKAN_CAUSE.findall(output)]
    return causes[-1].strip() if causes else ""


def advice_for(cause: str) -> str:
    """Return what to do about a GPU error or a missing CUDA library, or "" for other errors."""
    return next((advice for pattern, advice in _ADVICE if re.search(pattern, cause)), "")


def why_no_gpu(log: str, vulkan: bool | None = None) -> str:
    """Return why a build with GPU support found no GPU, given llama.cpp's log, or "" if unknown.

    Without a driver, CUDA reports that the driver is too old, which is not returned because it is misleading.

    vulkan  whether Vulkan started, or None if this build of llama.cpp does not use it
    """
    from llmrun.base.machine.energy import nvidia_cards  # llama.cpp's process starts faster without it

    failed = _INITIALIZING.search(log)
    has_driver = NVIDIA_DRIVER.exists() or bool(nvidia_cards())
    if failed is not None and has_driver and _NO_DEVICE not in failed[1]:
        return failed[1].strip()
    if vulkan is not None:
        numbers = os.environ.get(_HIDING_FROM_VULKAN)
        if numbers is None:
            return "Vulkan's drivers found no GPU" if vulkan else "Vulkan has no driver"
        hiding = f"the variable {_HIDING_FROM_VULKAN} is '{numbers}'"
        return hiding if vulkan else f"Vulkan has no driver for these devices: {hiding}"
    for name in _HIDING:
        value = os.environ.get(name)
        if value is not None and (has_driver or value in _HIDE_ALL):
            return f"the variable {name} is '{value}'"
    return ""
