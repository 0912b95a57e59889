"""Tests that models with recurrent layers compute the same bits after any sequence of steps, cuts and copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.backends.base import CHECKPOINT_DISTANCE, OpenOptions
from llmrun.backends.checkpoints import Checkpoints
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.base.errors import Cancelled, KVFull
from llmrun.base.types import IMAGE_ROW, LOGITS, Batch
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.layouts.kv import REPLAY_ROWS
from llmrun.model.plan.shapes import MatrixState
from llmrun.model.vision.layout import Rows
from llmrun.model.vision.projector import ProjectorFile, read_projector
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.vision.projectors import tiny_projector, tiny_text_model
from tests.support.vision.prompts import Image, part_of, prompt_batch

pytestmark = pytest.mark.push

# A delta rule with each mapping of heads to key heads, SSD, and both SSD and attention in each layer.
HYBRIDS = pytest.mark.parametrize("name", ["qwen35", "qwen3next", "granitehybrid", "falcon-h1", "jamba"])
CONTEXT = 2048
PROMPT = [int(token) for token in np.random.default_rng(0).integers(3, 290, 1300)]


@contextmanager
def opened(
    path: Path,
    *,
    threads: int = 2,
    max_sequences: int = 1,
    keeps_rows: bool = False,
    projector: ProjectorFile | None = None,
) -> Iterator[CpuBackend]:
    """Open a model. A projector comes without an encoder, because random rows of images are good enough."""
    options = OpenOptions(context_size=CONTEXT, max_sequences=max_sequences, threads=threads, keeps_rows=keeps_rows)
    vision: Any = projector and SimpleNamespace(projector=projector, close=lambda: None)
    with open_gguf(path) as file:
        backend = CpuBackend(file, options, vision=vision)
    try:
        yield backend
    finally:
        backend.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


@cache
def expected_logits(path: Path) -> NDArray[np.float32]:
    with opened(path, threads=1) as backend:
        return forward(backend, 0, 0, PROMPT, wanted=len(PROMPT))


def forward(backend: CpuBackend, seq: int, start: int, tokens: Sequence[int], wanted: int = 1) -> NDArray[np.float32]:
    """Run tokens, and return the logits of the last `wanted` of them."""
    return backend.forward(part(seq, start, tokens, wanted)).logits


def matrices(backend: CpuBackend) -> list[NDArray[np.uint8]]:
    """Return the matrices of the first sequence's states, for each group of layers."""
    assert backend._states is not None
    groups = zip(backend.plan.states, backend._states._memory, strict=True)
    return [
        memory[:, 0, : group.shape.matrix_bytes] for group, memory in groups if isinstance(group.shape, MatrixState)
    ]


def part(seq: int, start: int, tokens: Sequence[int], wanted: int) -> Batch:
    batch = batch_of(rows(seq, start, tokens))
    return replace(batch, want=(np.arange(len(tokens)) >= len(tokens) - wanted) * np.uint8(LOGITS))


@pytest.mark.cover(1)
@HYBRIDS
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_chunks_change_nothing(folder: Path, name: str, threads: int) -> None:
    path = tiny_architecture(folder, name)
    expected = expected_logits(path)
    with opened(path, threads=threads) as backend:
        for chunk in (1, 7, 17, 256):
            count = 60 if chunk == 1 else 300
            for at in range(0, count, chunk):
                tokens = PROMPT[at : min(at + chunk, count)]
                for wanted in (1, len(tokens)):  # the second time, the step is repeated from its start
                    if wanted > 1 or len(tokens) == 1:
                        kept = backend.kv.truncate(0, at)
                        forward(backend, 0, kept, PROMPT[kept:at]) if kept < at else None
                    found = forward(backend, 0, at, tokens, wanted)
                    np.testing.assert_array_equal(found, expected[at + len(tokens) - wanted : at + len(tokens)])
            backend.kv.free(0)


