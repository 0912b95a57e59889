"""Tests of the libraries of kernels that wheels contain, and of libraries that are damaged, missing or foreign."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmrun import __version__
from llmrun.backends.cpu.team import START, TEAM_KERNELS
from llmrun.base import compiled
from llmrun.base.compiled import compiling, library, loading
from llmrun.base.compiled.host import host_target, load_kernels
from llmrun.base.compiled.kernel import KernelCompileError, KernelName
from llmrun.base.compiled.levels import PORTABLE, target_of
from llmrun.base.compiled.library import BadLibrary, survey
from llmrun.base.errors import KernelWarning
from llmrun.base.processes import commands
from scripts.kernel_libraries import PLATFORMS, link
from scripts.kernel_list import kernels_of, known_shapes
from tests.support.kernels.libraries import build_small, forget, installed, own_platform
from tests.support.missing_packages import hide

OWN = own_platform()
pytestmark = [pytest.mark.push, pytest.mark.skipif(OWN is None, reason="there are no wheels for this platform")]

OTHER_SHAPE = KernelName.of("attention.attention", "merge", value_size=16, values="f16")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with libraries that contain the kernels of the team."""
    assert OWN is not None
    folder = tmp_path_factory.mktemp("libraries")
    build_small([OWN], folder, TEAM_KERNELS)
    return folder / OWN.name


@pytest.fixture
def folder(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of an installation's libraries, which a test may damage. No library has been hashed before."""
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copytree(built, tmp_path / "libraries")
    with installed(tmp_path / "libraries"):
        yield tmp_path / "libraries"


def own_library(folder: Path) -> Path:
    assert OWN is not None
    return folder / f"{host_target().level.name}{OWN.suffix}"


def test_kernels_come_from_the_library_and_are_not_compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_compile", lambda *_: pytest.fail("compiled"))
    found = load_kernels(TEAM_KERNELS)
    opened = library.library_of(host_target().level.name)
    assert opened is not None
    assert [kernel.address for kernel in found.values()] == [opened.address(name) for name in TEAM_KERNELS]
    assert not (folder.parent / "cache" / "kernels").exists()


def test_a_shape_that_the_library_lacks_is_compiled(folder: Path) -> None:
    kernels = load_kernels([START, OTHER_SHAPE])
    assert kernels[OTHER_SHAPE].address
    assert len(list((folder.parent / "cache" / "kernels").iterdir())) == 1


IMPORTS = """
import sys
sys.modules["numba"] = sys.modules["llvmlite"] = None
from pathlib import Path
from llmrun.base.compiled import library
library.folder = lambda: Path(sys.argv[1])
from llmrun.base.compiled.host import host_target, load_kernels
from llmrun.base.compiled.kernel import KernelName
names = [KernelName.of("team", "start"), KernelName.of("attention.attention", "merge", value_size=16, values="f16")]
print(host_target().level.name, len(load_kernels(names[:1])))
try:
    load_kernels(names)
except Exception as error:
    print(error, error.hint, sep="\\n")
"""


def test_libraries_need_neither_numba_nor_llvmlite(built: Path, tmp_path: Path) -> None:
    """The level can be chosen without these packages, too. Kernels for other shapes fail with an error."""
    shutil.copytree(built, tmp_path / "libraries")
    environment = commands.environment() | {"LLMRUN_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, str(tmp_path / "libraries")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        f"{host_target().level.name} 1",
        "this installation lacks kernels: attention.attention.merge value_size=16 values=f16",
        'install Numba, which compiles kernels: pip install "llmrun-gguf[jit]"',
    ], done.stderr


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    image = bytearray(path.read_bytes())
    image[len(image) // 2] ^= 1
    path.write_bytes(image)


def replace_with_another(path: Path) -> None:
    path.write_bytes(path.with_name(f"base{path.suffix}").read_bytes())


def replace_with_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, "is damaged"),
    "flipped": (flip, "is damaged"),
    "empty": (empty, "is damaged"),
    "another library": (replace_with_another, "is damaged"),
    "missing": (Path.unlink, "is missing"),
    "a folder": (replace_with_a_folder, "is not a file"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("used_before", [False, True])
def test_a_bad_library_costs_one_warning_and_is_not_used(folder: Path, name: str, used_before: bool) -> None:
    damage, words = DAMAGES[name]
    if used_before:
        load_kernels([START])
        loading._loaded.clear()
        forget()
    damage(own_library(folder))
    with pytest.warns(KernelWarning) as told:
        load_kernels([START])
    told_of = f"installed kernels cannot be used, so they are compiled on this machine: {own_library(folder)} {words}"
    assert [str(one.message) for one in told] == [f"{told_of}; to repair: {loading.REINSTALL}"]
    with pytest.raises(BadLibrary, match=words):
        survey()


def test_a_pipe_is_not_read(folder: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs named pipes")
    own_library(folder).unlink()
    os.mkfifo(own_library(folder))
    with pytest.warns(KernelWarning, match="is not a file"):
        load_kernels([START])
    with pytest.raises(BadLibrary, match="is not a file"):
        survey()


def test_without_a_compiler_a_bad_library_is_one_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truncate(own_library(folder))
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    monkeypatch.delitem(sys.modules, compiling.__name__)
    monkeypatch.delattr(compiled, "compiling")
    with pytest.raises(KernelCompileError) as failure:
        load_kernels([START])
    assert str(failure.value) == f"cannot load kernels: {own_library(folder)} is damaged"
    assert failure.value.hint.startswith("install llmrun again: pip install --force-reinstall")


def test_llvmlite_without_numba_is_no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "numba")
    monkeypatch.delitem(sys.modules, compiling.__name__)
    monkeypatch.delattr(compiled, "compiling")
    with pytest.raises(KernelCompileError, match="this installation lacks kernels: "):
        load_kernels([OTHER_SHAPE])


def test_a_file_that_is_not_a_library_is_refused(folder: Path) -> None:
    """The SHA-256 of the file matches, so only the system's loader notices."""
    path = own_library(folder)
    path.write_bytes(b"not a library")
    index = json.loads((folder / "index.json").read_text())
    index["libraries"][host_target().level.name]["sha256"] = hashlib.sha256(b"not a library").hexdigest()
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.warns(KernelWarning, match=r"compiled on this machine: .* cannot be loaded: "):
        load_kernels([START])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is damaged"),
        ("[]", "is damaged"),
        ("{}", "is damaged"),
        ('{"version": "9", "sources": "", "libraries": {"avx2": []}}', "is damaged"),
        ("[" * 100_000, "is damaged"),
        ('{"version": "9.9", "sources": "", "libraries": {}}', f"belongs to llmrun 9.9, not to {__version__}"),
        (f'{{"version": "{__version__}", "sources": "", "libraries": {{}}}}', "does not list the library"),
    ],
)
def test_a_bad_index_costs_one_warning(folder: Path, text: str, words: str) -> None:
    (folder / "index.json").write_text(text)
    with pytest.warns(KernelWarning, match=words) as told:
        load_kernels([START])
    assert len(told) == 1


