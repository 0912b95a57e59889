"""Tests of the CI workflow, which only CI services can run: its structure, and that it runs scripts/test's tests."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
WORKFLOW: dict[str, Any] = yaml.load(TEXT, Loader=yaml.BaseLoader)  # as text, because "on" would be a boolean
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
STEPS = [(name, number, step) for name, job in JOBS.items() for number, step in enumerate(job["steps"])]

OF_JOBS = {"name", "runs-on", "timeout-minutes", "strategy", "steps"}
OF_STEPS = {"name", "if", "run", "uses", "with"}
RUNNERS = {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15", "windows-2025"}


def test_the_workflow_has_no_unknown_keys(saw: Callable[[int, str, int], None]) -> None:
    saw(len(STEPS), "steps of the workflow", 10)
    assert set(WORKFLOW) == {"name", "on", "permissions", "concurrency", "jobs"}
    assert set(WORKFLOW["on"]) == {"push", "pull_request", "workflow_dispatch"}
    assert WORKFLOW["permissions"] == {"contents": "read"}
    for job in JOBS.values():
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job) <= OF_JOBS
        assert 0 < int(job["timeout-minutes"]) <= 360  # the longest that the service permits


@pytest.mark.parametrize(("job", "number", "step"), STEPS)
def test_every_step_does_one_thing(job: str, number: int, step: dict[str, Any]) -> None:
    assert set(step) <= OF_STEPS
    assert ("run" in step) != ("uses" in step)
    if "uses" in step:
        assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
    else:
        assert step["name"]
        assert "with" not in step
        for script in re.findall(r"\bscripts/\w+", step["run"]):
            assert os.access(ROOT / script, os.X_OK), script


def test_expressions_name_existing_values() -> None:
    for job in JOBS.values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for expression in re.findall(r"\$\{\{ (.*?) \}\}", yaml.dump(job)):
            name = re.sub(r"^hashFiles\([^)]*\)$", "github.ref", expression)
            known = {"github.ref", *(f"matrix.{axis}" for axis in matrix)}
            assert name in known, expression


def test_all_systems_and_the_oldest_and_newest_python_are_tested() -> None:
    matrix = JOBS["test"]["strategy"]["matrix"]
    assert set(matrix["os"]) == RUNNERS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, after_newest = re.findall(r"3\.(\d+)", project["requires-python"])
    assert matrix["python"] == [f"3.{oldest}", f"3.{int(after_newest) - 1}"]


def test_windows_runs_the_tests_of_the_script() -> None:
    """The script needs a POSIX shell, so the workflow repeats its command."""
    script = (ROOT / "scripts" / "test").read_text(encoding="utf-8")
    command = re.search(r'-m pytest (.*?) "\$@"', script.replace("\\\n", " "), re.DOTALL)
    assert command
    (step,) = (step for _, _, step in STEPS if step.get("name") == "Test on Windows")
    assert step["run"].split() == f"python -m pytest {command[1]}".split()
