"""Tests of compiled kernels: they load without Numba, and the cache is either right or not used."""

from __future__ import annotations

import ast
import errno
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import llvmlite.binding as llvm
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import llmrun
from llmrun.backends.cpu.team import START, TEAM_KERNELS
from llmrun.base.compiled import cache, compiling, loading, sources
from llmrun.base.compiled.host import host_levels, host_target, load_kernel, load_kernels
from llmrun.base.compiled.kernel import KernelCompileError, KernelName
from llmrun.base.compiled.levels import AVX2, NEON_DOT, PORTABLE, Level, Target, target_of
from llmrun.base.errors import KernelWarning
from llmrun.base.processes.child import Child
from llmrun.base.processes.commands import command
from llmrun.base.processes.frames import Codec
from tests.support.cli.commands import ROOT
from tests.support.kernels.objects import object_images
from tests.support.tiers import examples

pytestmark = pytest.mark.push

PACKAGE = Path(llmrun.__path__[0])
ROOMS = ("kernels", "formats/layouts", "formats/quants", "model/plan")  # rooms whose code ends up in machine code
# This kernel compiles in a twentieth of the time that a kernel adding two numbers takes.
NAME = START


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a new interpreter with this process's cache, unless `environment` says otherwise."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


LOAD = """
import sys
from llmrun.base.compiled.host import load_kernels
from llmrun.base.compiled.kernel import KernelName
from llmrun.backends.cpu.team import TEAM_KERNELS
done = []
kernels = load_kernels(TEAM_KERNELS, lambda ready, total: done.append((ready, total)))
assert all(kernel.address for kernel in kernels.values())
print(done, "numba" in sys.modules)
"""


