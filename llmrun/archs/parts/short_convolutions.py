"""Functions for short convolution layers. They read the hyperparameters and add the ops to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.archs.parts.hyperparameters import MOST_HEADS, layers_of
from llmrun.archs.parts.keys import Keys

if TYPE_CHECKING:
    from llmrun.archs.parts.writer import PlanWriter
    from llmrun.plan.values import Value

_MOST_TAPS = 64  # real models have 3
_FEATURES_AT_ONCE = 16  # the vector size of the kernel


def attention_layers(keys: Keys) -> tuple[tuple[bool, ...], int]:
    """Return whether each layer is an attention layer, and the number of KV heads of the attention layers.

    Convolution layers have no KV heads. Raises BadGGUF and UnsupportedModel.
    """
    key, layers = "attention.head_count_kv", layers_of(keys)
    if not keys.is_array(key):
        return (True,) * layers, keys.integer(key, minimum=1, maximum=MOST_HEADS)
    counts = keys.of_each_layer(key, layers)
    some = set(counts) - {0}
    if len(some) > 1:
        raise keys.unsupported(f"different values of {keys.name(key)} in different layers")
    kv_heads = some.pop() if some else 1  # the value is not used if there are no attention layers
    if not 1 <= kv_heads <= MOST_HEADS:
        raise keys.bad(key, f"must be 0 to {MOST_HEADS}, not {kv_heads}")
    return tuple(count > 0 for count in counts), kv_heads


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
