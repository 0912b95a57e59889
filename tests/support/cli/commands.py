"""Run the real `llmrun` process, with pipes or in a terminal, and write scripts for its scripted backend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.support.cli import forking

ROOT = Path(__file__).resolve().parents[3]
LLMRUN = (sys.executable, "-m", "llmrun")
TIMEOUT_S = 120  # for a stuck process; normal runs are far quicker


def llmrun(
    *arguments: str | bytes, stdin: bytes | None = b"", env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[bytes]:
    """Run llmrun with pipes for all three streams. `env` replaces the environment."""
    env = os.environ if env is None else env
    if stdin is not None and _can_fork(arguments, env):
        return forking.run(arguments, stdin, env, TIMEOUT_S, cwd)
    return subprocess.run(
        [*LLMRUN, *arguments],
        input=stdin,
        capture_output=True,
        check=False,
        cwd=cwd,
        env=env if cwd == ROOT else {"PYTHONPATH": str(ROOT), **env},
        timeout=TIMEOUT_S,
    )


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    """Run llmrun, check its exit code, and return its stdout and stderr."""
    done = llmrun(*arguments)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == code, out + err
    return out, err


def _can_fork(arguments: Sequence[str | bytes], env: Mapping[str, str]) -> bool:
    """Return whether a run can be forked. Variables that Python reads only at its start must be this process's."""
    return (
        forking.is_enabled
        and _read_at_start(env) == _read_at_start(os.environ)
        and sum(map(len, arguments)) < forking.MOST_BYTES // 2
    )


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in env.items() if name.startswith(("PYTHON", "LC_", "LANG"))}
    if found.get("PYTHONPATH") == str(ROOT):
        del found["PYTHONPATH"]
    return found


def scripted(*arguments: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Run `llmrun generate` on the scripted backend, which answers "You said: " and the prompt."""
    return llmrun("generate", "--backend", "scripted", *arguments, **options)


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which $LLMRUN is the command. The exit code is that of the first process in the last
    pipeline."""
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
    """Start llmrun with all three streams connected to a terminal, or skip the test on Windows."""
    return module_on_terminal("llmrun", *arguments, columns=columns, env={**os.environ, **environment})


def module_on_terminal(
    module: str, *arguments: str, columns: int, env: Mapping[str, str], cwd: Path = ROOT, encoding: str | None = None
) -> pexpect.spawn[Any]:
    """Start `python -m MODULE`, or a fork that calls its `main()`, on a terminal. Skips the test on Windows."""
    if sys.platform == "win32":
        pytest.skip("needs a POSIX terminal")
    from tests.support.cli.forked_terminal import ForkedSpawn

    start = ForkedSpawn if _can_fork(arguments, env) else pexpect.spawn
    return start(
        sys.executable,
        ["-m", module, *arguments],
        cwd=str(cwd),
        env={"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **env},
        dimensions=(24, columns),
        timeout=TIMEOUT_S,
        encoding=encoding,
    )


def modes_of_a_new_terminal() -> list[Any]:
    """Return the modes with which a process finds its terminal.

    They are read from a terminal of their own: a forked child may have changed its own before a test can ask.
    """
    if sys.platform == "win32":
        pytest.skip("needs a POSIX terminal")
    import termios

    theirs, ours = os.openpty()
    try:
        return termios.tcgetattr(ours)
    finally:
        os.close(theirs)
        os.close(ours)


def screen_of(*arguments: str, columns: int = 100, **environment: str) -> tuple[str, int]:
    """Return everything a run writes to its terminal, with plain newlines, and its exit code."""
    process = on_terminal(*arguments, columns=columns, **environment)
    written = process.read().decode().replace("\r\n", "\n")
    process.close()
    assert process.exitstatus is not None, f"killed by signal {process.signalstatus}"
    return written, process.exitstatus


def script_file(folder: Path, answers: Sequence[tuple[str, str]], **options: Any) -> str:
    """Write a script for the scripted backend, as (cue, answer) pairs, and return its path. `options` go to
    ScriptedBackend."""
    path = folder / "script.json"
    path.write_text(json.dumps({"answers": answers, **options}))
    return str(path)
