"""Every kernel the tests look at, compiled into their cache: `python -m tests.support.compiled [--beside]` other tests.

A minute of two processors: the suite's first minutes leave one idle most of the time.
"""

from __future__ import annotations

import os
import sys

from llmrun.kernels.store import KernelName, object_images
from tests.support.kernel_runs import ALL_KERNELS, LEVELS_HERE, TARGETS, target_of

# (heads of a group, head size, value size, type of the cache) of the attention tests.
SHAPES = [
    (*shape, "f16") for shape in ((1, 16, 16), (2, 48, 32), (3, 64, 64), (1, 48, 48), (11, 16, 16), (4, 512, 512))
]
SHAPES += [(*shape, "q8_0") for shape in ((3, 64, 64), (1, 48, 48), (11, 16, 16), (16, 576, 512))]
ATTENTION = tuple(
    name
    for group, head_size, value_size, kv_type in SHAPES
    for name in (
        KernelName.of("rope", "rope_store", head_size=head_size, value_size=value_size, kv_type=kv_type),
        KernelName.of(
            "attention", "attention", head_size=head_size, value_size=value_size, group=group, kv_type=kv_type
        ),
        KernelName.of("attention", "merge", value_size=value_size),
    )
)


def compile_all() -> None:
    for level in LEVELS_HERE:
        object_images((*ALL_KERNELS, *ATTENTION), target_of(level))
    for target in TARGETS.values():
        object_images(ALL_KERNELS, target)


if __name__ == "__main__":
    if "--beside" in sys.argv[1:] and hasattr(os, "nice"):
        os.nice(10)
    compile_all()
