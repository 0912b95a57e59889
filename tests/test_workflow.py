"""Tests of the workflows, which only CI services can run: their structure, their permissions and what they test."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.kernel_libraries import PLATFORMS

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".github" / "workflows"
TEXTS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.iterdir())}
WORKFLOWS: dict[str, dict[str, Any]] = {
    name: yaml.load(text, Loader=yaml.BaseLoader)  # as text, because "on" would be a boolean
    for name, text in TEXTS.items()
}
JOBS: dict[tuple[str, str], dict[str, Any]] = {
    (name, job): content for name, workflow in WORKFLOWS.items() for job, content in workflow["jobs"].items()
}
STEPS = [(*path, number, step) for path, job in JOBS.items() for number, step in enumerate(job.get("steps", []))]

OF_JOBS = {
    "name",
    "if",
    "needs",
    "runs-on",
    "container",
    "environment",
    "permissions",
    "timeout-minutes",
    "strategy",
    "steps",
}
OF_CALLS = {"if", "needs", "uses", "with"}
OF_STEPS = {"name", "if", "run", "uses", "with", "env"}
RUNNERS = {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15", "windows-2025"}
# Only these jobs may do more than read the repository, and none of them runs code of dependencies.
PERMISSIONS = {
    ("release", "attest"): {"attestations": "write", "id-token": "write"},
    ("release", "pypi"): {"id-token": "write"},
    ("release", "github"): {"contents": "write"},
}
VALUES = {  # the values that expressions may use, besides those of the job's matrix
    "github.ref",
    "github.event_name == 'pull_request'",
    "github.token",
}
# The platforms in the names of the wheels that scripts/build creates.
WHEELS = {"any", *(platform.wheel_tag.partition(".")[0] for platform in PLATFORMS.values())}


def matrix_values(job: dict[str, Any]) -> dict[str, set[str]]:
    """Return the values of each axis of a job's matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    found = {axis: set(values) for axis, values in matrix.items() if axis != "include"}
    for row in matrix.get("include", []):
        for axis, value in row.items():
            found.setdefault(axis, set()).add(value)
    return found


def test_the_workflows_have_no_unknown_keys(saw: Callable[[int, str, int], None]) -> None:
    saw(len(STEPS), "steps of the workflows", 30)
    events = {name: set(workflow["on"]) for name, workflow in WORKFLOWS.items()}
    assert events == {
        "ci": {"push", "pull_request", "workflow_dispatch"},
        "release": {"push"},
        "wheels": {"workflow_call"},
    }
    for workflow in WORKFLOWS.values():
        assert (
            {"name", "on", "permissions", "jobs"}
            <= set(workflow)
            <= {*("name", "on", "permissions", "jobs"), "concurrency"}
        )
    for path, job in JOBS.items():
        if "uses" in job:
            assert set(job) <= OF_CALLS
            assert (ROOT / job["uses"]).is_file()
            continue
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job) <= OF_JOBS, path
        assert 0 < int(job["timeout-minutes"]) <= 360  # the longest that the service permits
        assert (matrix_values(job)["os"] if "matrix" in job["runs-on"] else {job["runs-on"]}) <= RUNNERS


def test_jobs_have_no_more_permissions_than_they_need() -> None:
    assert all(workflow["permissions"] == {"contents": "read"} for workflow in WORKFLOWS.values())
    assert {path: job["permissions"] for path, job in JOBS.items() if "permissions" in job} == PERMISSIONS
    for path in PERMISSIONS:
        assert "pip" not in str([step.get("run") for step in JOBS[path]["steps"]])


@pytest.mark.parametrize(("workflow", "job", "number", "step"), STEPS)
def test_every_step_does_one_thing(workflow: str, job: str, number: int, step: dict[str, Any]) -> None:
    assert set(step) <= OF_STEPS
    assert ("run" in step) != ("uses" in step)
    if "uses" not in step:
        assert step["name"]
        assert "with" not in step
        for script in re.findall(r"(\w+ |)\b(scripts/[\w.]+)", step["run"]):
            assert os.access(ROOT / script[1], os.R_OK if script[0] == "python " else os.X_OK), script


def test_actions_are_pinned_to_commits(saw: Callable[[int, str, int], None]) -> None:
    """Tags can be moved to other code. All workflows use the same version of an action, which the comment names."""
    used = [line.split("uses: ")[1] for text in TEXTS.values() for line in text.splitlines() if "uses: " in line]
    pinned = [name for name in used if not name.startswith("./")]
    saw(len(pinned), "uses of actions", 20)
    assert [
        name for name in pinned if not re.fullmatch(r"(actions|pypa)/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", name)
    ] == []
    assert len(set(pinned)) == len({name.split("@")[0] for name in pinned})


