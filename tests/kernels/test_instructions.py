"""Tests on every kernel's disassembly: no instruction or register above its level, and no library calls."""

from __future__ import annotations

import ast
import re
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import capstone
import pytest

from llmrun import kernels
from llmrun.base.compiled.host import IDENTIFY
from llmrun.base.compiled.kernel import KernelName
from llmrun.kernels import object_file
from llmrun.kernels.code.simd import NEON
from tests.support.kernels.objects import object_images
from tests.support.kernels.runs import ALL_KERNELS, LEVELS_HERE, TARGETS, own_kernels, stand_in

# Machine code depends only on the sources of kernels and the versions of Numba and LLVM.
pytestmark = pytest.mark.night

# Capstone's names for the extensions that each level may use.
ANY_X86 = {"mode64", "not64bitmode", "jump", "ret", "call", "branch_relative", "cmov", "sse1", "sse2"}
HASWELL = {"avx", "avx2", "fma", "fc16", "bmi", "bmi2", "sse3", "ssse3", "sse41", "sse42", "novlx"}
ICE_LAKE = {"avx512", "vlx", "bwi", "dqi", "cdi"}
GROUPS = {
    "portable": ANY_X86,
    "avx2": ANY_X86 | HASWELL,
    "avxvnni": ANY_X86 | HASWELL,
    "avx512vnni": ANY_X86 | HASWELL | ICE_LAKE,
}
REGISTERS = {
    "portable": ("ymm", "zmm", "k", "tmm"),
    "avx2": ("zmm", "k", "tmm"),
    "avxvnni": ("zmm", "k", "tmm"),
    "avx512vnni": ("tmm",),
}

ATTENTION = KernelName.of(
    "attention.attention", "attention", head_size=48, value_size=48, group=1, keys="q4_0", values="q4_0"
)
_EXECUTABLE = 4  # SHF_EXECINSTR


def code_sections(image: bytes) -> Iterator[bytes]:
    """Return the bytes of every executable section of an ELF object."""
    section_offset = struct.unpack_from("<Q", image, 0x28)[0]
    entry_size, n_sections = struct.unpack_from("<HH", image, 0x3A)
    for index in range(n_sections):
        header = section_offset + index * entry_size
        flags = struct.unpack_from("<Q", image, header + 8)[0]
        offset, size = struct.unpack_from("<QQ", image, header + 0x18)
        if flags & _EXECUTABLE and size:
            yield image[offset : offset + size]


def disassembled(level: str, image: bytes) -> list[capstone.CsInsn]:
    """Return every instruction; fail on bytes that do not decode."""
    arm = level in NEON
    machine = (capstone.CS_ARCH_ARM64, capstone.CS_MODE_ARM) if arm else (capstone.CS_ARCH_X86, capstone.CS_MODE_64)
    decoder = capstone.Cs(*machine)
    decoder.detail = True
    instructions: list[capstone.CsInsn] = []
    for code in code_sections(image):
        start = 0
        while start < len(code):
            found = list(decoder.disasm(code[start:], start))
            instructions += found
            start += sum(instruction.size for instruction in found)
            if start < len(code):
                assert level == "avxvnni", "an instruction nobody knows"
                code = with_vpmaddubsw(code, start)
    assert instructions
    return instructions


def with_vpmaddubsw(code: bytes, at: int) -> bytes:
    """Replace `vpdpbusd` or `vpdpwssd` with an instruction of the same form, as Capstone 5 knows only AVX-512's."""
    prefix, escape, _, opcode = code[at : at + 4]
    assert (prefix, escape & 0x1F) == (0xC4, 2), "an instruction nobody knows"
    assert opcode in (0x50, 0x52), "an instruction nobody knows"
    return code[: at + 3] + b"\x04" + code[at + 4 :]


def registers_of(instruction: capstone.CsInsn) -> set[str]:
    read, written = instruction.regs_access()
    return {instruction.reg_name(register) for register in (*read, *written)}


@pytest.fixture(scope="module", params=TARGETS)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def code(level: str) -> dict[str, list[capstone.CsInsn]]:
    images = object_images(own_kernels(ALL_KERNELS, level), TARGETS[level])
    return {f"{name.module}.{name.function}{name.parameters}": disassembled(level, images[name]) for name in images}


