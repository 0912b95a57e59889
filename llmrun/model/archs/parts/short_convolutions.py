"""Functions for short convolution layers. They read the hyperparameters and add the ops to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.model.archs.parts.keys import Keys

if TYPE_CHECKING:
    from llmrun.model.archs.parts.writer import PlanWriter
    from llmrun.model.plan.values import Value

_MOST_TAPS = 64  # real models have 3
_FEATURES_AT_ONCE = 16  # the vector size of the kernel


def taps_of(keys: Keys) -> int:
    """Return the number of positions that a convolution covers, including the row's own. Raises BadGGUF."""
    return keys.integer("shortconv.l_cache", minimum=2, maximum=_MOST_TAPS)


def add_convolution(w: PlanWriter, block: str, h: Value, taps: int, to: Value) -> None:
    """Add the convolution of h to `to`. Raises UnsupportedModel."""
    if to.width % _FEATURES_AT_ONCE:
        keys = Keys(w.tensors.file)
        raise keys.unsupported(
            f"the features of a convolution must be a multiple of {_FEATURES_AT_ONCE}, not {to.width}"
        )
    weight = w.tensors.vector(f"{block}.shortconv.conv.weight", taps, to.width).reshape(to.width, taps)
    mixed = w.plan.convolve(w.linear(f"{block}.shortconv.in_proj", h, 3 * to.width), weight)
    w.linear_add(f"{block}.shortconv.out_proj", mixed, to=to)