# The kernels of the team, and those that choose the level: `identify`, and `trial` at the best level and at the lowest.
N_COMPILED = len(TEAM_KERNELS) + 1 + 2 * (host_levels()[0] is not PORTABLE)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up an empty cache; return the folder where kernels will be stored."""
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def entry_is_sound(path: Path) -> bool:
    entry = path.read_bytes()
    return entry_of(path.stem, entry[32:]) == entry


def entry_of(key: str, image: bytes) -> bytes:
    return hashlib.sha256(key.encode() + image).digest() + image


# --- warm and cold ------------------------------------------------------------------------------------------------


def test_a_warm_start_imports_no_numba() -> None:
    load_kernels(TEAM_KERNELS)
    done = run_python(LOAD)
    assert done.stdout == "[] False\n", done.stderr


def test_a_cold_start_compiles_each_kernel_once_and_says_how_far_it_is(cold: Path) -> None:
    done = run_python(LOAD)
    assert done.stdout == "[(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)] False\n", done.stderr
    assert len(list(cold.iterdir())) == N_COMPILED
    assert run_python(LOAD).stdout == "[] False\n"


def test_a_kernel_asked_for_twice_is_compiled_once(cold: Path) -> None:
    reports: list[tuple[int, int]] = []
    with mock.patch.object(loading, "_loaded", {}):
        load_kernels([NAME, NAME], lambda *report: reports.append(report))
    assert reports == [(0, 1), (1, 1)]


@pytest.mark.night
def test_there_are_no_more_compilers_than_processors_for_this_process(cold: Path) -> None:
    with (
        mock.patch.object(compiling, "most_threads", return_value=1),
        mock.patch.object(compiling, "_Child", wraps=compiling._Child) as child,
    ):
        object_images(TEAM_KERNELS, host_target())
    assert len(TEAM_KERNELS) > 1
    assert child.call_count == 1


def test_a_loaded_kernel_is_not_loaded_again() -> None:
    first = load_kernels([NAME])[NAME]
    assert load_kernels([NAME])[NAME] is first


@pytest.mark.night
def test_processes_that_start_at_once_compile_each_kernel_once(cold: Path) -> None:
    """The other processes wait. Eight processes that each compile everything would keep the machine busy eight times as
    long.
    """
    processes = [
        subprocess.Popen([sys.executable, "-c", LOAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    written = []
    while any(process.poll() is None for process in processes):
        written += [(path.name, path.stat().st_ino) for path in cold.glob("*.o")]
        time.sleep(0.01)
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert output.endswith("False\n")
    assert len(list(cold.iterdir())) == N_COMPILED
    assert len(set(written)) == N_COMPILED  # none was written twice
    assert all(entry_is_sound(path) for path in cold.iterdir())


def fake_compiler(image: bytes) -> AbstractContextManager[object]:
    """Return a patch with which no process is started, and every kernel is compiled to `image`."""
    return mock.patch.object(
        compiling, "_Child", return_value=mock.Mock(**{"compile.return_value": {host_target(): image}})
    )


def test_a_process_that_is_stopped_is_not_waited_for_for_ever(cold: Path, sound_entry: tuple[str, bytes]) -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX locks")
    import fcntl

    cold.mkdir(parents=True)
    entry = sound_entry[1]
    with (
        (cold / f".{compiling.key_of(NAME, host_target())}").open("wb") as claim,
        mock.patch.object(cache, "_MAX_WAIT_SECONDS", 0.1),
        fake_compiler(entry[32:]),
    ):
        fcntl.flock(claim, fcntl.LOCK_EX)
        assert object_images([NAME], host_target())[NAME] == entry[32:]


def test_the_half_written_entry_of_a_process_that_was_killed_is_taken_over(
    damaged: Path, sound_entry: tuple[str, bytes]
) -> None:
    (damaged.parent / f".{damaged.stem}").write_bytes(b"half an object" * 10_000)
    assert object_images([NAME], host_target())[NAME] == sound_entry[1][32:]
    assert list(damaged.parent.iterdir()) == [damaged]
    assert entry_is_sound(damaged)


@pytest.mark.night
def test_the_users_numba_settings_change_nothing(cold: Path) -> None:
    """NUMBA_DISABLE_JIT would disable compiling, and NUMBA_OPT=0 would store slow code under the key of fast code."""
    done = run_python(LOAD, NUMBA_DISABLE_JIT="1", NUMBA_OPT="0", NUMBA_CPU_NAME="generic")
    assert done.returncode == 0, done.stderr
    same = {path.name: path.read_bytes() for path in cold.iterdir()}
    shutil.rmtree(cold.parent)
    run_python(LOAD)
    assert {path.name: path.read_bytes() for path in cold.iterdir()} == same


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound_entry() -> tuple[str, bytes]:
    """Return (file name, bytes) of a valid cache entry."""
    key = compiling.key_of(NAME, host_target())
    image = object_images([NAME], host_target())[NAME]
    return f"{key}.o", entry_of(key, image)


@pytest.fixture
def damaged(cold: Path, sound_entry: tuple[str, bytes]) -> Iterator[Path]:
    """Yield the path of an entry for a test to damage, with a fake compiler that returns a ready result."""
    name, entry = sound_entry
    cold.mkdir(parents=True)
    with fake_compiler(entry[32:]):
        yield cold / name


def assert_mends(path: Path, entry: bytes) -> None:
    """Assert that a damaged entry is compiled again and replaced, with one warning, and then used."""
    assert isinstance(compiling._Child, mock.Mock)
    compiler = compiling._Child.return_value.compile
    compiler.reset_mock()
    with pytest.warns(KernelWarning, match="found damaged kernels and compiled them again: 1 in") as told:
        assert object_images([NAME], host_target())[NAME] == entry[32:]
    assert len(told) == 1
    assert_silent(entry)
    assert compiler.call_count == 1
    assert path.read_bytes() == entry
    assert list(path.parent.iterdir()) == [path]


def assert_silent(entry: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert object_images([NAME], host_target())[NAME] == entry[32:]


def test_any_flipped_bit_is_noticed(damaged: Path, sound_entry: tuple[str, bytes]) -> None:
    entry = sound_entry[1]

    @given(st.integers(0, 8 * len(entry) - 1))
    @settings(max_examples=examples(150))
    def flip(bit: int) -> None:
        flipped = bytearray(entry)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.write_bytes(flipped)
        assert_mends(damaged, entry)

    flip()


@pytest.mark.parametrize("length", [0, 1, 31, 32, 33, 500, -1])
def test_a_truncated_entry_is_noticed(damaged: Path, sound_entry: tuple[str, bytes], length: int) -> None:
    damaged.write_bytes(sound_entry[1][:length])
    assert_mends(damaged, sound_entry[1])


def test_an_entry_that_grew_is_noticed(damaged: Path, sound_entry: tuple[str, bytes]) -> None:
    damaged.write_bytes(sound_entry[1] + b"\0")
    assert_mends(damaged, sound_entry[1])


def test_an_entry_under_another_entrys_name_is_noticed(damaged: Path, sound_entry: tuple[str, bytes]) -> None:
    """The entry is valid, but it defines another symbol, so calling it would jump to address zero."""
    stranger = b"another object"
    damaged.write_bytes(entry_of("0" * 64, stranger))
    assert_mends(damaged, sound_entry[1])


def test_an_entry_that_is_a_pipe_or_huge_is_not_read(damaged: Path, sound_entry: tuple[str, bytes]) -> None:
    if sys.platform == "win32":
        pytest.skip("needs named pipes")
    os.mkfifo(damaged)
    assert_mends(damaged, sound_entry[1])
    with damaged.open("wb") as file:
        file.truncate(1 << 40)
    assert_mends(damaged, sound_entry[1])


def test_a_folder_in_an_entrys_place_is_left_alone(damaged: Path, sound_entry: tuple[str, bytes]) -> None:
    damaged.mkdir()
    for _ in range(2):
        assert_unkept(sound_entry[1], f"{damaged}: Is a directory")
    assert list(damaged.parent.iterdir()) == [damaged]


def test_a_file_in_the_folders_place_costs_a_warning(
    damaged: Path, sound_entry: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = damaged.parent / "a file"
    blocked.write_text("")
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(blocked))
    assert_unkept(sound_entry[1], f"{blocked}/kernels: Not a directory")
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(damaged.parent.parent))
    damaged.parent.rename(damaged.parent.with_name("elsewhere"))
    damaged.parent.write_text("")
    assert_unkept(sound_entry[1], f"{damaged.parent}: File exists")


def test_a_disk_without_room_costs_a_warning(damaged: Path, sound_entry: tuple[str, bytes]) -> None:
    if sys.platform == "win32":
        pytest.skip("needs resource limits")
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # maximum file size in bytes; Python ignores the signal
    try:
        assert_unkept(sound_entry[1], f"{damaged.parent}: File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(damaged.parent.iterdir()) == []


def test_a_file_system_without_locks_is_written_all_the_same(damaged: Path, sound_entry: tuple[str, bytes]) -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX locks")
    import fcntl

    with mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        assert_silent(sound_entry[1])
    assert damaged.read_bytes() == sound_entry[1]


def assert_unkept(entry: bytes, words: str) -> None:
    with pytest.warns(KernelWarning) as told:
        assert object_images([NAME], host_target())[NAME] == entry[32:]
    expected = f"cannot save compiled kernels, so every start compiles them: {words}"
    assert [str(warning.message) for warning in told] == [expected]


@pytest.mark.night
def test_a_damaged_entry_is_compiled_again_by_a_real_process(cold: Path) -> None:
    run_python(LOAD)
    victim = cold / f"{compiling.key_of(START, host_target())}.o"
    good = victim.read_bytes()
    victim.write_bytes(good[:100] + bytes([good[100] ^ 1]) + good[101:])
    done = run_python(LOAD)
    assert done.stdout == "[(0, 1), (1, 1)] False\n"
    assert "KernelWarning: found damaged kernels" in done.stderr
    assert victim.read_bytes() == good


@pytest.mark.night
def test_a_compiler_needs_no_folder_for_temporary_files(cold: Path) -> None:
    """Where there is no space for a kernel, there may be no space for temporary files either."""
    done = run_python("import tempfile; tempfile.tempdir = '/nowhere'\n" + LOAD, TMPDIR="/nowhere")
    assert done.stdout == "[(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)] False\n", done.stderr


# --- interruption -----------------------------------------------------------------------------------------------------

INTERRUPTED = """
import sys
from llmrun.base.compiled.host import load_kernels
from tests.support.kernels.runs import ALL_KERNELS
load_kernels(ALL_KERNELS, lambda ready, total: print(ready, flush=True))
"""


@pytest.mark.night
def test_an_interrupted_compile_leaves_whole_entries_and_no_processes(cold: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["0\n", "1\n"]
    children = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert children
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    entries = list(cold.iterdir())
    assert entries
    assert all(path.suffix == ".o" and entry_is_sound(path) for path in entries)


def children_of(pid: int) -> list[int]:
    """Return the child processes of all the process's threads."""
    lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for children in lists for child in children.split()]


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_kernel_that_does_not_compile_is_one_sentence(cold: Path) -> None:
    name = KernelName.of("linear.int8", "linear", weight="q9_9")
    with pytest.raises(KernelCompileError, match="cannot compile kernel") as failure:
        load_kernels([name])
    assert str(failure.value) == "cannot compile kernel: linear.int8.linear weight=q9_9: KeyError: 'q9_9'"
    assert "Traceback" in str(failure.value.__cause__)
    assert not list(cold.glob("*"))


