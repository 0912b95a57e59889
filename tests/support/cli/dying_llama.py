"""Kills llama.cpp's process while a command uses it, or interrupts the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)

from tests.support.cli.commands import LLMRUN, ROOT, TIMEOUT_S
from tests.support.models.downloads import smollm2


def worker_of(process: subprocess.Popen[bytes]) -> int:
    """Wait for llama.cpp's process and return its id."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            if b"llama.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        time.sleep(0.005)
    raise AssertionError("llama.cpp was not started")


def errors_of_a_chat(*flags: str, kill: Callable[[subprocess.Popen[bytes]], None]) -> list[str]:
    """Ask a question in a chat, call `kill` during the answer, and return the lines on stderr."""
    terminal, stdout = os.openpty()
    command = [*LLMRUN, "chat", "-m", str(smollm2()), "-n", "1500", "-q", *flags]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(stdout)
    assert process.stdin is not None
    process.stdin.write(b"Write a long story about the sea.\n")
    process.stdin.flush()
    os.read(terminal, 5)
    kill(process)
    _, error = process.communicate(timeout=TIMEOUT_S)
    os.close(terminal)
    return error.decode().splitlines()


def assert_ends_in_one_line(number: signal.Signals, doing: str, gpu_layers: str) -> None:
    """Check that `llmrun generate` ends with one line at most, and leaves no process.

    SIGKILL goes to llama.cpp's process and SIGINT to ours.
    """
    options = ["--backend", "llama", "--gpu-layers", gpu_layers, "-t", "1", "-n", "4000", "-q", "--raw", "Once"]
    command = [*LLMRUN, "generate", "-m", str(smollm2()), *options]
    terminal, stdout = os.openpty()  # a terminal gets each word, and a pipe only whole lines
    process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(stdout)
    worker = worker_of(process)
    if doing == "running":
        os.read(terminal, 5)
    os.kill(worker if number == signal.SIGKILL else process.pid, number)
    _, error = process.communicate(timeout=TIMEOUT_S)
    os.close(terminal)
    if number == signal.SIGKILL:
        assert process.returncode == 3
        first, hint = error.decode().splitlines()
        done = f"{doing} {smollm2()}"
        if doing == "loading" and gpu_layers != "0":
            done = "looking for GPUs"  # the first request to the process
        assert first == f"error: llama.cpp died while {done}: SIGKILL"
        assert hint.startswith("hint: ")
    else:
        assert process.returncode == 130
        assert error == b""
    end = time.monotonic() + TIMEOUT_S  # a process that was just starting exits when it sees that its parent is gone
    while Path(f"/proc/{worker}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{worker}").exists()
