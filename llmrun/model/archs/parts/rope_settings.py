"""RoPE settings from the metadata, and the Rope objects built from these settings.

With every scaling method, the angle is linear in the position, so each method can be expressed as a set of frequencies
and one magnitude. The formulas come from ggml's rope, with llama.cpp's defaults. llama.cpp's `freq_scale` is
1 / factor here.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor, pi
from typing import TYPE_CHECKING, Self

import numpy as np
from msgspec import Struct, structs

from llmrun.model.plan.elementary import Pairing, Rope, inverse_powers, log

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.archs.parts.keys import Keys
    from llmrun.model.archs.parts.tensors import Tensors

_MOST_FREQUENCY = 1e9  # radians per position; the frequencies of real models are at most 1
_LEAST_FREQUENCY = 1e-6  # with a lower frequency, a pair rotates by less than a degree in 16,000 positions
_MOST_CONTEXT = 1 << 27


class YarnSettings(Struct, frozen=True):
    """The settings of YaRN.

    YaRN keeps the frequency of fast feature pairs and divides the frequency of slow pairs by the factor.

    original_context  context size before scaling, in tokens
    fast, slow        thresholds in full rotations within the original context; pairs with more than `fast` rotations
                      keep their frequency, pairs with fewer than `slow` have it divided by the factor, and pairs in
                      between are interpolated
    log_multiplier    mscale_all_dim in DeepSeek's config; 0 selects the paper's formula for the magnitude
    """

    original_context: int
    fast: float
    slow: float
    log_multiplier: float


class RopeSettings(Struct, frozen=True):
    """The RoPE settings shared by all layers with the same rotation.

    dimensions        number of features of a head that are rotated, starting with the first
    base              base of the geometric series of frequencies
    factor            divisor for the positions; YaRN applies the divisor only to slow pairs
    yarn              None if all pairs are scaled equally
    original_context  context size in tokens above which LongRoPE's long factors are used
    magnitude         `rope.scaling.attn_factor`
    axes              with M-RoPE, the position that rotates each pair: 0 for time, 1 for height and 2 for width
    """

    dimensions: int
    base: float
    factor: float
    yarn: YarnSettings | None
    original_context: int
    magnitude: float
    axes: tuple[int, ...] = ()

    @classmethod
    def of(cls, keys: Keys, head_size: int, train_context: int) -> Self:
        """Read the settings. Raises BadGGUF."""
        dimensions = rotated_features(keys, "rope.dimension_count", head_size, head_size)
        kind = keys.string("rope.scaling.type", "linear")  # the GGUF reader has already checked this value
        base = keys.positive("rope.freq_base", 10000.0)
        factor = keys.positive("rope.scaling.factor", keys.positive("rope.scale_linear", 1.0))
        original = keys.integer("rope.scaling.original_context_length", train_context, minimum=1, maximum=_MOST_CONTEXT)
        if kind == "yarn" and base <= 1:
            raise keys.bad("rope.freq_base", f"must be above 1 for YaRN, not {base}")
        return cls(
            dimensions=dimensions,
            base=base,
            factor=1.0 if kind == "none" else factor,
            yarn=YarnSettings(original, 32.0, 1.0, 0.0) if kind == "yarn" else None,
            original_context=original,
            magnitude=keys.positive("rope.scaling.attn_factor", 1.0),
        )

    def with_base(self, base: float) -> RopeSettings:
        return structs.replace(self, base=base)

    def with_yarn_of(self, keys: Keys) -> RopeSettings:
        """Return the settings with the YaRN parameters from the file.

        llama.cpp reads YaRN parameters only for a few architectures.
        """
        if self.yarn is None:
            return self
        fast = _turns(keys, "rope.scaling.yarn_beta_fast", self.yarn.fast)
        slow = _turns(keys, "rope.scaling.yarn_beta_slow", self.yarn.slow)
        multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
        if multiplier < 0:
            raise keys.bad("rope.scaling.yarn_log_multiplier", f"must be 0 or more, not {multiplier}")
        return structs.replace(self, yarn=YarnSettings(self.yarn.original_context, fast, slow, multiplier))

    def with_sections_of(self, keys: Keys, head_size: int, *, interleaved: bool) -> RopeSettings:
        """Return the settings with the sections of multimodal RoPE (M-RoPE). Raises BadGGUF and UnsupportedModel.

        M-RoPE has four positions per row, and `rope.dimension_sections` contains the number of feature pairs that each
        position rotates. The pairs of the first three positions are interleaved in some models and consecutive in other
        models. For text, the first three positions equal the token's position, so M-RoPE rotates text like NeoX RoPE.

        In llama.cpp, the fourth position is always 0. So files in which the fourth position rotates a pair are refused,
        unless the pair hardly rotates. In Qwen3-VL, pairs 61 and 62 of 64 rotate with time in the original model, and
        here, but not in llama.cpp. Consecutive sections whose first or second section is empty are also refused,
        because llama.cpp ignores them and rotates like models without M-RoPE.
        """
        key = "rope.dimension_sections"
        sections = keys.several(key, 4, minimum=0, maximum=head_size)
        if not 1 <= sum(sections) <= head_size or not any(sections[:3]):
            raise keys.bad(key, f"must have a sum of 1 to {head_size}, not {sum(sections)}")
        pairs = np.arange(self.dimensions // 2) % sum(sections)
        if interleaved:
            axes = np.where(pairs < 3 * np.array(sections)[pairs % 3], pairs % 3, 3)
        else:
            axes = np.searchsorted(np.cumsum(sections[:3]), pairs, side="right")
        is_fast = inverse_powers(self.base, len(pairs)) > _LEAST_FREQUENCY
        if ((axes == 3) & is_fast).any() or not (interleaved or all(sections[:2])):
            raise keys.unsupported(f"a {keys.name(key)} of {', '.join(str(size) for size in sections)}")
        return structs.replace(self, axes=tuple((axes % 3).tolist()))

    def with_dimensions(self, dimensions: int) -> RopeSettings:
        return structs.replace(self, dimensions=dimensions)

    def unscaled(self) -> RopeSettings:
        """Return the settings without scaling, for sliding-window layers."""
        return structs.replace(self, factor=1.0, yarn=None)

    def rope(self, file: GGUFFile, pairing: Pairing, factors: NDArray[np.float32] | None = None) -> Rope:
        """Build the Rope. `factors` is float32[pairs]; the frequency of each pair is divided by its factor.

        Raises BadGGUF if a frequency is too high.
        """
        divisors = np.ones(1) if factors is None else factors.astype(np.float64)
        with np.errstate(over="ignore"):
            fast = inverse_powers(self.base, self.dimensions // 2) / divisors
            slow = fast / self.factor
        if max(fast.max(), slow.max()) > _MOST_FREQUENCY:
            most, seen = f"{_MOST_FREQUENCY:g} radians per position", f"{max(fast.max(), slow.max()):g}"
            raise file.bad("rope.freq_base with its scaling and factors", f"must give at most {most}, not {seen}")
        if self.yarn is not None:
            kept = self._kept_by_yarn(self.yarn)
            slow = slow * (1 - kept) + fast * kept
        axes = np.array(self.axes, np.intp) if self.axes else None
        return Rope(slow, pairing, self.magnitude_with_yarn, axes=axes)

    @property
    def magnitude_with_yarn(self) -> float:
        """The factor by which rotated features are multiplied."""
        return self.magnitude if self.yarn is None else self.magnitude * self._yarn_magnitude(self.yarn)

    def rope_of(self, tensors: Tensors, pairing: Pairing) -> Rope:
        """Build the Rope with the frequency factors in the file's tensors.

        The tensors contain either Llama 3.1's factors or the two sets of factors of LongRoPE.

        Raises BadGGUF and UnsupportedModel.
        """
        one = self._factors(tensors, "rope_freqs.weight")
        if one is not None:
            return self.rope(tensors.file, pairing, one)
        short, long = (self._factors(tensors, f"rope_factors_{name}.weight") for name in ("short", "long"))
        rope = self.rope(tensors.file, pairing, short)
        if long is None:
            return rope
        return replace(rope, longer=(self.original_context, self.rope(tensors.file, pairing, long)))

    def _factors(self, tensors: Tensors, name: str) -> NDArray[np.float32] | None:
        factors = tensors.optional_vector(name, self.dimensions // 2)
        if factors is not None and not (np.isfinite(factors).all() and (factors > 0).all()):
            raise tensors.file.bad(name, "all factors must be positive and finite")
        return factors

    def _kept_by_yarn(self, yarn: YarnSettings) -> NDArray[np.float64]:
        """Return the fraction of its frequency that each pair keeps, as float64[pairs] from 0 to 1."""

        def pair_of(turns: float) -> float:
            """Return the fractional index of the pair that makes `turns` rotations within the original context."""
            return self.dimensions * log(yarn.original_context / (turns * 2 * pi)) / (2 * log(self.base))

        first, last = max(0, floor(pair_of(yarn.fast))), min(self.dimensions - 1, ceil(pair_of(yarn.slow)))
        pairs = np.arange(self.dimensions // 2, dtype=np.float64)
        kept: NDArray[np.float64] = 1 - np.clip((pairs - first) / max(0.001, last - first), 0, 1)
        return kept

    def _yarn_magnitude(self, yarn: YarnSettings) -> float:
        def of(multiplier: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * multiplier * log(self.factor) + 1.0

        return of(1.0) / of(yarn.log_multiplier) if yarn.log_multiplier else of(1.0)


def rotated_features(keys: Keys, key: str, default: int, head_size: int) -> int:
    """Return the number of features of a head that are rotated. Raises BadGGUF."""
    dimensions = keys.integer(key, default, minimum=2, maximum=head_size)
    if dimensions % 2:
        raise keys.bad(key, f"must be even, not {dimensions}")
    if dimensions > head_size:
        raise keys.bad(key, f"missing, and the {dimensions} of other layers exceed the head size of {head_size}")
    return dimensions


def _turns(keys: Keys, key: str, default: float) -> float:
    """Read YaRN's `beta_fast` or `beta_slow`. In real models, the values are 32 and 1."""
    turns = keys.positive(key, default)
    if not 1e-6 <= turns <= 1e6:
        raise keys.bad(key, f"must be 1e-06 to 1e+06, not {turns:g}")
    return turns
