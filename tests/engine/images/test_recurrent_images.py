"""Tests that recurrent models compute an image once in both backends, although their states cannot be rewound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.vision.projector import read_projector
from tests.support.engine.answers import answer_all
from tests.support.engine.pictures import BLUE, RED, PlainDecoder, ask, plain, png
from tests.support.templates.template_runs import PROCESS
from tests.support.vision.opened import open_vision
from tests.support.vision.projectors import tiny_projector, tiny_text_model
from tests.support.vision.seeing import HashedVision

if TYPE_CHECKING:
    from llmrun.backends.base import Backend
    from llmrun.base.types import Batch, Outputs

pytestmark = pytest.mark.push

FILES = [png(plain(200, 150, color)) for color in (RED, BLUE)]


def on_cpu(folder: Path, name: str) -> CpuBackend:
    vision = HashedVision(read_projector(tiny_projector(folder, name)), waits=0)
    with open_gguf(tiny_text_model(folder, name)) as file:
        return CpuBackend(file, OpenOptions(context_size=2048, max_sequences=2, threads=2), vision=vision)


def on_llama(folder: Path, name: str) -> Backend:
    opened: Any = open_vision(folder, name, max_sequences=2)
    opened.vision.close()
    opened.vision = HashedVision(opened.vision.projector, waits=0)
    backend: Backend = opened
    return backend


class Counted:
    """An engine that counts the rows of its passes."""

    def __init__(self, backend: Backend) -> None:
        self.engine = Engine(backend, templates=PROCESS)
        assert self.engine.image_encoder is not None
        vars(self.engine.image_encoder)["_decoder"] = PlainDecoder()
        assert isinstance(backend.vision, HashedVision)
        self._vision, self._forward = backend.vision, backend.forward
        backend.forward = self.forward  # type: ignore[method-assign]
        self._rows = 0

    def forward(self, batch: Batch) -> Outputs:
        self._rows += len(batch.tokens)
        return self._forward(batch)

    def ask(self, request: Request) -> tuple[int, int, int]:
        """Return the prompt's tokens after its last image, how many tokens of the prompt were computed, and how many
        images were encoded."""
        request = structs.replace(request, max_tokens=20, sampling=replace(request.sampling, temperature=0.0))
        prepared = self.engine.prepare(request)
        last = max(place for place, number in enumerate(prepared.cached_as) if number < 0)
        rows, encoded = self._rows, self._vision.begun
        [answer] = answer_all(self.engine, [request])
        computed = self._rows - rows - (len(answer.tokens) - 1)
        return len(prepared.cached_as) - last - 1, computed, self._vision.begun - encoded


@pytest.mark.parametrize("name", ["qwen3vl_merger qwen35", "lfm2"])
@pytest.mark.parametrize("opened", [on_cpu, on_llama])
def test_another_question_computes_only_the_text_after_the_image(
    tmp_path: Path, opened: Callable[[Path, str], Backend], name: str
) -> None:
    """llama.cpp#26994: prefix with image never cached for hybrid models."""
    counted = Counted(opened(tmp_path, name))
    with counted.engine:
        _, computed, encoded = counted.ask(ask([FILES[0], "What is this?"]))
        assert computed > 30
        assert encoded == 1
        for question in ("Where was this taken?", "And when was it, as far as you can see?", "By whom?"):
            after, computed, encoded = counted.ask(ask([FILES[0], question]))
            assert 10 < after - 8 <= computed <= after
            assert encoded == 0
        _, _, encoded = counted.ask(ask([FILES[0], "What is this?", FILES[1]]))
        assert encoded == 1
        after, computed, encoded = counted.ask(ask([FILES[0], "What is this?", FILES[1], "and this?"]))
        assert computed <= after
        assert encoded == 0