def test_expressions_name_existing_values() -> None:
    for path, job in JOBS.items():
        known = VALUES | {f"matrix.{axis}" for axis in matrix_values(job)}
        for expression in re.findall(r"\$\{\{ (.*?) \}\}", yaml.dump(job, width=10_000)):
            assert re.sub(r"^hashFiles\([^)]*\)$", "github.ref", expression) in known, path
        for step in job.get("steps", []):  # text from outside, such as a tag's name, would become part of the script
            assert set(re.findall(r"\$\{\{ (\w+)", step.get("run", ""))) <= {"matrix"}, path


def test_cached_sources_exist() -> None:
    patterns = {
        pattern
        for text in TEXTS.values()
        for found in re.findall(r"hashFiles\(([^)]*)\)", text)
        for pattern in re.findall(r"'(.*?)'", found)
    }
    assert patterns
    assert [pattern for pattern in patterns if not any(ROOT.glob(pattern))] == []


def test_all_systems_and_the_oldest_and_newest_python_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, after_newest = map(int, re.findall(r"3\.(\d+)", project["requires-python"]))
    tested, tried = (JOBS[path]["strategy"]["matrix"] for path in (("ci", "test"), ("wheels", "try")))
    assert set(tested["os"]) == RUNNERS
    assert tested["python"] == [f"3.{oldest}", f"3.{after_newest - 1}"]
    assert {row["python"] for row in tried["include"]} == {f"3.{minor}" for minor in range(oldest, after_newest)}


def test_windows_runs_the_tests_of_the_script() -> None:
    """The script needs a POSIX shell, so the workflow repeats its command."""
    script = (ROOT / "scripts" / "test").read_text(encoding="utf-8")
    command = re.search(r'-m pytest (.*?) "\$@"', script.replace("\\\n", " "), re.DOTALL)
    assert command
    (step,) = (step for *_, step in STEPS if step.get("name") == "Test on Windows")
    assert step["run"].split() == f"python -m pytest {command[1]}".split()


def test_every_wheel_is_tried_on_its_system() -> None:
    matrix = JOBS["wheels", "try"]["strategy"]["matrix"]["include"]
    systems = {row["tag"]: row["os"] for row in matrix}
    alpine = JOBS["wheels", "alpine"]
    assert alpine["container"].endswith("-alpine")
    (musl,) = re.findall(r"try_wheel\.py (\w+)", str(alpine["steps"]))
    assert {*systems, musl} == WHEELS
    assert len(systems) == len(matrix)
    expected = {"macosx": "macos-15", "win": "windows-2025"}
    for tag, system in systems.items():
        linux = "ubuntu-24.04-arm" if tag.endswith("aarch64") else "ubuntu-24.04"
        assert system == expected.get(tag.split("_")[0], linux), tag


def test_pushes_to_main_build_the_wheels_but_pull_requests_do_not() -> None:
    assert WORKFLOWS["ci"]["on"]["push"] == {"branches": ["main"]}
    assert JOBS["ci", "wheels"]["if"] == "github.event_name != 'pull_request'"


def test_releases_publish_only_what_was_checked_built_twice_and_tried() -> None:
    assert WORKFLOWS["release"]["on"] == {"push": {"tags": ["v*"]}}
    jobs = WORKFLOWS["release"]["jobs"]
    needed = {name: job.get("needs") for name, job in jobs.items()}
    assert needed == {"check": None, "wheels": "check", "attest": "wheels", "pypi": "attest", "github": "pypi"}
    assert jobs["wheels"]["with"] == {"repeat": "true"}
    repeat = JOBS["wheels", "repeat"]
    assert repeat["if"] == "inputs.repeat"
    assert not [step for step in repeat["steps"] if "cache" in step.get("uses", "")], "a cache would hide differences"
    assert "diff --recursive" in repeat["steps"][-1]["run"]


def test_only_one_job_can_upload_to_pypi() -> None:
    """PyPI accepts files only from jobs of release.yml in the environment `pypi`."""
    assert [path for path, job in JOBS.items() if "environment" in job] == [("release", "pypi")]
    assert JOBS["release", "pypi"]["environment"] == "pypi"
    publishing = [path for *path, _, step in STEPS if "pypi-publish" in step.get("uses", "")]
    assert publishing == [["release", "pypi"]]
