"""Vectors for kernels: a Numba type whose LLVM type is a vector, and the operations that kernels use.

Most operations use generic LLVM instructions, and LLVM splits 64-byte vectors into the vectors that the processor
supports. Five operations have an implementation for each instruction-set level: the integer dot product (dots.py), the
table lookup (unpack.py), fused multiply-add, the conversions to and from f16, and the pause in a spin loop. Functions
named `emit_*` build LLVM IR inside an @intrinsic. Everything under "callable in kernels" can be called directly in a
kernel.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from llmrun.kernels.code import software_fma

NEON = ("neoni8mm", "neondot")  # the instruction-set levels for Arm
LANES = 16  # number of floats in a vector, and of rows in a group of packed weights

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
F32X16 = ir.VectorType(F32, 16)
F16X16 = ir.VectorType(F16, 16)
I32X16 = ir.VectorType(I32, 16)
I16X16 = ir.VectorType(I16, 16)
I8X16, I8X64 = ir.VectorType(I8, 16), ir.VectorType(I8, 64)


# LLVM's names for the vector registers of each instruction-set level.
_REGISTERS = {
    "avx512vnni": [f"zmm{number}" for number in range(32)],
    "avxvnni": [f"ymm{number}" for number in range(16)],
    "avx2": [f"ymm{number}" for number in range(16)],
    **{level: [f"v{number}" for number in range(32)] for level in NEON},
}


class VectorType(types.Type):
    """A vector, or an array of vectors, held in registers."""

    def __init__(self, name: str, llvm_type: Any) -> None:
        self.llvm_type = llvm_type
        super().__init__(name=name)


@register_model(VectorType)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector_type: VectorType) -> None:
        super().__init__(manager, vector_type, vector_type.llvm_type)


f32x16 = VectorType("f32x16", F32X16)
i32x16 = VectorType("i32x16", I32X16)


def tile_type(rows: int) -> VectorType:
    """Return the type of an array of `rows` accumulators of 16 floats."""
    return VectorType(f"f32x16x{rows}", ir.ArrayType(F32X16, rows))


def integer_tile_type(rows: int) -> VectorType:
    """Return the type of an array of `rows` accumulators of 16 int32."""
    return VectorType(f"i32x16x{rows}", ir.ArrayType(I32X16, rows))


# --- building blocks of intrinsics ----------------------------------------------------------------------------------


def constant(llvm_type: Any, value: float) -> Any:
    """Return a vector constant with the same value in every lane."""
    return ir.Constant(llvm_type, [value] * llvm_type.count)


def emit_load(builder: Any, address: Any, llvm_type: Any, align: int = 1) -> Any:
    value = builder.load(builder.inttoptr(address, llvm_type.as_pointer()))
    value.align = align
    return value


def emit_store(builder: Any, address: Any, value: Any, align: int = 1) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer())).align = align


def emit_store_or_add(builder: Any, address: Any, value: Any, adds: Any) -> None:
    """Store a vector, or add it to the vector in memory if the i1 `adds` is set."""
    with builder.if_else(adds) as (then, otherwise):
        with then:
            before = emit_load(builder, address, value.type, 4)
            emit_store(builder, address, builder.fadd(before, value), 4)
        with otherwise:
            emit_store(builder, address, value, 4)


def emit_prefetch(builder: Any, address: Any) -> None:
    """Prefetch the cache line at an address."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    function = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    read, keep, data = I32(0), I32(3), I32(1)
    prefetch = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
    builder.call(prefetch, [pointer, read, keep, data])


def emit_offset(builder: Any, address: Any, n_bytes: int) -> Any:
    return builder.add(address, ir.Constant(I64, n_bytes)) if n_bytes else address


def emit_splat(builder: Any, value: Any, count: int = LANES) -> Any:
    vector = ir.VectorType(value.type, count)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, count), [0] * count))


def call(builder: Any, name: str, returns: Any, args: list[Any]) -> Any:
    """Emit a call to an LLVM intrinsic."""
    function_type = ir.FunctionType(returns, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), args)


