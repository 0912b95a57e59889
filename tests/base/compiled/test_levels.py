"""Tests of which instruction level is chosen, and of the features passed to LLVM."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from unittest import mock

import llvmlite.binding as llvm
import pytest

from llmrun.base.compiled import levels
from llmrun.base.compiled.levels import (
    AVX2,
    AVX512_VNNI,
    LEVELS,
    NEON_DOT,
    NEON_I8MM,
    PORTABLE,
    host_levels,
    host_target,
    target_for,
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
    machine: str, features: set[str], expected: list[levels.Level]
) -> None:
    present = dict.fromkeys(features, True) | {"sse4a": False}
    with (
        mock.patch.object(platform, "machine", return_value=machine),
        mock.patch.object(llvm, "get_host_cpu_features", return_value=present),
        mock.patch.object(processor, "arm_features", return_value={}),
    ):
        assert host_levels() == expected


def test_arm_features_that_llvm_does_not_report_count() -> None:
    """LLVM 22 reports no dot products on Linux. For unknown processors, it compiles them only if they are named."""
    with (
        mock.patch.object(platform, "machine", return_value="aarch64"),
        mock.patch.object(llvm, "get_host_cpu_name", return_value="generic"),
        mock.patch.object(
            llvm, "get_host_cpu_features", side_effect=lambda: llvm.FeatureMap(aes=True, neon=True, sve=False)
        ),
        mock.patch.object(processor, "arm_features", return_value={"neon": True, "dotprod": True, "i8mm": False}),
    ):
        assert host_levels() == [NEON_DOT, PORTABLE]
        target = target_for(NEON_DOT, NEON_DOT)
    assert (target.cpu, target.features) == ("generic", "+aes,+dotprod,-i8mm,+neon,-sve")


def test_a_feature_that_is_switched_off_does_not_count() -> None:
    """An example is AVX-512 on a system that does not save its registers."""
    off = dict.fromkeys(AVX2.features, True) | {"f16c": False}
    with mock.patch.object(llvm, "get_host_cpu_features", return_value=off):
        assert host_levels() == [PORTABLE]


def test_a_lower_level_is_compiled_for_a_plain_processor() -> None:
    target = target_for(AVX2, AVX512_VNNI)
    assert (target.cpu, target.features) == ("haswell", "")


@pytest.mark.parametrize(("machine", "cpu"), [("x86_64", "x86-64"), ("AMD64", "x86-64"), ("aarch64", "generic")])
def test_portable_is_compiled_for_the_oldest_processor_even_where_it_is_the_best(machine: str, cpu: str) -> None:
    with mock.patch.object(platform, "machine", return_value=machine):
        assert target_for(PORTABLE, PORTABLE).cpu == cpu


@pytest.mark.parametrize(
    ("default", "triple"),
    [
        ("x86_64-unknown-linux-gnu", "x86_64-unknown-linux-gnu"),
        ("arm64-apple-darwin24.1.0", "arm64-apple-darwin24.1.0-elf"),
        ("x86_64-pc-windows-msvc", "x86_64-pc-windows-msvc-elf"),
        ("x86_64-pc-windows-msvc-elf", "x86_64-pc-windows-msvc-elf"),
    ],
)
def test_objects_are_elf_on_every_system(default: str, triple: str) -> None:
    with mock.patch.object(llvm, "get_default_triple", return_value=default):
        assert target_for(PORTABLE, PORTABLE).triple == triple


@pytest.mark.push
@pytest.mark.parametrize("level", host_levels(), ids=lambda level: level.name)
def test_the_environment_forces_a_level(level: levels.Level) -> None:
    code = "from llmrun.base.compiled.levels import host_target; print(host_target().level.name)"
    environment = os.environ | {"LLMRUN_CPU_LEVEL": level.name}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == level.name


@pytest.mark.parametrize("name", ["avx1024", "neondot" if NEON_DOT not in host_levels() else "avx2"])
def test_a_level_this_processor_lacks_is_a_usage_error(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("LLMRUN_CPU_LEVEL", name)
    with pytest.raises(UsageError, match=f"LLMRUN_CPU_LEVEL: '{name}', this processor supports .*portable") as error:
        host_target.__wrapped__()
    assert error.value.hint
