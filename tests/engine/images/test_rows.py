"""Tests of the rows of images in steps: positions, look-ahead, and tiles that stay whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.types import IMAGE_ROW, Batch, Outputs
from llmrun.engine.drafting.base import NO_DRAFT, Draft, Drafter, DraftSource, Kind, Worth
from llmrun.engine.drafting.head import HeadSource
from llmrun.engine.drafting.lookup import LookupSource
from llmrun.engine.drafting.model import ModelSource
from llmrun.engine.requests import IMAGE_MARKER, Request, TextPrompt
from llmrun.engine.slots import whole_images
from tests.engine.drafting.test_head import TRUE, ScriptedHead
from tests.support.engine.answers import answer_all, run_to_the_end
from tests.support.engine.eager_speculation import speculate_eagerly
from tests.support.engine.pictures import BLUE, RED, Sight, ask, plain, png

WIDE, TALL = png(plain(160, 64, RED)), png(plain(32, 96, BLUE))  # 5 x 2 and 1 x 3 patches


def joined(batches: list[Batch], name: str) -> np.ndarray:
    return np.concatenate([getattr(batch, name) for batch in batches])


def expected_positions(tokens: list[int], grids: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Compute the positions as Qwen2-VL's `get_rope_index` defines them, row by row."""
    found, at, index, queue = [], 0, 0, list(grids)
    while index < len(tokens):
        if tokens[index] != IMAGE_ROW:
            found.append((at, at, at))
            at, index = at + 1, index + 1
            continue
        nx, ny = queue.pop(0)
        found += [(at, at + row, at + column) for row in range(ny) for column in range(nx)]
        at, index = at + max(nx, ny), index + nx * ny
    return found


@pytest.mark.parametrize("rows", [3, 512])
def test_rope_positions_follow_rows_and_columns(tmp_path: Path, rows: int) -> None:
    """llama.cpp#17290: positions of small or narrow images off."""
    sight = Sight(tmp_path, {"uses_mrope": True}, rows_per_step=rows, voice=None)
    request = ask(["Look: ", WIDE, TALL, " ok?"], max_tokens=4)
    answer_all(sight.engine, [request])
    tokens = joined(sight.backend.batches, "tokens").tolist()
    # The first steps of small chunks have no image, and need no positions.
    found = [
        each.pos[:, None].repeat(3, 1) if each.rope_pos is None else each.rope_pos for each in sight.backend.batches
    ]
    assert [tuple(row) for row in np.concatenate(found).tolist()] == expected_positions(tokens, [(5, 2), (1, 3)])
    assert joined(sight.backend.batches, "pos").tolist() == [*range(len(tokens))]
    assert all(each.rope_pos is not None for each in sight.backend.batches[-3:])


def test_other_requests_keep_their_positions(tmp_path: Path) -> None:
    sight = Sight(tmp_path, {"uses_mrope": True}, max_sequences=2)
    answer_all(sight.engine, [ask(["a", WIDE], max_tokens=9), ask("hello", max_tokens=9)])
    mixed = [each for each in sight.backend.batches if len({*each.seq.tolist()}) == 2]
    assert mixed
    [image_seq] = {int(seq) for each in sight.backend.batches for seq in each.seq[each.tokens == IMAGE_ROW]}
    for batch in mixed:
        assert batch.rope_pos is not None
        text = batch.seq != image_seq
        assert (batch.rope_pos[text] == batch.pos[text][:, None]).all()