def test_one_bad_kernel_does_not_spoil_the_others(cold: Path) -> None:
    with pytest.raises(KernelCompileError):
        object_images([KernelName.of("rows.rowwise", "no_such_kernel"), NAME], host_target())
    assert object_images([NAME], host_target())[NAME]


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('numba is broken')", "numba is broken"),
        ("import os; os._exit(3)", "exited without an error message"),
        ("print('\\0' * 6 + 'aa half of it')", "exited without an error message"),
        ("import sys; print('noise, which is no frame'); sys.stdin.read()", "sent an invalid answer: a message of "),
        ("import sys; print(end='\\0' * 7 + '\\2[}'); sys.stdin.read()", "sent an invalid answer"),
    ],
    ids=["says why", "silent", "dies while answering", "talks", "sends no values"],
)
def test_a_compiler_that_dies_is_reported(cold: Path, program: str, words: str) -> None:
    real = subprocess.Popen

    def broken_compiler(_: object, **options: object) -> object:
        return real([sys.executable, "-c", program], **options)  # type: ignore[call-overload]

    with (
        mock.patch.object(subprocess, "Popen", side_effect=broken_compiler),
        pytest.raises(KernelCompileError, match=words),
    ):
        object_images([NAME, *TEAM_KERNELS], host_target())
    assert not list(cold.glob("*"))


