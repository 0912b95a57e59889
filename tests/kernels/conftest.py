"""Kernels are compiled side by side before the first test asks for one: a compiler takes a second to start."""

from __future__ import annotations

import pytest

from llmrun.kernels.store import KernelName, object_images
from tests.support.kernel_runs import ALL_KERNELS, LEVELS_HERE, target_of

# (heads of a group, head size) of the attention tests.
SHAPES = ((1, 16), (2, 32), (3, 64), (1, 48), (11, 16))
ATTENTION = tuple(
    name
    for group, size in SHAPES
    for name in (
        KernelName.of("rope", "rope_store", head_size=size),
        KernelName.of("attention", "attention", head_size=size, group=group),
        KernelName.of("attention", "merge", head_size=size),
    )
)


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    for level in LEVELS_HERE:
        object_images((*ALL_KERNELS, *ATTENTION), target_of(level))