@HYBRIDS
def test_a_rejected_draft_leaves_nothing_behind(folder: Path, name: str) -> None:
    """Drafts of 8 tokens are rejected from any token on, also right after a prompt. Nothing is computed twice.

    Afterwards, the states are bit-identical to those of a cache that has never seen a draft.
    """
    path = tiny_architecture(folder, name)
    expected = expected_logits(path)
    wrong = [token + 1 for token in PROMPT]
    for prompt in (5, 40, 300):
        with opened(path) as backend:
            forward(backend, 0, 0, PROMPT[:prompt])
            at = prompt
            for right in [*range(9), *range(8, -1, -1)]:
                draft = [*PROMPT[at + 1 : at + 1 + right], *wrong[at + 1 + right : at + 9]]
                found = forward(backend, 0, at, [PROMPT[at], *draft], wanted=9)
                np.testing.assert_array_equal(found[: right + 1], expected[at : at + right + 1])
                at += right + 1
                assert backend.kv.truncate(0, at) == at
            forward(backend, 0, at, PROMPT[at : at + 1])
            with opened(path) as plain:
                forward(plain, 0, 0, PROMPT[:prompt])
                for position in range(prompt, at + 1):
                    forward(plain, 0, position, PROMPT[position : position + 1])
                for drafted, undrafted in zip(matrices(backend), matrices(plain), strict=True):
                    np.testing.assert_array_equal(drafted, undrafted)


@HYBRIDS
def test_a_draft_models_tokens_can_be_removed(folder: Path, name: str) -> None:
    """A draft model runs its tokens one by one, and then some of them turn out to be wrong."""
    path = tiny_architecture(folder, name)
    expected = expected_logits(path)
    with opened(path, keeps_rows=True) as backend:
        forward(backend, 0, 0, PROMPT[:60])
        at = 60
        for right in [*range(REPLAY_ROWS), *range(0, REPLAY_ROWS, 3)]:
            drafted = [*PROMPT[at : at + right], *[7] * (REPLAY_ROWS - right)]
            for index, token in enumerate(drafted):
                found = forward(backend, 0, at + index, [token])
                if index < right:
                    np.testing.assert_array_equal(found[0], expected[at + index])
            at += right
            assert backend.kv.truncate(0, at) == at


@HYBRIDS
def test_the_longest_draft_can_be_rejected_entirely(folder: Path, name: str) -> None:
    path = tiny_architecture(folder, name)
    expected = expected_logits(path)
    with opened(path) as backend:
        forward(backend, 0, 0, PROMPT[:100])
        for at in range(100, 110):
            found = forward(backend, 0, at, [PROMPT[at], *[7] * (REPLAY_ROWS - 1)], wanted=REPLAY_ROWS)
            np.testing.assert_array_equal(found[0], expected[at])
            assert backend.kv.truncate(0, at + 1) == at + 1


@pytest.mark.sample(2)
@HYBRIDS
def test_the_end_of_a_prompt_can_be_cut(folder: Path, name: str) -> None:
    """The next turn of a chat often differs in the last tokens of the prompt. At most 32 tokens are computed again."""
    path = tiny_architecture(folder, name)
    expected = expected_logits(path)
    with opened(path) as backend:
        for chunks, cut in product(((300,), (284, 16), (299, 1), (256, 44), (290, 10)), range(1, REPLAY_ROWS + 1)):
            at = 0
            for chunk in chunks:
                forward(backend, 0, at, PROMPT[at : at + chunk], wanted=int(at + chunk == 300))
                at += chunk
            kept = backend.kv.truncate(0, 300 - cut)
            assert kept == 300 - cut or 300 - 2 * REPLAY_ROWS <= kept < 300 - cut
            found = forward(backend, 0, kept, PROMPT[kept:320], wanted=20)
            np.testing.assert_array_equal(found, expected[300:320])
            backend.kv.free(0)


@HYBRIDS
def test_after_an_answer_its_prompt_is_restored_from_a_checkpoint(folder: Path, name: str) -> None:
    """The answer has 600 tokens, so the checkpoint of the prompt is restored although there is a newer one."""
    path = tiny_architecture(folder, name)
    expected = expected_logits(path)
    with opened(path, max_sequences=2) as backend:
        forward(backend, 0, 0, PROMPT[:300])
        for at in range(300, 900):
            forward(backend, 0, at, PROMPT[at : at + 1])
        assert backend.kv.copy(0, 1, 700) == 512  # every 512 tokens
        found = forward(backend, 1, 512, PROMPT[512:720], wanted=20)
        np.testing.assert_array_equal(found, expected[700:720])
        kept = backend.kv.truncate(0, 297)
        assert 300 - REPLAY_ROWS <= kept <= 297
        found = forward(backend, 0, kept, PROMPT[kept:320], wanted=20)
        np.testing.assert_array_equal(found, expected[300:320])