def test_no_instruction_is_above_its_level(level: str, code: dict[str, list[capstone.CsInsn]]) -> None:
    if level in NEON:
        allowed = {"neon", "jump", "branch_relative", "return", "fparmv8", "crc", "call"}
    else:
        allowed = GROUPS[level]
    for kernel, instructions in code.items():
        for instruction in instructions:
            groups = {instruction.group_name(group) for group in instruction.groups}
            assert groups <= allowed, f"{kernel}: {instruction.mnemonic} {instruction.op_str}: {groups - allowed}"


def test_no_register_is_above_its_level(level: str, code: dict[str, list[capstone.CsInsn]]) -> None:
    too_high = REGISTERS.get(level, ("z", "p"))  # SVE registers on AArch64
    for kernel, instructions in code.items():
        for instruction in instructions:
            for register in registers_of(instruction):
                above = register.rstrip("0123456789") in too_high
                assert not above, f"{kernel}: {instruction.mnemonic} {instruction.op_str}"


def test_the_integer_kernels_use_their_levels_dot_product(level: str, code: dict[str, list[capstone.CsInsn]]) -> None:
    wanted = {
        "portable": {"pmaddwd"},
        "avx2": {"vpmaddubsw"},
        "avxvnni": {"vpmaddubsw"},  # see with_vpmaddubsw
        "avx512vnni": {"vpdpbusd"},
        "neoni8mm": {"smmla", "sdot"},  # for panels and for planes
        "neondot": {"sdot"},
    }[level]
    for kernel, instructions in code.items():
        if kernel.startswith(("linear.int8.", "experts.int8.")):
            found = {instruction.mnemonic for instruction in instructions}
            assert wanted <= found, kernel
            assert level == "neoni8mm" or "smmla" not in found, kernel


UNFUSED = ("linear.embed.", "attention.rope.", "experts.rows.", "rows.convolution.", "team.", "packing.")


def test_sums_of_products_are_fused_where_the_level_can(level: str, code: dict[str, list[capstone.CsInsn]]) -> None:
    """Nothing else may be fused: a compiler that fuses on its own would change results from version to version."""
    for kernel, instructions in code.items():
        fused = any("fmadd" in i.mnemonic or i.mnemonic in ("fmla", "fmadd") for i in instructions)
        if level == "portable" or kernel.startswith((*UNFUSED, "sampling.", "processor.")):
            assert not fused, kernel
        elif kernel.startswith(
            (
                "linear.int8.",
                "linear.floats.",
                "experts.int8.",
                "experts.floats.",
                "attention.attention.",
                "rows.norms.",
                "rows.rowwise.soft_cap",
            )
        ):
            assert fused, kernel


def loops(instructions: list[capstone.CsInsn]) -> Iterator[list[capstone.CsInsn]]:
    """Return the innermost loops, each from the target of a backward jump up to that jump."""
    places = {instruction.address: index for index, instruction in enumerate(instructions)}
    last_end = -1
    for index, instruction in enumerate(instructions):
        if instruction.mnemonic.startswith(("j", "b.", "cbnz")) and "0x" in instruction.op_str:
            start = places.get(int(instruction.op_str.rpartition("0x")[2], 16), index + 1)
            if last_end < start <= index:
                last_end = index
                yield instructions[start : index + 1]


@pytest.mark.parametrize(("level", "registers"), [("avx512vnni", 16), ("avx2", 12)])
def test_sums_of_a_tile_of_attention_stay_in_registers(level: str, registers: int) -> None:
    """Checks full tiles that convert their operands. LLVM once spilled half of the sums to the stack in each step,
    which made the attention of prefill take twice as long.
    """
    name = KernelName.of(
        "attention.attention", "attention", head_size=48, value_size=48, group=1, keys="f16", values="f16"
    )
    instructions = disassembled(level, object_images([name], TARGETS[level])[name])
    tiles = [
        loop
        for loop in loops(instructions)
        if sum("fmadd" in instruction.mnemonic for instruction in loop) >= registers
        and any(instruction.mnemonic == "vcvtph2ps" for instruction in loop)
        and any(instruction.mnemonic == "vbroadcastss" for instruction in loop)
        # Values that only some rows attend to are added to states in memory.
        and not any(i.op_str.startswith(("ymm", "zmm")) and "word ptr [r" in i.op_str.split(",")[0] for i in loop)
    ]
    assert len(tiles) >= 2  # one for scores and one for values
    for tile in tiles:
        assert not any("rsp" in instruction.op_str for instruction in tile)


