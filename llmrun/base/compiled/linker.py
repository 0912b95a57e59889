"""The linker that loads machine code into this process."""

from __future__ import annotations

import sys

import llvmlite.binding as llvm


def create_linker(machine: llvm.TargetMachine) -> llvm.LLJIT:
    """Return a linker for objects of this target.

    LLVM's older linker maps the sections of an object separately. If they are more than 2 GiB apart, as may happen
    beside the weights of a large model, it aborts the process. JITLink maps each object as a whole, but llvmlite does
    not offer it on Windows.
    """
    return llvm.create_lljit_compiler(machine, use_jit_link=sys.platform != "win32")
