"""Tests of the report on the processor, the memory and Python for each kind of machine."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from llmrun import __version__
from llmrun.backends.cpu import prefetching
from llmrun.backends.cpu.speeds.measured import keep_speeds
from llmrun.base.compiled import host, levels, library
from llmrun.base.compiled.kernel import KernelCompileError
from llmrun.base.compiled.library import BadLibrary, LibrarySurvey
from llmrun.base.compiled.sources import digest_of_all
from llmrun.base.errors import KernelWarning
from llmrun.jobs.doctor import processor
from llmrun.jobs.doctor.examine import NOTE, OK, PROBLEM, Machine
from llmrun.jobs.doctor.interpreter import look_at_python
from llmrun.jobs.doctor.processor import (
    look_at_level,
    look_at_libraries,
    look_at_memory,
    look_at_prefetching,
    look_at_processor,
    measure_speed,
)
from tests.support.missing_packages import hide

GB = 10**9


def machine(**system: Any) -> Machine:
    made = Machine()
    made.system = {"cpu": "A processor", "threads": 2, "cores_physical": 2, **system}
    return made


# Python


def test_this_python_and_its_libraries_are_right() -> None:
    python, llmrun = look_at_python(Machine())
    assert (python.name, python.status, llmrun.name, llmrun.status) == ("python", OK, "llmrun", OK)
    assert python.facts["bits"] == 64
    assert llmrun.facts["numba"]


def test_a_python_of_32_bits_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "maxsize", 2**31 - 1)
    python, _ = look_at_python(Machine())
    assert python.status == PROBLEM
    assert "64-bit" in python.advice


@pytest.mark.parametrize("version", [(3, 10), (3, 15)])
def test_a_python_that_nobody_has_tried_is_a_problem(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    python, _ = look_at_python(Machine())
    assert (python.status, python.advice) == (PROBLEM, "Use Python 3.11 to 3.14. Other versions are not tested.")


def test_free_threaded_builds_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sysconfig.get_config_vars(), "Py_GIL_DISABLED", 1)
    python, _ = look_at_python(Machine())
    assert python.status == PROBLEM
    assert "free-threaded" in python.advice


def test_outside_of_any_environment_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    python, _ = look_at_python(Machine())
    assert python.words.endswith("not in a virtual environment")


def test_a_missing_library_is_a_problem_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numpy" else find(name))
    _, llmrun = look_at_python(Machine())
    assert llmrun.status == PROBLEM
    assert llmrun.command == f"{sys.executable} -m pip install numpy"


def test_a_missing_numba_is_not_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "numba", "llvmlite")
    _, llmrun = look_at_python(Machine())
    assert llmrun.status == OK
    assert llmrun.words == f"llmrun {__version__} with numpy {version('numpy')}"
    assert llmrun.facts["numba"] is llmrun.facts["llvmlite"] is None
    assert llmrun.facts["numpy"] == version("numpy")
    assert llmrun.facts["pillow"] == version("pillow")


def test_without_llguidance_formats_do_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "llguidance")
    _, llmrun, formats = look_at_python(Machine())
    assert (llmrun.status, formats.status) == (OK, NOTE)
    assert formats.words == "llguidance is missing, so response formats and tools do not work"
    assert formats.command == f"{sys.executable} -m pip install 'llguidance>=1.6,<2'"


# Processor


def test_cores_threads_and_a_containers_share_are_told() -> None:
    (found,) = look_at_processor(machine(cpu_quota=1.5, threads=1))
    assert found.words == "A processor: 2 cores, 1 thread used, limited to 1.5 CPUs by this container"
    (found,) = look_at_processor(machine(cores_physical=None, cores_logical=None))
    assert found.words == "A processor: 1 core, 2 threads used"


# Kernels


def libraries(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    """Make `survey` return `found`, or raise it if it is an exception."""

    def survey() -> object:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(library, "survey", survey)


def test_kernels_of_the_wheel_are_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, LibrarySurvey({"base": 1 * GB, "avx2": 2 * GB}, digest_of_all()))
    (found,) = look_at_libraries(Machine())
    assert (found.status, found.words) == (OK, "kernels come with llmrun: 2 files, 3.00 GB")
    assert found.facts["shipped"]


def test_kernels_of_other_sources_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, LibrarySurvey({"base": 1 * GB}, "other"))
    (found,) = look_at_libraries(Machine())
    assert (found.status, found.advice.split(".")[0]) == (
        NOTE,
        "Changes to kernels have no effect in an installed wheel",
    )


def test_a_source_checkout_compiles_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, None)
    (found,) = look_at_libraries(Machine())
    words = f"kernels are compiled on this machine, by Numba {version('numba')}"
    assert (found.status, found.words, found.command) == (OK, words, "")


def test_a_damaged_library_is_a_note_if_numba_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, BadLibrary("/x/avx2.so is damaged"))
    (found,) = look_at_libraries(Machine())
    assert found.status == NOTE
    assert found.words.endswith(": /x/avx2.so is damaged")
    assert found.command == f"pip install --force-reinstall --no-deps llmrun-gguf=={__version__}"


@pytest.mark.parametrize(
    ("found", "words", "command"),
    [
        (None, "this installation has neither kernels nor a compiler for them", 'pip install "llmrun-gguf[jit]"'),
        (BadLibrary("/x/avx2.so is missing"), "/x/avx2.so is missing", "pip install --force-reinstall"),
    ],
)
def test_no_kernels_and_no_compiler_are_a_problem(
    monkeypatch: pytest.MonkeyPatch, found: object, words: str, command: str
) -> None:
    hide(monkeypatch, "numba", "llvmlite")
    libraries(monkeypatch, found)
    (finding,) = look_at_libraries(Machine())
    assert (finding.status, finding.words) == (PROBLEM, words)
    assert finding.command.startswith(command)


def test_missing_kernels_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "numba", "llvmlite")
    libraries(monkeypatch, BadLibrary("/x/base.so is missing"))
    without_kernels(monkeypatch)
    (found,) = (*look_at_libraries(Machine()), *look_at_level(Machine()), *look_at_prefetching(machine()))
    assert found.words == "/x/base.so is missing"


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise KernelCompileError("cannot load kernels: /x/base.so cannot be loaded")

    monkeypatch.setattr(host, "host_levels", fail)
    monkeypatch.setattr(prefetching, "host_target", fail)


def test_kernels_that_look_right_but_fail_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries(monkeypatch, LibrarySurvey({"base": 1 * GB}, digest_of_all()))
    without_kernels(monkeypatch)
    assert [found.status for found in look_at_libraries(Machine())] == [OK]
    with pytest.raises(KernelCompileError):  # `examine` reports the error as a problem
        list(look_at_level(Machine()))


@pytest.mark.usefixtures("any_level")
def test_warnings_about_libraries_are_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The base library may be damaged, which the first question about the processor finds out."""

    def warn() -> list[levels.Level]:
        warnings.warn("/x/base.so is damaged", KernelWarning, stacklevel=1)
        return [levels.PORTABLE]

    monkeypatch.setattr(host, "host_levels", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernelWarning)
        (found,) = look_at_level(Machine())
    assert found.words.endswith(": /x/base.so is damaged")
    host.host_target.cache_clear()