def emit_fma(builder: Any, level: str, a: Any, b: Any, c: Any) -> Any:
    """Emit a * b + c, rounded only once at every instruction-set level."""
    if level == "portable" and not builder.module.triple.startswith(("aarch64", "arm64")):
        return software_fma.emit(builder, a, b, c)
    return call(builder, "llvm.fma.v16f32", F32X16, [a, b, c])


def emit_f16_to_f32(builder: Any, level: str, halves: Any) -> Any:
    """Convert a <16 x half> to <16 x float>. The result is exact."""
    if level != "portable":
        return builder.fpext(halves, F32X16)
    # This uses integer arithmetic because LLVM would turn fpext into a call to __extendhfsf2. Shifting the exponent and
    # mantissa of a half to their positions in a float yields 2^-112 times the value. A multiplication corrects that for
    # both normal and subnormal numbers.
    bits = builder.zext(builder.bitcast(halves, I16X16), I32X16)
    sign = builder.shl(builder.and_(bits, constant(I32X16, 0x8000)), constant(I32X16, 16))
    magnitude = builder.and_(bits, constant(I32X16, 0x7FFF))
    moved = builder.bitcast(builder.shl(magnitude, constant(I32X16, 13)), F32X16)
    scaled = builder.bitcast(builder.fmul(moved, constant(F32X16, 2.0**112)), I32X16)
    special = builder.icmp_unsigned(">=", magnitude, constant(I32X16, 0x7C00))
    infinite = builder.or_(builder.shl(magnitude, constant(I32X16, 13)), constant(I32X16, 0x7F800000))
    return builder.bitcast(builder.or_(sign, builder.select(special, infinite, scaled)), F32X16)


def emit_f32_to_f16(builder: Any, level: str, floats: Any) -> Any:
    """Convert a <16 x float> to <16 x half>, rounding to nearest even."""
    if level != "portable":
        return builder.fptrunc(floats, F16X16)
    bits = builder.bitcast(floats, I32X16)
    sign = builder.lshr(builder.and_(bits, constant(I32X16, 0x80000000)), constant(I32X16, 16))
    magnitude = builder.and_(bits, constant(I32X16, 0x7FFFFFFF))
    # If the half is subnormal, the low bits of (magnitude + 0.5) are its correctly rounded bits.
    summed = builder.fadd(builder.bitcast(magnitude, F32X16), constant(F32X16, 0.5))
    subnormal = builder.sub(builder.bitcast(summed, I32X16), constant(I32X16, 0x3F000000))
    odd = builder.and_(builder.lshr(magnitude, constant(I32X16, 13)), constant(I32X16, 1))
    # Subtract 112 from the exponent, and add one less than half an ulp for rounding.
    rebased = builder.add(magnitude, constant(I32X16, 0xC8000FFF - (1 << 32)))
    normal = builder.lshr(builder.add(rebased, odd), constant(I32X16, 13))
    is_subnormal = builder.icmp_unsigned("<", magnitude, constant(I32X16, 0x38800000))
    is_nan = builder.icmp_unsigned(">", magnitude, constant(I32X16, 0x7F800000))
    is_large = builder.icmp_unsigned(">=", magnitude, constant(I32X16, 0x47800000))
    finite = builder.select(is_subnormal, subnormal, normal)
    large = builder.select(is_nan, constant(I32X16, 0x7E00), constant(I32X16, 0x7C00))
    half = builder.or_(sign, builder.select(is_large, large, finite))
    return builder.bitcast(builder.trunc(half, I16X16), F16X16)


def emit_bf16_to_f32(builder: Any, bits: Any) -> Any:
    """Convert 16 bfloat16 bit patterns, <16 x i16>, to <16 x float>. The result is exact."""
    return builder.bitcast(builder.shl(builder.zext(bits, I32X16), constant(I32X16, 16)), F32X16)


def emit_free_registers(builder: Any, level: str) -> None:
    """Make LLVM free all vector registers, by marking them as clobbered before and after a tile.

    Otherwise, LLVM keeps constants of the surrounding code in registers and spills the tile's accumulators instead.
    Without this workaround, half of the 16 accumulators would be stored and reloaded in each step.
    """
    changed = ",".join(f"~{{{name}}}" for name in _REGISTERS.get(level, []))
    if changed:
        builder.asm(ir.FunctionType(ir.VoidType(), []), "", changed, [], True)