@pytest.mark.parametrize(
    ("level", "dot", "tile", "most"), [("avx512vnni", "vpdpbusd", 64, 0), ("avx2", "vpmaddwd", 32, 12)]
)
def test_integer_sums_of_attention_stay_in_registers(level: str, dot: str, tile: int, most: int) -> None:
    """Checks full tiles of 8 queries (AVX-512) and 4 queries (AVX2), where a few operands are on the stack.

    LLVM once kept the address of each query's weights on the stack and incremented all of them in each step.
    """
    name = KernelName.of(
        "attention.attention", "attention", head_size=48, value_size=48, group=1, keys="q8_0", values="q8_0"
    )
    instructions = disassembled(level, object_images([name], TARGETS[level])[name])
    tiles = [loop for loop in loops(instructions) if sum(one.mnemonic == dot for one in loop) >= tile]
    assert len(tiles) >= 2  # one for scores and one for weighted sums
    for loop in tiles:
        assert sum("rsp" in one.op_str for one in loop) <= most


@pytest.mark.parametrize(
    ("level", "dots", "most"), [("avx512vnni", 64, 0), ("avx512vnni", 32, 0), ("avx2", 72, 16), ("avx2", 36, 4)]
)
def test_sums_of_few_rows_stay_in_registers(level: str, dots: int, most: int) -> None:
    """Checks the tiles with 8 and 4, or 4 and 2 rows by the number of their dot products. With 4 rows and AVX2, the
    8 vectors of float sums are stored once per block. LLVM once stored 30 vectors, the weights among them.
    """
    name = KernelName.of("linear.int8", "linear", weight="q4_0")
    instructions = disassembled(level, object_images([name], TARGETS[level])[name])
    multiplies = ("vpdpbusd",) if level == "avx512vnni" else ("vpmaddubsw", "vpmaddwd")
    tiles = [loop for loop in loops(instructions) if sum(i.mnemonic in multiplies for i in loop) == dots]
    assert tiles
    for tile in tiles:
        stored = [i for i in tile if i.op_str.startswith(("ymmword ptr [rsp", "zmmword ptr [rsp"))]
        assert len(stored) <= most


@pytest.mark.parametrize(("level", "dot"), [("avx2", "vpmaddubsw"), ("avx512vnni", "vpdpbusd")])
@pytest.mark.parametrize("weight", ["q4_0", "q8_0"])
def test_single_rows_stay_in_registers_and_prefetch(level: str, dot: str, weight: str) -> None:
    """LLVM once moved up to 30 vectors of each block to the stack and back at AVX2."""
    name = KernelName.of("linear.int8", "linear", weight=weight)
    instructions = disassembled(level, object_images([name], TARGETS[level])[name])
    found = [loop for loop in loops(instructions) if any(one.mnemonic == "prefetcht0" for one in loop)]
    dots = {sum(one.mnemonic == dot for one in loop): loop for loop in found}
    row = dots[min(filter(None, dots))]  # the loops with more dot products are those of tiles
    assert not any("rsp" in one.op_str and "mm" in one.op_str for one in row)


@pytest.mark.parametrize("level", ["avx2", "avx512vnni"])
def test_vectors_on_the_stack_are_aligned(level: str) -> None:
    """Vectors that cross cache lines once made a tile of 4 rows take nearly twice as long."""
    names = [KernelName.of("linear.int8", "linear", weight="q6_k")]
    names += [
        KernelName.of(
            "attention.attention", "attention", head_size=64, value_size=64, group=3, keys="f16", values="f16"
        )
    ]
    moves = Counter(
        instruction.mnemonic
        for name, image in object_images(names, TARGETS[level]).items()
        for instruction in disassembled(level, image)
        if re.search(r"[yz]mmword ptr \[rsp", instruction.op_str) and instruction.mnemonic.startswith("vmov")
    )
    assert moves
    assert all(mnemonic.startswith(("vmovaps", "vmovapd", "vmovdqa")) for mnemonic in moves), moves


