"""Tests that the Numba speed-ups do not change the code that Numba generates."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing

import pytest

from llmrun.base.compiled.compiling import _Child
from llmrun.base.compiled.kernel import KernelName
from tests.support.cli.commands import ROOT
from tests.support.kernels.runs import TARGETS

# One kernel of many types, one with tuples, branches and loops, and one outside any kernel family.
_COMPILE = """
import hashlib, sys
import llvmlite.binding as llvm
from llmrun.kernels import compiler, faster_numba
from tests.support.kernels.runs import TARGETS

compiler._make_no_code_for_this_process()
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
if sys.argv[1] == "faster":
    faster_numba.make_faster()
target = TARGETS["portable"]
for module, name, parameters in [
    ("packing.pack", "pack_integers", {"weight": "q5_0"}),
    ("linear.embed", "embed", {"weight": "q6_k"}),
    ("limits", "multiply", {}),
]:
    (made,) = compiler.compile_kernel(
        module, name, parameters, target.level.name, [target.triple], target.cpu, target.features, "symbol"
    )
    print(module, hashlib.sha256(made).hexdigest())
"""


def compiled(way: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", _COMPILE, way], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.night
def test_the_objects_are_the_same_to_the_byte() -> None:
    plain = compiled("as it comes")
    assert len(plain) == 3
    assert compiled("faster") == plain


@pytest.mark.night
def test_an_object_does_not_depend_on_the_kernels_compiled_before() -> None:
    """Both kernels call `min` with the same types, but from functions with different flags."""
    merge = KernelName.of("attention.attention", "merge", value_size=16, values="f16")
    attention = KernelName.of(
        "attention.attention", "attention", group=2, head_size=16, value_size=16, keys="f16", values="f16"
    )
    target = TARGETS["avx512vnni"]
    with closing(_Child([target])) as fresh, closing(_Child([target])) as used:
        used.compile(merge)
        assert used.compile(attention) == fresh.compile(attention)
