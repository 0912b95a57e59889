"""Tests of the memory for checkpoints of llama.cpp's recurrent states, with a state that is a number."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from llmrun.backends.llama import state_checkpoints
from llmrun.backends.llama.state_checkpoints import StateCheckpoints


class NumberedStates:
    """The functions of llama.cpp that save and restore states. The state of each sequence is a byte."""

    def __init__(self, n_sequences: int, *, recurrent: bool = False, hybrid: bool = True) -> None:
        self.states = [0] * n_sequences
        self.llama_model_is_recurrent = lambda model: recurrent
        self.llama_model_is_hybrid = lambda model: hybrid

    def llama_state_seq_get_size_ext(self, context: Any, seq: int, flags: int) -> int:
        assert flags == 1
        return 8

    def llama_state_seq_get_data_ext(self, context: Any, data: Any, n_bytes: int, seq: int, flags: int) -> int:
        assert flags == 1
        data[0] = self.states[seq]
        return n_bytes

    def llama_state_seq_set_data_ext(self, context: Any, data: Any, n_bytes: int, seq: int, flags: int) -> int:
        assert flags == 1
        self.states[seq] = data[0]
        return n_bytes


def show(made: StateCheckpoints, llama: NumberedStates, lengths: ctypes.Array[ctypes.c_int32], seq: int) -> None:
    """Run an image of 600 rows, and text after it. The state counts the images of all sequences."""
    lengths[seq] += 600
    llama.states[seq] += 1
    made.after([seq] * 600, lengths, images=True)
    made.before([seq], lengths, images=False)
    lengths[seq] += 1
    made.after([seq], lengths, images=False)


def test_many_images_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation with 30 images leaves another one its checkpoint, and keeps its own last ones."""
    monkeypatch.setattr(state_checkpoints, "n_within_budget", lambda n_bytes: 4)
    llama, lengths = NumberedStates(3), (ctypes.c_int32 * 3)()
    made = StateCheckpoints(llama, None, None, 3)
    show(made, llama, lengths, 0)
    for _ in range(30):
        show(made, llama, lengths, 1)
    assert len(made._states) == 4
    for image in (30, 29, 28):
        assert made.restore(1, 601 * image) == 601 * image - 1
        assert llama.states[1] == image
        made.cut(1, 601 * image - 2)
    assert made.restore(1, 601 * 27) == 0
    llama.states[0] = 0
    assert made.restore(0, 601) == 600
    assert llama.states[0] == 1


def test_large_states_have_two_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_checkpoints, "n_within_budget", lambda n_bytes: 0)
    llama, lengths = NumberedStates(1), (ctypes.c_int32 * 1)()
    made = StateCheckpoints(llama, None, None, 1)
    for _ in range(5):
        show(made, llama, lengths, 0)
    assert len(made._states) == 2
    assert made.restore(0, lengths[0]) == lengths[0] - 1


def test_models_without_a_recurrent_state_have_no_checkpoints() -> None:
    llama, lengths = NumberedStates(1, hybrid=False), (ctypes.c_int32 * 1)()
    made = StateCheckpoints(llama, None, None, 1)
    show(made, llama, lengths, 0)
    assert made.restore(0, 601) == 0