@pytest.mark.parametrize("weight", ["q4_0", "q4_k", "q6_k", "q8_0", "mxfp4"])
def test_matrix_products_of_panels_stay_in_registers(weight: str) -> None:
    """A tile of 2 rows has one loop over its blocks, with 32 `smmla` and nothing on the stack."""
    name = KernelName.of("linear.int8", "linear", weight=weight)
    instructions = disassembled("neoni8mm", object_images([name], TARGETS["neoni8mm"])[name])
    [tile] = [loop for loop in loops(instructions) if any(one.mnemonic == "smmla" for one in loop)]
    found = Counter(one.mnemonic for one in tile)
    assert (found["smmla"], found["sdot"]) == (32, 0)
    assert not any("[sp" in one.op_str for one in tile)


def test_spinning_threads_tell_the_processor(level: str, code: dict[str, list[capstone.CsInsn]]) -> None:
    pause = {"portable": None, **dict.fromkeys(NEON, "yield")}.get(level, "pause")
    workers = [instructions for kernel, instructions in code.items() if kernel.startswith("team.work")]
    assert len(workers) == sum(name.function.startswith("work") for name in own_kernels(ALL_KERNELS, level))
    for work in workers:
        assert pause is None or any(instruction.mnemonic == pause for instruction in work)


def test_no_kernel_needs_a_library(level: str) -> None:
    for name, image in object_images(own_kernels(ALL_KERNELS, level), TARGETS[level]).items():
        defined, undefined = object_file.symbols(image)
        assert len(defined) == 1, name
        assert undefined <= object_file.ALLOWED_UNDEFINED, name


def test_the_list_of_kernels_is_whole() -> None:
    """A kernel that is missing from the list would not be disassembled."""
    assert {(name.module, name.function) for name in ALL_KERNELS} == set(kernels_in_sources())


def test_kernels_are_compiled_where_their_code_differs() -> None:
    for level in TARGETS:
        own = set(own_kernels(ALL_KERNELS, level))
        assert own >= {name for name in ALL_KERNELS if name.module in ("linear.int8", "experts.int8")}
        if level in (LEVELS_HERE[0], "portable", "neondot"):
            assert own == set(ALL_KERNELS) - ({IDENTIFY} if level != "portable" else set())


def test_avx_vnni_is_avx2_without_dot_products() -> None:
    """`stand_in` relies on this."""
    names = [
        KernelName.of("rows.norms", "rmsnorm"),
        KernelName.of("experts.routing", "route"),
        KernelName.of("rows.rowwise", "add"),
        ATTENTION,
    ]
    assert all(stand_in(name, "avxvnni") == "avx2" for name in names if LEVELS_HERE[0] != "avxvnni")
    with_vnni, without = (object_images(names, TARGETS[level]) for level in ("avxvnni", "avx2"))
    for name in names:
        assert list(code_sections(with_vnni[name])) == list(code_sections(without[name]))


def kernels_in_sources() -> Iterator[tuple[str, str]]:
    """Return the (module, function) of every top-level kernel or kernel family in the sources."""
    for path in Path(kernels.__path__[0]).rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                marks = {mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)}
                if marks & {"kernel", "kernel_family"}:
                    yield ".".join(path.relative_to(kernels.__path__[0]).with_suffix("").parts), node.name


def test_a_register_above_the_level_is_seen() -> None:
    """Tests the check itself, on kernels of a higher level."""
    images = object_images(ALL_KERNELS[:1], TARGETS["avx512vnni"])
    instructions = disassembled("avx512vnni", images[ALL_KERNELS[0]])
    registers = {register.rstrip("0123456789") for i in instructions for register in registers_of(i)}
    groups = {i.group_name(group) for i in instructions for group in i.groups}
    assert registers & set(REGISTERS["avx2"])
    assert groups - GROUPS["avx2"]
