"""Models that read images, for comparisons of answers by the same model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.errors import Cancelled
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.vision.layout import Rows
from tests.support.gguf.gguf_files import CONTROL
from tests.support.vision.opened import SMALL
from tests.support.vision.projectors import TINY_PROJECTORS, tiny_projector, tiny_text_model, vision_vocabulary

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import Backend
    from llmrun.model.vision.layout import ImageLayout, Projector

_CONTEXT = 2048


class Seeing(Protocol):
    """A model that reads images.

    name   for messages
    sizes  widths and heights of pictures that suit the model
    ends   the tokens that end an answer
    """

    name: str
    sizes: tuple[tuple[int, int], ...]
    ends: tuple[int, ...]

    def open(self, *, threads: int, sequences: int = 1, is_full: bool = False) -> Backend:
        """Open the model. Answers do not depend on the arguments.

        is_full  True if the KV cache has room for only one context
        """

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments with which `llmrun serve` opens the model."""


class ScriptedSeeing:
    """A scripted model, whose logits are noise that depends on all rows and their positions.

    projector   the fields of ScriptedProjector
    checkpoint  as in ScriptedCache
    """

    sizes: tuple[tuple[int, int], ...] = ((32, 32), (64, 96), (96, 64), (150, 40), (300, 200))
    ends = tuple(ScriptedBackend().tokenizer.end_of_generation)

    def __init__(self, folder: Path, projector: dict[str, Any], checkpoint: int | None = None) -> None:
        self.name = f"scripted {projector} {checkpoint or ''}"
        self._script, self._projector = folder / "script.json", folder / "mmproj.json"
        self._projector.write_text(json.dumps(projector))
        # No conversation has this cue, so the voice is silent.
        self._script.write_text(json.dumps({"answers": [["\x01\x02", "-"]], "checkpoint": checkpoint}))
        self._checkpoint = checkpoint

    def open(self, *, threads: int, sequences: int = 1, is_full: bool = False) -> Backend:
        return ScriptedBackend(
            None,
            projector=self._projector,
            checkpoint=self._checkpoint,
            context_size=_CONTEXT,
            max_sequences=sequences,
            capacity=_CONTEXT if is_full else None,
        )

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments with which `llmrun serve` opens the model."""
        return ["-m", str(self._script), "--backend", "scripted", "--mmproj", str(self._projector)]


class HashedVision:
    """An encoder whose rows are noise that depends on every pixel of their tile. It needs neither weights nor libmtmd.

    waits  how often `advance` returns before the rows are complete
    begun  how many encodings were begun
    """

    runs_apart = True

    def __init__(self, projector: Projector, waits: int = 2) -> None:
        self.projector, self._waits, self.begun = projector, waits, 0

    def begin(self, tiles: Sequence[NDArray[np.uint8]], layout: ImageLayout) -> _HashedRows:
        self.begun += 1
        pieces = [piece for piece in layout.pieces if isinstance(piece, Rows)]
        rows = [_noise(tiles[piece.tile], (piece.count, self.projector.row_width)) for piece in pieces]
        return _HashedRows(np.concatenate(rows), self._waits)

    def expected_seconds(self, layout: ImageLayout) -> None:
        """Return None, because the time is unknown."""

    def close(self) -> None:
        """Do nothing."""


@dataclass
class _HashedRows:
    """An Encoding that is complete after some calls of `advance`."""

    rows: NDArray[np.float32]
    waits: int
    is_cancelled: bool = False
    progress: float = 0.0

    def advance(self, seconds: float) -> NDArray[np.float32] | None:
        if self.is_cancelled:
            raise Cancelled("stopped while an image was encoded")
        self.waits -= seconds > 0
        return None if self.waits >= 0 else self.rows

    def cancel(self) -> None:
        self.is_cancelled = True


def _noise(tile: NDArray[np.uint8], shape: tuple[int, int]) -> NDArray[np.float32]:
    digest = hashlib.sha256(f"{tile.shape}".encode() + tile.tobytes()).digest()
    return np.random.default_rng(list(digest)).standard_normal(shape, np.float32)


class TinySeeing:
    """A tiny model of a row of TINY_PROJECTORS with random weights, and its encoder, on the CPU engine."""

    sizes: tuple[tuple[int, int], ...] = ((28, 28), (40, 90), (90, 40), (160, 130))

    def __init__(self, folder: Path, name: str, weight_type: str, most: int | None = None) -> None:
        self.name = name
        self.ends = tuple(token for token, kind in enumerate(vision_vocabulary(name).types) if kind == CONTROL)
        self._model = tiny_text_model(folder, name)
        self._projector, self._most = tiny_projector(folder, name, weight_type, **SMALL.get(name, {})), most

    def open(self, *, threads: int, sequences: int = 1, is_full: bool = False) -> Backend:
        options = OpenOptions(
            context_size=_CONTEXT,
            max_sequences=sequences,
            kv_tokens=_CONTEXT if is_full else None,
            threads=threads,
            saves_state=True,
            mmproj=str(self._projector),
            image_max_tokens=self._most,
        )
        with open_gguf(self._model) as file:
            return CpuBackend(file, options)

    def arguments(self, folder: Path) -> list[str]:
        limit = [] if self._most is None else ["--image-max-tokens", str(self._most)]
        sizes = ["--ctx-size", str(_CONTEXT), *limit]
        return ["-m", str(self._model), "--backend", "cpu", "--mmproj", str(self._projector), *sizes]


def _scripted(projector: Mapping[str, Any], checkpoint: int | None = None) -> Callable[[Path], Seeing]:
    return lambda folder: ScriptedSeeing(folder, dict(projector), checkpoint)


def _tiny(name: str, weight_type: str) -> Callable[[Path], Seeing]:
    return lambda folder: TinySeeing(folder, name, weight_type, 70 if name.startswith("gemma4") else None)


# The weights of every other encoder are quantized, and so are its keys and values.
SEEING: dict[str, Callable[[Path], Seeing]] = {
    **{name: _tiny(name, ("F32", "Q8_0")[number % 2]) for number, name in enumerate(TINY_PROJECTORS)},
    "scripted": _scripted({}),
    "scripted, not causal": _scripted({"is_causal": False}, 8),
    "scripted, M-RoPE": _scripted({"uses_mrope": True}, 16),
    "scripted, tiles": _scripted({"has_overview": True, "end": ""}, 24),
}
