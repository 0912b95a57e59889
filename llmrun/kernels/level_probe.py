"""A probe that checks whether an instruction-set level works on this processor.

    python -m llmrun.kernels.level_probe LEVEL TRIPLE CPU FEATURES

It exits with 0 if the level works. level_check.py runs it in a child process, because an illegal instruction kills the
process. The probe compiles the building blocks of the kernels for this level and for the portable level, and checks
that both compute the same results.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numpy.typing import NDArray

from llmrun.compiled.levels import LEVELS, PORTABLE, Target, target_for
from llmrun.kernels.code import dots, simd, unpack
from llmrun.kernels.code.simd import F16X16, F32X16, I8X64, I32, I32X16, I64
from llmrun.layouts.packed_types import PACKED_TYPES

_LINE = 64
_INPUTS = 4  # one cache line each: bytes below 16, any bytes, float16, and negative floats
_RESULTS = 9
_SYMBOL = "trial"


def results(target: Target) -> NDArray[np.uint8]:
    """Run the building blocks for this target on fixed inputs, and return their results as uint8[9, 64]."""
    random = np.random.default_rng(1)
    memory = np.zeros((_INPUTS + _RESULTS, _LINE), np.uint8)
    memory[0] = random.integers(0, 16, _LINE)
    memory[1] = random.integers(0, 256, _LINE)
    memory[2, :32] = random.standard_normal(16).astype(np.float16).view(np.uint8)
    memory[3] = -random.integers(0, 16, 16).astype(np.float32).view(np.uint8)
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(target.triple).create_target_machine(
        cpu=target.cpu, features=target.features, opt=2, jit=True
    )
    with llvm.create_mcjit_compiler(llvm.parse_assembly(str(_module(target))), machine) as engine:
        engine.finalize_object()
        ctypes.CFUNCTYPE(None, ctypes.c_int64)(engine.get_function_address(_SYMBOL))(memory.ctypes.data)
    return memory[_INPUTS:]


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
    """Emit integer products with unsigned and with signed weights, table lookups, conversions, and float arithmetic.

    The float operations are chosen so that all levels round in the same way.
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
    entries = ir.Constant(ir.VectorType(simd.I8, 16), list(range(-40, 40, 5)))
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
    ]


def main(level_name: str, triple: str, cpu: str, features: str) -> int:
    level = next(level for level in LEVELS if level.name == level_name)
    same = np.array_equal(results(Target(level, triple, cpu, features)), results(target_for(PORTABLE, level)))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
