"""What layers keep from step to step in the KV cache, by the shape of it."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.layouts.kv_blocks import BLOCK, HeadLayout

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Heads of a layer. Grouped-query attention (GQA): `heads` is a multiple of `kv_heads`.

    head_size   features of a query's head and a key's
    window      how many positions a row sees, its own among them; 0: all before it
    value_size  features of a value's head; 0: as many as a key's
    """

    heads: int
    kv_heads: int
    head_size: int
    window: int = 0
    value_size: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_size", self.value_size or self.head_size)

    def layout(self, kv_type: str) -> HeadLayout:
        """Of a KV head in the cache."""
        return HeadLayout(kv_type, self.head_size, self.value_size)

    def block_bytes(self, kv_type: str) -> int:
        """Of a block of the cache, in one layer."""
        return self.kv_heads * self.layout(kv_type).n_bytes


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """A short convolution over positions: a row sees `taps` positions, its own among them. They are kept as float32 in
    the cache's blocks: [position, feature]."""

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
    """Where one layer's keys and values are in the KV cache: its number in the group of all layers of its shape."""

    shape: KVShape
    group: int
    layer: int


@dataclass(slots=True)
class KVGroup:
    """All layers of one shape, whose cache is one array."""

    shape: KVShape
    layers: int = 0