@pytest.mark.cover(1)
@HYBRIDS
@pytest.mark.parametrize("seed", range(6))
def test_random_steps_cuts_and_copies_change_nothing(folder: Path, name: str, seed: int) -> None:
    """Rows of three sequences share steps. Prompts, answers, drafts, cuts, copies and cancelled steps are random."""
    path, random = tiny_architecture(folder, name), np.random.default_rng(seed)
    expected = expected_logits(path)
    lengths = [0, 0, 0]
    with opened(path, threads=1 + seed % 3, max_sequences=3, keeps_rows=seed % 2 == 1) as backend:
        for _ in range(120):
            action = random.choice(["step", "step", "step", "cut", "copy", "cancel"])
            seq, other = (int(each) for each in random.choice(3, 2, replace=False))
            if action == "cut":
                n = int(random.integers(max(0, lengths[seq] - random.choice([3, 40, 700])), lengths[seq] + 1))
                lengths[seq] = checked_kept(backend.kv.truncate(seq, n), n)
            elif action == "copy":
                n = int(random.integers(0, lengths[seq] + 1))
                lengths[other] = checked_kept(backend.kv.copy(seq, other, n), n)
            else:
                batches: list[Batch] = []
                found_at: list[int] = []
                for each in random.permutation(3)[: random.integers(1, 4)].tolist():
                    at = lengths[each]
                    count = min(int(random.choice([1, 1, 9, 16, 30, 100])), len(PROMPT) - at)
                    if not count:
                        lengths[each] = backend.kv.truncate(each, 0)
                        continue
                    wanted = int(random.choice([0, 1, 1, min(count, 9), count]))
                    batches.append(part(each, at, PROMPT[at : at + count], wanted))
                    found_at += range(at + count - wanted, at + count)
                    lengths[each] += count
                if not batches:
                    continue
                batch = mixed(batches, random) if action == "step" else joined(batches)
                if action == "cancel":
                    backend.cancel()
                    with pytest.raises(Cancelled):
                        backend.forward(batch)
                    for each in set(batch.seq.tolist()):
                        before = int(batch.pos[batch.seq == each].min())
                        lengths[each] = checked_kept(backend.kv.truncate(each, before), before)
                    continue
                found = backend.forward(batch).logits
                order = batch.pos[batch.want != 0]
                assert sorted(order.tolist()) == sorted(found_at)
                np.testing.assert_array_equal(found, expected[order])


def test_short_turns_keep_no_more_checkpoints_than_are_counted(folder: Path) -> None:
    """`footprint` counts one for each sequence, and one every 512 tokens. The second last prompt can be restored."""
    path = tiny_architecture(folder, "qwen35")
    expected = expected_logits(path)
    with opened(path) as backend:
        states = backend._states
        assert states is not None
        unused, ends = len(states.checkpoints.free), list(range(80, 1280, 80))
        for end in ends:
            at = backend.kv.lengths[0]
            forward(backend, 0, at, PROMPT[at:end])
            for position in range(end, end + 3):
                forward(backend, 0, position, PROMPT[position : position + 1])
            assert unused - len(states.checkpoints.free) <= 2 + end // CHECKPOINT_DISTANCE
        end = ends[-2]
        kept = backend.kv.truncate(0, end - 3)
        assert kept >= end - 2 * REPLAY_ROWS
        found = forward(backend, 0, kept, PROMPT[kept : end + 20], wanted=20)
        np.testing.assert_array_equal(found, expected[end : end + 20])
        backend.kv.free(0)
        assert len(states.checkpoints.free) == unused


def test_a_full_cache_makes_no_checkpoints(folder: Path) -> None:
    """The engine repeats a step without its forced tokens if the cache is too full for them."""
    with open_gguf(tiny_architecture(folder, "qwen35")) as file:
        backend = CpuBackend(file, OpenOptions(context_size=256, max_sequences=2, kv_tokens=256, threads=1))
    with closing(backend):
        states = backend._states
        assert states is not None
        forward(backend, 0, 0, PROMPT[:120])
        forward(backend, 1, 0, PROMPT[:60])
        unused = len(states.checkpoints.free)
        for at in range(120, 130):
            with pytest.raises(KVFull):
                forward(backend, 0, at, PROMPT[at : at + 100])
            forward(backend, 0, at, PROMPT[at : at + 1])
        assert len(states.checkpoints.free) == unused
        assert backend.kv.truncate(0, 129) == 104


@pytest.mark.parametrize("after", [False, True])
def test_an_exception_after_a_step_does_not_leave_an_old_position_for_a_new_state(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, after: bool
) -> None:
    """Ctrl-C can raise an exception between the end of a step and the end of its bookkeeping."""
    path = tiny_architecture(folder, "qwen35")
    with opened(path) as backend:
        forward(backend, 0, 0, PROMPT[:300])
        forward(backend, 0, 300, PROMPT[300:301])
        states = backend._states
        assert states is not None
        finish = states.finish

        def interrupted() -> None:
            if after:
                finish()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(states, "finish", interrupted)
            with pytest.raises(KeyboardInterrupt):
                forward(backend, 0, 301, PROMPT[301:340])
        kept = backend.kv.truncate(0, 301)
        found = forward(backend, 0, kept, PROMPT[kept:340], wanted=20)
        np.testing.assert_array_equal(found, expected_logits(path)[320:340])


# The recurrent states of Qwen3.5, with M-RoPE, and the short convolutions of LFM2, which are windows of the KV cache.
SEEING = pytest.mark.parametrize("name", ["qwen3vl_merger qwen35", "lfm2"])


def seen(projector: ProjectorFile, seed: int, *, nx: int = 20, ny: int = 15) -> Image:
    """Return an image of random rows."""
    rows = np.random.default_rng(seed).standard_normal((nx * ny, projector.row_width)).astype(np.float32)
    return Image(Rows(0, nx * ny, nx, ny), rows)


@pytest.mark.cover(2)
@SEEING
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("chunk", [7, 100, 256, 2000])
def test_checkpoints_after_images_change_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, threads: int, chunk: int
) -> None:
    """ggml-org/llama.cpp#26994: prefix with image never cached for hybrid models.

    Logits are the same without a checkpoint, with any division into steps, and after another question.
    """
    path, projector = tiny_text_model(folder, name), read_projector(tiny_projector(folder, name))
    pictures = [seen(projector, seed) for seed in (1, 2)]
    one, two = 20 + 300, 20 + 300 + 240 + 300
    parts: list[list[int] | Image] = [PROMPT[:20], pictures[0], PROMPT[20:260], pictures[1]]
    first, second = (prompt_batch(projector, [*parts, PROMPT[at : at + 30]], wanted=200) for at in (300, 400))
    edited = prompt_batch(projector, [*parts[:2], PROMPT[500:520]], wanted=10)
    with monkeypatch.context() as patch, opened(path, projector=projector, threads=1) as plain:
        patch.setattr(Checkpoints, "slot_for", lambda self, seq: None)
        expected = [whole(plain, batch) for batch in (first, second, edited)]
    with opened(path, projector=projector, threads=threads, max_sequences=2) as backend:
        answered = prompt_batch(projector, [*parts, PROMPT[300:1000]])  # the answer is longer than any window
        n = len(answered.tokens)
        for at in range(0, n, chunk):
            backend.forward(part_of(answered, at, min(at + chunk, n), wanted=1))
        assert backend.kv.truncate(0, two + 2) == two
        found = backend.forward(part_of(first, two)).logits
        np.testing.assert_array_equal(found, expected[0][-len(found) :])
        assert backend.kv.copy(0, 1, two) == two
        rest = part_of(second, two)
        again = backend.forward(replace(rest, seq=np.ones_like(rest.seq))).logits
        np.testing.assert_array_equal(again, expected[1][-len(again) :])
        assert backend.kv.truncate(0, one + 4) == one
        np.testing.assert_array_equal(backend.forward(part_of(edited, one)).logits, expected[2])


@SEEING
def test_nothing_before_a_restored_image_end_is_reachable(folder: Path, name: str) -> None:
    """Text and a small image are in the same block of the cache, but only the inputs before the end are restored."""
    path, projector = tiny_text_model(folder, name), read_projector(tiny_projector(folder, name))
    batch = prompt_batch(projector, [PROMPT[:40], seen(projector, 1, nx=3, ny=2), PROMPT[40:800]])
    with opened(path, projector=projector) as backend:
        backend.forward(batch)
        assert backend.kv.truncate(0, 47) == 46
        assert backend.kv.truncate(0, 40) == 0


