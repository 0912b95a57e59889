"""Tests that a run forked by tests/support/cli/forking.py behaves like a newly started process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import forking
from tests.support.cli.commands import llmrun, screen_of, script_file

pytestmark = pytest.mark.push

if sys.platform != "linux":
    pytest.skip("runs are forked only on Linux", allow_module_level=True)

RUNS: dict[str, tuple[list[str | bytes], bytes]] = {
    "an answer": (["generate", "--backend", "scripted", "--quiet", "hi"], b""),
    "a prompt from stdin": (["generate", "--backend", "scripted", "--quiet"], "grüße\n".encode()),
    "stdin that nobody reads": (["--version"], b"x" * 1_000_000),
    "no such option": (["generate", "--no-such"], b""),
    "no such model": (["generate", "-m", "no/such/model.gguf", "hi"], b""),
    "an argument that is not UTF-8": (["generate", "--backend", "scripted", "--quiet", b"\xff"], b""),
    "much output": (["generate", "--help"], b""),
}


def outcome(done: subprocess.CompletedProcess[bytes]) -> tuple[int, bytes, bytes]:
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", RUNS)
def test_forks_and_processes_do_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, stdin = RUNS[name]
    monkeypatch.setattr(forking, "is_enabled", True)
    forked = outcome(llmrun(*arguments, stdin=stdin))
    monkeypatch.setattr(forking, "is_enabled", False)
    assert forked == outcome(llmrun(*arguments, stdin=stdin))


def test_forks_have_their_own_environment_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "is_enabled", True)
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi"}\n')
    arguments = ("batch", "in.jsonl", "-o", "out.jsonl", "--backend", "scripted")
    done = llmrun(*arguments, env={**os.environ, "LLMRUN_QUIET": "1", "LLMRUN_MAX_TOKENS": "0"}, cwd=tmp_path)
    assert (done.returncode, b"LLMRUN_MAX_TOKENS" in done.stderr) == (2, True)
    assert llmrun(*arguments, cwd=tmp_path).returncode == 0
    assert "You said: hi" in (tmp_path / "out.jsonl").read_text()


def test_forks_and_processes_do_the_same_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screens = []
    for is_enabled in (True, False):
        monkeypatch.setattr(forking, "is_enabled", is_enabled)
        screens.append(screen_of("generate", "--backend", "scripted", "-q", "--nope", columns=50))
    assert screens[0] == screens[1]
    assert screens[0][1] == 2


def test_a_fork_that_hangs_is_killed(tmp_path: Path) -> None:
    script = script_file(tmp_path, [("assistant\n", "word " * 100)], step_seconds=1.0)
    with pytest.raises(subprocess.TimeoutExpired):
        forking.run(["generate", "--backend", "scripted", "-m", script, "hi"], b"", os.environ, timeout=1.0)