def test_a_progress_report_that_raises_stops_the_compilers(cold: Path) -> None:
    def give_up(ready: int, total: int) -> None:
        if ready:
            raise RuntimeError("enough")

    before = set(children_of(os.getpid()))
    with mock.patch.object(loading, "_loaded", {}), pytest.raises(RuntimeError, match="enough"):
        load_kernels(TEAM_KERNELS, give_up)
    assert set(children_of(os.getpid())) <= before


# --- the cache key ----------------------------------------------------------------------------------------------------


def fresh_key(name: KernelName, target: Target) -> str:
    for cached in (sources.digest_of, sources._source):
        cached.cache_clear()
    key: str = compiling.key_of.__wrapped__(name, target)
    return key


def test_the_key_changes_with_everything_the_code_depends_on() -> None:
    target = host_target()
    name = KernelName.of("linear.int8", "linear", weight="q4_0")
    keys = [
        fresh_key(name, target),
        fresh_key(KernelName.of("linear.int8", "linear", weight="q4_1"), target),
        fresh_key(KernelName.of("linear.floats", "linear", weight="q4_0"), target),
        fresh_key(KernelName.of("linear.int8", "linear2", weight="q4_0"), target),
        fresh_key(name, replace(target, level=PORTABLE)),
        fresh_key(name, replace(target, triple="aarch64-unknown-linux-gnu")),
        fresh_key(name, replace(target, cpu="another")),
        fresh_key(name, replace(target, features="+another")),
    ]
    numba, llvmlite = version("numba"), version("llvmlite")
    for versions in ((numba, "99"), ("99", llvmlite)):
        with mock.patch.object(compiling, "_VERSIONS", versions):
            keys.append(fresh_key(name, target))
    with mock.patch.object(sys.implementation, "cache_tag", "cpython-399"):
        keys.append(fresh_key(name, target))
    assert len(set(keys)) == len(keys)
    assert fresh_key(name, target) == keys[0]


