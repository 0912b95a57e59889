"""Tests that pairs of images which resemble each other never mix, whatever the engine has cached or is running.

The reports of the fault are sgl-project/sglang#11785 (images of equal size had the same cache key), jundot/omlx#1417
(a cached prefix with another picture was reused) and ikawrakow/ik_llama.cpp#1893 (the second image of a conversation
was taken as the first one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from llmrun.engine.engine import Engine
from llmrun.engine.image_encoder import RecentRows
from llmrun.engine.requests import Request, StatePlace
from llmrun.engine.saved_state.budget import Budget
from llmrun.engine.saved_state.chunks import SavedChunks
from tests.support.engine.answers import Gathered, answer_all
from tests.support.engine.pictures import Piece, Pixels, PlainDecoder, Sight, ask, png
from tests.support.templates.template_runs import PROCESS
from tests.support.vision.seeing import SEEING

pytestmark = pytest.mark.push

KINDS: list[dict[str, Any]] = [
    {},
    {"is_causal": False},
    {"uses_mrope": True},
    {"has_overview": True},
    {"is_causal": False, "uses_mrope": True, "has_overview": True, "end": ""},
]
BEFORE = "Words before the picture, long enough to be worth a place in a file with saved prefixes. "


def _noise(width: int, height: int, seed: int) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def _one_pixel(width: int, height: int) -> Pixels:
    """Return the first picture with one channel of the last pixel changed by 1."""
    pixels = _noise(width, height, 1)
    pixels[-1, -1, 2] ^= 1
    return pixels


FIRST = png(_noise(96, 64, 1))
LARGE, LARGE_END = (png(pixels, level=0) for pixels in (_noise(300, 200, 1), _one_pixel(300, 200)))
PAIRS: dict[str, tuple[Sequence[Piece], Sequence[Piece]]] = {
    "equal size": ([FIRST], [png(_noise(96, 64, 2))]),
    "one pixel": ([FIRST], [png(_one_pixel(96, 64))]),
    "files that share a prefix": ([LARGE], [LARGE_END]),
    "same pixels in another file": ([FIRST], [png(_noise(96, 64, 1), level=0)]),
    "a file that continues the other": ([FIRST], [FIRST + FIRST]),
    "same bytes in another shape": ([FIRST], [png(_noise(96, 64, 1).reshape(96, 64, 3))]),
    "mirrored": ([FIRST], [png(_noise(96, 64, 1)[:, ::-1])]),
    "another detail": ([FIRST], [(FIRST, "low")]),
    "another position": ([FIRST, "What?"], ["What?", FIRST]),
    "another order": ([FIRST, LARGE], [LARGE, FIRST]),
    "one and two": ([FIRST], [FIRST, FIRST]),
}


def _requests(pair: tuple[Sequence[Piece], Sequence[Piece]]) -> list[Request]:
    """Return requests with each one of the pair, and with both in each order."""
    one, other = pair
    contents = [one, other, [*one, *other], [*other, *one], [*one, *one], [*other, "and", *other]]
    asked = [ask([BEFORE, *content, "?"], max_tokens=5, logprobs=3) for content in contents]
    return [structs.replace(each, sampling=replace(each.sampling, temperature=0.0)) for each in asked]


# Opens an engine. The options are `max_sequences` and `rows_per_step`.
Open = Callable[..., Engine]
Way = Callable[[Open, Sequence[Request], Path], Iterator[Gathered]]


def in_turn(opened: Open, requests: Sequence[Request], _: Path) -> Iterator[Gathered]:
    """A single slot keeps only what the last request left, so each request follows a similar one."""
    engine = opened()
    for request in requests:
        yield from answer_all(engine, [request])


def in_many_slots(opened: Open, requests: Sequence[Request], _: Path) -> Iterator[Gathered]:
    engine = opened(max_sequences=4)
    for request in requests:
        yield from answer_all(engine, [request])


def in_small_steps(opened: Open, requests: Sequence[Request], _: Path) -> Iterator[Gathered]:
    engine = opened(rows_per_step=4)
    for request in requests:
        yield from answer_all(engine, [request])


def at_once(opened: Open, requests: Sequence[Request], _: Path) -> Iterator[Gathered]:
    yield from answer_all(opened(max_sequences=3), requests)


def with_encoded_rows(opened: Open, requests: Sequence[Request], _: Path) -> Iterator[Gathered]:
    """The KV cache is emptied, so that all rows run again. There is memory for the rows of one or two images."""
    engine = opened()
    assert engine.image_encoder is not None
    projector = engine.image_encoder.projector
    engine.image_encoder.recent = RecentRows(most_bytes=4 * projector.row_width * projector.layout(300, 200).rows)
    for request in requests:
        yield from answer_all(engine, [request])
        while engine._slots.forget_oldest_idle():
            pass


def from_state_files(opened: Open, requests: Sequence[Request], folder: Path) -> Iterator[Gathered]:
    """Each request begins with the state that the request before has saved."""
    for request in requests:
        engine = opened()
        engine.use_state(StatePlace(str(folder / "state.kv")), pytest.fail)
        yield from answer_all(engine, [request])
        engine.save_state()


def from_saved_prefixes(opened: Open, requests: Sequence[Request], folder: Path) -> Iterator[Gathered]:
    for request in requests:
        engine = opened()
        budget = Budget([folder / "saved"], 1 << 30)
        engine.use_saved(SavedChunks(folder / "saved", engine.state_key, budget, pytest.fail))
        yield from answer_all(engine, [request])
        while engine.save_prefix():
            pass


WAYS: list[Way] = [
    in_turn,
    in_many_slots,
    in_small_steps,
    at_once,
    with_encoded_rows,
    from_state_files,
    from_saved_prefixes,
]


def _exactly(answer: Gathered) -> tuple[object, ...]:
    return answer.text, answer.tokens, answer.logprobs, answer.finished.reason


def _compare(opened: Open, pair: str, way: Way, folder: Path) -> int:
    """Compare the answers to both orders of the requests with those of fresh engines.

    Returns how many tokens one of the answers found in a cache.
    """
    requests = _requests(PAIRS[pair])
    expected = [_exactly(answer_all(opened(), [request])[0]) for request in requests]
    answers = [*way(opened, requests, folder), *way(opened, requests[::-1], folder)]
    assert [_exactly(answer) for answer in answers] == expected + expected[::-1]
    return max(answer.finished.timings.cached_tokens for answer in answers)


@pytest.mark.cover(2)
@pytest.mark.parametrize("checkpoint", [None, 8])
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", PAIRS)
def test_similar_images_never_mix(tmp_path: Path, pair: str, way: Way, kind: int, checkpoint: int | None) -> None:
    def opened(*, max_sequences: int = 1, **options: Any) -> Engine:
        models = {"checkpoint": checkpoint, "max_sequences": max_sequences}
        return Sight(tmp_path, KINDS[kind], voice=None, **models, **options).engine

    cached = _compare(opened, pair, way, tmp_path)
    assert cached > len(BEFORE) - 8 or way is with_encoded_rows


@pytest.mark.cover(1)
@pytest.mark.parametrize("name", ["gemma3", "gemma4v", "qwen3vl_merger", "qwen3vl_merger qwen35", "idefics3"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("pair", PAIRS)
def test_similar_images_never_mix_on_the_cpu_engine(tmp_path: Path, pair: str, way: Way, name: str) -> None:
    model = SEEING[name](tmp_path)
    with ExitStack() as stack:

        def opened(*, max_sequences: int = 1, **options: Any) -> Engine:
            backend = model.open(threads=2, sequences=max_sequences)
            stack.callback(backend.close)
            engine = Engine(backend, templates=PROCESS, **options)
            assert engine.image_encoder is not None
            vars(engine.image_encoder)["_decoder"] = PlainDecoder()
            return engine

        _compare(opened, pair, way, tmp_path)


@pytest.mark.parametrize("way", [from_state_files, from_saved_prefixes])
def test_saved_states_never_match_another_projector(tmp_path: Path, way: Way) -> None:
    request = _requests(PAIRS["equal size"])[0]
    expected = [_exactly(answer_all(Sight(tmp_path, kind, voice=None).engine, [request])[0]) for kind in KINDS]
    kinds = iter([*KINDS, *KINDS[::-1]])

    def opened() -> Engine:
        return Sight(tmp_path, next(kinds), voice=None).engine

    found = [_exactly(answer) for answer in way(opened, [request] * 2 * len(KINDS), tmp_path)]
    assert found == expected + expected[::-1]


@pytest.mark.parametrize("rows_per_step", [4, 512])
def test_each_tile_gets_its_own_rows(tmp_path: Path, rows_per_step: int) -> None:
    sight = Sight(tmp_path, {"has_overview": True}, rows_per_step=rows_per_step)
    answer_all(sight.engine, [ask([FIRST, "?"])])
    assert sight.engine.image_encoder is not None
    [rows] = sight.engine.image_encoder.recent._rows.values()
    run = [batch.embeds for batch in sight.backend.batches if batch.embeds is not None]
    np.testing.assert_array_equal(np.concatenate(run), rows)
