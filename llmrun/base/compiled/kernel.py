"""Names of kernels, and kernels in memory."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable

from msgspec import Struct

from llmrun.base.errors import LlmrunError

Progress = Callable[[int, int], None]  # called with (number of kernels ready, number of kernels to compile)

_Function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 4)


class KernelName(Struct, frozen=True):
    """The name of a kernel.

    module      dotted name of the module, below llmrun.kernels
    function    name of the kernel or kernel family in the module
    parameters  parameters of the kernel family
    """

    module: str
    function: str
    parameters: tuple[tuple[str, int | str], ...] = ()

    @classmethod
    def of(cls, module: str, function: str, **parameters: int | str) -> KernelName:
        return cls(module, function, tuple(sorted(parameters.items())))

    @property
    def symbol(self) -> str:
        """The kernel's name in object files and shared libraries, such as `linear_embed_embed__weight_q8_0`."""
        words = [f"{self.module}_{self.function}", *(f"{name}_{value}" for name, value in self.parameters)]
        return re.sub(r"\W", "_", "__".join(words))

    def __str__(self) -> str:
        return " ".join([f"{self.module}.{self.function}", *(f"{name}={value}" for name, value in self.parameters)])


TRIAL = KernelName.of("level_probe", "trial")  # the kernel with which level_check.py tries an instruction-set level


class Kernel:
    """A kernel in memory: machine code at `address` with the signature (op, step, thread, n_threads)."""

    def __init__(self, address: int) -> None:
        self.address = address
        self._function = _Function(address)

    def run(self, op: int, step: int, thread: int, n_threads: int) -> None:
        """Run the kernel without holding the GIL."""
        # Numba's calling convention requires one buffer for the return value and another for an exception.
        scratch = (ctypes.c_int64 * 2)()
        base = ctypes.addressof(scratch)
        self._function(base, base + 8, op, step, thread, n_threads)

    def __call__(self, *words: int) -> None:
        """Run the kernel on a single thread, with `words` as the op record."""
        record = (ctypes.c_int64 * len(words))(*words)
        self.run(ctypes.addressof(record), 0, 0, 1)


class KernelCompileError(LlmrunError):
    """A kernel could not be compiled or loaded, because of a bug in llmrun or a broken installation."""
