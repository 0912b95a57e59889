"""Tests of scripts/wheels.py, which adds libraries of kernels to the wheel without kernels."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.base.processes import commands
from llmrun.formats.gguf.reader import open_gguf
from scripts import wheels
from scripts.kernel_libraries import PLATFORMS
from scripts.wheels import platform_wheel
from tests.support.cli.commands import ROOT
from tests.support.kernels.libraries import build_small, own_platform
from tests.support.kernels.runs import LEVELS_HERE, at_level
from tests.support.models.downloads import smollm2

INFORMATION = "llmrun_gguf-0.1.0.dist-info"
METADATA = """Metadata-Version: 2.4
Name: llmrun-gguf
Requires-Dist: numpy<3,>=2.1
Requires-Dist: llguidance<2,>=1.6
Provides-Extra: jit
Requires-Dist: numba<0.69,>=0.68; extra == 'jit'

Requires-Dist: is only text here
"""


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Return the path of a small wheel without kernels."""
    path = tmp_path / "llmrun_gguf-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("llmrun/__init__.py", "")
        archive.writestr(f"{INFORMATION}/METADATA", METADATA)
        archive.writestr(
            f"{INFORMATION}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{INFORMATION}/RECORD", "")
    return path


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    folder = tmp_path / "libraries"
    folder.mkdir()
    (folder / "avx2.so").write_bytes(b"machine code")
    (folder / "index.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_wheel_has_the_tags_of_its_platform(plain: Path, libraries: Path, tmp_path: Path, name: str) -> None:
    path = platform_wheel(plain, libraries, PLATFORMS[name], tmp_path / "dist")
    tag = PLATFORMS[name].wheel_tag
    assert path.name == f"llmrun_gguf-0.1.0-py3-none-{tag}.whl"
    with zipfile.ZipFile(path) as archive:
        lines = archive.read(f"{INFORMATION}/WHEEL").decode().splitlines()
        assert archive.read("llmrun/kernels/libraries/avx2.so") == b"machine code"
    assert [line.removeprefix("Tag: py3-none-") for line in lines if line.startswith("Tag:")] == tag.split(".")
    assert "Root-Is-Purelib: false" in lines


def test_the_record_lists_every_file(plain: Path, libraries: Path, tmp_path: Path) -> None:
    path = platform_wheel(plain, libraries, PLATFORMS["windows-x86_64"], tmp_path)
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(f"{INFORMATION}/RECORD").decode()))}
        assert list(rows) == [*sorted(name for name in names if "RECORD" not in name), f"{INFORMATION}/RECORD"]
        for name in names:
            digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest()).rstrip(b"=").decode()
            if rows[name][0]:
                assert rows[name] == [f"sha256={digest}", str(len(archive.read(name)))]
    assert rows[f"{INFORMATION}/RECORD"] == ["", ""]


def test_packages_without_wheels_become_an_extra(plain: Path, libraries: Path, tmp_path: Path) -> None:
    """pip would otherwise compile llguidance on musl, which needs Rust."""
    for name in ("linux-x86_64", "musllinux-x86_64"):
        with zipfile.ZipFile(platform_wheel(plain, libraries, PLATFORMS[name], tmp_path / name)) as archive:
            lines = archive.read(f"{INFORMATION}/METADATA").decode().splitlines()
        wanted = "Requires-Dist: llguidance<2,>=1.6"
        if name == "linux-x86_64":
            assert lines == METADATA.splitlines()
        else:
            assert wanted not in lines
            assert f"{wanted}; extra == 'formats'" in lines
            assert "Provides-Extra: formats" in lines
            assert lines[-1] == "Requires-Dist: is only text here"


def test_two_wheels_of_a_commit_have_equal_bytes(
    plain: Path, libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    one, other = (
        platform_wheel(plain, libraries, PLATFORMS["macos-arm64"], tmp_path / folder).read_bytes() for folder in "ab"
    )
    assert one == other
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1800000000")
    assert platform_wheel(plain, libraries, PLATFORMS["macos-arm64"], tmp_path / "c").read_bytes() != one


def test_an_unknown_platform_is_a_one_line_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert wheels.main("x.whl", "dist", "amiga") == 2
    assert capsys.readouterr().err.startswith("error: unknown platform: amiga; the platforms are linux-x86_64, ")


def test_a_failing_linker_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise subprocess.CalledProcessError(1, ["python", "-m", "ziglang"])

    monkeypatch.setattr(wheels, "build_libraries", fail)
    assert wheels.main("x.whl", "dist") == 1
    assert capsys.readouterr().err == "error: cannot link kernels: zig failed with exit status 1\n"


RUN = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
sys.path.insert(0, sys.argv.pop(1))
import llmrun
from llmrun.__main__ import main
assert llmrun.__file__.startswith(sys.path[0]), llmrun.__file__
main()
"""


@pytest.mark.push
def test_a_wheel_answers_without_a_compiler(tmp_path: Path) -> None:
    """The wheel has only the kernels of SmolLM2. All caches are empty."""
    own = own_platform()
    if own is None:
        pytest.skip("there are no wheels for this platform")
    model = smollm2()
    with at_level(LEVELS_HERE[0]) as loaded, open_gguf(model) as file:
        CpuBackend(file, OpenOptions(context_size=512)).close()
    build_small([own], tmp_path / "libraries", loaded)
    environment = {name: value for name, value in commands.environment().items() if not name.startswith("LLMRUN_")}
    wheel = tmp_path / "wheel"
    shutil.copytree(ROOT / "llmrun", wheel / "llmrun", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(tmp_path / "libraries" / own.name, wheel / "llmrun" / "kernels" / "libraries")
    shutil.copy(ROOT / "models.toml", wheel / "llmrun")
    (tmp_path / "config.toml").touch()
    places = {"CONFIG": "config.toml", "DATA_DIR": "data", "CACHE_DIR": "cache"}
    environment |= {f"LLMRUN_{name}": str(tmp_path / place) for name, place in places.items()}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path != str(ROOT))
    arguments = ["generate", "-q", "-m", str(model), "--temp", "0", "-n", "16", "Name three colors."]
    command = [sys.executable, "-P", "-c", RUN, str(wheel), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.stdout, done.returncode) == ("1. Red\n2. Blue\n3. Green\n", 0), done.stderr
    assert not (tmp_path / "cache" / "kernels").exists()