@pytest.mark.parametrize("rows", [1, 4, 12, 512])
@pytest.mark.parametrize("overview", [False, True])
def test_tiles_that_are_not_causal_stay_whole(tmp_path: Path, rows: int, overview: bool) -> None:
    """llama.cpp#18757, #23409: process aborts when an image exceeds the micro-batch."""
    sight = Sight(tmp_path, {"is_causal": False, "has_overview": overview}, rows_per_step=rows, voice=None)
    [answer] = answer_all(sight.engine, [ask(["Look: ", WIDE, TALL, " ok?"], max_tokens=4)])
    assert answer.finished.timings.encoded_images == 2
    for batch in sight.backend.batches:
        if batch.embeds is not None:
            assert batch.ahead is not None
            images = (batch.tokens == IMAGE_ROW).tolist()
            ends = [not ahead for ahead, is_image in zip(batch.ahead.tolist(), images, strict=True) if is_image]
            assert ends[-1]
            assert not batch.ahead[batch.tokens != IMAGE_ROW].any()
    aheads = [each.ahead[each.tokens == IMAGE_ROW] for each in sight.backend.batches if each.ahead is not None]
    one = [0] if overview else []
    assert np.concatenate(aheads).tolist() == [*range(9, -1, -1), *one, 2, 1, 0, *one]


@pytest.mark.parametrize("projector", [{}, {"is_causal": False}, {"uses_mrope": True}])
def test_a_prompt_may_end_with_an_image(tmp_path: Path, projector: dict[str, Any]) -> None:
    """Pixtral's last row is a marker, so nothing follows it."""
    sight = Sight(tmp_path, {**projector, "end": ""}, voice=None)
    request = Request(TextPrompt(IMAGE_MARKER, (WIDE,)), max_tokens=3)
    assert sight.engine.prepare(request).tokens[-1] == IMAGE_ROW
    one, two = (answer_all(sight.engine, [request])[0] for _ in range(2))
    assert one.tokens == two.tokens
    assert sight.encoded == 1


def test_rows_that_a_cancelled_step_lost_are_run_again(tmp_path: Path) -> None:
    """A recurrent state that a cancelled step had changed is lost, and the last checkpoint may be inside an image."""
    sight = Sight(tmp_path, {"is_causal": False}, voice=None, rows_per_step=8)
    request = ask(["Look: ", WIDE, " at this, please."], max_tokens=3)
    request_id = sight.engine.submit(request)
    while not any(each.embeds is not None for each in sight.backend.batches):
        sight.engine.step()
    kv, run = sight.backend.kv, sight.backend.kv.truncate
    end = len(kv.sequences[0])
    kv.truncate = lambda seq, n: run(seq, min(n, end - 5))  # type: ignore[method-assign]
    sight.backend.cancel()
    sight.engine.step()
    kv.truncate = run  # type: ignore[method-assign]
    [answer] = run_to_the_end(sight.engine, [request_id])
    [expected] = answer_all(Sight(tmp_path, {"is_causal": False}, voice=None).engine, [request])
    assert answer.tokens == expected.tokens
    assert sight.encoded == 1


def test_prefixes_end_before_an_image_or_after_it() -> None:
    numbers = [5, 6, -4, -7, -9, 8, -10, -12, -13]
    assert [whole_images(numbers, n) for n in range(10)] == [0, 1, 2, 2, 2, 5, 6, 7, 7, 9]


@pytest.mark.parametrize(
    "changed", [{}, {"repeat_last_n": 4}, {"dry_multiplier": 0.5}, {"dry_multiplier": 0.5, "samplers": "dry"}]
)
def test_penalties_pass_over_image_rows(tmp_path: Path, changed: dict[str, Any]) -> None:
    """The penalties count the same tokens as without the image, and no row is taken for a token."""
    request = ask(["a" * 40, WIDE, "b"], max_tokens=4)
    own = {"repeat_penalty": 1.5, "repeat_last_n": -1, "temperature": 0.0, **changed}
    request = structs.replace(request, sampling=replace(request.sampling, **own))
    [answer] = answer_all(Sight(tmp_path, voice=None).engine, [request])
    assert len(answer.tokens) == 4
    prepared = Sight(tmp_path, voice=None).engine.prepare(request)
    assert list(prepared.words) == [token for token in prepared.tokens if token >= 0]


def test_lookup_drafts_answers_about_images(tmp_path: Path) -> None:
    request = ask(["one two three four five six seven " * 3, WIDE, "one two three"], max_tokens=200)
    [plain_answer] = answer_all(Sight(tmp_path).engine, [request])
    sight = Sight(tmp_path)
    speculate_eagerly(sight.engine, [LookupSource()])
    [answer] = answer_all(sight.engine, [request])
    assert answer.text == plain_answer.text
    assert answer.finished.timings.accepted_tokens > 20


