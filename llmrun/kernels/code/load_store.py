"""Scalar loads, stores, atomics and calls by integer address, for use in kernels."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def _integer_load(llvm_type: Any, *, signed: bool) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(builder.inttoptr(args[0], llvm_type.as_pointer()))
            value.align = 1
            if llvm_type is _I64:
                return value
            return builder.sext(value, _I64) if signed else builder.zext(value, _I64)

        return types.int64(types.int64), codegen

    return load


def _integer_store(llvm_type: Any) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            narrow = args[1] if llvm_type is _I64 else builder.trunc(args[1], llvm_type)
            written = builder.store(narrow, builder.inttoptr(args[0], llvm_type.as_pointer()))
            written.align = 1
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), codegen

    return store


def _float_load(llvm_type: Any, numba_type: Any) -> Any:
    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(builder.inttoptr(args[0], llvm_type.as_pointer()))
            value.align = numba_type.bitwidth // 8
            return value

        return numba_type(types.int64), codegen

    return load


def _float_store(llvm_type: Any, numba_type: Any) -> Any:
    @intrinsic
    def store(typingctx: Any, address: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            written = builder.store(args[1], builder.inttoptr(args[0], llvm_type.as_pointer()))
            written.align = numba_type.bitwidth // 8
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return store


load_u8 = _integer_load(_I8, signed=False)
load_u16 = _integer_load(_I16, signed=False)
load_u32 = _integer_load(_I32, signed=False)
load_i32 = _integer_load(_I32, signed=True)
load_i64 = _integer_load(_I64, signed=True)
store_u8 = _integer_store(_I8)
store_i16 = _integer_store(_I16)
store_i32 = _integer_store(_I32)
store_i64 = _integer_store(_I64)


load_f32 = _float_load(ir.FloatType(), types.float32)
load_f64 = _float_load(ir.DoubleType(), types.float64)
store_f32 = _float_store(ir.FloatType(), types.float32)
store_f64 = _float_store(ir.DoubleType(), types.float64)


@intrinsic
def hidden(typingctx: Any, value: Any) -> Any:
    """Return `value`, but hide from LLVM whether it is a constant, so that loops with this bound are not unrolled."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.asm(ir.FunctionType(_I64, [_I64]), "", "=r,0", [args[0]], False)

    return types.int64(types.int64), codegen


@intrinsic
def copy_bytes(typingctx: Any, destination: Any, source: Any, count: Any) -> Any:
    """Copy bytes with memcpy, which is on the allow-list of undefined symbols."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _I8.as_pointer()
        cgutils.raw_memcpy(
            builder,
            builder.inttoptr(args[0], pointer),
            builder.inttoptr(args[1], pointer),
            args[2],
            1,
            align=1,
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def atomic_add(typingctx: Any, address: Any, value: Any) -> Any:
    """Atomically add to an int64, with sequential consistency, and return its previous value."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def atomic_load(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def atomic_store(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], _I64.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _call_by_address(n_args: int, returns: Any) -> Any:
    function_type = ir.FunctionType(returns, [_I64] * n_args)

    def emit(builder: Any, address: Any, args: Any) -> Any:
        return builder.call(builder.inttoptr(address, function_type.as_pointer()), args)

    return emit


_call6 = _call_by_address(6, _I64)
_call2 = _call_by_address(2, _I64)
_call1 = _call_by_address(1, _I64)


@intrinsic
def call_c6(typingctx: Any, function: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
    """Call the C function at an address with six word-sized arguments. It is used for libc's `syscall`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call6(builder, args[0], args[1:])

    return types.int64(*[types.int64] * 7), codegen


@intrinsic
def call_c2(typingctx: Any, function: Any, a: Any, b: Any) -> Any:
    """Call the C function at an address with two word-sized arguments."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call2(builder, args[0], args[1:])

    return types.int64(*[types.int64] * 3), codegen


@intrinsic
def call_c1(typingctx: Any, function: Any, a: Any) -> Any:
    """Call the C function at an address with one word-sized argument."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _call1(builder, args[0], args[1:])

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def call_kernel(typingctx: Any, kernel: Any, op: Any, step: Any, thread: Any, n_threads: Any) -> Any:
    """Call the kernel at an address, using Numba's calling convention for functions without a wrapper."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _I8.as_pointer()
        function_type = ir.FunctionType(_I32, [pointer.as_pointer(), pointer.as_pointer(), *[_I64] * 4])
        result = cgutils.alloca_once(builder, pointer)
        error = cgutils.alloca_once(builder, pointer)
        function = builder.inttoptr(args[0], function_type.as_pointer())
        builder.call(function, [result, error, *args[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen
