"""Tests that text models read the rows of images as in llama.cpp, and that nothing else changes their bits.

The table of models is in tests/support/vision/projectors.py. test_numerics.py compares instruction-set levels.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llmrun.base.errors import KVFull
from llmrun.model.plan.ops import activations
from llmrun.model.vision.layout import Rows
from llmrun.model.vision.projector import read_projector
from tests.model.archs.test_architectures import activation_in_a_table, distance, has_gelu
from tests.support.models.fidelity import ENGINE_FLOOR, TWIN_BOUND, kl_divergence, plan_of
from tests.support.models.llama_cpp_oracle import LlamaCppModel
from tests.support.models.tiny_adapters import AdaptedOracle, scales_of, tiny_adapter
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture
from tests.support.vision.image_models import IMAGE_MODELS, Parts, opened, twin_logits
from tests.support.vision.mtmd_oracle import seen_by_libmtmd
from tests.support.vision.opened import SMALL
from tests.support.vision.projectors import TEXT_WIDTH, TINY_PROJECTORS, tiny_projector, tiny_text_model
from tests.support.vision.prompts import Image, joined, one_tile, part_of, prompt_batch, tiles_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from llmrun.backends.cpu.backend import CpuBackend
    from llmrun.base.types import Batch

pytestmark = pytest.mark.push

# The windows of these models have 16 or 24 positions, and attention proceeds in chunks of 128.
PROMPTS: tuple[Parts, ...] = (
    (11, (5, 4), 9),
    ((6, 3), 5, (2, 7), (3, 3), 7),
    (5, (1, 23), 3, (17, 1), 6),
    (20, (9, 8), 13),
    (12, (20, 16), 30),
)
LONG: Parts = (7, (4, 3), (1, 6), 40, (12, 14), 12)
DECODED = 5
GELU_BOUND = 1e-7  # nats; ggml looks up GELU in a table of float16

# One model of each kind: two-way masks in all layers and in those with a window, row 0 of a table, M-RoPE with
# consecutive and interleaved pairs, deepstack, recurrent layers, short convolutions, scaled rows, and plain rows.
KINDS = ("gemma3", "gemma4", "gemma4 E2B", "qwen2vl", "qwen3vlmoe", "qwen35", "lfm2", "granite", "mistral3 temperature")
MODELS = [pytest.param(name, marks=() if name in KINDS else pytest.mark.night) for name in IMAGE_MODELS]


# --- against llama.cpp -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_llama_cpp(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of images and texts, in F32, within the bounds for text.

    At most 1e-11 was measured for the twin, 6e-9 with GELU, and at most 2e-7 for the engine. A float16 cache routes
    single rows to other experts, in llama.cpp as in our engine, so models with experts need the median.
    """
    monkeypatch.setattr(activations, "activation_reference", activation_in_a_table)
    path, model = tiny_architecture(tmp_path, name), IMAGE_MODELS[name]
    plan, of_twin, of_engine = plan_of(path), [], []
    with LlamaCppModel.oracle(path) as oracle, opened(path, model) as backend:
        for seed, parts in enumerate(PROMPTS):
            batch = model.batch(parts, seed=seed)
            found = [twin_logits(plan, batch), backend.forward(batch).logits]
            backend.kv.free(0)
            twin, engine = kl_divergence(oracle.logits_of_batch(batch), found)
            of_twin.append(twin)
            of_engine.append(engine)
    assert np.concatenate(of_twin).mean() <= (GELU_BOUND if has_gelu(path) else TWIN_BOUND)
    average = np.median if TINY_ARCHITECTURES[name].experts else np.mean
    assert average(np.concatenate(of_engine)) <= ENGINE_FLOOR


# E2B and E4B, which libmtmd recognizes by their width, are causal.
E2B = ("gemma4v", "gemma4 E2B", 1536)
BEFORE, AFTER = [5, 6, 7, 8], [9, 10, 11]


@pytest.mark.parametrize(
    ("name", "text", "width"),
    [
        *(pytest.param(name, "", TEXT_WIDTH, marks=pytest.mark.night) for name in TINY_PROJECTORS),
        E2B,
    ],
)
def test_logits_are_those_of_libmtmds_helper(tmp_path: Path, name: str, text: str, width: int) -> None:
    """libmtmd's helper itself chooses positions and masks, with a float16 cache as in the engine."""
    file = tiny_projector(tmp_path, name, text_width=width, **SMALL.get(name, {}))
    projector, path = read_projector(file), tiny_text_model(tmp_path, name, text=text, text_width=width)
    layout = one_tile(projector.layout(300, 200))
    tile = tiles_of(layout)[0]
    seen = seen_by_libmtmd(path, file, tile, projector.most_rows, before=BEFORE, after=AFTER)
    (piece,) = layout.pieces
    assert isinstance(piece, Rows)
    batch = prompt_batch(projector, [BEFORE, Image(piece, seen.rows), AFTER], wanted=len(AFTER))
    with opened(path, projector, context_size=2048) as backend:
        (divergence,) = kl_divergence(seen.logits, [backend.forward(batch).logits])
    assert divergence.mean() <= ENGINE_FLOOR


@pytest.mark.night
@pytest.mark.parametrize("name", ["gemma3", "qwen3vl"])
def test_adapters_change_images_as_in_llama_cpp(tmp_path: Path, name: str) -> None:
    path, model = tiny_architecture(tmp_path, name), IMAGE_MODELS[name]
    adapter, batch = tiny_adapter(tmp_path / "a.gguf", path), model.batch(PROMPTS[1])
    adapted = replace(batch, scales=scales_of(len(batch.tokens), 1.0))
    with AdaptedOracle(path, [(adapter, 1.0)]) as oracle, opened(path, model, adapters=[str(adapter)]) as backend:
        (divergence,) = kl_divergence(oracle.logits_of_batch(batch), [backend.forward(adapted).logits])
    assert divergence.mean() <= ENGINE_FLOOR