class BlindHead(ScriptedHead):
    """A head whose model sees no images, so that its hidden states differ from those of the model."""

    def _whose(self, seq: int, position: int, state: NDArray[np.float32]) -> str:
        return TRUE


def noisy(tmp_path: Path, projector: dict[str, Any]) -> Sight:
    """Return an engine whose answers are random, but depend only on the last four tokens."""
    sight = Sight(tmp_path, projector, voice=None, max_sequences=3)
    logits = sight.backend._logits
    sight.backend._logits = lambda tokens: logits(tokens[-4:])  # type: ignore[method-assign]
    return sight


def lookup(network: ScriptedBackend) -> DraftSource:
    return LookupSource()


def model(network: ScriptedBackend) -> DraftSource:
    return ModelSource(network, network.info.vocabulary_size)


def head(network: ScriptedBackend) -> DraftSource:
    return HeadSource(BlindHead(network))


@pytest.mark.push
@pytest.mark.cover(2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("projector", [{}, {"is_causal": False, "encode_looks": 3}, {"uses_mrope": True}])
@pytest.mark.parametrize("source", [lookup, model, head])
def test_drafts_change_no_answer_about_images(
    tmp_path: Path, source: Callable[[ScriptedBackend], DraftSource], projector: dict[str, Any], temperature: float
) -> None:
    """Networks that draft read the conversation without the images, and draw at the positions of the model."""
    asked = (["one two " * 9, WIDE, TALL, "one two"],), ([TALL, "a question"], "an answer", [WIDE, "?"]), ("hello",)
    requests = [ask(*contents, max_tokens=30) for contents in asked]
    requests = [
        structs.replace(each, sampling=replace(each.sampling, temperature=temperature, repeat_penalty=1.1))
        for each in requests
    ]
    expected = answer_all(noisy(tmp_path, projector).engine, requests)
    sight = noisy(tmp_path, projector)
    speculate_eagerly(sight.engine, [source(noisy(tmp_path, projector).backend)])
    for _ in range(2):  # a prefix is cached the second time
        answers = answer_all(sight.engine, requests)
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
        if source is not lookup and not projector:  # steps with prompts have no drafts, and M-RoPE changes the noise
            assert all(answer.finished.timings.steps < 8 for answer in answers)
    assert sight.engine.draft_error == ""


class Watcher(Drafter, DraftSource):
    """Records the hidden states that it gets, and drafts nothing."""

    name, takes_hidden = "watcher", True
    expected: Mapping[Kind, float] = {}

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], int, NDArray[np.float32]]] = []

    def drafter(self, request: Request) -> Watcher:
        return self

    def draft(self, tokens: Sequence[int], most: int, worth: Worth) -> Draft:
        return NO_DRAFT

    def observe_hidden(self, tokens: Sequence[int], first: int, hidden: NDArray[np.float32]) -> None:
        self.seen.append(([*tokens], first, hidden))


def test_heads_get_the_states_of_words_only(tmp_path: Path) -> None:
    sight, watcher, outputs = Sight(tmp_path, voice=None, rows_per_step=7), Watcher(), list[Outputs]()
    speculate_eagerly(sight.engine, [watcher])
    forward = sight.backend.forward
    sight.backend.forward = lambda batch: outputs.append(forward(batch)) or outputs[-1]  # type: ignore[method-assign, func-returns-value]
    answer_all(sight.engine, [ask(["see ", WIDE, " and ", TALL, "?"], max_tokens=5)])
    is_word = joined(sight.backend.batches, "tokens") != IMAGE_ROW
    states = np.concatenate([output.hidden for output in outputs])[is_word]
    np.testing.assert_array_equal(np.concatenate([hidden for _, _, hidden in watcher.seen]), states)
    assert [first for _, first, _ in watcher.seen] == [
        *accumulate([len(hidden) for *_, hidden in watcher.seen[:-1]], initial=0)
    ]
    assert all(IMAGE_ROW not in tokens for tokens, *_ in watcher.seen)
