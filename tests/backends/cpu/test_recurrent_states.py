"""Tests of recurrent states and their checkpoints, in which a state is a hash of the tokens that it summarizes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmrun.backends.base import CHECKPOINT_DISTANCE
from llmrun.backends.cpu.recurrent_states import (
    RecurrentStates,
    checkpoint_bytes,
    checkpoint_shapes,
    n_checkpoints,
)
from llmrun.backends.cpu.steps import runs_of
from llmrun.formats.layouts import kv as layout
from llmrun.formats.layouts.kv import REPLAY_ROWS
from llmrun.model.plan.shapes import ConvolutionState, MatrixState, StateGroup
from tests.support.tiers import examples

CONVOLUTION, MATRIX = ConvolutionState(16, 4), MatrixState(2, 1, 16, 16, 2)
GROUPS = [StateGroup(CONVOLUTION, 2), StateGroup(MATRIX, 3)]


class Sequences:
    """States of a few sequences, whose "kernels" store tokens and their hashes. Token t of history h is 1000 h + t."""

    def __init__(self, count: int, checkpoints: int, *, keeps_rows: bool = False) -> None:
        self.memory = [np.zeros((group.layers, count, group.shape.n_bytes), np.uint8) for group in GROUPS]
        saved = [np.zeros(shape, np.uint8) for shape in checkpoint_shapes(GROUPS, checkpoints)]
        self.n_checkpoints = checkpoints
        self.states = RecurrentStates(GROUPS, self.memory, saved, keeps_rows=keeps_rows)
        self.tokens: list[list[int]] = [[] for _ in range(count)]

    def step(self, parts: dict[int, tuple[list[int], int]], images: dict[int, int] | None = None) -> None:
        """Run new tokens of each sequence. The logits of the last `wanted` of them are wanted.

        images  how many of the last tokens of each sequence are rows of an image
        """
        rows = [
            (seq, len(self.tokens[seq]) + at, at >= len(new) - wanted, at >= len(new) - (images or {}).get(seq, 0))
            for seq, (new, wanted) in parts.items()
            for at in range(len(new))
        ]
        runs = self.states.begin(runs_of(*(list(column) for column in zip(*rows, strict=True))))
        for words in runs.words.tolist():
            self._run(words, parts[words[layout.RUN_SEQUENCE // 8]][0])
        self.states.finish()

    def _run(self, words: list[int], new: list[int]) -> None:
        seq, base, start, commit = (
            words[offset // 8] for offset in (layout.RUN_SEQUENCE, layout.RUN_BASE, layout.RUN_START, layout.RUN_COMMIT)
        )
        assert start == len(self.tokens[seq])
        assert base <= start
        assert base <= commit
        assert start - base <= REPLAY_ROWS
        self.assert_state(seq, base)
        self.tokens[seq] = self.tokens[seq] + new
        assert len(self.tokens[seq]) - commit <= REPLAY_ROWS
        ring = self._ring(seq)
        for position in range(max(start, commit - CONVOLUTION.taps + 1), len(self.tokens[seq])):
            ring[:, position % CONVOLUTION.ring_rows] = self.tokens[seq][position]
        self._matrix(seq)[:] = summary(self.tokens[seq][:commit])

    def _ring(self, seq: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return self.memory[0].view(np.int32)[:, seq].reshape(2, CONVOLUTION.ring_rows, -1)

    def _matrix(self, seq: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
        return self.memory[1].view(np.int32)[:, seq, : MATRIX.matrix_bytes // 4]

    def assert_state(self, seq: int, base: int) -> None:
        """Assert that the next step finds the state at the base and all inputs that a convolution needs."""
        tokens = self.tokens[seq]
        if base:
            assert (self._matrix(seq) == summary(tokens[:base])).all()
        for position in range(max(0, len(tokens) - CONVOLUTION.taps + 1), len(tokens)):
            assert (self._ring(seq)[:, position % CONVOLUTION.ring_rows] == tokens[position]).all()

    def reach(self, seq: int, n: int) -> int:
        return self.states.reachable(seq, min(n, len(self.tokens[seq])))[0]

    def cut(self, seq: int, n: int) -> int:
        kept = self.reach(seq, n)
        self.states.cut(seq, kept)
        self.tokens[seq] = self.tokens[seq][:kept]
        return kept

    def copy(self, src: int, dst: int, n: int) -> int:
        self.cut(dst, 0)
        kept = self.reach(src, n)
        if kept:
            self.states.share(src, dst, kept)
            self.tokens[dst] = self.tokens[src][:kept]
        return kept

    @property
    def n_owned(self) -> int:
        return len({id(each) for owned in self.states.checkpoints.owned for each in owned})


def summary(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % (1 << 31)


def history(h: int, start: int, count: int) -> list[int]:
    return [1000 * h + at for at in range(start, start + count)]


def run(made: Sequences, seq: int, count: int, *, h: int = 0, chunk: int = 256) -> None:
    """Run a prompt of `count` tokens in chunks."""
    start = len(made.tokens[seq])
    for at in range(start, start + count, chunk):
        new = min(chunk, start + count - at)
        made.step({seq: (history(h, at, new), int(at + new == start + count))})


def decode(made: Sequences, seq: int, count: int, *, h: int = 0) -> None:
    for _ in range(count):
        made.step({seq: (history(h, len(made.tokens[seq]), 1), 1)})


def show(made: Sequences, seq: int, count: int, *, h: int = 0, chunk: int = 256) -> None:
    """Run an image of `count` rows in chunks."""
    start = len(made.tokens[seq])
    for at in range(start, start + count, chunk):
        new = min(chunk, start + count - at)
        made.step({seq: (history(h, at, new), 0)}, {seq: new})


def test_an_answer_has_no_rows_to_replay() -> None:
    made = Sequences(1, 4)
    run(made, 0, 100)
    assert made.states.bases == [84]  # the end of the prompt can be cut
    decode(made, 0, 5)
    assert made.states.bases == [105]


def test_a_prompt_can_be_cut_after_a_short_last_step() -> None:
    for chunks in ([100], [84, 16], [90, 10], [99, 1]):
        made = Sequences(1, 4)
        for index, chunk in enumerate(chunks):
            start = len(made.tokens[0])
            made.step({0: (history(0, start, chunk), int(index == len(chunks) - 1))})
        decode(made, 0, 50)
        assert 100 - 2 * REPLAY_ROWS <= made.cut(0, 98) <= 98


def test_checkpoints_are_made_at_regular_distances() -> None:
    made = Sequences(1, 8)
    run(made, 0, 100)
    decode(made, 0, 1500)
    assert made.cut(0, 1550) == 3 * CHECKPOINT_DISTANCE
    assert made.cut(0, 1500) == 2 * CHECKPOINT_DISTANCE
    assert made.cut(0, 600) == CHECKPOINT_DISTANCE
    assert made.cut(0, 511) == 84
    assert made.cut(0, 83) == 0


def test_the_least_recently_used_checkpoint_is_dropped() -> None:
    made = Sequences(3, 2)
    run(made, 0, 100)
    run(made, 1, 200, h=1)
    decode(made, 0, 1)
    assert made.copy(0, 2, 90) == 84  # uses the first one
    run(made, 2, 300, h=2)  # needs a place
    decode(made, 0, 30)
    decode(made, 1, 30, h=1)
    assert made.reach(0, 90) == 84
    assert made.reach(1, 190) == 0


def test_forced_tokens_do_not_fill_the_memory_for_checkpoints() -> None:
    """A grammar forces 10 tokens, and one is drawn, again and again."""
    made = Sequences(1, 8)
    run(made, 0, 100)
    for _ in range(30):
        made.step({0: (history(0, len(made.tokens[0]), 11), 1)})
    assert made.n_owned == 1
    assert made.cut(0, 90) == 84


def test_a_lost_state_is_restored_from_a_checkpoint() -> None:
    made = Sequences(1, 4)
    run(made, 0, 100)
    decode(made, 0, 10)
    made.states.begin(runs_of([0], [110], [True]))
    made.memory[1][:] = 0xFF
    made.states.lose()
    assert made.cut(0, 110) == 84
    made.assert_state(0, 84)
    made.states.begin(runs_of([0], [84], [True]))
    made.states.lose()
    assert made.cut(0, 10) == 0


def test_the_tokens_of_a_draft_model_can_be_removed() -> None:
    made = Sequences(1, 4, keeps_rows=True)
    run(made, 0, 100)
    decode(made, 0, 30)
    assert made.cut(0, 130 - REPLAY_ROWS) == 130 - REPLAY_ROWS


@pytest.mark.parametrize("chunk", [7, 40, 256])
@pytest.mark.parametrize("question", [1, 10, 30])
def test_another_question_begins_after_the_image(chunk: int, question: int) -> None:
    """ggml-org/llama.cpp#26994: prefix with image never cached for hybrid models."""
    made = Sequences(2, 8)
    run(made, 0, 9)
    show(made, 0, 700, chunk=chunk)
    run(made, 0, question)
    decode(made, 0, 600)
    assert made.cut(0, 709 + min(question - 1, 3)) == 709
    run(made, 0, question, h=1)
    assert made.copy(0, 1, 709) == 709  # another request about the same image
    assert made.cut(0, 708) == 0  # no checkpoint is made inside the image


