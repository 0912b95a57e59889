"""Every kernel the tests look at, compiled into their cache: `python -m tests.support.compiled [--beside]` other tests.

A minute of two processors: the suite's first minutes leave one idle most of the time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from llmrun.kernels.store import KernelName, object_images
from tests.support.kernel_runs import ALL_KERNELS, LEVELS_HERE, TARGETS, target_of

AttentionKind = tuple[int, int, int, str]  # (heads of a group, head size, value size, type of the cache)

# Of the attention tests: those that tiny models have too, and more. Each is four seconds of compiling at a level.
# Levels differ in the length of a vector and in the dot product of integers, which attention has not. So the best and
# the portable one have all, AVX2 the most awkward ones of the others, and AVX-VNNI, which is AVX2 here, none of them.
SHAPES: tuple[AttentionKind, ...] = (
    (2, 16, 16, "f16"),
    (3, 64, 64, "f16"),
    (1, 48, 48, "f16"),
    (3, 64, 64, "q8_0"),
    (1, 48, 48, "q8_0"),
)
AWKWARD: tuple[AttentionKind, ...] = ((11, 16, 16, "f16"), (2, 48, 32, "f16"))
MORE_SHAPES: tuple[AttentionKind, ...] = (
    *AWKWARD,
    (11, 16, 16, "q8_0"),
    (4, 512, 512, "f16"),
    (16, 576, 512, "q8_0"),
)


def attention_shapes(level: str) -> tuple[AttentionKind, ...]:
    if level in (LEVELS_HERE[0], "portable"):
        return SHAPES + MORE_SHAPES
    return SHAPES + AWKWARD if level == "avx2" else SHAPES


def attention_kernels(level: str) -> Iterator[KernelName]:
    for group, head_size, value_size, kv_type in attention_shapes(level):
        sizes = {"head_size": head_size, "value_size": value_size}
        yield KernelName.of("rope", "rope_store", **sizes, kv_type=kv_type)
        yield KernelName.of("attention", "attention", **sizes, group=group, kv_type=kv_type)
        yield KernelName.of("attention", "merge", value_size=value_size)


def compile_all() -> None:
    for level in LEVELS_HERE:
        object_images((*ALL_KERNELS, *attention_kernels(level)), target_of(level))
    for target in TARGETS.values():
        object_images(ALL_KERNELS, target)


if __name__ == "__main__":
    if "--beside" in sys.argv[1:] and hasattr(os, "nice"):
        os.nice(10)
    compile_all()
