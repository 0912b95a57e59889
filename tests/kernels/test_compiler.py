"""Tests that the compiler rejects kernels that would need more than their own machine code."""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import pytest
from numba.core.errors import NumbaError

from llmrun.base.compiled.host import host_target
from llmrun.kernels import object_file
from llmrun.kernels.code.load_store import load_i64, store_i64
from llmrun.kernels.compiler import compile_kernel, kernel, kernel_family
from llmrun.kernels.object_file import ForeignSymbolError


@pytest.fixture(autouse=True)
def _targets() -> Iterator[None]:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    yield
    sys.modules.pop("llmrun.kernels.made_here", None)


def compiled(function: Callable[..., Any], **parameters: Any) -> bytes:
    """Compile a kernel that a test defines, and return its object file."""
    module = ModuleType("llmrun.kernels.made_here")
    module.made = function  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    target = host_target()
    machine = (target.level.name, [target.triple], target.cpu, target.features)
    return compile_kernel("made_here", "made", parameters, *machine, "the_symbol")[0]


@pytest.mark.push
def test_a_kernel_is_one_global_name_that_needs_nothing() -> None:
    @kernel
    def add(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        store_i64(op, load_i64(op) + load_i64(op + 8))

    assert object_file.symbols(compiled(add)) == ({"the_symbol"}, set())


def test_a_family_is_built_for_the_level_with_its_parameters() -> None:
    seen = []

    @kernel_family
    def family(level: str, amount: int) -> Callable[..., None]:
        seen.append((level, amount))

        @kernel
        def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
            store_i64(op, amount)

        return run

    compiled(family, amount=3)
    assert seen == [(host_target().level.name, 3)]


def test_a_family_may_leave_the_level_out() -> None:
    @kernel_family
    def family(amount: int) -> Callable[..., None]:
        @kernel
        def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
            store_i64(op, amount)

        return run

    assert object_file.symbols(compiled(family, amount=3)) == ({"the_symbol"}, set())


def test_a_kernel_that_calls_the_mathematical_library_is_refused() -> None:
    @kernel
    def sine(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        store_i64(op, int(math.sin(float(load_i64(op))) * 100))

    with pytest.raises(ForeignSymbolError, match=r"a kernel must not call .*sin"):
        compiled(sine)


@pytest.mark.push
def test_a_kernel_that_allocates_is_refused() -> None:
    @kernel
    def allocate(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        store_i64(op, np.zeros(load_i64(op)).size)

    with pytest.raises(ForeignSymbolError, match="NRT"):
        compiled(allocate)


def test_a_kernel_that_prints_is_refused() -> None:
    @kernel
    def speak(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        print(load_i64(op))  # noqa: T201 - it never runs

    with pytest.raises(ForeignSymbolError, match="Py"):
        compiled(speak)


def test_a_kernel_whose_types_do_not_fit_is_refused() -> None:
    @kernel
    def confused(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        store_i64(op, "text")

    with pytest.raises(NumbaError):
        compiled(confused)


@pytest.mark.parametrize("image", [b"", b"\x7fELF\x01\x01" + bytes(100), b"\xcf\xfa\xed\xfe" + bytes(100)])
def test_only_64_bit_elf_is_an_object(image: bytes) -> None:
    with pytest.raises(ForeignSymbolError, match="ELF"):
        object_file.symbols(image)


def test_an_object_without_the_wanted_symbol_is_refused() -> None:
    @kernel
    def nothing(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        store_i64(op, 1)

    with pytest.raises(ForeignSymbolError, match="does not define another: it defines"):
        object_file.check_symbols(compiled(nothing), "another")
