"""Integer dot products of a block of 32 columns for 16 outputs, implemented for each instruction-set level.

The weights of a block are 8 vectors <64 x i8>. Vector j holds columns 4j to 4j + 3 of 16 rows. Weights with up to 6
bits are unsigned, and their zero point is corrected using the sum of the activations. Weights with 8 bits and weights
looked up in a table are signed bytes. All sums are exact integers, so all levels give identical results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from llvmlite import ir

from llmrun.formats.quants.weight_type import PackedType
from llmrun.kernels.code import simd
from llmrun.kernels.code.simd import I8, I16, I32, I32X16, call, constant

_VNNI = ("avx512vnni", "avxvnni")
_I32X8, _I16X16, _I8X32 = ir.VectorType(I32, 8), ir.VectorType(I16, 16), ir.VectorType(I8, 32)
_I32X4 = ir.VectorType(I32, 4)
_ACTIVATION = 127  # the largest magnitude of an activation
_LARGEST_I16 = 32767
SIGNED_BYTES = PackedType((8,))  # the integers of Q8_0
_SMMLA = "llvm.aarch64.neon.smmla.v4i32.v16i8"


def takes_unsigned(level: str, packed: PackedType) -> bool:
    """Return whether `emit_dots` expects unsigned weight bytes, which exceed the actual values by `bias_of`."""
    return level in _VNNI or not packed.is_signed


def bias_of(level: str, packed: PackedType) -> int:
    """Return the bias, which is the difference between a weight byte and the weight's value.

    To correct for it, `emit_dots` must start from -bias x the sum of the activations.
    """
    if not packed.is_signed:
        return packed.zero
    return 128 if takes_unsigned(level, packed) else 0


def emit_dots(
    builder: Any, level: str, packed: PackedType, weights: list[Any], activations: list[Any], starts: list[Any]
) -> list[Any]:
    """Emit starts + weights . activations (the dot product), as a <16 x i32> for each sub-block.

    weights      8 vectors <64 x i8>
    activations  8 i32, each with 4 columns of int8
    starts       <16 x i32> for each sub-block
    """
    per_sub = len(weights) // len(starts)
    found = []
    for sub, start in enumerate(starts):
        chains = new_chains(builder, level, packed, start, 1)
        for index in range(sub * per_sub, (sub + 1) * per_sub):
            chains[index % len(chains)].add(weights[index], broadcast(builder, level, activations[index]))
        found.append(emit_total(builder, chains))
    return found


def multiplies_pairs(level: str) -> bool:
    """Return whether the level has an instruction that multiplies several outputs by a pair of rows."""
    return level == "neoni8mm"


def emit_paired(builder: Any, weights: list[Any]) -> list[Any]:
    """Reorder the weights of a block for `emit_pair_dots`.

    Vectors 2i and 2i + 1 of the result, <64 x i8>, hold columns 8i to 8i + 7 of outputs 0 to 7 and 8 to 15.
    """
    vectors = [builder.bitcast(vector, I32X16) for vector in weights]
    paired = []
    for first in range(0, len(vectors), 2):
        for half in range(2):
            lanes = [output + 16 * four for output in range(8 * half, 8 * half + 8) for four in range(2)]
            mask = ir.Constant(I32X16, lanes)
            paired.append(builder.bitcast(builder.shuffle_vector(*vectors[first : first + 2], mask), simd.I8X64))
    return paired


def emit_pair_dots(builder: Any, weights: list[Any], rows: list[list[Any]], starts: list[Any]) -> list[Any]:
    """Emit starts + weights . activations for each of two rows, as a <16 x i32>, with `smmla`.

    It multiplies 2 outputs by 2 rows, 8 columns at a time: 32 products where `sdot` has 16.

    weights  vectors from `emit_paired`
    rows     for each row, a <16 x i8> for every 16 columns
    starts   for each row, a <16 x i32>
    """
    halves: list[list[Any]] = [[], []]  # for each row, the results of 8 outputs
    for half in range(2):
        # Part i has the sums of outputs 8 * half + 2i and 2i + 1, each for both rows.
        lanes = [
            [8 * half + 2 * part + output + 16 * row for output in range(2) for row in range(2)] for part in range(4)
        ]
        sums = [builder.shuffle_vector(*starts, ir.Constant(_I32X4, of_part)) for of_part in lanes]
        for index, weight in enumerate(weights[half::2]):
            eights = [simd.emit_part(builder, row[index // 2], index % 2, 2) for row in rows]
            sums = _emit_pair_products(builder, sums, weight, simd.emit_join(builder, eights))
        joined = _join(builder, sums)
        for row in range(2):
            halves[row].append(builder.shuffle_vector(joined, joined, ir.Constant(_I32X8, list(range(row, 16, 2)))))
    return [simd.emit_join(builder, of_row) for of_row in halves]


def emit_pair_sums(builder: Any, sums: Any, weight: Any, pair: Any) -> Any:
    """Add the products of 8 columns of 8 outputs, a <64 x i8>, and two rows, a <16 x i8>, to a <16 x i32>."""
    return _join(builder, _emit_pair_products(builder, _split(builder, sums, 4), weight, pair))


def _emit_pair_products(builder: Any, sums: list[Any], weight: Any, pair: Any) -> list[Any]:
    twos = _split(builder, weight, 4)
    return [call(builder, _SMMLA, _I32X4, [total, two, pair]) for total, two in zip(sums, twos, strict=True)]


def broadcast(builder: Any, level: str, activation: Any) -> Any:
    """Emit a vector of the level's size that repeats 4 columns of activations (an i32) for every output."""
    n_bytes = 64 // _SUMS[level].parts
    return builder.bitcast(simd.emit_splat(builder, activation, n_bytes // 4), ir.VectorType(I8, n_bytes))


def new_chains(builder: Any, level: str, packed: PackedType, start: Any, n_outputs: int) -> list[Sum]:
    """Return the accumulators of 16 outputs, with `start`, a <16 x i32>, as the initial value of their total.

    Callers add to one accumulator after another.

    In tiles of up to 4 x 16 outputs, two independent sums halve the latency of AVX-512's dot products. The order does
    not matter, because integer addition is exact.
    """
    n_chains = 2 if level == "avx512vnni" and n_outputs <= 4 else 1
    starts = [start, constant(I32X16, 0)]
    return [_SUMS[level](builder, packed, first) for first in starts[:n_chains]]


def new_sum(builder: Any, level: str, start: Any) -> Sum:
    """Return an accumulator of 16 outputs for signed bytes, with `start`, a <16 x i32>, as its initial value."""
    return _SUMS[level](builder, SIGNED_BYTES, start)


def emit_total(builder: Any, chains: list[Sum]) -> Any:
    """Emit the total of the accumulators that `new_chains` returned, a <16 x i32>."""
    total = chains[0].total()
    for chain in chains[1:]:
        total = builder.add(total, chain.total())
    return total


def multiplies_words(level: str) -> bool:
    """Return whether weighted sums of bytes use weights of 16 bits, which `emit_weighted` takes as pairs.

    With AVX2, two products of 7 bits take longer than one of 16 bits.
    """
    return level == "avx2"


def emit_weighted(builder: Any, level: str, total: Any, values: Any, weights: list[Any]) -> Any:
    """Emit total + the weighted sum of 4 values for each of 16 outputs.

    total    <16 x i32>
    values   <64 x i8>, signed
    weights  one i32 with 4 weights of 7 bits; or, if `multiplies_words`, two i32 with weights of up to 15 bits: weights
             0 and 2, then weights 1 and 3
    """
    if multiplies_words(level):
        return _emit_weighted_words(builder, total, values, weights)
    repeated = broadcast(builder, level, weights[0])
    if level not in _VNNI:
        chain = new_sum(builder, level, total)
        chain.add(values, repeated)
        return chain.total()
    # The instruction's first factor is unsigned. Weights of 7 bits have the same value signed and unsigned.
    kind, parts = _SUMS[level], _SUMS[level].parts
    assert issubclass(kind, _OneInstruction)
    sums = [
        call(builder, kind.instruction, part.type, [part, repeated, of_part])
        for part, of_part in zip(_split(builder, total, parts), _split(builder, values, parts), strict=True)
    ]
    return _join(builder, sums)


def _emit_weighted_words(builder: Any, total: Any, values: Any, weights: list[Any]) -> Any:
    eight = constant(_I16X16, 8)
    sums = []
    for part, of_part in zip(_split(builder, total, 2), _split(builder, values, 2), strict=True):
        words = builder.bitcast(of_part, _I16X16)
        halves = builder.ashr(builder.shl(words, eight), eight), builder.ashr(words, eight)
        for half, weight in zip(halves, weights, strict=True):
            repeated = builder.bitcast(simd.emit_splat(builder, weight, 8), _I16X16)
            part = builder.add(part, call(builder, "llvm.x86.avx2.pmadd.wd", _I32X8, [half, repeated]))
        sums.append(part)
    return _join(builder, sums)


def emit_in_order(builder: Any, level: str, sums: list[Sum]) -> None:
    """Keep LLVM from moving later additions before those that were emitted so far.

    This keeps tiles within the 16 registers of AVX2. Without it, LLVM multiplies one row after another and spills the
    weights in between. The table shows instructions per block, and vectors stored to the stack or loaded from it:

                              in LLVM's order      in this order
      Q4_0, tile of 4 rows       353 (97)             293 (20)
      Q4_0, tile of 2 rows       226 (42)             176 (1)
      Q8_0, panels, 2 rows       248 (82)

    With AVX2, one thread and panels in the CPU cache, 32 rows took 170 ns per block instead of 250 (Q4_0), 185 instead
    of 240 (Q4_K) and 294 instead of 351 (Q8_0).
    """
    if not _SUMS[level].few_registers:
        return
    found = simd.emit_together(builder, [vector for one in sums for vector in one.latest()])
    for index, one in enumerate(sums):
        one.replace_latest(found[index * one.parts : (index + 1) * one.parts])


class Sum(ABC):
    """An accumulator for integer dot products of 16 outputs, held in `parts` vectors of the level's size."""

    parts = 1
    few_registers = False

    def __init__(self, builder: Any, packed: PackedType, start: Any) -> None:
        self._builder, self._packed = builder, packed
        self._sums = _split(builder, start, self.parts)

    def add(self, weight: Any, activations: Any) -> None:
        """Add the products of 4 columns. `weight` is a <64 x i8>, and `activations` come from `broadcast`."""
        for index, part in enumerate(_split(self._builder, weight, self.parts)):
            self._add_part(index, part, activations)

    def total(self) -> Any:
        """Emit the total, a <16 x i32>."""
        return _join(self._builder, self._sums)

    def latest(self) -> list[Any]:
        """Return the vectors that the last addition computed."""
        return self._sums

    def replace_latest(self, vectors: list[Any]) -> None:
        self._sums = vectors

    @abstractmethod
    def _add_part(self, index: int, weight: Any, activations: Any) -> None: ...


class _OneInstruction(Sum):
    """A sum for instruction-set levels with a dot product instruction.

    The instruction multiplies 4 pairs of bytes and adds the products to a 32-bit integer.
    """

    instruction: str

    def _add_part(self, index: int, weight: Any, activations: Any) -> None:
        total = self._sums[index]
        self._sums[index] = call(self._builder, self.instruction, total.type, [total, weight, activations])


class _Avx512(_OneInstruction):
    instruction = "llvm.x86.avx512.vpdpbusd.512"


class _AvxVnni(_OneInstruction):
    parts = 2
    few_registers = True
    instruction = "llvm.x86.avx512.vpdpbusd.256"


class _NeonDot(_OneInstruction):
    parts = 4
    instruction = "llvm.aarch64.neon.sdot.v4i32.v16i8"


class _Avx2(Sum):
    """A sum for AVX2.

    `pmaddubsw` multiplies unsigned by signed bytes and adds two products in 16 bits, with saturation. Signed weights
    are therefore passed as magnitudes, and their signs are moved to the activations. Sums stay in 16 bits as long as
    they cannot overflow, and are then widened with `pmaddwd`.
    """

    parts = 2
    few_registers = True

    def __init__(self, builder: Any, packed: PackedType, start: Any) -> None:
        super().__init__(builder, packed, start)
        largest = 128 if packed.is_signed else (1 << packed.bits) - 1
        self._max_narrow = _LARGEST_I16 // (2 * largest * _ACTIVATION)
        self._narrow = [constant(_I16X16, 0)] * self.parts
        self._counts = [0] * self.parts  # number of results added to each 16-bit sum

    def total(self) -> Any:
        for index, count in enumerate(self._counts):
            if count:
                self._widen(index)
        return super().total()

    def latest(self) -> list[Any]:
        return self._narrow if self._counts[0] else self._sums

    def replace_latest(self, vectors: list[Any]) -> None:
        if self._counts[0]:
            self._narrow = vectors
        else:
            self._sums = vectors

    def _add_part(self, index: int, weight: Any, activations: Any) -> None:
        builder = self._builder
        if self._packed.is_signed:
            activations = call(builder, "llvm.x86.avx2.psign.b", _I8X32, [activations, weight])
            negative = builder.sub(constant(_I8X32, 0), weight)
            weight = builder.select(builder.icmp_signed("<", weight, constant(_I8X32, 0)), negative, weight)
        pairs = call(builder, "llvm.x86.avx2.pmadd.ub.sw", _I16X16, [weight, activations])
        self._narrow[index] = builder.add(self._narrow[index], pairs)
        self._counts[index] += 1
        if self._counts[index] == self._max_narrow:
            self._widen(index)

    def _widen(self, index: int) -> None:
        wide = call(self._builder, "llvm.x86.avx2.pmadd.wd", _I32X8, [self._narrow[index], constant(_I16X16, 1)])
        self._sums[index] = self._builder.add(self._sums[index], wide)
        self._narrow[index], self._counts[index] = constant(_I16X16, 0), 0


class _Portable(Sum):
    """A sum for any processor.

    Even and odd bytes are widened separately, so that LLVM can use `pmaddwd` and nothing saturates.
    """

    def _add_part(self, index: int, weight: Any, activations: Any) -> None:
        builder, total = self._builder, self._sums[index]
        for first in (0, 2):
            lanes = [4 * lane + first + offset for lane in range(16) for offset in (0, 1)]
            mask, wide = ir.Constant(ir.VectorType(I32, 32), lanes), ir.VectorType(I32, 32)
            w = builder.sext(builder.shuffle_vector(weight, weight, mask), wide)
            x = builder.sext(builder.shuffle_vector(activations, activations, mask), wide)
            product = builder.mul(w, x)
            even = ir.Constant(I32X16, list(range(0, 32, 2)))
            odd = ir.Constant(I32X16, list(range(1, 32, 2)))
            evens = builder.shuffle_vector(product, product, even)
            total = builder.add(total, builder.add(evens, builder.shuffle_vector(product, product, odd)))
        self._sums[index] = total


def _split(builder: Any, vector: Any, parts: int) -> list[Any]:
    return [simd.emit_part(builder, vector, index, parts) for index in range(parts)] if parts > 1 else [vector]


def _join(builder: Any, parts: list[Any]) -> Any:
    while len(parts) > 1:
        parts = [simd.emit_join(builder, parts[index : index + 2]) for index in range(0, len(parts), 2)]
    return parts[0]


_SUMS: dict[str, type[Sum]] = {
    "avx512vnni": _Avx512,
    "avxvnni": _AvxVnni,
    "avx2": _Avx2,
    "neoni8mm": _NeonDot,  # where emit_pair_dots is not used
    "neondot": _NeonDot,
    "portable": _Portable,
}
