"""Object files of kernels, which tests examine."""

from __future__ import annotations

from collections.abc import Sequence

from llmrun.base.compiled.compiling import images_for
from llmrun.base.compiled.kernel import KernelName
from llmrun.base.compiled.levels import Target


def object_images(names: Sequence[KernelName], target: Target) -> dict[KernelName, bytes]:
    """Return the objects of kernels for any target, even one that this processor cannot run."""
    return images_for(names, [target], None)[target]
