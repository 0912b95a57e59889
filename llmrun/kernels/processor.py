"""A kernel that asks an x86 processor for its features, because not every system reports them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.kernels.code.load_store import store_i64
from llmrun.kernels.compiler import kernel

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_EXTENDED = 0x80000001  # the leaf with AMD's features
_OSXSAVE = 1 << 27  # in ECX of leaf 1: the system lets programs read XCR0


@intrinsic
def _cpuid(typingctx: Any, leaf: Any, subleaf: Any) -> Any:
    """Return (EAX, EBX, ECX, EDX) of a leaf as int64."""
    registers = types.UniTuple(types.int64, 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.LiteralStructType([_I32] * 4), [_I32, _I32])
        narrow = [builder.trunc(arg, _I32) for arg in args]
        found = builder.asm(function, "cpuid", "={ax},={bx},={cx},={dx},{ax},{cx}", narrow, True)
        words = [builder.zext(builder.extract_value(found, index), _I64) for index in range(4)]
        return context.make_tuple(builder, registers, words)

    return registers(types.int64, types.int64), codegen


@intrinsic
def _enabled_registers(typingctx: Any) -> Any:
    """Return the low half of XCR0: the registers that the system saves."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = ir.FunctionType(ir.LiteralStructType([_I32] * 2), [_I32])
        found = builder.asm(function, "xgetbv", "={ax},={dx},{cx}", [ir.Constant(_I32, 0)], True)
        return builder.zext(builder.extract_value(found, 0), _I64)

    return types.int64(), codegen


@kernel
def identify(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Write six words: ECX of leaf 1, EBX and ECX of leaf 7, EAX of leaf 7.1, ECX of leaf 0x80000001, and XCR0.

    Words that the processor does not have are 0.
    """
    last = _cpuid(0, 0)[0]
    basic = _cpuid(1, 0)[2]
    store_i64(op, basic)
    for word in range(1, 6):
        store_i64(op + 8 * word, 0)
    if last >= 7:
        leaf = _cpuid(7, 0)
        store_i64(op + 8, leaf[1])
        store_i64(op + 16, leaf[2])
        if leaf[0] >= 1:
            store_i64(op + 24, _cpuid(7, 1)[0])
    if _cpuid(_EXTENDED - 1, 0)[0] >= _EXTENDED:
        store_i64(op + 32, _cpuid(_EXTENDED, 0)[2])
    if basic & _OSXSAVE != 0:
        store_i64(op + 40, _enabled_registers())
