"""Tests of wheels on machines that can run them here. `scripts/test_wheels` installs the wheels and runs the tests."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.kernel_list import CACHES
from tests.support.cli.commands import llmrun
from tests.support.models.downloads import smollm2
from tests.support.models.numeric_models import NUMERIC_MODELS, read_digests, write_numeric_model
from tests.support.wheels.machines import DISTRIBUTIONS, INSTALLED, MACHINES, has, run_on, there
from tests.support.wheels.macho import read_dylib

pytestmark = pytest.mark.wheels

# The prompt has enough tokens for matrix products of panels.
_GENERATE = ("generate", "-q", "--temp", "0", "-n", "16", "Tell me a story about a small robot that finds a garden.")
_COMPILERS = ("numba", "llvmlite")
_LOOK = f"""
import importlib.util, json, llmrun
print(json.dumps([llmrun.__file__, [name for name in {_COMPILERS} if importlib.util.find_spec(name)]]))
"""

_AT_LEVELS = [(name, level) for name, machine in MACHINES.items() for level in machine.levels]
on_every_machine = pytest.mark.parametrize("machine", MACHINES)


@pytest.fixture(autouse=True)
def _skip_missing(request: pytest.FixtureRequest) -> None:
    if "machine" in request.fixturenames:
        needed = MACHINES[request.getfixturevalue("machine")].folder
        if not has(needed):
            pytest.skip(f"no wheel for {needed}")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for number, (name, model) in enumerate(NUMERIC_MODELS.items()):
        path = folder / f"{number}.gguf"
        write_numeric_model(path, name)
        found[name] = (path, model.kv_type)
    return found


@functools.cache
def answer_here() -> str:
    """Return the answer of this checkout, with kernels that are compiled for this processor."""
    done = llmrun(*_GENERATE, "-m", str(smollm2()))
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


@on_every_machine
def test_no_compiler_is_installed(tmp_path: Path, machine: str) -> None:
    done = run_on(machine, tmp_path, "-c", _LOOK)
    assert done.returncode == 0, done.stderr
    file, compilers = json.loads(done.stdout)
    assert INSTALLED.name in file
    assert compilers == []


@pytest.mark.parametrize("machine", [name for name, machine in MACHINES.items() if not machine.emulates])
def test_the_doctor_chooses_the_best_level(tmp_path: Path, machine: str) -> None:
    """Where instructions raise signals, the doctor's measurements would take hours."""
    done = run_on(machine, tmp_path, "-m", "llmrun", "doctor", "--offline", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    checks: dict[str, Any] = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    facts = checks["kernels_level"]["facts"]
    assert (facts["level"], facts["refused"]) == (MACHINES[machine].levels[0], [])


@pytest.mark.parametrize(("machine", "level"), [pair for pair in _AT_LEVELS if not MACHINES[pair[0]].emulates])
def test_the_first_answer_is_the_same(tmp_path: Path, machine: str, level: str) -> None:
    """All caches are empty. The answer is compared with that of compiled kernels, and nothing is compiled."""
    model = there(machine, smollm2())
    done = run_on(machine, tmp_path, "-m", "llmrun", *_GENERATE, "-m", model, LLMRUN_CPU_LEVEL=level)
    assert done.returncode == 0, done.stderr
    assert done.stdout == answer_here() != ""
    assert not (tmp_path / "cache" / "kernels").exists()


@pytest.mark.parametrize(("machine", "level"), _AT_LEVELS)
def test_results_have_the_recorded_digests(
    tmp_path: Path, machine: str, level: str, models: dict[str, tuple[Path, str]]
) -> None:
    """Wheels lack kernels for some pairs of cache types. Where instructions raise signals, few models run."""
    names = [name for name in models if NUMERIC_MODELS[name].kv_type in CACHES]
    if MACHINES[machine].emulates:
        names = [name for name in names if name.endswith((" weights", " experts"))]
    text = json.dumps({name: (there(machine, models[name][0]), models[name][1]) for name in names})
    done = run_on(machine, tmp_path, "-m", "tests.support.models.digests", text=text, LLMRUN_CPU_LEVEL=level)
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert found == {name: read_digests()["models"][name]["logits"] for name in names}
    assert not (tmp_path / "cache" / "kernels").exists()


def _wheels(pattern: str) -> list[Any]:
    return [pytest.param(path, id=path.stem.rpartition("-")[2]) for path in sorted(DISTRIBUTIONS.glob(pattern))]


@pytest.mark.parametrize("wheel", _wheels("*linux*.whl"))
def test_auditwheel_allows_the_tags(wheel: Path) -> None:
    """auditwheel reports the oldest glibc that a wheel works with. A wheel without needed libraries suits any musl."""
    command = [str(INSTALLED / "tools" / "bin" / "auditwheel"), "show", str(wheel)]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed, promised = (
        re.findall(r"manylinux_2_(\d+)_", text) for text in (report.partition("platform")[2], wheel.name)
    )
    assert all(int(glibc) <= int(minor) for glibc in needed for minor in promised), report
    assert "requires no external shared libraries" in report


@pytest.mark.skipif(not has("macos"), reason="no wheel for macos")
def test_libraries_for_macos_are_sound() -> None:
    """They have the same kernels as the libraries for Linux, need only the system's library, and are signed."""
    (tag,) = [path.stem.rpartition("-")[2] for path in DISTRIBUTIONS.glob("*macosx*.whl")]
    newest = tuple(map(int, re.findall(r"\d+", tag)[:2]))
    folder = Path("llmrun", "kernels", "libraries")
    libraries = sorted((INSTALLED / "macos" / folder).glob("*.dylib"))
    assert {path.stem for path in libraries} >= {"base", "portable", "neondot", "neoni8mm"}
    for path in libraries:
        found = read_dylib(path)
        assert found.minimum <= newest
        assert set(found.libraries) <= {"/usr/lib/libSystem.B.dylib"}
        assert found.undefined <= {"dyld_stub_binder", "memcpy", "memmove", "memset", "bzero"}
        linux = INSTALLED / "arm" / folder / f"{path.stem}.so"
        assert found.exported - {"_mh_dylib_header", "__dso_handle"} == set(_symbols(linux))


def _symbols(library: Path) -> list[str]:
    """Return the functions that a library for Linux exports."""
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", str(library)]
    return [
        line.split()[0]
        for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