@pytest.fixture
def any_level(monkeypatch: pytest.MonkeyPatch) -> None:
    host.host_target.cache_clear()
    monkeypatch.setattr(host, "host_levels", lambda: [levels.AVX2, levels.PORTABLE])


def trial_says(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    monkeypatch.setattr(host, "level_works", lambda *target: works)


@pytest.mark.usefixtures("any_level")
def test_the_level_that_worked_when_it_was_tried_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    trial_says(monkeypatch, True)
    (found,) = look_at_level(Machine())
    assert (found.status, found.words) == (OK, "kernels use AVX2; tested on this machine")
    host.host_target.cache_clear()


@pytest.mark.usefixtures("any_level")
def test_a_level_that_failed_its_trial_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    trial_says(monkeypatch, False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernelWarning)
        (found,) = look_at_level(Machine())
    assert found.status == NOTE
    assert "instructions that do not work: avx2" in found.words
    assert found.facts["level"] == "portable"
    host.host_target.cache_clear()


@pytest.mark.usefixtures("any_level")
def test_a_processor_with_no_level_of_ours_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "host_levels", lambda: [levels.PORTABLE])
    (found,) = look_at_level(Machine())
    assert (found.status, found.facts["tried"]) == (NOTE, False)
    host.host_target.cache_clear()


