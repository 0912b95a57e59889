"""Tests of the repair command for each kind of GPU and each state of llama.cpp."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

import pytest

from llmrun.backends.llama import build_command
from llmrun.backends.llama.build_command import llama_requirement
from llmrun.backends.llama.gpu_check import LlamaTrial
from llmrun.base.machine.gpus import Gpu
from llmrun.jobs.doctor import graphics
from llmrun.jobs.doctor.examine import NOTE, OK, Finding, Machine
from llmrun.jobs.doctor.graphics import look_at_gpus, look_at_llama

H200 = Gpu("NVIDIA", "NVIDIA H200", "driver 570.1", 150 * 10**9, 140 * 10**9)
RADEON = Gpu("AMD", "Radeon", "driver amdgpu")
APPLE = Gpu("Apple", "Apple M4", "Metal")
ARC = Gpu("Intel", "Intel GPU 0x56a0", "driver xe")
# The installed package's requirement in shell quotes, or only the name in a folder that was never installed.
WHAT = shlex.quote(name if (name := llama_requirement()).startswith("llama-cpp") else "llama-cpp-python")
PIP = f"{sys.executable} -m pip install --force-reinstall --no-deps --no-cache-dir {WHAT}"
FRESH = f"{sys.executable} -m pip install --no-cache-dir {WHAT}"

SDK_ADVICE = "To use the GPU, install the Vulkan SDK 1.3.272 or later (glslc, vulkan.hpp, spirv.hpp) first, then run"
PATIENCE = "which takes a quarter of an hour or more and needs a C++ compiler"
INDEX = "--only-binary llama-cpp-python --extra-index-url https://abetlen.github.io/llama-cpp-python/whl/"


@pytest.fixture(autouse=True)
def no_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(build_command, "_ROCM", Path("/no such folder"))
    monkeypatch.setattr(build_command, "_CUDA", Path("/no such file"))
    monkeypatch.setenv("VULKAN_SDK", "/opt/vulkan")
    tools(monkeypatch)


def tools(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name in names else None)


def machine(*gpus: Gpu) -> Machine:
    made = Machine()
    made.gpus = gpus
    return made


def llama(monkeypatch: pytest.MonkeyPatch, trial: LlamaTrial | None, *gpus: Gpu, amx: bool = False) -> Finding:
    monkeypatch.setattr(graphics, "try_llama", lambda: trial)
    monkeypatch.setattr(graphics, "_has_amx", lambda: amx)
    (found,) = look_at_llama(machine(*gpus))
    return found


def test_no_gpu_is_no_fault() -> None:
    (found,) = look_at_gpus(machine())
    assert (found.status, found.name) == (OK, "gpu_none")


def test_each_gpu_is_a_line_with_driver_and_memory() -> None:
    first, second, third = look_at_gpus(machine(H200, RADEON, Gpu("NVIDIA", "NVIDIA GPU 0x1", "")))
    assert (first.name, first.words) == ("gpu_0", "NVIDIA H200, driver 570.1, 140 GB of 150 GB free")
    assert (second.name, second.status, second.words) == ("gpu_1", OK, "Radeon, driver amdgpu")
    assert (third.status, third.advice) == (NOTE, "Install NVIDIA's driver to use this GPU.")
    assert second.facts["memory_bytes"] is None


@pytest.mark.parametrize(
    ("gpus", "found", "flags", "wheels"),
    [
        ((H200, ARC), ("nvcc",), "-DGGML_CUDA=on", "cu124"),
        ((APPLE,), (), "-DGGML_METAL=on", "metal"),
        ((RADEON,), ("hipcc",), "-DGGML_HIP=on", "rocm72"),
        ((RADEON,), ("glslc",), "-DGGML_VULKAN=on", "vulkan"),
        ((ARC,), ("glslc",), "-DGGML_VULKAN=on", "vulkan"),
    ],
)
def test_the_command_builds_for_the_gpu_and_the_advice_names_wheels(
    gpus: tuple[Gpu, ...], found: tuple[str, ...], flags: str, wheels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools(monkeypatch, *found)
    finding = llama(monkeypatch, LlamaTrial("0.3.36"), *gpus)
    assert finding.status == NOTE
    assert finding.advice == (
        f"To use the GPU, run the command below: pip compiles llama.cpp, {PATIENCE}. "
        f"For a ready-made wheel, add {INDEX}{wheels}."
    )
    assert finding.command == f'CMAKE_ARGS="{flags}" {PIP}'


@pytest.mark.parametrize(("gpu", "tool"), [(H200, "CUDA toolkit (nvcc)"), (RADEON, "Vulkan SDK 1.3.272 or later")])
def test_what_a_build_needs_and_is_not_there_is_said(gpu: Gpu, tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tool in llama(monkeypatch, LlamaTrial("0.3.36"), gpu).advice


def test_windows_has_a_shell_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "executable", r"C:\Program Files\python.exe")
    tools(monkeypatch, "nvcc")
    command = llama(monkeypatch, LlamaTrial("0.3.36"), H200).command
    assert command.startswith('$env:CMAKE_ARGS="-DGGML_CUDA=on"; & "C:\\Program Files\\python.exe" -m pip install')


def test_without_a_gpu_a_build_without_one_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    found = llama(monkeypatch, LlamaTrial("0.3.36", "CPU : AVX2 = 1"))
    assert (found.status, found.advice, found.command) == (OK, "", "")
    assert found.facts["system"] == "CPU : AVX2 = 1"


@pytest.mark.parametrize("gpu", [Gpu("AMD", "AMD GPU", ""), Gpu("NVIDIA", "NVIDIA GPU", "driver nouveau")])
def test_gpus_without_a_driver_need_no_build(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llama(monkeypatch, LlamaTrial("0.3.36"), gpu).status == OK
    (found,) = look_at_gpus(machine(gpu))
    assert (found.status, found.advice) == (NOTE, f"Install {gpu.maker}'s driver to use this GPU.")


def test_a_build_that_uses_the_gpu_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = LlamaTrial("0.3.36", offloads=True, gpus=({"description": "NVIDIA H200", "free": 1, "total": 2},))
    found = llama(monkeypatch, trial, H200)
    assert (found.status, found.words) == (OK, "llama-cpp-python 0.3.36 works and can use NVIDIA H200")


def test_a_software_driver_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = LlamaTrial("0.3.36", offloads=True, gpus=({"description": "llvmpipe (LLVM 15)", "free": 1, "total": 2},))
    found = llama(monkeypatch, trial)
    words = "llama-cpp-python 0.3.36 works and can use llvmpipe (LLVM 15), a software driver"
    assert (found.status, found.words) == (OK, words)


@pytest.mark.parametrize(
    ("header", "spirv", "advice"),
    [
        ("#define VK_EXT_layer_settings 1", True, "To use the GPU, run"),
        ("#define VK_EXT_layer_settings 1", False, SDK_ADVICE),
        ("#define VK_HEADER_VERSION 239", True, SDK_ADVICE),
        (None, True, SDK_ADVICE),
    ],
    ids=["complete", "no SPIRV-Headers", "Debian 12", "no headers"],
)
def test_old_vulkan_headers_are_detected(
    header: str | None, spirv: bool, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, text in (("vulkan/vulkan_core.h", header), ("spirv/unified1/spirv.hpp", "" if spirv else None)):
        if text is not None:
            (tmp_path / path).parent.mkdir(parents=True)
            (tmp_path / path).write_text(text)
    tools(monkeypatch, "glslc")
    monkeypatch.delenv("VULKAN_SDK")
    monkeypatch.setattr(build_command, "_HEADERS", tmp_path)
    assert llama(monkeypatch, LlamaTrial("0.3.36"), RADEON).advice.startswith(f"{advice} the command below: ")


def test_a_missing_vulkan_driver_is_not_a_wrong_build(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = LlamaTrial("0.3.36", offloads=True, why_none="Vulkan has no driver", advice="install a Vulkan driver")
    found = llama(monkeypatch, trial, RADEON)
    assert (found.status, found.command) == (NOTE, "")
    assert found.words == "llama-cpp-python 0.3.36 works, but it finds no GPU: Vulkan has no driver"
    assert found.advice == "Install a Vulkan driver."


@pytest.mark.parametrize(("gpus", "status"), [((), OK), ((H200,), NOTE)])
def test_a_build_for_gpus_that_sees_none_is_wrong_where_there_is_one(
    gpus: tuple[Gpu, ...], status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = llama(monkeypatch, LlamaTrial("0.3.36", offloads=True), *gpus)
    assert (found.status, bool(found.command)) == (status, bool(gpus))


def test_a_gpu_that_cannot_be_found_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebuilding llama.cpp would change nothing."""
    why, advice = "the variable CUDA_VISIBLE_DEVICES is ''", "unset the variable to use the GPU"
    trial = LlamaTrial("0.3.36", offloads=True, why_none=why, advice=advice)
    found = llama(monkeypatch, trial, H200)
    assert (found.status, found.command) == (NOTE, "")
    assert found.words == f"llama-cpp-python 0.3.36 works, but it finds no GPU: {why}"
    assert found.advice == "Unset the variable to use the GPU."
    assert llama(monkeypatch, trial).status == OK