def emit_part(builder: Any, vector: Any, index: int, parts: int) -> Any:
    """Emit one of the equal parts of a vector."""
    size = vector.type.count // parts
    lanes = list(range(index * size, (index + 1) * size))
    return builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(I32, size), lanes))


def emit_together(builder: Any, values: list[Any]) -> list[Any]:
    """Return the same x86 vectors, for operations that must not begin before all of these vectors are computed.

    This emits an assembly statement without instructions, whose operands are registers that hold the vectors.
    """
    function = ir.FunctionType(ir.LiteralStructType([value.type for value in values]), [value.type for value in values])
    constraints = ["=x"] * len(values) + [str(index) for index in range(len(values))]
    found = builder.asm(function, "", ",".join(constraints), values, side_effect=False)
    return [builder.extract_value(found, index) for index in range(len(values))]


def emit_join(builder: Any, halves: list[Any]) -> Any:
    """Concatenate two vectors."""
    low, high = halves
    return builder.shuffle_vector(
        low, high, ir.Constant(ir.VectorType(I32, 2 * low.type.count), list(range(2 * low.type.count)))
    )


def emit_fold(builder: Any, vector: Any, combine: Any) -> Any:
    """Reduce 16 lanes to one by combining halves: 8 + 8, 4 + 4, 2 + 2, 1 + 1. The result depends on this order."""
    count = LANES
    while count > 1:
        count //= 2
        mask_type = ir.VectorType(I32, count)
        low = builder.shuffle_vector(vector, vector, ir.Constant(mask_type, list(range(count))))
        high = builder.shuffle_vector(vector, vector, ir.Constant(mask_type, list(range(count, 2 * count))))
        vector = combine(low, high)
    return builder.extract_element(vector, I32(0))


def emit_absolute(builder: Any, x: Any) -> Any:
    return builder.bitcast(builder.and_(builder.bitcast(x, I32X16), constant(I32X16, 0x7FFFFFFF)), F32X16)


def emit_larger(builder: Any, a: Any, b: Any) -> Any:
    """Emit the larger of a and b, lane by lane if they are vectors. If either is NaN, the result is b."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


ROUNDING = 12582912.0  # 1.5 * 2**23: once it is added, the low bits contain the rounded integer


def emit_rounded(builder: Any, x: Any) -> Any:
    """Round to nearest even and convert to <16 x i32>. |x| must be below 2^22, and NaN becomes 0."""
    x = builder.select(builder.fcmp_ordered("ord", x, x), x, constant(F32X16, 0.0))
    shifted = builder.bitcast(builder.fadd(x, constant(F32X16, ROUNDING)), I32X16)
    return builder.sub(shifted, constant(I32X16, 0x4B400000))


def emit_exp(builder: Any, level: str, x: Any) -> Any:
    """Emit e**x for x <= 0, with x clamped at -87.

    It uses Cody-Waite range reduction and a polynomial of degree 7. The error is at most 2 ulp.
    """
    x = builder.select(builder.fcmp_ordered("<", x, constant(F32X16, -87.0)), constant(F32X16, -87.0), x)
    magic = constant(F32X16, ROUNDING)
    shifted = emit_fma(builder, level, x, constant(F32X16, 1.4426950216293335), magic)
    n = builder.fsub(shifted, magic)
    r = emit_fma(builder, level, n, constant(F32X16, -0.693145751953125), x)
    r = emit_fma(builder, level, n, constant(F32X16, -1.428606765330187e-06), r)
    p = constant(F32X16, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = emit_fma(builder, level, p, r, constant(F32X16, coefficient))
    exponent = builder.shl(builder.bitcast(shifted, I32X16), constant(I32X16, 23))
    return builder.bitcast(builder.add(builder.bitcast(p, I32X16), exponent), F32X16)


EXP_COEFFICIENTS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)


# --- callable in kernels ----------------------------------------------------------------------------------------------


@intrinsic
def load_f32x16(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_load(builder, args[0], F32X16, 4)

    return f32x16(types.int64), codegen


@intrinsic
def store_f32x16(typingctx: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_store(builder, args[0], args[1], 4)
        return context.get_dummy_value()

    return types.void(types.int64, f32x16), codegen


@intrinsic
def prefetch_line(typingctx: Any, address: Any) -> Any:
    """Prefetch the cache line at an address."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def splat(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_splat(builder, args[0])

    return f32x16(types.float32), codegen


