"""Compile every kernel that the tests use into the cache: `python -m tests.support.kernels.compiled [--beside]`.

This takes five minutes on one processor. Tests that run at the same time spend a third of their time waiting.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts.kv import parse_kv_type
from tests.support.kernels.objects import object_images
from tests.support.kernels.runs import ALL_KERNELS, LEVELS_HERE, TARGETS, own_kernels, target_of

AttentionKind = tuple[int, int, int, str]  # (query heads per KV head, head size, value size, cache type)

# The shapes of the attention tests, which include those of the tiny models. Each takes four seconds to compile per
# level.
SHAPES: tuple[AttentionKind, ...] = (
    (2, 16, 16, "f16"),
    (3, 64, 64, "f16"),
    (1, 48, 48, "f16"),
    (3, 64, 64, "q8_0"),
    (1, 48, 48, "q8_0"),
    (11, 16, 16, "f16"),
    (11, 16, 16, "q8_0"),
    (2, 48, 32, "f16"),
    (4, 512, 512, "f16"),
    (16, 576, 512, "q8_0"),
    (3, 64, 64, "q4_0"),
    (1, 48, 48, "q4_0"),
    (11, 16, 16, "q4_0"),
    (1, 80, 80, "q4_0"),
    (3, 64, 64, "q8_0:q4_0"),
    (2, 48, 32, "q4_0:f16"),
    (2, 48, 32, "f16:q8_0"),
)


def attention_kernels() -> Iterator[KernelName]:
    for group, head_size, value_size, kv_type in SHAPES:
        sizes = {"head_size": head_size, "value_size": value_size}
        keys, values = (kind.name for kind in parse_kv_type(kv_type))
        yield KernelName.of("attention.rope", "rope_store", **sizes, keys=keys, values=values)
        yield KernelName.of("attention.attention", "attention", **sizes, group=group, keys=keys, values=values)
        yield KernelName.of("attention.attention", "merge", value_size=value_size, values=values)


def compile_all() -> None:
    for level in LEVELS_HERE:
        object_images(own_kernels((*ALL_KERNELS, *attention_kernels()), level), target_of(level))
    for level, target in TARGETS.items():
        object_images(own_kernels(ALL_KERNELS, level), target)


if __name__ == "__main__":
    if "--beside" in sys.argv[1:] and hasattr(os, "nice"):
        os.nice(10)
    compile_all()
