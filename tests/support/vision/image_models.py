"""Tiny text models that read images, and prompts whose images have random rows of embeddings.

To a text model, the rows of any encoder are numbers. Random ones test as much as the encoder's, and cost less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.plan import reference
from llmrun.model.plan.twin import ImageInputs
from llmrun.model.vision.layout import Rows
from llmrun.model.vision.projector import FAMILIES
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES
from tests.support.vision.projectors import TINY_PROJECTORS
from tests.support.vision.prompts import Image, prompt_batch

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from llmrun.base.types import Batch
    from llmrun.model.plan.plan import Plan

# Gemma 4 E2B and E4B read images causally, unlike the larger models. The width of their embeddings decides.
_CAUSAL_TEXTS = ("gemma4 E2B",)
_TOKENS = 290

Grid = tuple[int, int]  # the columns and rows of an image's embeddings
Parts = Sequence[int | Grid]  # the number of tokens of each text, and the grid of each image


@dataclass(frozen=True)
class ImageModel:
    """A row of TINY_ARCHITECTURES that reads images. See `Projector` for `is_causal` and `uses_mrope`."""

    text: str
    is_causal: bool
    uses_mrope: bool
    most_rows: int = 400
    weight_bytes: int = 0
    memory_bytes: int = 0

    @property
    def row_width(self) -> int:
        row = TINY_ARCHITECTURES[self.text]
        parts: int = 1 + row.keys.get("n_deepstack_layers", 0)
        return row.width * parts

    def batch(self, parts: Parts, *, seq: int = 0, seed: int = 0) -> Batch:
        """Return the batch of a prompt that requests the logits of every row."""
        random = np.random.default_rng(seed)
        made: list[list[int] | Image] = []
        for tile, part in enumerate(parts):
            if isinstance(part, int):
                made.append(random.integers(3, _TOKENS, part).tolist())
            else:
                nx, ny = part
                rows = random.standard_normal((nx * ny, self.row_width)).astype(np.float32)
                made.append(Image(Rows(tile, nx * ny, nx, ny), rows))
        return prompt_batch(self, made, seq=seq, wanted=None)


@contextmanager
def opened(path: Path, projector: object, **options: Any) -> Iterator[CpuBackend]:
    """Open a model in the CPU engine with a projector, but without an encoder."""
    vision: Any = SimpleNamespace(projector=projector, close=lambda: None)
    with open_gguf(path) as file:
        backend = CpuBackend(file, OpenOptions(**{"context_size": 512, "threads": 2} | options), vision=vision)
    try:
        yield backend
    finally:
        backend.close()


def twin_logits(plan: Plan, batch: Batch, kv_type: str | None = None) -> NDArray[np.float32]:
    """Return the logits of each row of one sequence with images, without any rounding if `kv_type` is None."""
    assert batch.embeds is not None
    images = ImageInputs(batch.embeds, batch.rope_pos, batch.ahead)
    if kv_type is None:
        return reference.exact(plan, batch.tokens, images=images)
    return reference.quantizing(plan, batch.tokens, kv_type, images=images)


def _models() -> dict[str, ImageModel]:
    found = {}
    for projector in TINY_PROJECTORS.values():
        family = FAMILIES[projector.family]
        for text in (projector.text, *projector.more_texts):
            found[text] = ImageModel(text, family.is_causal or text in _CAUSAL_TEXTS, family.uses_mrope)
    return found


IMAGE_MODELS: dict[str, ImageModel] = _models()
