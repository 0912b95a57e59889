"""Families that see an image as a whole: Gemma 3 and 4, Qwen's models, and Pixtral.

The sizes are those of the models' processors in Hugging Face transformers, with the same arithmetic in float64.
libmtmd, the vision library of llama.cpp, computes other sizes for some images, and letterboxes them instead of
stretching:

family   libmtmd                                                    the model's processor, and llmrun
-------  ---------------------------------------------------------  -------------------------------------------------
Gemma 4  keeps the size if it has 70 to 1120 tokens                 scales each image to its budget of tokens
Qwen     rounds halves away from zero, in float32                   rounds halves to even
Qwen     narrow sides have at least one row before the limits       narrow sides may round to 0 rows, so that images
         are applied                                                below the minimum are enlarged
Qwen     any shape                                                  sides that differ at most 200 times
Pixtral  rounds to the nearest row; at most 1024 tokens             rounds up; the longest edge is limited
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from llmrun.base.errors import UsageError
from llmrun.formats.images.header import LONGEST_SIDE
from llmrun.formats.images.scaling import Filter
from llmrun.model.vision.family import (
    HIGH,
    LOW,
    MERGE_SIZE,
    SCALE_FACTOR,
    Family,
    Limits,
    Sizes,
    fault_of_square,
    whole_image,
)

if TYPE_CHECKING:
    from llmrun.model.vision.layout import ImageLayout


class Gemma3(Family):
    names = ("gemma3",)
    placeholders = ("<start_of_image>",)
    markers = ("<start_of_image>", "<end_of_image>")
    merge_key, usual_merge = SCALE_FACTOR, 4
    is_causal = False

    def __init__(self, sizes: Sizes, limits: Limits) -> None:
        super().__init__(sizes, limits)
        limits.check_reachable(self.most_rows, self.most_rows)

    @classmethod
    def fault(cls, sizes: Sizes) -> str:
        return fault_of_square(sizes)

    @property
    def most_rows(self) -> int:
        return self.sizes.side**2

    def layout(self, width: int, height: int, detail: str) -> ImageLayout:
        side = self.sizes.image_size
        start, end = "\n\n<start_of_image>", "<end_of_image>\n\n"
        return whole_image((side, side), Filter.BILINEAR, start, (self.sizes.side, self.sizes.side), end)


class Gemma4(Family):
    """Gemma 4, whose images are always scaled to one of a few numbers of tokens."""

    names = ("gemma4v", "gemma4uv")
    placeholders = ("<|image|>",)
    markers = ("<|image>", "<image|>")
    merge_key, usual_merge = SCALE_FACTOR, 3
    is_causal = False

    BUDGETS = (70, 140, 280, 560, 1120)
    USUAL = 280

    def __init__(self, sizes: Sizes, limits: Limits) -> None:
        super().__init__(sizes, limits)
        least, most = limits.least or 1, limits.most or self.BUDGETS[-1]
        self._budgets = [budget for budget in self.BUDGETS if least <= budget <= most]
        if not self._budgets:
            known = ", ".join(map(str, self.BUDGETS[:-1])) + f" or {self.BUDGETS[-1]}"
            raise UsageError(
                f"images have a budget of {known} tokens with this projector: none is within image_min_tokens and "
                "image_max_tokens"
            )

    @property
    def most_rows(self) -> int:
        return self._budgets[-1]

    def layout(self, width: int, height: int, detail: str) -> ImageLayout:
        unit = self.sizes.unit
        budget = self._budgets[0] if detail == LOW else self._budgets[-1] if detail == HIGH else self._usual
        factor = math.sqrt(budget * unit**2 / (width * height))
        columns, rows = (math.floor(factor * side / unit) for side in (width, height))
        if not rows:
            columns, rows = budget, 1
        elif not columns:
            columns, rows = 1, budget
        return whole_image((columns * unit, rows * unit), Filter.BICUBIC, "<|image>", (columns, rows), "<image|>")

    @property
    def _usual(self) -> int:
        """The budget that is closest to the default."""
        return min(self._budgets, key=lambda budget: abs(budget - self.USUAL))


class QwenVL(Family):
    """Qwen2-VL and Qwen2.5-VL."""

    names: ClassVar[tuple[str, ...]] = ("qwen2vl_merger", "qwen2.5vl_merger")
    placeholders = ("<|vision_start|><|image_pad|><|vision_end|>",)
    markers = ("<|vision_start|>", "<|vision_end|>")
    merge_key, usual_merge = MERGE_SIZE, 2
    uses_mrope = True

    # Tokens. Smaller images are enlarged to LEAST, and larger images reduced to USUAL, or to MOST for high detail. The
    # models' own limit is 16384, which takes minutes on a CPU.
    LEAST, LOWEST, USUAL, MOST = 4, 64, 1024, 4096
    _MOST_RATIO = 200

    @classmethod
    def fault(cls, sizes: Sizes) -> str:
        return "" if sizes.merge == 2 else f"only 2 patches per row are supported, not {sizes.merge}"

    @property
    def most_rows(self) -> int:
        least, most = self._limits_of(HIGH)
        return most_aligned(least, most, self._MOST_RATIO)

    def layout(self, width: int, height: int, detail: str) -> ImageLayout:
        longer, shorter = max(width, height), min(width, height)
        if longer / shorter > self._MOST_RATIO:
            raise UsageError(
                f"the image is too narrow for this model: {width:,} x {height:,} pixels: one side may be at most "
                f"{self._MOST_RATIO} times the other",
                hint="crop the image",
            )
        unit = self.sizes.unit
        # Narrow images may have more rows with lower limits, because their longer side is stretched.
        details = (detail, "auto") if detail == LOW else (detail,)
        sizes = [aligned_size(width, height, unit, *self._limits_of(one), narrowest=0) for one in details]
        size = min(sizes, key=math.prod)
        grid = size[0] // unit, size[1] // unit
        return whole_image(size, Filter.BICUBIC, "<|vision_start|>", grid, "<|vision_end|>")

    def _limits_of(self, detail: str) -> tuple[int, int]:
        """Return the least and most tokens for a detail."""
        least, most = self.limits.least or self.LEAST, self.limits.most
        if detail == LOW:
            most = min(self.limits.least or self.LOWEST, most or self.MOST)
        elif most is None:
            most = max(least, self.MOST if detail == HIGH else self.USUAL)
        return min(least, most), most


class Qwen3VL(QwenVL):
    """Qwen3-VL, Qwen3.5 and Qwen3.6."""

    names = ("qwen3vl_merger",)
    LEAST = 64


class Pixtral(Family):
    """Pixtral, Mistral Small 3.x and Ministral 3. A row of embeddings ends with the embedding of [IMG_BREAK]."""

    names = ("pixtral",)
    placeholders = ("[IMG]",)
    markers = ("[IMG_END]",)
    merge_key, usual_merge = MERGE_SIZE, 1

    LOWEST = 64

    def __init__(self, sizes: Sizes, limits: Limits) -> None:
        super().__init__(sizes, limits)
        limits.check_reachable(1)

    @property
    def most_rows(self) -> int:
        side = -(-self.sizes.image_size // self.sizes.unit)
        most = _with_breaks(side, side)
        if (least := self.limits.least) is not None:
            most = max(most, 2 * most_aligned(least, self.limits.most or least, LONGEST_SIDE))
        return most

    def layout(self, width: int, height: int, detail: str) -> ImageLayout:
        unit = self.sizes.unit
        least, most = self.limits.least or 1, self.limits.most
        if detail == LOW:
            most = min(max(least, self.LOWEST), most or self.LOWEST)
        columns, rows = self._grid(width, height, most)
        if _with_breaks(columns, rows) < least:
            size = aligned_size(width, height, unit, least, max(least, most or least))
            columns, rows = size[0] // unit, size[1] // unit
        size = columns * unit, rows * unit
        return whole_image(size, Filter.BICUBIC, "", (columns, rows), "[IMG_END]", extra=rows - 1)

    def _grid(self, width: int, height: int, most: int | None) -> tuple[int, int]:
        """Return columns and rows for the longest edge that the model allows, or for the longest one with `most`."""
        unit = self.sizes.unit
        edge = self.sizes.image_size
        while True:
            ratio = max(width / edge, height / edge, 1.0)
            # Here, transformers rounds very narrow sides to 0, and fails.
            columns, rows = (-(-max(1, math.floor(side / ratio)) // unit) for side in (width, height))
            if most is None or _with_breaks(columns, rows) <= most or edge <= unit:
                return columns, rows
            edge = (min(edge, max(width, height)) - 1) // unit * unit or unit


def _with_breaks(columns: int, rows: int) -> int:
    return columns * rows + rows - 1


def aligned_size(width: int, height: int, unit: int, least: int, most: int, *, narrowest: int = 1) -> tuple[int, int]:
    """Return the size closest to that of an image whose sides are multiples of `unit`, with `least` to `most` units.

    Images with narrow sides may have more units. This is `smart_resize` of transformers, except for
    `narrowest`, the minimum number of units of a side before the limits are applied.
    """
    columns, rows = (max(narrowest, round(side / unit)) for side in (width, height))
    if columns * rows > most:
        beta = math.sqrt((height * width) / (most * unit**2))
        columns, rows = (max(1, math.floor(side / beta / unit)) for side in (width, height))
    elif columns * rows < least:
        beta = math.sqrt(least * unit**2 / (height * width))
        columns, rows = (math.ceil(side * beta / unit) for side in (width, height))
    return columns * unit, rows * unit


def most_aligned(least: int, most: int, ratio: int) -> int:
    """Return a bound of the units in `aligned_size`, for images whose sides differ at most `ratio` times."""
    enlarged = least + math.ceil(math.sqrt(least) * (math.sqrt(ratio) + 1)) + 1
    return max(most, math.ceil(math.sqrt(most * ratio)) if ratio > most else 0, enlarged)
