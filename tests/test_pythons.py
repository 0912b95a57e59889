"""Tests of scripts/environment.sh and scripts/test_pythons with stand-ins for interpreters."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Runs this test's Python, with changes, for `python -c SOURCE ARGUMENTS`.
INTERPRETER = """#!/bin/sh
shift
exec "{python}" -c '
import platform, sys, sysconfig
{changes}
sys.argv.pop(1)
exec(source)' "$@"
"""
TEST = """#!/bin/sh
for argument in "$@"; do
    case $argument in --junit-xml=*) report=${argument#--junit-xml=} ;; esac
done
mkdir -p "$LLMRUN_VENV"
[ "$LLMRUN_VENV" != .venv-3.13 ] || exit 1
printf '<testsuites><testsuite tests="7" failures="%s" errors="0" skipped="2" time="4.2"/></testsuites>' \
    "$FAILURES" >"$report"
exit "$FAILURES"
"""


def interpreter(path: Path, *changes: str) -> Path:
    """Write a stand-in for an interpreter: this Python, after the given statements."""
    lines = "\n".join(["source = sys.argv[1]", *changes])
    path.write_text(INTERPRETER.format(python=sys.executable, changes=lines))
    path.chmod(0o700)
    return path


def python_of(folder: Path, version: str) -> Path:
    """Write a stand-in for an interpreter of the given version."""
    numbers = version.replace(".", ", ")
    return interpreter(
        folder / f"python{version}",
        f"sys.version_info = ({numbers})",
        f'platform.python_version = lambda: "{version}"',
    )


def run(clone: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    return subprocess.run(command, cwd=clone, capture_output=True, text=True, env={**os.environ, **variables})


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a clone with a compiled llama.cpp, in which scripts/test is a stand-in that writes a report."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "scripts" / "test").write_text(TEST)
    (tmp_path / "scripts" / "found").write_text('. "$(dirname "$0")/environment.sh"\nfind_python\n')
    (tmp_path / "scripts" / "requirement").write_text('. "$(dirname "$0")/environment.sh"\nllama_cpp_requirement\n')
    wheels = tmp_path / ".venv-wheels"
    wheels.mkdir()
    (wheels / "built").write_text(run(tmp_path, "sh", "scripts/requirement").stdout)
    return tmp_path


@pytest.mark.push
@pytest.mark.parametrize("version", ["3.11.0", "3.12.6", "3.13.15", "3.14.10"])
def test_supported_pythons_are_used(clone: Path, version: str) -> None:
    python = python_of(clone, version)
    assert run(clone, "sh", "scripts/found", PYTHON=str(python)).stdout == f"{python}\n"


@pytest.mark.parametrize("version", ["3.10.14", "3.15.0"])
def test_other_pythons_are_refused(clone: Path, version: str) -> None:
    done = run(clone, "sh", "scripts/found", PYTHON=str(python_of(clone, version)))
    assert (done.returncode, done.stdout) == (1, "")
    assert "3.11 to 3.14" in done.stderr


def test_free_threaded_builds_are_refused(clone: Path) -> None:
    python = interpreter(clone / "python3.14t", 'sysconfig.get_config_vars()["Py_GIL_DISABLED"] = 1')
    done = run(clone, "sh", "scripts/found", PYTHON=str(python))
    assert (done.returncode, done.stdout) == (1, "")
    assert "free-threaded" in done.stderr


def test_the_pinned_llama_cpp_is_found(clone: Path) -> None:
    requirement = run(clone, "sh", "scripts/requirement").stdout
    assert requirement.startswith("llama-cpp-python[server]==")
    assert len(requirement.splitlines()) == 1


@pytest.mark.push
def test_the_table_has_the_counts_of_each_python(clone: Path) -> None:
    pythons = [python_of(clone, version) for version in ("3.11.2", "3.14.10")]
    done = run(clone, "scripts/test_pythons", *pythons, FAILURES="0")
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert rows == [
        ["Python", "quick", "counts"],
        ["3.11.2", "passed", "7 tests, 0 failed, 2 skipped, 4 s"],
        ["3.14.10", "passed", "7 tests, 0 failed, 2 skipped, 4 s"],
    ]


@pytest.mark.push
def test_one_python_that_fails_does_not_stop_the_others(clone: Path) -> None:
    pythons = [python_of(clone, version) for version in ("3.13.1", "3.14.10")]
    done = run(clone, "scripts/test_pythons", *pythons, FAILURES="3")
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert rows[1:] == [
        ["3.13.1", "FAILED", "no tests ran"],
        ["3.14.10", "FAILED", "7 tests, 3 failed, 2 skipped, 4 s"],
    ]
