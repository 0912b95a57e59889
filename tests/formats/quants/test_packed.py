"""Tests of the layout of packed groups: where each block's scales, minimums and values are."""

from __future__ import annotations

from functools import partial

import pytest

from llmrun.formats.layouts.linear import PACKED_TYPES
from llmrun.formats.quants.weight_type import CACHE_LINE, PackedType

# The offsets of each block's (scales, minimums, first plane, second plane) in a group, written by hand from the
# description in quants/weight_type.py.
BY_HAND: dict[str, list[tuple[int, ...]]] = {
    "q4_0": [(0, 64), (32, 320), (576, 640), (608, 896)],
    "q8_0": [(0, 64), (32, 576), (1088, 1152), (1120, 1664)],
    "q4_1": [(0, 32, 64), (320, 352, 384), (640, 672, 704), (960, 992, 1024)],
    "mxfp4": [(0, 64), (16, 320), (32, 576), (48, 832), (1088, 1152)],
    "q4_k": [(64, 96, 128), (80, 112, 384), (640, 672, 704), (656, 688, 960)],
    "q5_k": [(64, 96, 192, 128), (80, 112, 512, 448)],
    "q6_k": [(64, 256, 128), (96, 640, 512), (896, 1088, 960)],
}
# The offsets of (upper scales, upper minimums) for every 8 blocks.
UPPERS: dict[str, list[tuple[int, ...]]] = {
    "q4_k": [(0, 32), (2368, 2400)],
    "q6_k": [(0,), (32,), (6720,)],
}


def indices(packed: PackedType, block: int) -> tuple[int, int]:
    """Return the first block of a block's segment, and the block's place in the segment."""
    place = block % packed.segment_blocks
    return block - place, place


def parts(packed: PackedType, n_blocks: int) -> list[tuple[int, int]]:
    """Return (first byte, number of bytes) of each part of a group, in the order in which a kernel reads the parts."""
    found = []
    for block in range(n_blocks):
        scale_bytes = 16 * packed.scale_bytes
        at = indices(packed, block)
        if packed.two_levels and block % 8 == 0:
            found.append((packed.upper_scales_at(*at), 32))
            found += [(packed.upper_mins_at(*at), 32)] * packed.mins
        found.append((packed.scales_at(*at), scale_bytes))
        found += [(packed.mins_at(*at), scale_bytes)] * packed.mins
        for plane in reversed(range(len(packed.planes))):
            found.append((packed.values_at(plane, *at), CACHE_LINE * packed.planes[plane]))
    return found


def lengths(packed: PackedType) -> list[int]:
    return [8, 16, 24, 40] if packed.two_levels else [1, 2, 3, 5, 18]


@pytest.mark.parametrize("name", BY_HAND)
def test_offsets_are_the_documented_ones(name: str) -> None:
    packed = PACKED_TYPES[name]
    offsets = [packed.scales_at, *[packed.mins_at] * packed.mins]
    offsets += [partial(packed.values_at, plane) for plane in range(len(packed.planes))]
    assert [tuple(at(*indices(packed, block)) for at in offsets) for block in range(len(BY_HAND[name]))] == BY_HAND[
        name
    ]


@pytest.mark.parametrize("name", UPPERS)
def test_upper_scales_are_on_the_documented_lines(name: str) -> None:
    packed = PACKED_TYPES[name]
    offsets = [packed.upper_scales_at, *[packed.upper_mins_at] * packed.mins]
    for block in range(8 * len(UPPERS[name])):
        assert tuple(at(*indices(packed, block)) for at in offsets) == UPPERS[name][block // 8]


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_parts_of_a_group_do_not_overlap(name: str) -> None:
    packed = PACKED_TYPES[name]
    for n_blocks in lengths(packed):
        taken = sorted(parts(packed, n_blocks))
        ends = [start + size for start, size in taken]
        assert all(end <= start for end, (start, _) in zip(ends, taken[1:], strict=False))
        assert ends[-1] == packed.group_bytes(32 * n_blocks)


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_whole_segments_have_no_gaps(name: str) -> None:
    packed = PACKED_TYPES[name]
    n_blocks = 16  # whole segments and whole lines of upper scales
    assert sum(size for _, size in parts(packed, n_blocks)) == packed.group_bytes(32 * n_blocks)


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_new_cache_lines_are_read_in_order(name: str) -> None:
    """Processors prefetch memory that is read in the order of its addresses."""
    packed = PACKED_TYPES[name]
    for n_blocks in lengths(packed):
        lines = [
            line
            for start, size in parts(packed, n_blocks)
            for line in range(start // CACHE_LINE, -(-(start + size) // CACHE_LINE))
        ]
        first_uses = list(dict.fromkeys(lines))
        assert first_uses == sorted(first_uses)


@pytest.mark.parametrize("name", PACKED_TYPES)
def test_values_begin_on_cache_lines(name: str) -> None:
    packed = PACKED_TYPES[name]
    starts = [
        packed.values_at(plane, *indices(packed, block)) for plane in range(len(packed.planes)) for block in range(40)
    ]
    assert all(start % CACHE_LINE == 0 for start in starts)


def test_a_short_last_segment_ends_with_its_values() -> None:
    """Rows of 576 columns have 18 blocks, which are four and a half MXFP4 segments."""
    assert PACKED_TYPES["mxfp4"].group_bytes(576) == 5 * 64 + 18 * 256
