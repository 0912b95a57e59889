"""Tests of requests with images on the CPU engine: answers do not depend on company, chunks, prefixes or drafts.

The rows of images are random numbers, which follow from the pixels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.engine.drafting.lookup import LookupSource
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.vision.projector import read_projector
from tests.support.engine.answers import answer_all
from tests.support.engine.eager_speculation import speculate_eagerly
from tests.support.engine.pictures import BLUE, GREEN, RED, AtOnce, PlainDecoder, ask, plain, png
from tests.support.templates.template_runs import PROCESS
from tests.support.vision.opened import SMALL
from tests.support.vision.projectors import tiny_projector, tiny_text_model
from tests.support.vision.seeing import HashedVision

if TYPE_CHECKING:
    from llmrun.base.types import Batch, Outputs

pytestmark = pytest.mark.push

FILES = [png(plain(150, 90, color)) for color in (RED, GREEN, BLUE)]


@contextmanager
def opened(folder: Path, name: str, rows_per_step: int = 256) -> Iterator[tuple[Engine, list[Batch]]]:
    """Open a tiny model. Yields the engine, and the list of its batches."""
    projector = read_projector(tiny_projector(folder, name, **SMALL.get(name, {})))
    sizes = OpenOptions(context_size=2048, max_sequences=4, threads=2)
    with open_gguf(tiny_text_model(folder, name)) as file:
        backend = CpuBackend(file, sizes, vision=HashedVision(projector))
    batches: list[Batch] = []
    forward = backend.forward

    def watched(batch: Batch) -> Outputs:
        batches.append(batch)
        return forward(batch)

    backend.forward = watched  # type: ignore[method-assign]
    engine = Engine(backend, templates=PROCESS, rows_per_step=rows_per_step)
    assert engine.image_encoder is not None
    vars(engine.image_encoder).update(_decoder=PlainDecoder(), _threads=AtOnce())
    try:
        yield engine, batches
    finally:
        engine._requests.drop_all()
        backend.close()


def requests() -> list[Request]:
    asked = [
        ask(["see ", FILES[0], " and ", FILES[1], "?"]),
        ask(["see ", FILES[0], " and ", FILES[2], "?"]),
        ask("only text, which has no image at all"),
        ask([FILES[1], "one"], "two", [FILES[2], "three"]),
    ]
    return [
        structs.replace(each, max_tokens=12, sampling=replace(each.sampling, temperature=temperature, seed=1))
        for each, temperature in zip(asked, (0.0, 1.0, 0.0, 1.0), strict=True)
    ]


@pytest.mark.parametrize("name", ["gemma3", "gemma4uv", "qwen3vl_merger", "qwen3vl_merger qwen35", "pixtral"])
def test_answers_depend_on_nothing_else(tmp_path: Path, name: str) -> None:
    expected = []
    for request in requests():
        with opened(tmp_path, name) as (engine, _):
            expected += [answer.tokens for answer in answer_all(engine, [request])]
    assert len({*map(tuple, expected)}) == len(expected)
    for rows in (7, 256):
        with opened(tmp_path, name, rows_per_step=rows) as (engine, batches):
            assert [answer.tokens for answer in answer_all(engine, requests())] == expected
            assert any(len({*batch.seq.tolist()}) > 1 for batch in batches if batch.embeds is not None)
            speculate_eagerly(engine, [LookupSource()])
            assert [answer.tokens for answer in answer_all(engine, requests())] == expected