def _elementwise(operation: str) -> Any:
    @intrinsic
    def apply(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, operation)(args[0], args[1])

        return f32x16(f32x16, f32x16), codegen

    return apply


add, subtract, multiply, divide = (_elementwise(name) for name in ("fadd", "fsub", "fmul", "fdiv"))


@intrinsic
def maximum(typingctx: Any, a: Any, b: Any) -> Any:
    """Return the larger of a and b in each lane. If either is NaN, the result is b."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_larger(builder, *args)

    return f32x16(f32x16, f32x16), codegen


@intrinsic
def absolute(typingctx: Any, a: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_absolute(builder, args[0])

    return f32x16(f32x16), codegen


@intrinsic
def sum_lanes(typingctx: Any, a: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_fold(builder, args[0], builder.fadd)

    return types.float32(f32x16), codegen


@intrinsic
def max_lanes(typingctx: Any, a: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_fold(builder, args[0], lambda low, high: emit_larger(builder, low, high))

    return types.float32(f32x16), codegen


@intrinsic
def select_negative(typingctx: Any, condition: Any, a: Any, b: Any) -> Any:
    """Select the lanes of a where `condition` is below zero, and the lanes of b elsewhere."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        negative = builder.fcmp_ordered("<", args[0], constant(F32X16, 0.0))
        return builder.select(negative, args[1], args[2])

    return f32x16(f32x16, f32x16, f32x16), codegen


@intrinsic
def first_lane(typingctx: Any, vector: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], I32(0))

    return types.float32(f32x16), codegen


@intrinsic
def keep_between(typingctx: Any, vector: Any, first: Any, end: Any, other: Any) -> Any:
    """Keep the lanes from `first` up to `end` of a vector, and set the others to `other`.

    `first` may be below 0 and `end` above 16, but `end` must not be below `first`.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector, first, end, other = args
        lanes = ir.Constant(I32X16, list(range(LANES)))
        since_first = builder.sub(lanes, emit_splat(builder, builder.trunc(first, I32)))
        count = emit_splat(builder, builder.trunc(builder.sub(end, first), I32))
        keep = builder.icmp_unsigned("<", since_first, count)
        return builder.select(keep, vector, emit_splat(builder, other))

    return f32x16(f32x16, types.int64, types.int64, types.float32), codegen


class Operations:
    """The intrinsics whose implementation depends on the instruction-set level."""

    def __init__(self, level: str) -> None:
        self.fma = _fma(level)
        self.exp = _exp(level)
        self.load_f16x16 = _load_f16x16(level)
        self.pause = _pause(level)


def _fma(level: str) -> Any:
    @intrinsic
    def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit_fma(builder, level, *args)

        return f32x16(f32x16, f32x16, f32x16), codegen

    return fma


def _exp(level: str) -> Any:
    @intrinsic
    def exp(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit_exp(builder, level, args[0])

        return f32x16(f32x16), codegen

    return exp


def _load_f16x16(level: str) -> Any:
    @intrinsic
    def load_f16x16(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit_f16_to_f32(builder, level, emit_load(builder, args[0], F16X16, 2))

        return f32x16(types.int64), codegen

    return load_f16x16


def _pause(level: str) -> Any:
    @intrinsic
    def pause(typingctx: Any) -> Any:
        """Emit the processor's hint for spin loops."""

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            if level in ("avx512vnni", "avxvnni", "avx2"):
                function = ir.FunctionType(ir.VoidType(), [])
                builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.x86.sse2.pause"), [])
            elif level in NEON:
                function = ir.FunctionType(ir.VoidType(), [I32])
                builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.aarch64.hint"), [I32(1)])
            return context.get_dummy_value()

        return types.void(), codegen

    return pause
