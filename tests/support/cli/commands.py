"""Run the real `llmrun` process, with pipes or on a terminal, and write scripts for its scripted backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pexpect

ROOT = Path(__file__).resolve().parents[3]
LLMRUN = (sys.executable, "-m", "llmrun")
TIMEOUT_S = 120  # for a stuck process; nothing is meant to come near it


def llmrun(
    *arguments: str | bytes, stdin: bytes | None = b"", env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """One run with pipes for all three streams. `env` replaces the environment."""
    return subprocess.run(
        [*LLMRUN, *arguments], input=stdin, capture_output=True, check=False, cwd=ROOT, env=env, timeout=TIMEOUT_S
    )


def scripted(*arguments: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """`llmrun generate` on the scripted backend, which answers "You said: " and the prompt."""
    return llmrun("generate", "--backend", "scripted", *arguments, **options)


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """A line of bash in which $LLMRUN is the command; its exit code is that of the last pipe's first process."""
    return subprocess.run(
        ["bash", "-c", command + "; exit ${PIPESTATUS[0]}"],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"LLMRUN": " ".join(LLMRUN)} | environment,
        stdin=subprocess.DEVNULL,
        timeout=TIMEOUT_S,
    )


def on_terminal(*arguments: str, columns: int = 100, **environment: str) -> pexpect.spawn[bytes]:
    """A run whose three streams are a terminal."""
    env = {"TERM": "xterm-256color", **os.environ, **environment}
    return pexpect.spawn(
        LLMRUN[0],
        [*LLMRUN[1:], *arguments],
        cwd=str(ROOT),
        env=env,
        dimensions=(24, columns),
        timeout=TIMEOUT_S,
    )


def screen_of(*arguments: str, columns: int = 100, **environment: str) -> tuple[str, int]:
    """Everything a run writes to its terminal, with plain newlines, and its exit code."""
    process = on_terminal(*arguments, columns=columns, **environment)
    written = process.read().decode().replace("\r\n", "\n")
    process.close()
    assert process.exitstatus is not None, f"killed by signal {process.signalstatus}"
    return written, process.exitstatus


def script_file(folder: Path, answers: Sequence[tuple[str, str]], **options: Any) -> str:
    """A model for the scripted backend: says each answer after its cue. `options` are ScriptedBackend's own."""
    path = folder / "script.json"
    path.write_text(json.dumps({"answers": answers, **options}))
    return str(path)
