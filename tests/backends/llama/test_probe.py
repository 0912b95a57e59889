"""Tests of the device probe: it runs in another process, is cached, and runs again when anything changes."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from llmrun.backends.llama import probe
from llmrun.backends.llama.probe import gpus, installed_version
from llmrun.backends.registry import Gpus
from llmrun.base.errors import BackendCrashed


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "llama"


def count_questions(monkeypatch: pytest.MonkeyPatch, answer: Gpus) -> list[int]:
    asked: list[int] = []

    def ask() -> Gpus:
        asked.append(1)
        return answer

    monkeypatch.setattr(probe, "_find_gpus", ask)
    return asked


def test_this_build_says_whether_it_offloads(cache: Path) -> None:
    found = gpus()
    assert found.names or found.reason
    assert len(list(cache.glob("gpus-*.json"))) == 1


def test_the_answer_is_remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_questions(monkeypatch, Gpus(("NVIDIA H200",)))
    assert gpus() == gpus() == Gpus(("NVIDIA H200",))
    assert asked == [1]


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b'{"names": [1], "reason": ""}', b'{"names": "x", "reason": ""}', b"\xff", b"[" * 100_000]
    + [f'{{"names": ["GPU"], "reason": "", "until": {until}}}'.encode() for until in ("0.0", "9e99", "1", '"x"')],
)
def test_a_damaged_memory_is_asked_again_and_mended(
    cache: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    asked = count_questions(monkeypatch, Gpus((), "none"))
    gpus()
    [memory] = cache.glob("gpus-*.json")
    memory.write_bytes(damage)
    assert gpus() == Gpus((), "none")
    assert asked == [1, 1]
    assert json.loads(memory.read_bytes()) == {"names": [], "reason": "none", "until": None}


def test_other_visible_gpus_are_another_question(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_questions(monkeypatch, Gpus(("A", "B")))
    gpus()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpus()
    assert asked == [1, 1]


def test_another_installation_is_another_question(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_questions(monkeypatch, Gpus(()))
    package = tmp_path / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '1'")
    (package / "lib" / "libllama.so").write_bytes(b"old")
    monkeypatch.setattr(probe, "_package", lambda: package)
    gpus()
    (package / "lib" / "libllama.so").write_bytes(b"newer")
    gpus()
    assert asked == [1, 1]


def test_where_nothing_can_be_written_the_question_is_asked_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "file"))
    asked = count_questions(monkeypatch, Gpus((), "none"))
    assert gpus() == gpus() == Gpus((), "none")
    assert asked == [1, 1]


def test_without_the_extra_nothing_is_started(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_package", lambda: None)
    asked = count_questions(monkeypatch, Gpus(("never",)))
    assert gpus() == Gpus((), "llama.cpp is not installed")
    assert asked == []


def test_a_probe_that_failed_is_not_asked_again_for_a_while(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hanging driver costs twenty seconds, which not every command should pay."""
    asked: list[int] = []

    def crash() -> Gpus:
        asked.append(1)
        raise BackendCrashed("llama.cpp died while looking for GPUs: SIGKILL")

    monkeypatch.setattr(probe, "_find_gpus", crash)
    assert gpus() == gpus() == Gpus((), "llama.cpp died while looking for GPUs: SIGKILL")
    assert asked == [1]
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    gpus()
    assert asked == [1, 1]


@pytest.mark.push
def test_a_driver_that_hangs_is_given_up(cache: Path, tmp_path: Path) -> None:
    """Simulates a library that never finishes loading, as far as the waiting process can tell."""
    package = tmp_path / "hanging" / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "llama_cpp.py").write_text("import time\ntime.sleep(600)")
    code = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
        "from llmrun.backends.llama import probe\nprobe._LIMIT_S = 0.5\nprint(probe.gpus().reason)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "llama.cpp died while looking for GPUs: SIGKILL\n"


def test_who_waits_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_questions(monkeypatch, Gpus((), "none"))
    told: list[str] = []
    for _ in range(2):
        gpus(lambda what, fraction: told.append(what))
    assert told == ["looking for GPUs (first run only)"]


def test_other_devices_in_the_machine_are_another_question(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder may be shared with a machine that has a GPU."""
    asked = count_questions(monkeypatch, Gpus(()))
    gpus()
    monkeypatch.setattr(probe, "_gpu_devices", lambda: iter(["nvidia0", "nvidiactl"]))
    gpus()
    assert asked == [1, 1]


def test_a_folder_of_that_name_is_not_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    assert not probe.is_installed()


def test_an_installation_that_does_not_load_is_a_reason(cache: Path, tmp_path: Path) -> None:
    """The library is missing. The reason is one line, with no traceback on any stream."""
    package = tmp_path / "broken" / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "llama_cpp.py").write_text("raise OSError('libcuda.so.1: cannot open shared object file')")
    code = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
        "from llmrun.backends.llama.probe import gpus\nprint(gpus().reason)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "libcuda.so.1" in ran.stdout
    assert ran.stdout.count("\n") == 1
    assert ran.stderr == ""


def test_a_remembered_answer_costs_no_heavy_import(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus()
    code = (
        "import sys\nfrom llmrun.backends.llama.probe import gpus\ngpus()\n"
        "print([m for m in ('numpy', 'llama_cpp', 'importlib.metadata', 'subprocess') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "[]\n"


def test_an_unknown_version_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    assert installed_version() == importlib.metadata.version("llama-cpp-python")
    monkeypatch.setattr(importlib.metadata, "version", unknown)
    assert installed_version() is None
