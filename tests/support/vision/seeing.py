"""Models that read images, for comparisons of answers by the same model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from llmrun.backends.scripted import ScriptedBackend

if TYPE_CHECKING:
    from llmrun.backends.base import Backend


class Seeing(Protocol):
    """A model that reads images.

    name   for messages
    sizes  widths and heights of pictures that suit the model
    ends   the tokens that end an answer
    """

    name: str
    sizes: Sequence[tuple[int, int]]
    ends: Sequence[int]

    def open(self, *, threads: int, sequences: int = 1) -> Backend:
        """Open the model. Answers do not depend on the arguments."""

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments with which `llmrun serve` opens the model."""


class ScriptedSeeing:
    """A scripted model, whose logits are noise that depends on all rows and their positions.

    projector   the fields of ScriptedProjector
    checkpoint  as in ScriptedCache
    """

    sizes = ((32, 32), (64, 96), (96, 64), (150, 40), (300, 200))
    ends = tuple(ScriptedBackend().tokenizer.end_of_generation)

    def __init__(self, folder: Path, projector: dict[str, Any], checkpoint: int | None = None) -> None:
        self.name = f"scripted {projector} {checkpoint or ''}"
        self._script, self._projector = folder / "script.json", folder / "mmproj.json"
        self._projector.write_text(json.dumps(projector))
        # No conversation has this cue, so that the voice is silent.
        self._script.write_text(json.dumps({"answers": [["\x01\x02", "-"]], "checkpoint": checkpoint}))
        self._checkpoint = checkpoint

    def open(self, *, threads: int, sequences: int = 1) -> Backend:
        return ScriptedBackend(
            None,
            projector=self._projector,
            checkpoint=self._checkpoint,
            max_sequences=sequences,
            capacity=4096 * sequences if sequences < 3 else 6000,
        )

    def arguments(self, folder: Path) -> list[str]:
        """Return the arguments with which `llmrun serve` opens the model."""
        return ["-m", str(self._script), "--backend", "scripted", "--mmproj", str(self._projector)]


SEEING: dict[str, Callable[[Path], Seeing]] = {
    "scripted": lambda folder: ScriptedSeeing(folder, {}),
    "scripted, not causal": lambda folder: ScriptedSeeing(folder, {"is_causal": False}),
    "scripted, M-RoPE": lambda folder: ScriptedSeeing(folder, {"uses_mrope": True}, 16),
    "scripted, tiles": lambda folder: ScriptedSeeing(folder, {"has_overview": True, "end": ""}, 24),
}
