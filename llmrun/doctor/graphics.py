"""The doctor's checks of the GPUs and of llama.cpp, which is the only backend that uses GPUs."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmrun.amounts import format_bytes
from llmrun.backends.llama.build_command import (
    WITHOUT_AMX,
    build_command,
    build_flags,
    install_command,
    rebuild_command,
)
from llmrun.backends.llama.gpu_check import LlamaTrial, try_llama
from llmrun.doctor.findings import NOTE, OK, Finding
from llmrun.doctor.machine import Machine
from llmrun.machine.gpus import Gpu
from llmrun.machine.processor import text_of

SECTION = "GPU"
LLAMA = "llama.cpp"


def look_at_gpus(machine: Machine) -> Iterator[Finding]:
    for number, gpu in enumerate(machine.gpus):
        facts = {
            "maker": gpu.maker,
            "gpu": gpu.name,
            "driver": gpu.driver or None,
            "memory_bytes": gpu.memory or None,
            "memory_free": gpu.memory_free if gpu.memory else None,
        }
        words = f"{gpu.name}, {gpu.driver or 'no driver loaded'}"
        if gpu.memory:
            words += f", {format_bytes(gpu.memory_free)} of {format_bytes(gpu.memory)} free"
        status, advice = (OK, "") if gpu.driver else (NOTE, f"Install {gpu.maker}'s driver to use it.")
        yield Finding(SECTION, f"gpu_{number}", status, words, advice, facts=facts)
    if not machine.gpus:
        yield Finding(SECTION, "gpu_none", OK, "no GPU found; models run on the processor")


def look_at_llama(machine: Machine) -> Iterator[Finding]:
    """Check llama-cpp-python. All failures are only notes because the package is optional."""
    trial = try_llama()
    flags, needed = build_flags(machine.gpus)
    if trial is None:
        facts = {"installed": False}
        words = "not installed; most models run without it"
        if flags:
            advice, command = _for_the_gpu(needed), build_command(flags)
        else:
            advice, command = "To run models of other architectures, install it:", install_command()
        yield Finding(LLAMA, "llama_cpp", NOTE, words, advice, command, facts)
        return
    yield _finding_of(trial, machine.gpus, flags, needed)


def _finding_of(trial: LlamaTrial, gpus: Sequence[Gpu], flags: str, needed: str) -> Finding:
    facts = {
        "installed": True,
        "version": trial.version,
        "system": trial.system or None,
        "offloads": trial.offloads,
        "gpus": [str(gpu["description"]) for gpu in trial.gpus],
        "crashed": trial.crashed,
        "failure": trial.failure or None,
    }
    name = f"llama-cpp-python {trial.version}" if trial.version else "llama-cpp-python"
    if trial.failure:
        words = f"{name} {'crashes' if trial.crashed else 'does not work'} on this machine: {trial.failure}"
        advice, flags = _after_a_failure(trial, flags)
        return Finding(LLAMA, "llama_cpp", NOTE, words, advice, rebuild_command(flags), facts)
    if trial.gpus:
        names = " and ".join(str(gpu["description"]) for gpu in trial.gpus)
        return Finding(LLAMA, "llama_cpp", OK, f"{name} works and can use {names}", facts=facts)
    if trial.offloads:
        words = f"{name} works; it has GPU support but finds no GPU"
        usable = any(gpu.driver for gpu in gpus)
        advice, command = (_for_the_gpu(needed), rebuild_command(flags)) if usable else ("", "")
        return Finding(LLAMA, "llama_cpp", NOTE if usable else OK, words, advice, command, facts)
    words = f"{name} works; it was built without GPU support"
    if not flags:
        return Finding(LLAMA, "llama_cpp", OK, words, facts=facts)
    return Finding(LLAMA, "llama_cpp", NOTE, words, _for_the_gpu(needed), rebuild_command(flags), facts)


def _for_the_gpu(needed: str) -> str:
    return f"To use the GPU, install {needed} first, then run:" if needed else "To use the GPU:"


def _after_a_failure(trial: LlamaTrial, flags: str) -> tuple[str, str]:
    """Return (advice, CMake flags). If the processor has AMX, the likeliest cause of a crash is a compiler bug."""
    if trial.crashed and _has_amx():
        return "Rebuild it without AMX:", f"{flags} {WITHOUT_AMX}".strip()
    if trial.crashed:
        return "Use --backend cpu, or rebuild it for this machine:", flags
    return "Use --backend cpu, or reinstall it:", flags


def _has_amx(root: Path = Path("/")) -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    return " amx_tile" in (text_of(root / "proc/cpuinfo") or "")