def test_an_answer_can_follow_an_image_at_once() -> None:
    made = Sequences(1, 4)
    run(made, 0, 9)
    made.step({0: (history(0, 9, 100), 1)}, {0: 100})
    decode(made, 0, 50)
    assert made.cut(0, 150) == 109


def test_an_image_without_text_after_it_can_be_copied() -> None:
    """A copy ends in the image, too, so that it makes the checkpoint when text follows."""
    made = Sequences(2, 4)
    run(made, 0, 9)
    show(made, 0, 100)
    assert made.copy(0, 1, 109) == 109
    for seq in (0, 1):
        run(made, seq, 20)
        decode(made, seq, 30)
        assert made.cut(seq, 112) == 109


def test_checkpoints_after_images_outlive_others() -> None:
    """Within 512 tokens, many short turns after an image do not displace its checkpoint."""
    made = Sequences(1, 8)
    run(made, 0, 20)
    show(made, 0, 100)
    for _ in range(8):
        run(made, 0, 20)
        decode(made, 0, 15)
    assert made.n_owned == 3
    assert made.cut(0, 123) == 120


def test_many_images_do_not_displace_other_conversations() -> None:
    made = Sequences(3, 7)
    for seq in (0, 1):
        run(made, seq, 30, h=seq)
        show(made, seq, 100, h=seq)
        run(made, seq, 30, h=seq)
        decode(made, seq, 40, h=seq)
    for _ in range(30):
        show(made, 2, 300, h=2)
        run(made, 2, 20, h=2)
        decode(made, 2, 10, h=2)
    assert [made.reach(seq, 140) for seq in (0, 1)] == [130, 130]
    last = len(made.tokens[2]) - 30
    assert made.cut(2, last + 3) == last