@SEEING
def test_saved_sequences_contain_checkpoints_after_images(folder: Path, name: str) -> None:
    path, projector = tiny_text_model(folder, name), read_projector(tiny_projector(folder, name))
    parts: list[list[int] | Image] = [PROMPT[:20], seen(projector, 1)]
    answered, edited = (prompt_batch(projector, [*parts, text]) for text in (PROMPT[20:700], PROMPT[700:720]))
    with opened(path, projector=projector, max_sequences=2) as backend:
        backend.forward(answered)
        saved = [replace(each, read=partial(bytes, bytes(each.read()))) for each in backend.kv.save(0, 1000)]
        assert backend.kv.load(1, saved) >= 1000 - 2 * REPLAY_ROWS
        assert backend.kv.truncate(1, 325) == 320
        rest = part_of(edited, 320)
        found = backend.forward(replace(rest, seq=np.ones_like(rest.seq))).logits
        np.testing.assert_array_equal(found, whole(backend, edited))


def whole(backend: CpuBackend, batch: Batch) -> NDArray[np.float32]:
    backend.kv.free(0)
    return backend.forward(batch).logits


@pytest.mark.cover(1)
@SEEING
@pytest.mark.parametrize("seed", range(6))
def test_random_steps_with_images_change_nothing(folder: Path, name: str, seed: int) -> None:
    """Prompts of two sequences with images share steps, and are cut and copied anywhere at the borders of images."""
    path, random = tiny_text_model(folder, name), np.random.default_rng(seed)
    projector = read_projector(tiny_projector(folder, name))
    first, second, third = (seen(projector, number) for number in (1, 2, 3))
    batch = prompt_batch(projector, [PROMPT[:30], first, PROMPT[30:33], second, PROMPT[40:300], third, PROMPT[300:800]])
    n = len(batch.tokens)
    batch = replace(batch, want=np.full(n, LOGITS, np.uint8))
    with opened(path, projector=projector, threads=1) as backend:
        expected = backend.forward(batch).logits
    lengths = [0, 0]
    with opened(path, projector=projector, threads=1 + seed % 3, max_sequences=2) as backend:
        for _ in range(60):
            action = random.choice(["step", "step", "step", "cut", "copy"])
            seq = int(random.integers(2))
            n_kept = int(random.integers(0, lengths[seq] + 1))
            while 0 < n_kept < n and batch.tokens[n_kept] == IMAGE_ROW == batch.tokens[n_kept - 1]:
                n_kept -= 1
            if action == "cut":
                lengths[seq] = checked_kept(backend.kv.truncate(seq, n_kept), n_kept)
            elif action == "copy":
                lengths[1 - seq] = checked_kept(backend.kv.copy(seq, 1 - seq, n_kept), n_kept)
            else:
                steps = []
                for each in random.permutation(2).tolist():
                    at = lengths[each]
                    end = min(n, at + int(random.choice([1, 9, 100, 400])))
                    lengths[each] = end
                    if at < end:
                        own = part_of(batch, at, end)
                        steps.append(replace(own, seq=np.full_like(own.seq, each)))
                if steps:
                    both = joined(steps)
                    embeds = [each.embeds for each in steps if each.embeds is not None]
                    rope = [each.rope_pos for each in steps if each.rope_pos is not None]
                    both = replace(
                        both,
                        embeds=np.concatenate(embeds) if embeds else None,
                        rope_pos=np.concatenate(rope) if rope else None,
                    )
                    np.testing.assert_array_equal(backend.forward(both).logits, expected[both.pos])


def checked_kept(kept: int, n: int) -> int:
    assert 0 <= kept <= n
    return kept


def joined(batches: Sequence[Batch]) -> Batch:
    return Batch(
        *(np.concatenate([getattr(each, name) for each in batches]) for name in ("tokens", "seq", "pos", "want"))
    )


def mixed(batches: Sequence[Batch], random: np.random.Generator) -> Batch:
    """Join batches and shuffle their rows, but keep the rows of each sequence in order."""
    whole = joined(batches)
    places = random.permutation(whole.seq)
    order = np.empty(len(places), np.int64)
    for seq in set(places.tolist()):
        order[places == seq] = np.flatnonzero(whole.seq == seq)
    return Batch(*(np.ascontiguousarray(getattr(whole, name)[order]) for name in ("tokens", "seq", "pos", "want")))