def test_libraries_without_an_index_cost_one_warning(folder: Path) -> None:
    (folder / "index.json").unlink()
    with pytest.warns(KernelWarning, match="index.json is missing") as told:
        load_kernels([START])
    assert len(told) == 1


def test_a_library_is_hashed_once_until_it_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_kernels([START])
    monkeypatch.setattr(library, "_hash", lambda *_: pytest.fail("hashed again"))
    loading._loaded.clear()
    forget()
    load_kernels([START])


def test_a_cache_that_cannot_be_written_costs_only_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "file").touch()
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(folder.parent / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_kernels([START])


def test_two_links_of_the_same_objects_have_equal_bytes(tmp_path: Path) -> None:
    for platform in PLATFORMS.values():
        if platform.architecture == "x86_64":
            target = target_of(PORTABLE, platform.triple)
            images = compiling.images_for(TEAM_KERNELS, [target], None)[target]
            for folder in ("one", "other"):
                (tmp_path / folder).mkdir(exist_ok=True)
                link(platform, images, tmp_path / folder / f"x{platform.suffix}")
            one, other = ((tmp_path / folder / f"x{platform.suffix}").read_bytes() for folder in ("one", "other"))
            assert one == other


def test_symbols_of_kernels_are_unique() -> None:
    names = kernels_of("avx2", known_shapes())
    assert len({name.symbol for name in names}) == len(names)
    assert all(name.symbol.isidentifier() for name in names)