def test_checkpoints_after_images_are_saved_and_loaded() -> None:
    made = Sequences(2, 8)
    run(made, 0, 9)
    show(made, 0, 100)
    run(made, 0, 30)
    decode(made, 0, 20)
    parts = [replace(part, read=partial(bytes, bytes(part.read()))) for part in made.states.save(0, 159)]
    assert [(part.end, part.contents) for part in parts] == [(109, 1), (123, 0), (159, 0)]
    made.tokens[1] = made.tokens[0]
    made.states.load(1, 159, parts)
    assert made.cut(1, 159) == 159
    for _ in range(4):
        run(made, 1, 20)
        decode(made, 1, 20)
    assert made.cut(1, 120) == 109  # the loaded checkpoint has outlived the others


def test_the_number_of_checkpoints_has_a_budget() -> None:
    large = [StateGroup(MatrixState(32, 16, 128, 128, 2), 24)]
    assert checkpoint_bytes(large) == 32 * 128 * 128 * 4 * 24
    assert n_checkpoints(large, 1) == 5  # 256 MiB
    assert n_checkpoints(large, 8) == 17  # two for each sequence
    assert n_checkpoints(GROUPS, 1) == 64
    assert n_checkpoints([], 4) == 0


SEQUENCES = 3


class StatesMachine(RuleBasedStateMachine):
    """Compares the states with the tokens of each sequence, after any operations."""

    @initialize(checkpoints=st.integers(1, 6), keeps_rows=st.booleans())
    def open(self, checkpoints: int, keeps_rows: bool) -> None:
        self.made, self.h = Sequences(SEQUENCES, checkpoints, keeps_rows=keeps_rows), 0

    @rule(
        counts=st.lists(st.sampled_from([0, 1, 1, 2, 9, 16, 17, 40, 256]), min_size=SEQUENCES, max_size=SEQUENCES),
        wanted=st.sampled_from([0, 1, 1, 1, 9, 300]),
        images=st.lists(st.sampled_from([0, 0, 5, 300]), min_size=SEQUENCES, max_size=SEQUENCES),
    )
    def step(self, counts: list[int], wanted: int, images: list[int]) -> None:
        self.h += 1
        parts = {
            seq: (history(self.h, len(self.made.tokens[seq]), count), min(wanted, count))
            for seq, count in enumerate(counts)
            if count
        }
        if parts:
            self.made.step(parts, dict(enumerate(images)))

    @rule(seq=st.integers(0, SEQUENCES - 1), back=st.sampled_from([0, 1, 8, 15, 16, 17, 60, 600, 10_000]))
    def cut(self, seq: int, back: int) -> None:
        n = max(0, len(self.made.tokens[seq]) - back)
        assert 0 <= self.made.cut(seq, n) <= n

    @rule(seqs=st.permutations(range(SEQUENCES)), back=st.sampled_from([0, 1, 8, 16, 60, 600]))
    def copy(self, seqs: list[int], back: int) -> None:
        self.made.copy(seqs[0], seqs[1], max(0, len(self.made.tokens[seqs[0]]) - back))

    @rule(seq=st.integers(0, SEQUENCES - 1))
    @precondition(lambda self: any(self.made.tokens))
    def fail(self, seq: int) -> None:
        n = len(self.made.tokens[seq])
        self.made.states.begin(runs_of([seq], [n], [True]))
        self.made.memory[1][:, seq] = 0xFF
        self.made.states.lose()
        assert self.made.cut(seq, n) <= n

    @invariant()
    def states_are_right(self) -> None:
        for seq, base in enumerate(self.made.states.bases):
            assert base is not None
            assert base <= len(self.made.tokens[seq]) <= base + REPLAY_ROWS
            self.made.assert_state(seq, base)

    @invariant()
    def no_checkpoint_leaks(self) -> None:
        states = self.made.states
        assert self.made.n_owned + len(states.checkpoints.free) == self.made.n_checkpoints
        for each in {id(each): each for owned in states.checkpoints.owned for each in owned}.values():
            assert each.owners == sum(each in owned for owned in states.checkpoints.owned)
            assert each.slot not in states.checkpoints.free


TestStatesMachine = pytest.mark.push(StatesMachine.TestCase)
TestStatesMachine.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