def test_a_build_for_other_gpus_is_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMX is not blamed for a GPU error."""
    why = "llama.cpp died while multiplying on a GPU: SIGABRT: no kernel image is available for execution on the device"
    tools(monkeypatch, "nvcc")
    found = llama(monkeypatch, LlamaTrial("0.3.36", failure=why, crashed=True), H200, amx=True)
    assert found.advice == f"Rebuild it for this GPU; pip compiles llama.cpp, {PATIENCE}:"
    assert found.command == f'CMAKE_ARGS="-DGGML_CUDA=on" {PIP}'


def test_a_gpu_without_memory_needs_no_rebuilding(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "llama.cpp died while multiplying on a GPU: SIGABRT: out of memory"
    found = llama(monkeypatch, LlamaTrial("0.3.36", failure=why, crashed=True), H200)
    assert found.command == ""
    assert found.advice.startswith("Check with nvidia-smi which programs use the GPU's memory; ")


def test_what_is_not_installed_is_a_note_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = llama(monkeypatch, None)
    assert found.status == NOTE
    assert PATIENCE in found.advice
    assert found.command.startswith(f"{sys.executable} -m pip install {INDEX}cpu ")
    tools(monkeypatch, "nvcc")
    assert llama(monkeypatch, None, H200).command == f'CMAKE_ARGS="-DGGML_CUDA=on" {FRESH}'


def test_a_crash_is_a_note_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    died = LlamaTrial(None, failure="llama.cpp died while multiplying: SIGILL", crashed=True)
    found = llama(monkeypatch, died)
    assert found.status == NOTE
    assert found.words == "llama-cpp-python crashes on this machine: llama.cpp died while multiplying: SIGILL"
    assert found.command == PIP


def test_a_crash_on_a_processor_with_amx_is_built_anew_without(monkeypatch: pytest.MonkeyPatch) -> None:
    died = LlamaTrial("0.3.36", failure="llama.cpp died while multiplying: SIGSEGV", crashed=True)
    command = llama(monkeypatch, died, amx=True).command
    flags = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
    assert command == f"CMAKE_ARGS=\"-DCMAKE_C_FLAGS='{flags}' -DCMAKE_CXX_FLAGS='{flags}'\" {PIP}"
    tools(monkeypatch, "nvcc")
    assert llama(monkeypatch, died, H200, amx=True).command.startswith('CMAKE_ARGS="-DGGML_CUDA=on -DCMAKE_C_FLAGS=')


def test_an_installation_that_is_not_whole_is_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = llama(monkeypatch, LlamaTrial("0.3.36", failure="OSError: libllama.so"))
    assert "does not work on this machine" in found.words
    assert found.advice.startswith("Use --backend cpu, or reinstall it")


def test_named_libraries_are_not_reinstalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/opt/llama")
    found = llama(monkeypatch, LlamaTrial("0.3.36", failure="the llama.cpp library in /opt/llama does not match"))
    assert found.advice.startswith("Unset LLAMA_CPP_LIB_PATH, or name libraries that match llama-cpp-python")
    assert found.command == ""


@pytest.mark.parametrize(("flags", "expected"), [("flags : fpu amx_bf16 amx_tile", True), ("flags : fpu avx2", False)])
def test_amx_is_seen_where_linux_tells_of_it(
    flags: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(flags)
    assert graphics._has_amx(tmp_path) is expected
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert not graphics._has_amx(tmp_path)
