"""Kernels that measure this machine's limits: its memory bandwidth and its integer multiply throughput.

Decoding must read all weights for each token, and prefill must multiply each row by all weights. Benchmarks therefore
report speeds as percentages of these limits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from llmrun.formats.layouts import records
from llmrun.formats.layouts.linear import PACKED_TYPES
from llmrun.formats.layouts.records import READ_BYTES, MultiplyWords, ReadWords, independent_sums
from llmrun.kernels.code import simd
from llmrun.kernels.code.dots import emit_dots, emit_pair_sums, multiplies_pairs
from llmrun.kernels.code.load_store import load_i64
from llmrun.kernels.code.work import claim
from llmrun.kernels.compiler import kernel, kernel_family

_READ = records.offsets(ReadWords)
_MULTIPLY = records.offsets(MultiplyWords)

_LINE = 64


@intrinsic
def _add_lines(typingctx: Any, total: Any, address: Any) -> Any:
    """Return `total` XORed with the READ_BYTES bytes at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        total, address = args
        total = builder.bitcast(total, simd.I32X16)
        for offset in range(0, READ_BYTES, _LINE):
            at = simd.emit_offset(builder, address, offset)
            total = builder.xor(total, simd.emit_load(builder, at, simd.I32X16, _LINE))
        return builder.bitcast(total, simd.F32X16)

    return simd.f32x16(simd.f32x16, types.int64), codegen


@kernel
def read(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
    """Read memory in chunks. `results` has 64 bytes per thread."""
    n_chunks, chunk_bytes = load_i64(op + _READ.chunks), load_i64(op + _READ.chunk_bytes)
    ahead, part_bytes = load_i64(op + _READ.ahead), chunk_bytes // load_i64(op + _READ.streams)
    total = simd.splat(types.float32(0))
    chunk = claim(op)
    while chunk < n_chunks:
        start = load_i64(op + _READ.address) + chunk * chunk_bytes
        for first in range(start, start + part_bytes, READ_BYTES):
            for at in range(first, start + chunk_bytes, part_bytes):
                if ahead != 0:
                    for line in range(0, READ_BYTES, _LINE):
                        simd.prefetch_line(at + ahead + line)
                total = _add_lines(total, at)
        chunk = claim(op)
    simd.store_f32x16(load_i64(op + _READ.results) + _LINE * thread, total)


@kernel_family
def multiply(level: str) -> Callable[..., None]:
    """Build a kernel that repeats integer dot products in registers `rounds` times.

    `vectors` contains the weights, 64 bytes for each sum. `results` has as many bytes for each thread.
    """
    n_sums = independent_sums(level)
    load, add, store = _sums(level, n_sums)

    @kernel
    def run(op: Any, step: Any, thread: Any, n_threads: Any) -> None:
        weights = load(load_i64(op + _MULTIPLY.vectors))
        sums = weights
        for number in range(load_i64(op + _MULTIPLY.rounds)):
            sums = add(sums, weights, number)
        store(load_i64(op + _MULTIPLY.results) + _LINE * n_sums * thread, sums)

    return run


def _sums(level: str, count: int) -> tuple[Any, Any, Any]:
    """Return (load, add, store) for `count` vectors of 16 integers that stay in registers."""
    tile = simd.VectorType(f"i32x16x{count}", ir.ArrayType(simd.I32X16, count))
    packed = PACKED_TYPES["q4_1"]

    @intrinsic
    def load(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            vectors = ir.Constant(tile.llvm_type, ir.Undefined)
            for index in range(count):
                at = simd.emit_offset(builder, args[0], _LINE * index)
                vectors = builder.insert_value(vectors, simd.emit_load(builder, at, simd.I32X16, _LINE), index)
            return vectors

        return tile(types.int64), codegen

    @intrinsic
    def add(typingctx: Any, sums: Any, weights: Any, number: Any) -> Any:
        """Add the product of weights and activations to every sum.

        The activations change from round to round, because the compiler could otherwise hoist the products out of the
        loop.
        """

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums, weights, number = args
            activation = builder.trunc(number, simd.I32)
            for index in range(count):
                weight = builder.bitcast(builder.extract_value(weights, index), simd.I8X64)
                start = builder.extract_value(sums, index)
                if multiplies_pairs(level):
                    pair = builder.bitcast(simd.emit_splat(builder, activation, 4), simd.I8X16)
                    total = emit_pair_sums(builder, start, weight, pair)
                else:
                    (total,) = emit_dots(builder, level, packed, [weight], [activation], [start])
                sums = builder.insert_value(sums, total, index)
            return sums

        return tile(tile, tile, types.int64), codegen

    @intrinsic
    def store(typingctx: Any, address: Any, sums: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            for index in range(count):
                at = simd.emit_offset(builder, args[0], _LINE * index)
                simd.emit_store(builder, at, builder.extract_value(args[1], index), _LINE)
            return context.get_dummy_value()

        return types.void(types.int64, tile), codegen

    return load, add, store
