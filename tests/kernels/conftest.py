"""Kernels are compiled side by side before the first test asks for one: a compiler takes a second to start."""

from __future__ import annotations

import pytest

from llmrun.kernels.store import KernelName, object_images
from tests.support.kernel_runs import ALL_KERNELS, LEVELS_HERE, target_of

MORE_HEAD_SIZES = tuple(
    KernelName.of("attention", name, head_size=size) for size in (16, 48, 64) for name in ("rope_store", "attention")
)


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    for level in LEVELS_HERE:
        object_images((*ALL_KERNELS, *MORE_HEAD_SIZES), target_of(level))
