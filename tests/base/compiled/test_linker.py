"""Tests of the linker: how compiled kernels are placed in memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from llmrun.base.compiled import compiling
from llmrun.base.compiled.host import host_target
from llmrun.base.compiled.kernel import KernelCompileError, KernelName
from llmrun.base.processes import commands
from tests.support.kernels.objects import object_images

pytestmark = pytest.mark.push

SAMPLE = KernelName.of("sampling.chain", "sample")

# Leaves one free page above a mapping of 8 GiB, and fills all other gaps above it. The constants of a kernel fit into
# the page, but its code does not.
_BESIDE_A_LARGE_MODEL = """
import ctypes
from llmrun.base.compiled.compiling import _linker
from tests.support.kernels.objects import object_images
from llmrun.base.compiled.host import load_kernels
from llmrun.base.compiled.kernel import KernelName
from llmrun.base.compiled.host import host_target

libc, page = ctypes.CDLL(None), 4096
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

def reserve(n_bytes):
    return libc.mmap(None, n_bytes, 0, 0x4022, -1, 0)  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE

name = KernelName.of("sampling.chain", "sample")
object_images([name], host_target())
_linker()
gap = reserve(16 * page)
weights = reserve(8 << 30)
for bits in range(32, 11, -1):
    while (address := reserve(1 << bits)) > weights:
        pass
    libc.munmap(address, 1 << bits)
libc.munmap(gap + 8 * page, page)
print(hex(load_kernels([name])[name].address))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="gaps are filled from the top on Linux only")
def test_kernels_load_beside_a_large_model() -> None:
    object_images([SAMPLE], host_target())
    done = subprocess.run(
        [sys.executable, "-c", _BESIDE_A_LARGE_MODEL],
        env=commands.environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.startswith("0x"), done.stderr


def test_objects_that_cannot_be_loaded_are_an_error() -> None:
    image = object_images([SAMPLE], host_target())[SAMPLE]
    with pytest.raises(KernelCompileError, match="cannot load compiled kernels: "):
        compiling._link({SAMPLE: image[:1000]})
