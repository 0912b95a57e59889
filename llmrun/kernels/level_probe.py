"""A probe that checks whether an instruction-set level works on this processor.

    python -m llmrun.kernels.level_probe LEVEL TRIPLE CPU FEATURES

It exits with 0 if the level works. compiled/levels.py runs it in a child process, because an illegal instruction kills
the process. The probe compiles the building blocks of the kernels for this level, and checks that they compute the same
bits as their twins in NumPy.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from llmrun.base.compiled.levels import LEVELS, Target
from llmrun.base.compiled.store import create_linker
from llmrun.formats.layouts.linear import PACKED_TYPES
from llmrun.kernels.code import dots, simd, unpack
from llmrun.kernels.code.simd import F16X16, F32X16, I8X64, I32, I32X16, I64

_LINE = 64
_INPUTS = 4  # one cache line each: bytes below 16, any bytes, float16, and negative floats
_RESULTS = 11
_SYMBOL = "trial"
_PAIR = (0, 16)  # the offsets of two rows of activations in the second line
_ENTRIES = np.arange(-40, 40, 5, dtype=np.int8)  # of the table


def results(target: Target) -> NDArray[np.uint8]:
    """Run the building blocks for this target on the inputs, and return their results as uint8[11, 64]."""
    memory = np.concatenate([_inputs(), np.zeros((_RESULTS, _LINE), np.uint8)])
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=2, jit=True
    )
    builder = llvm.JITLibraryBuilder().add_ir(str(_module(target))).export_symbol(_SYMBOL)
    library = builder.link(create_linker(machine), _SYMBOL)
    ctypes.CFUNCTYPE(None, ctypes.c_int64)(library[_SYMBOL])(memory.ctypes.data)
    return memory[_INPUTS:]


def _inputs() -> NDArray[np.uint8]:
    random = np.random.default_rng(1)
    lines = np.zeros((_INPUTS, _LINE), np.uint8)
    lines[0] = random.integers(0, 16, _LINE)
    lines[1] = random.integers(0, 256, _LINE)
    lines[2, :32] = random.standard_normal(16).astype(np.float16).view(np.uint8)
    lines[3] = (-random.uniform(1, 16, 16)).astype(np.float32).view(np.uint8)
    return lines


def twin() -> NDArray[np.uint8]:
    """Return the results that the building blocks must have."""
    lines = _inputs()
    small, any_bytes, floats = lines[0], lines[1], lines[3].view(np.float32)
    halves = lines[2, :32].view(np.float16)
    activation = any_bytes[:4].view(np.int8).astype(np.int32)
    eights = np.concatenate([any_bytes.reshape(16, 4), small.reshape(16, 4)], 1).view(np.int8).astype(np.int32)
    wide = halves.astype(np.float32)
    larger = np.where(wide > floats, wide, floats)
    # In float64, the square is exact, and so is the sum for these inputs. So it is rounded once, as it must be.
    fused = (floats.astype(np.float64) ** 2 + floats).astype(np.float32)
    found = [
        small.reshape(16, 4).astype(np.int32) @ activation,
        any_bytes.view(np.int8).reshape(16, 4).astype(np.int32) @ activation,
        _ENTRIES[small],
        any_bytes >> 3 & 15,
        wide,
        halves.view(np.uint16).astype(np.int32),
        fused,
        floats.astype(np.int32),
        np.ascontiguousarray(np.concatenate([wide, larger])[1::2]),
        *(eights @ any_bytes[first : first + 8].view(np.int8).astype(np.int32) for first in _PAIR),
    ]
    return np.stack([line.view(np.uint8) for line in found])


def _module(target: Target) -> ir.Module:
    """Build the module with the function `void trial(int64 memory)`."""
    module = ir.Module(_SYMBOL)
    module.triple = target.triple
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64]), _SYMBOL)
    builder = ir.IRBuilder(function.append_basic_block())
    base = function.args[0]
    for index, value in enumerate(_emit_values(builder, target.level.name, base)):
        simd.emit_store(builder, simd.emit_offset(builder, base, _LINE * (_INPUTS + index)), value)
    builder.ret_void()
    return module


def _emit_values(builder: Any, level: str, base: Any) -> list[Any]:
    """Emit integer products of unsigned and of signed weights, table lookups, conversions, and float arithmetic.

    All levels round the results of the float operations in the same way.
    """

    def line(index: int, llvm_type: Any) -> Any:
        return simd.emit_load(builder, simd.emit_offset(builder, base, _LINE * index), llvm_type)

    small, any_bytes, halves, floats = line(0, I8X64), line(1, I8X64), line(2, F16X16), line(3, F32X16)
    activation = simd.emit_load(builder, simd.emit_offset(builder, base, _LINE), I32)
    zero = simd.constant(I32X16, 0)
    signed = PACKED_TYPES["q8_0"]
    weights = any_bytes
    bias = zero
    if dots.takes_unsigned(level, signed):  # add 128 to the weights, and correct for it in the sum
        weights = builder.xor(any_bytes, simd.constant(I8X64, -128))
        ones = dots.emit_dots(builder, "portable", signed, [simd.constant(I8X64, 1)], [activation], [zero])[0]
        bias = builder.mul(ones, simd.constant(I32X16, -128))
    entries = ir.Constant(ir.VectorType(simd.I8, 16), _ENTRIES.tolist())
    wide = simd.emit_f16_to_f32(builder, level, halves)
    narrow = builder.bitcast(simd.emit_f32_to_f16(builder, level, wide), ir.VectorType(simd.I16, 16))
    larger = simd.emit_larger(builder, wide, floats)
    return [
        dots.emit_dots(builder, level, PACKED_TYPES["q4_0"], [small], [activation], [zero])[0],
        dots.emit_dots(builder, level, signed, [weights], [activation], [bias])[0],
        unpack.emit_lookup(builder, level, entries, small),
        builder.and_(builder.lshr(any_bytes, simd.constant(I8X64, 3)), simd.constant(I8X64, 15)),
        wide,
        builder.zext(narrow, I32X16),
        simd.emit_fma(builder, level, floats, floats, floats),
        builder.fptosi(floats, I32X16),
        builder.shuffle_vector(wide, larger, ir.Constant(I32X16, list(range(1, 32, 2)))),
        *_emit_pair(builder, level, base, [any_bytes, small]),
    ]


def _emit_pair(builder: Any, level: str, base: Any, weights: list[Any]) -> list[Any]:
    """Emit the products of signed weights, for 8 columns, and two rows of activations."""
    zero, rows = simd.constant(I32X16, 0), [simd.emit_offset(builder, base, _LINE + first) for first in _PAIR]
    if dots.multiplies_pairs(level):
        activations = [[simd.emit_load(builder, row, simd.I8X16)] for row in rows]
        return dots.emit_pair_dots(builder, dots.emit_paired(builder, weights), activations, [zero, zero])
    signed = PACKED_TYPES["q8_0"]
    fours = [[simd.emit_load(builder, simd.emit_offset(builder, row, first), I32) for first in (0, 4)] for row in rows]
    return [dots.emit_dots(builder, "portable", signed, weights, activations, [zero])[0] for activations in fours]


def main(level_name: str, triple: str, cpu: str, features: str) -> int:
    level = next(level for level in LEVELS if level.name == level_name)
    return 0 if np.array_equal(results(Target(level, triple, cpu, features)), twin()) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