@pytest.mark.night
@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
@pytest.mark.parametrize("name", ["gemma3", "qwen2vl"])
def test_images_in_quantized_caches_are_near_the_twin(tmp_path: Path, name: str, kv_type: str) -> None:
    """Allow 2 % of the logits' range, as for text."""
    path, model = tiny_architecture(tmp_path, name), IMAGE_MODELS[name]
    batch = model.batch(LONG)
    expected = twin_logits(plan_of(path), batch, kv_type)
    with opened(path, model, kv_type=kv_type) as backend:
        at_once = logits_in_parts(backend, batch, [len(batch.tokens)])
        np.testing.assert_array_equal(logits_in_parts(backend, batch, random_ends(batch, 0)), at_once)
    assert distance(at_once, expected) <= 0.02


# --- the same bits ---------------------------------------------------------------------------------------------------


def logits_in_parts(backend: CpuBackend, batch: Batch, ends: Sequence[int]) -> NDArray[np.float32]:
    parts = [backend.forward(part_of(batch, start, end)).logits for start, end in pairwise([0, *ends])]
    backend.kv.free(0)
    return np.concatenate(parts)


def random_ends(batch: Batch, seed: int) -> list[int]:
    """Return ends of steps: random ones, none within an image with a two-way mask, and single rows at the end."""
    n = len(batch.tokens)
    allowed = np.arange(1, n - DECODED)
    if batch.ahead is not None:
        allowed = allowed[batch.ahead[allowed - 1] == 0]
    chosen = np.random.default_rng(seed).choice(allowed, 9, replace=False)
    return [*np.sort(chosen).tolist(), *range(n - DECODED, n + 1)]


@pytest.mark.parametrize("name", MODELS)
def test_steps_and_threads_change_nothing(tmp_path: Path, name: str) -> None:
    path, model = tiny_architecture(tmp_path, name), IMAGE_MODELS[name]
    batch = model.batch(LONG)
    with opened(path, model) as backend:
        expected = backend.forward(batch).logits
    for threads in (1, 2, 3):
        with opened(path, model, threads=threads) as backend:
            found = logits_in_parts(backend, batch, random_ends(batch, threads))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", KINDS)
def test_company_changes_nothing(tmp_path: Path, name: str) -> None:
    """Sequences with and without images share a step, and a text by itself has the step of a text."""
    path, model = tiny_architecture(tmp_path, name), IMAGE_MODELS[name]
    prompts: list[Parts] = [LONG, (40,), ((3, 5), 6), (4, (2, 2))]
    batches = [model.batch(parts, seq=seq, seed=seq) for seq, parts in enumerate(prompts)]
    text = replace(batches[1], rope_pos=None, ahead=None)
    with opened(path, model, max_sequences=4) as backend:
        alone = [backend.forward(batch).logits for batch in (batches[0], text, *batches[2:])]
        for seq in range(4):
            backend.kv.free(seq)
        np.testing.assert_array_equal(backend.forward(joined(batches)).logits, np.concatenate(alone))


@pytest.mark.parametrize("name", KINDS)
def test_prefixes_that_end_at_images_change_nothing(tmp_path: Path, name: str) -> None:
    path, model = tiny_architecture(tmp_path, name), IMAGE_MODELS[name]
    batch = model.batch(LONG)
    starts = [sum(part if isinstance(part, int) else part[0] * part[1] for part in LONG[:n]) for n in range(len(LONG))]
    with opened(path, model, max_sequences=2) as backend:
        expected = backend.forward(batch).logits
        for start in starts[1:]:
            kept = backend.kv.copy(0, 1, start)
            while kept not in starts and not model.is_causal:
                kept = backend.kv.truncate(1, max(start for start in starts if start < kept))
            rest = part_of(batch, kept)
            found = backend.forward(replace(rest, seq=np.ones_like(rest.seq))).logits
            np.testing.assert_array_equal(found, expected[kept:])


# --- steps -----------------------------------------------------------------------------------------------------------


def sizes_of_steps(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of each step from now on."""
    sizes: list[int] = []
    run = backend._team.run

    def watched(tokens: NDArray[np.int32], *inputs: Any, **more: Any) -> None:
        sizes.append(len(tokens))
        run(tokens, *inputs, **more)

    monkeypatch.setattr(backend._team, "run", watched)
    return sizes


def test_only_images_have_large_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large steps of text would delay other requests."""
    path, model = tiny_architecture(tmp_path, "gemma3"), IMAGE_MODELS["gemma3"]
    with opened(path, model, context_size=2048) as backend:
        sizes = sizes_of_steps(backend, monkeypatch)
        backend.forward(model.batch((300, (20, 20), (3, 5), 300)))
        assert sizes == [256, 44, 400, 256, 59]
        backend.kv.free(0)
        with pytest.raises(ValueError, match="more than 400 rows"):
            backend.forward(model.batch(((20, 20), 5, (21, 20), 5)))
        assert len(sizes) == 5


@pytest.mark.parametrize("name", ["qwen35", "lfm2"])
def test_a_full_cache_is_noticed_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, model = tiny_architecture(tmp_path, name), IMAGE_MODELS[name]
    with opened(path, model, max_sequences=2, kv_tokens=512) as backend:
        backend.forward(model.batch((448,)))
        sizes = sizes_of_steps(backend, monkeypatch)
        with pytest.raises(KVFull):
            backend.forward(model.batch((20, (5, 6), 40), seq=1))
        assert sizes == []