@pytest.mark.parametrize(
    "changed",
    [
        "kernels/linear/int8",
        "kernels/code/simd",
        "kernels/code/load_store",
        "kernels/code/work",
        "kernels/compiler",
        "kernels/object_file",
        "formats/layouts/records",
        "formats/layouts/linear",
        "formats/quants/k_quants",
    ],
)
def test_the_key_changes_with_the_kernels_file_and_every_file_it_imports(tmp_path: Path, changed: str) -> None:
    name = KernelName.of("linear.int8", "linear", weight="q4_0")
    before = fresh_key(name, host_target())
    copy = tmp_path / "llmrun"
    for room in ROOMS:
        shutil.copytree(PACKAGE / room, copy / room)
    with mock.patch.object(sources, "_PACKAGE", copy):
        assert fresh_key(name, host_target()) == before
        (copy / "kernels/attention/attention.py").write_text("another attention")
        assert fresh_key(name, host_target()) == before
        with (copy / f"{changed}.py").open("a") as file:
            file.write("\n")
        assert fresh_key(name, host_target()) != before
    assert fresh_key(name, host_target()) == before


SOURCES = [path for room in ROOMS[:3] for path in sorted((PACKAGE / room).rglob("*.py"))]
# These cannot change machine code: amounts, errors, the notation of settings, and the compiler's connection to its
# parent.
OTHERS = {
    "base.amounts",
    "base.errors",
    "base.sampling_texts",
    "base.processes.frames",
    "base.processes.worker",
}


@pytest.mark.parametrize("path", SOURCES, ids=[str(path.relative_to(PACKAGE)) for path in SOURCES])
def test_the_key_sees_every_import_of_a_kernels_file(path: Path) -> None:
    """sources.py finds imports with a regular expression, so these files may use only the syntax that it knows."""
    source = path.read_text()
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("llmrun") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("llmrun"):
            module = (node.module or "").removeprefix("llmrun.")
            is_file = (PACKAGE / f"{module.replace('.', '/')}.py").is_file()
            imported |= {module} if is_file else {f"{module}.{alias.name}" for alias in node.names}
    assert {
        name for name in imported if not f"{name.replace('.', '/')}/".startswith(tuple(f"{room}/" for room in ROOMS))
    } <= OTHERS
    assert set(sources._imported_files(source)) == imported - OTHERS


# --- calling ----------------------------------------------------------------------------------------------------------


def test_a_kernels_name_does_not_depend_on_the_order_of_its_parameters() -> None:
    assert KernelName.of("m", "f", a=1, b="x") == KernelName.of("m", "f", b="x", a=1)


def test_one_kernel_by_name() -> None:
    assert load_kernel("team", "start").address == load_kernels([START])[START].address


@pytest.mark.parametrize(("level", "cpu"), [(NEON_DOT, NEON_DOT.cpu), (AVX2, "generic")])
def test_macs_optimize_for_the_target_if_it_is_their_own(
    monkeypatch: pytest.MonkeyPatch, level: Level, cpu: str
) -> None:
    """LLVM calls the processors of Macs arm64, but our triples call them aarch64."""
    triple = f"{'aarch64' if level is NEON_DOT else 'x86_64'}-apple-macosx-elf"
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(llvm, "get_default_triple", lambda: "arm64-apple-darwin24.0.0")
    with mock.patch.object(compiling, "Child") as child:
        compiling._Child([target_of(level, triple)])
    assert child.call_args.kwargs["environment"]["NUMBA_CPU_NAME"] == cpu


def test_requests_to_the_compiler_are_frames(cold: Path) -> None:
    """The test replaces the compiler's parent, and checks that the answers contain what the parent needs."""
    target = host_target()
    request = {
        "module": NAME.module,
        "name": NAME.function,
        "parameters": {},
        "level_name": target.level.name,
        "triples": [target.triple],
        "cpu": target.cpu,
        "features": target.features,
        "symbol": "here",
    }
    values: Codec[Any] = Codec(Any)
    compiler = Child(command("kernels.compiler"), purpose="a compiler")
    try:
        compiler.send(values.encode(request))
        error, images = values.decode(compiler.receive(1 << 20) or b"")
    finally:
        compiler.end(10)
    assert (error, compiler.ending()) == ("", "exit status 0")
    assert [image[:4] for image in images] == [b"\x7fELF"]


@pytest.mark.night
def test_a_module_in_the_working_folder_is_not_taken_for_the_librarys(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('this is not json')")
    code = (
        "import sys; sys.path[:] = [path for path in sys.path if path]\n"
        "from llmrun.base.compiled.host import load_kernel\nload_kernel('team', 'start')"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        cwd=tmp_path,
        env={**os.environ, "LLMRUN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