@pytest.mark.usefixtures("any_level")
@pytest.mark.parametrize(("forced", "status"), [("avx2", OK), ("portable", NOTE), ("avx3", PROBLEM)])
def test_a_level_that_a_variable_forces_is_told(forced: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_CPU_LEVEL", forced)
    trial_says(monkeypatch, True)
    (found,) = look_at_level(Machine())
    assert found.status == status
    assert "LLMRUN_CPU_LEVEL" in found.words
    assert found.command == ("" if status == OK else "unset LLMRUN_CPU_LEVEL")
    host.host_target.cache_clear()


@pytest.mark.push
@pytest.mark.usefixtures("any_level")
def test_how_weights_are_prefetched_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    (found,) = look_at_prefetching(machine())
    assert (found.status, found.facts["threads"]) == (OK, 2)
    assert "no clear measurement yet" in found.words
    times = {"none": 1.0, "linear": 0.9, "streams": 0.5}
    keep_speeds(2, {"prefetch": times})
    (found,) = look_at_prefetching(machine())
    assert found.words.endswith("measured: 50% less time per token than the slowest way (not prefetched)")
    assert (found.facts["way"], found.facts["relative_times"]) == ("streams", times)


# Memory


def test_free_memory_and_its_modules_are_told() -> None:
    facts = {"memory_modules": 2, "memory_type": "DDR5", "memory_mts": 5600}
    (found,) = look_at_memory(machine(memory_bytes=64 * GB, memory_free=60 * GB, **facts))
    assert (found.status, found.words) == (OK, "60.0 GB of 64.0 GB free, 2× DDR5-5600")


def test_little_free_memory_is_a_note() -> None:
    (found,) = look_at_memory(machine(memory_bytes=64 * GB, memory_free=GB))
    assert found.status == NOTE
    assert found.advice


@pytest.mark.parametrize("known", [{}, {"memory_bytes": GB, "memory_free": None}])
def test_a_system_that_does_not_tell_is_a_note(known: dict[str, Any]) -> None:
    (found,) = look_at_memory(machine(**known))
    assert (found.status, found.words) == (NOTE, "the system does not report the amount of memory")


@pytest.mark.push
def test_speed_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_GIB", 1 << 26)
    (found,) = measure_speed(machine(threads=1, memory_free=None))
    assert (found.name, found.status) == ("speed", OK)
    assert found.facts["read_bytes_per_second"] > 1e8
    assert found.facts["int8_products_per_second"] > 1e8


def test_speed_is_not_measured_without_memory_to_read() -> None:
    (found,) = measure_speed(machine(memory_free=1 << 27))
    assert (found.status, found.words) == (NOTE, "not measured: too little memory is free")


def test_a_kernel_that_does_not_compile_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise KernelCompileError("cannot compile kernel: limits.read", hint="look again")

    monkeypatch.setattr("llmrun.backends.cpu.speeds.measured.MachineLimits", fail)
    (found,) = measure_speed(machine(memory_free=None))
    assert (found.status, found.advice) == (PROBLEM, "Look again.")
    assert "limits.read" in found.words


def test_without_a_level_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    host.host_target.cache_clear()
    monkeypatch.setenv("LLMRUN_CPU_LEVEL", "avx3")
    (found,) = measure_speed(machine(memory_free=None))
    assert (found.status, found.words) == (NOTE, "not measured: no valid instruction level is selected")


def test_the_best_of_three_counts_or_of_as_many_as_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = iter([1.0, 3.0, 2.0, 9.0])
    assert processor._best(lambda: next(speeds)) == 3.0
    monkeypatch.setattr(processor, "_MOST_SECONDS", 0.0)
    speeds = iter([1.0, 3.0])
    assert processor._best(lambda: next(speeds)) == 1.0
