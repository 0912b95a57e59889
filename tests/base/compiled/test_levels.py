"""Tests of the choice of the instruction level, and of the targets of levels."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
from unittest import mock

import llvmlite.binding as llvm
import pytest

from llmrun.base.compiled import host
from llmrun.base.compiled.host import features_in, host_features, host_levels, host_target
from llmrun.base.compiled.levels import (
    AVX2,
    AVX512_VNNI,
    LEVELS,
    NEON_DOT,
    NEON_I8MM,
    PORTABLE,
    X86,
    Level,
    elf_triple,
    machine,
    target_of,
)
from llmrun.base.errors import UsageError
from llmrun.base.machine import processor


def test_portable_runs_everywhere_and_is_the_last_choice() -> None:
    assert host_levels()[-1] is PORTABLE
    assert LEVELS[-1] is PORTABLE


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", set(AVX512_VNNI.features) | set(AVX2.features), [AVX512_VNNI, AVX2, PORTABLE]),
        ("x86_64", set(AVX2.features), [AVX2, PORTABLE]),
        ("AMD64", set(AVX2.features), [AVX2, PORTABLE]),
        ("x86_64", set(AVX2.features) - {"f16c"}, [PORTABLE]),
        ("x86_64", set(AVX2.features) - {"bmi2"}, [PORTABLE]),
        ("x86_64", {"sse2"}, [PORTABLE]),
        ("aarch64", {"neon", "dotprod"}, [NEON_DOT, PORTABLE]),
        ("arm64", {"neon", "dotprod"}, [NEON_DOT, PORTABLE]),
        ("ARM64", {"neon", "dotprod"}, [NEON_DOT, PORTABLE]),
        ("aarch64", {"neon", "dotprod", "i8mm"}, [NEON_I8MM, NEON_DOT, PORTABLE]),
        ("aarch64", {"neon", "i8mm"}, [PORTABLE]),
        ("aarch64", {"neon"}, [PORTABLE]),
        ("riscv64", {"neon", "dotprod", *AVX2.features}, [PORTABLE]),
    ],
)
def test_a_level_needs_its_machine_and_all_its_features(
    machine: str, features: set[str], expected: list[Level]
) -> None:
    with (
        mock.patch.object(platform, "machine", return_value=machine),
        mock.patch.object(host, "host_features", return_value=frozenset(features)),
    ):
        assert host_levels() == expected


def test_arm_features_come_from_the_system() -> None:
    with (
        mock.patch.object(platform, "machine", return_value="aarch64"),
        mock.patch.object(processor, "arm_features", return_value={"neon": True, "dotprod": True, "i8mm": False}),
    ):
        assert host_levels() == [NEON_DOT, PORTABLE]


ALL_BITS = -1


def test_a_feature_without_its_registers_does_not_count() -> None:
    """Operating systems may leave the registers of AVX-512, or even of AVX, disabled."""
    everything = features_in([ALL_BITS] * 6)
    assert everything.issuperset(AVX512_VNNI.features)
    only_avx = features_in([ALL_BITS] * 5 + [0x7])
    assert only_avx.issuperset(AVX2.features)
    assert not any(name.startswith("avx512") for name in only_avx)
    assert not features_in([ALL_BITS] * 5 + [0x1]) & {"avx2", "fma", "f16c", "avxvnni"}
    assert features_in([0] * 5 + [0xE7]) == frozenset()


@pytest.mark.push
@pytest.mark.skipif(platform.machine() not in X86, reason="a kernel for x86 processors")
def test_the_processor_reports_what_llvm_finds() -> None:
    found = llvm.get_host_cpu_features()
    assert host_features() == {name for name in host._FEATURES if found.get(name, False)}


def test_all_machines_of_a_level_have_the_same_target() -> None:
    assert (target_of(AVX2).cpu, target_of(AVX2).features) == ("haswell", "")
    assert target_of(NEON_I8MM).features == "+i8mm"


@pytest.mark.parametrize(("machine", "cpu"), [("x86_64", "x86-64"), ("AMD64", "x86-64"), ("aarch64", "generic")])
def test_portable_is_compiled_for_the_oldest_processor(machine: str, cpu: str) -> None:
    with mock.patch.object(platform, "machine", return_value=machine):
        assert target_of(PORTABLE).cpu == cpu


@pytest.mark.parametrize(
    ("system", "own", "triple"),
    [
        ("linux", "x86_64", "x86_64-unknown-linux-gnu"),
        ("linux", "aarch64", "aarch64-unknown-linux-gnu"),
        ("darwin", "arm64", "aarch64-apple-macosx-elf"),
    ],
)
def test_objects_are_elf_on_every_system(system: str, own: str, triple: str) -> None:
    with mock.patch.object(sys, "platform", system), mock.patch.object(platform, "machine", return_value=own):
        assert elf_triple() == triple
        assert target_of(PORTABLE).triple == triple


@pytest.mark.parametrize(("interpreter", "expected"), [("win-amd64", "AMD64"), ("win-arm64", "ARM64")])
def test_on_windows_the_interpreter_counts(monkeypatch: pytest.MonkeyPatch, interpreter: str, expected: str) -> None:
    """Windows on Arm also runs interpreters for x86-64."""
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(platform, "machine", lambda: "ARM64")
    monkeypatch.setattr(sysconfig, "get_platform", lambda: interpreter)
    assert machine() == expected


@pytest.mark.push
@pytest.mark.parametrize("level", host_levels(), ids=lambda level: level.name)
def test_the_environment_forces_a_level(level: Level) -> None:
    code = "from llmrun.base.compiled.host import host_target; print(host_target().level.name)"
    environment = os.environ | {"LLMRUN_CPU_LEVEL": level.name}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == level.name


@pytest.mark.parametrize("name", ["avx1024", "neondot" if NEON_DOT not in host_levels() else "avx2"])
def test_a_level_this_processor_lacks_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("LLMRUN_CPU_LEVEL", name)
    with pytest.raises(UsageError, match=f"LLMRUN_CPU_LEVEL: '{name}', this processor supports .*portable") as error:
        host_target.__wrapped__()
    assert error.value.hint
