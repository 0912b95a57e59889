"""An engine whose encoder works in the engine's thread, on a clock that only steps and tiles of rows advance."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmrun.backends.scripted_vision import ScriptedEncoding
from llmrun.base.types import Batch, Outputs
from llmrun.engine.requests import TextDelta
from tests.support.engine.pictures import Sight, ask


class Clock:
    """Replaces the clock of an engine and the pauses of its encoder.

    in_tile  called in the middle of each tile
    sliced   the seconds of all tiles so far
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.sliced = 1.0, 0.0
        self.in_tile: Callable[[], None] = lambda: None
        patch.setattr(time, "perf_counter", lambda: self.now)
        fake = SimpleNamespace(monotonic=lambda: self.now, sleep=self._tile)
        patch.setattr("llmrun.backends.scripted_vision.time", fake)

    def _tile(self, seconds: float) -> None:
        self.in_tile()
        self.now += seconds
        self.sliced += seconds


class Sliced(Sight):
    """An engine whose encoder works in the engine's thread, and whose steps take `step_s`, and `row_s` for each row."""

    def __init__(
        self,
        tmp_path: Path,
        patch: pytest.MonkeyPatch,
        *,
        tiles: int = 20,
        tile_s: float = 0.1,
        step_s: float = 0.02,
        row_s: float = 0.001,
        projector: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.clock = Clock(patch)
        fields = {"encode_tiles": tiles, "tile_seconds": tile_s, **(projector or {})}
        super().__init__(tmp_path, fields, **{"max_sequences": 4, **options})
        forward = self.backend.forward

        def timed(batch: Batch) -> Outputs:
            self.clock.now += step_s + row_s * len(batch.tokens)
            return forward(batch)

        patch.setattr(self.backend, "forward", timed)

    @property
    def begun(self) -> list[ScriptedEncoding]:
        assert self.backend.vision is not None
        return self.backend.vision.begun

    def answer_text(self, words: str = "a long question ", n: int = 200) -> int:
        """Submit a request and return its id when its answer has begun and steps of an answer have been timed."""
        number = self.engine.submit(ask(words * 10, max_tokens=n))
        n_tokens = 0
        while n_tokens < 3:
            n_tokens += sum(isinstance(event, TextDelta) for event in self.engine.step())
        return number
