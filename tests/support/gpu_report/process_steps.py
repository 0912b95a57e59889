"""The steps of scripts/check-gpu that run several processes, interrupt them, or need more memory than the GPU has."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llmrun.backends.llama.probe import gpus, usable_gpus
from llmrun.base.amounts import format_bytes
from llmrun.base.errors import DoesNotFit
from llmrun.base.machine.memory import free_memory
from tests.support.gpu_report.large_model import write_large_model
from tests.support.gpu_report.setup import Setup, checked
from tests.support.gpu_report.table import Row, StepFailed

SOON = 1.0  # seconds from Ctrl-C to the end of the command
LARGER = 1.15  # times the free memory of the GPUs
BESIDES = 4 << 30  # bytes of main memory that must stay free beside the layers on the CPU


def two_processes(setup: Setup) -> Iterator[Row]:
    """Run the model in two processes at once. Their answers must be those of one process alone."""
    alone = setup.generate(setup.model, "all", setup.tokens)
    command = setup.command(*setup.generating(setup.model, "all", setup.tokens))
    environment = setup.environment()
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    try:
        done = [(*process.communicate(timeout=setup.clock.limit(180)), process.returncode) for process in both]
    finally:
        for process in both:
            process.kill()
    found = [json.loads(checked(*one)) for one in done]
    speeds = " and ".join(f"{one['timings']['decode_per_second']:,.1f}" for one in found)
    same = all(_text(one) == _text(alone) for one in found)
    speed_alone = f"{alone['timings']['decode_per_second']:,.1f}"
    words = f"{speeds} tok/s, {speed_alone} alone; {'the same' if same else 'different'} text"
    yield Row("two processes at once", "all layers", words, "the same text", same)


def _text(answer: Mapping[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice.get("text", choice.get("message")))


def ctrl_c(setup: Setup) -> Iterator[Row]:
    """Interrupt an answer and a long prompt, and measure the time until the command has ended."""
    streaming = (
        "generate",
        "-m",
        str(setup.model),
        "--backend",
        "llama",
        "--gpu-layers",
        "all",
        "--raw",
        "--temp",
        "1",
    )
    prompt = setup.folder / "long_prompt.txt"
    prompt.write_text("one two three four " * 1800)
    yield _interrupted(setup, "an answer", [*streaming, "-n", "100000", "Once upon a time"], _answers)
    yield _interrupted(setup, "a long prompt", [*streaming, "-v", "-n", "4", "-f", str(prompt)], _has_loaded)


def _interrupted(
    setup: Setup, what: str, arguments: list[str], began: Callable[[subprocess.Popen[bytes]], bool]
) -> Row:
    limit = setup.clock.limit(120)
    process = subprocess.Popen(
        setup.command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=setup.environment()
    )
    killer = threading.Timer(limit, process.kill)
    killer.start()
    started = time.monotonic()
    try:
        if began(process):
            time.sleep(0.1)  # until some of the work is under way
            started = time.monotonic()
            process.send_signal(signal.SIGINT)
        process.communicate()
        took = time.monotonic() - started
    finally:
        killer.cancel()
        process.kill()
    if sys.platform != "win32" and process.returncode == -signal.SIGKILL:
        raise StepFailed(f"{what} did not begin or end within {limit:.0f} s")
    if process.returncode == 0:
        return Row("Ctrl-C", what, "it was over before the signal")
    words = f"{1000 * took:,.0f} ms, exit code {process.returncode}"
    return Row("Ctrl-C", what, words, f"< {SOON:.0f} s, exit code 130", took < SOON and process.returncode == 130)


def _answers(process: subprocess.Popen[bytes]) -> bool:
    """Wait for the first character of the answer. Returns False if there is none."""
    assert process.stdout is not None
    return bool(process.stdout.read(1))


def _has_loaded(process: subprocess.Popen[bytes]) -> bool:
    """Wait until the model is loaded, because the prompt follows. Returns False if the process ends before that."""
    assert process.stderr is not None
    return any(line.startswith(b"loaded in") for line in process.stderr)


def larger_than_the_memory(setup: Setup) -> Iterator[Row]:
    """Run a model that does not fit on the GPUs: some of its layers must run there, and all of them must be refused."""
    free = sum(int(gpu["free"]) for gpu in usable_gpus())
    size = round(LARGER * free)
    main_memory = free_memory()
    needed = (size if gpus().are_software else size - free) + BESIDES  # software drivers use the main memory
    if main_memory is not None and main_memory < needed:
        raise StepFailed(f"{format_bytes(main_memory)} of main memory is free, and {format_bytes(needed)} is needed")
    path = setup.folder / "large.gguf"
    try:
        layers = write_large_model(path, setup.model, size) + 1
        name = f"{format_bytes(path.stat().st_size)}, {layers} layers"
        answer = setup.generate(path, "auto", 8)
        placed = answer["run"]["gpu_layers"] or "0/0"
        words = f"{placed.replace('/', ' of ')} layers, {answer['timings']['decode_per_second']:,.2f} tok/s"
        yield Row(
            "larger than the memory",
            f"{name}; auto",
            words,
            "some of the layers",
            0 < int(placed.split("/")[0]) < layers,
        )
        refused = subprocess.run(
            setup.command(*setup.generating(path, "all", 8)),
            capture_output=True,
            text=True,
            check=False,
            env=setup.environment(),
            timeout=setup.clock.limit(120),
        )
        said = next((line for line in refused.stderr.splitlines() if "error" in line), "no message")
        passed = refused.returncode == DoesNotFit.exit_code
        yield Row(
            "larger than the memory", f"{name}; all", f"exit code {refused.returncode}: {said[:150]}", "refused", passed
        )
    finally:
        path.unlink(missing_ok=True)
