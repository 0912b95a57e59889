"""Tests of scripts/demo, with a stand-in for the environment that it would create."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone whose .venv is complete and whose llmrun prints its arguments."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    binaries = tmp_path / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name, does in {"python": "exit 0", "llmrun": 'printf "%s\\n" "$@"'}.items():
        (binaries / name).write_text(f"#!/bin/sh\n{does}\n")
        (binaries / name).chmod(0o700)
    stamp = subprocess.run("cksum <pyproject.toml", shell=True, cwd=tmp_path, capture_output=True, check=True).stdout
    (tmp_path / ".venv" / "installed-jit").write_bytes(stamp)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "question"),
    [([], "Give me three tips for staying healthy."), (["Name three", "colors."], "Name three colors.")],
)
def test_the_demo_shows_its_question_and_the_next_step(clone: Path, arguments: list[str], question: str) -> None:
    done = subprocess.run([clone / "scripts" / "demo", *arguments], capture_output=True, text=True, check=True)
    assert done.stderr == f"> {question}\nnext: . .venv/bin/activate && llmrun chat\n"
    assert done.stdout.partition("--\n")[2].split() == question.split()
