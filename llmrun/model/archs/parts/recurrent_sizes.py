"""The sizes of recurrent layers (`ssm.*`), with limits that protect against malicious headers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llmrun.model.archs.parts.hyperparameters import MOST_HEADS, MOST_WIDTH
from llmrun.model.archs.parts.keys import VECTOR, Keys

_MOST_HEAD_SIZE: Final = 1024  # real models have at most 256
_LEAST_TAPS, _MOST_TAPS = 2, 16  # the limits of the convolution's kernel; real models have 4


@dataclass(frozen=True, slots=True)
class RecurrentSizes:
    """The sizes of a recurrent layer, whose state is a matrix per head.

    heads       number of value heads
    key_heads   number of key heads, a divisor of `heads`; Mamba-2 calls them groups
    key_size    number of features of a key
    value_size  number of features of a value
    taps        number of positions that the convolution covers, including the row's own
    """

    heads: int
    key_heads: int
    key_size: int
    value_size: int
    taps: int

    @property
    def keys(self) -> int:
        """The number of features of all keys."""
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        """The number of features of all values."""
        return self.heads * self.value_size

    @property
    def convolved(self) -> int:
        """The number of features of the convolution, which covers queries, keys and values."""
        return 2 * self.keys + self.values


def recurrent_sizes_of(keys: Keys) -> RecurrentSizes:
    """Read the sizes. Raises BadGGUF and UnsupportedModel."""
    heads = keys.integer("ssm.time_step_rank", minimum=1, maximum=MOST_HEADS)
    key_heads = keys.integer("ssm.group_count", minimum=1, maximum=heads)
    if heads % key_heads:
        raise keys.bad("ssm.group_count", f"must be a divisor of {heads}, the number of heads, not {key_heads}")
    values = keys.integer("ssm.inner_size", minimum=1, maximum=MOST_WIDTH)
    if values % heads:
        raise keys.bad("ssm.inner_size", f"must be a multiple of {heads}, the number of heads, not {values}")
    value_size = values // heads
    if value_size % VECTOR or value_size > _MOST_HEAD_SIZE:
        raise keys.unsupported(f"recurrent heads of {value_size} features")
    return RecurrentSizes(
        heads=heads,
        key_heads=key_heads,
        key_size=key_size_of(keys),
        value_size=value_size,
        taps=taps_of(keys),
    )


def key_size_of(keys: Keys) -> int:
    return keys.features("ssm.state_size", minimum=1, maximum=_MOST_HEAD_SIZE)


def taps_of(keys: Keys) -> int:
    """Return the number of positions that the convolution covers. Raises BadGGUF and UnsupportedModel."""
    taps = keys.integer("ssm.conv_kernel", minimum=1, maximum=MOST_WIDTH)
    if not _LEAST_TAPS <= taps <= _MOST_TAPS:
        raise keys.unsupported(f"a convolution over {taps} positions")
    return taps
