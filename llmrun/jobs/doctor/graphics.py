"""The doctor's checks of the GPUs, llama.cpp and its RPC servers. llama.cpp is the only backend that uses GPUs."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

from llmrun.backends.llama.build_command import (
    COMPILES,
    WITHOUT_AMX,
    build_command,
    build_flags,
    install_command,
    rebuild_command,
    wheel_options,
)
from llmrun.backends.llama.gpu_check import LlamaTrial, try_llama
from llmrun.backends.llama.log import REBUILD, advice_for
from llmrun.backends.llama.process import named_library_advice
from llmrun.backends.llama.rpc_devices import build_problem, devices_with
from llmrun.backends.registry import is_software_device
from llmrun.base.amounts import format_bytes
from llmrun.base.errors import LlmrunError
from llmrun.base.machine.gpus import Gpu
from llmrun.base.machine.processor import text_of
from llmrun.jobs.doctor.examine import NOTE, OK, Finding, Machine, advice_of
from llmrun.options.settings import load_sound_settings

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
        status, advice = (OK, "") if gpu.is_usable else (NOTE, f"Install {gpu.maker}'s driver to use this GPU.")
        yield Finding(SECTION, f"gpu_{number}", status, words, advice, facts=facts)
    if not machine.gpus:
        yield Finding(SECTION, "gpu_none", OK, "no GPU found; models run on the processor")


def look_at_llama(machine: Machine) -> Iterator[Finding]:
    """Check llama-cpp-python. All failures are only notes, because the package is optional."""
    trial = try_llama()
    flags, needed = build_flags(machine.gpus)
    if trial is None:
        facts = {"installed": False}
        words = "not installed; most models run without it"
        if flags:
            advice, command = _for_the_gpu(flags, needed), build_command(flags)
        else:
            advice = f"To use models of other architectures, install a wheel. Without these options, {COMPILES}:"
            command = install_command()
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
        advice, command = _after_a_failure(trial, flags)
        return Finding(LLAMA, "llama_cpp", NOTE, words, advice, command, facts)
    if trial.gpus:
        return Finding(LLAMA, "llama_cpp", OK, f"{name} works and can use {_device_names(trial)}", facts=facts)
    usable = any(gpu.is_usable for gpu in gpus)
    if trial.why_none and usable:
        words = f"{name} works, but it finds no GPU: {trial.why_none}"
        return Finding(LLAMA, "llama_cpp", NOTE, words, _sentence(trial.advice), facts=facts)
    if trial.offloads:
        words = f"{name} works; it has GPU support but finds no GPU"
        advice, command = (_for_the_gpu(flags, needed), rebuild_command(flags)) if usable else ("", "")
        return Finding(LLAMA, "llama_cpp", NOTE if usable else OK, words, advice, command, facts)
    words = f"{name} works; it was built without GPU support"
    if not flags:
        return Finding(LLAMA, "llama_cpp", OK, words, facts=facts)
    return Finding(LLAMA, "llama_cpp", NOTE, words, _for_the_gpu(flags, needed), rebuild_command(flags), facts)


def _device_names(trial: LlamaTrial) -> str:
    names = [str(gpu["description"]) for gpu in trial.gpus]
    return " and ".join(f"{name}, a software driver" if is_software_device(name) else name for name in names)


def _for_the_gpu(flags: str, needed: str) -> str:
    first = f"To use the GPU, install {needed} first, then run" if needed else "To use the GPU, run"
    wheel = f"For a ready-made wheel, add {' '.join(wheel_options(flags))}"
    return f"{first} the command below: {COMPILES}. {wheel}."


def _after_a_failure(trial: LlamaTrial, flags: str) -> tuple[str, str]:
    """Return (advice, command). The command is "" if rebuilding or reinstalling llama.cpp would change nothing.

    If the processor has AMX, the likeliest cause of a crash without a GPU error is a compiler bug.
    """
    about_the_gpu = advice_for(trial.failure)
    if about_the_gpu == REBUILD:
        return f"Rebuild it for this GPU; {COMPILES}:", rebuild_command(flags)
    if about_the_gpu:
        return _sentence(about_the_gpu), ""
    if about_the_libraries := named_library_advice():
        return _sentence(about_the_libraries), ""
    if trial.crashed and _has_amx():
        return f"Rebuild it without AMX; {COMPILES}:", rebuild_command(f"{flags} {WITHOUT_AMX}".strip())
    if trial.crashed:
        return f"Use --backend cpu, or rebuild it for this machine; {COMPILES}:", rebuild_command(flags)
    return f"Use --backend cpu, or reinstall it; {COMPILES}:", rebuild_command(flags)


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def _has_amx(root: Path = Path("/")) -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    return " amx_tile" in (text_of(root / "proc/cpuinfo") or "")


_NAME = "rpc_servers"


def look_at_rpc(machine: Machine) -> Iterator[Finding]:
    """Check whether llama.cpp can use the servers. RPC support is not required if the settings name no servers."""
    settings, _ = load_sound_settings()
    servers = settings.rpc_servers
    if not servers:
        return
    facts = {"servers": servers.split(",")}
    problem = build_problem()
    if problem is not None:
        words = f"RPC servers cannot be used: {problem.words}"
        advice = f"To use the RPC servers in the settings, {problem.verb}; {COMPILES}:"
        yield Finding(LLAMA, _NAME, NOTE, words, advice, problem.command, facts)
        return
    if machine.offline:
        yield Finding(
            LLAMA, _NAME, OK, "llama.cpp was built with RPC; offline: the RPC servers were not tried", facts=facts
        )
        return
    try:
        devices = devices_with(servers, anyway=settings.rpc_anyway)
    except LlmrunError as error:
        yield Finding(LLAMA, _NAME, NOTE, str(error), advice_of(error), facts=facts)
        return
    found = ", ".join(f"{device['description']} ({format_bytes(device['free'])} free)" for device in devices)
    yield Finding(LLAMA, _NAME, OK, f"with the RPC servers, llama.cpp can use {found}", facts=facts)
