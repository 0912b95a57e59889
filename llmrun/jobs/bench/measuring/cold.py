"""Measures cold starts: the time from launching `llmrun generate` to its first output."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time

from llmrun.backends.device_lists import RPC_OFF
from llmrun.base import child_processes
from llmrun.base.errors import BackendCrashed, LlmrunError
from llmrun.formats.gguf.problems import shown
from llmrun.jobs.bench.measuring.sample import Sample
from llmrun.jobs.bench.measuring.sweep import BenchTarget

_PROMPT = "Why is the sky blue?"
_LAST_WORDS = 400
# The error classes to choose from. The exit code of `llmrun generate` determines which one is raised.
_ALL: tuple[type[LlmrunError], ...] = (BackendCrashed, *LlmrunError.__subclasses__())
_KINDS = {kind.exit_code: kind for kind in _ALL}


def cold_start(target: BenchTarget) -> Sample:
    """Run `llmrun generate` once and return its timing. Raises the command's error if it fails."""
    arguments = ["generate", "--model", target.path, "--backend", target.backend, "--kv-type", target.kv_type]
    arguments += ["--gpu-layers", str(target.gpu_layers), "--max-tokens", "1", "--temp", "0", "--quiet"]
    arguments += ["--speculate", target.draft or target.speculate, "--rpc", RPC_OFF]
    arguments += [part for adapter in target.adapters for part in ("--lora", adapter)]
    if target.threads is not None:
        arguments += ["--threads", str(target.threads)]
    with tempfile.TemporaryFile() as errors:
        started = time.perf_counter()
        process = subprocess.Popen(
            child_processes.command("", *arguments, _PROMPT),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            **child_processes.in_own_group(),
            env=child_processes.environment(),
        )
        try:
            first = os.read(process.stdout.fileno(), 1) if process.stdout is not None else b""
            cold = time.perf_counter() - started
            process.communicate()
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds = time.perf_counter() - started
        if process.returncode or not first:
            errors.seek(0)
            raise _failure(process.returncode, errors.read().decode(errors="replace"))
    return Sample((), seconds, cold=cold)


def _failure(status: int, written: str) -> LlmrunError:
    said = [line.removeprefix("error: ") for line in written.splitlines() if line.startswith("error: ")]
    words = shown(said[-1] if said else f"llmrun generate exited with status {status}", _LAST_WORDS)
    return _KINDS.get(status, LlmrunError)(words)
