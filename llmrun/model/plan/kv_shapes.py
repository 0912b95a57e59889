"""The shapes of the data that layers store in the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.formats.layouts.kv_blocks import BLOCK, HeadLayout
from llmrun.formats.layouts.kv_types import parse_kv_type
from llmrun.model.plan.reach import ALL, Reach

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The head counts and sizes of an attention layer.

    heads       number of query heads, a multiple of `kv_heads` with grouped-query attention (GQA)
    head_size   features of each query and key head
    window      number of positions that a row attends to, including its own; 0 means all earlier positions
    value_size  features of each value head; 0 means the same as `head_size`
    around      without a causal mask, the number of positions before and after its own that a row attends to, or ALL;
                None with a causal mask
    """

    heads: int
    kv_heads: int
    head_size: int
    window: int = 0
    value_size: int = 0
    around: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_size", self.value_size or self.head_size)

    @property
    def reach(self) -> Reach:
        """The positions that a row attends to, relative to its own."""
        if self.around is not None:
            return Reach(self.around, self.around)
        return Reach(self.window - 1 if self.window else ALL, 0)

    def layout(self, kv_type: str) -> HeadLayout:
        """Return the cache layout of one KV head."""
        return HeadLayout(*parse_kv_type(kv_type), self.head_size, self.value_size)

    def block_bytes(self, kv_type: str) -> int:
        """Return the size in bytes of one cache block in one layer."""
        return self.kv_heads * self.layout(kv_type).n_bytes


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """A short convolution over positions. Each row depends on `taps` positions, including its own.

    The cache's blocks store the inputs as float32[position, feature].
    """

    width: int
    taps: int

    @property
    def window(self) -> int:
        return self.taps

    def block_bytes(self, kv_type: str) -> int:
        return _FLOAT * self.width * BLOCK


KVShape = AttentionShape | ConvolutionShape


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The location of one layer's keys and values in the KV cache: the layer's group, and its index in that group."""

    shape: KVShape
    group: int
    layer: int


@dataclass(slots=True)
class KVGroup:
    """All layers of one shape. They share a single cache array."""

    shape: KVShape
    layers: int = 0
