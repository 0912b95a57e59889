"""Checkpoints of llama.cpp's recurrent states after images, so that other questions reuse the images.

llama.cpp cannot rewind a recurrent state. A checkpoint is the part of a saved sequence that contains only this state,
without keys and values, which llama.cpp can rewind. A checkpoint is made when text follows an image.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, Final

from llmrun.backends.checkpoints import Checkpoints, n_within_budget

_ONLY_STATE: Final = 1  # llama.cpp's LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


def n_checkpoints(n_bytes: int) -> int:
    """Return how many checkpoints of this size a context keeps: as many as fit in the budget, but at least two."""
    return max(2, n_within_budget(n_bytes))


class StateCheckpoints:
    """The checkpoints of a context, in memory that is allocated when a checkpoint is made.

    Models without a recurrent state have no checkpoints.
    """

    def __init__(self, llama: Any, model: Any, context: Any, max_sequences: int) -> None:
        self._llama, self._context, self._max_sequences = llama, context, max_sequences
        self._has_state = llama.llama_model_is_recurrent(model) or llama.llama_model_is_hybrid(model)
        self._made: Checkpoints | None = None  # None until the size of a checkpoint is known
        self._states: dict[int, Any] = {}  # uint8[] of each slot

    def before(self, sequences: Iterable[int], lengths: ctypes.Array[ctypes.c_int32], *, images: bool) -> None:
        """Save the states of the sequences that continue with text after an image. Call this before a pass.

        images  whether the rows of the pass are rows of images
        """
        made = self._made
        if made is not None and not images:
            for seq in set(sequences):
                if made.follows_image(seq, lengths[seq]):
                    self._save(made, seq, lengths[seq])

    def after(self, sequences: Iterable[int], lengths: ctypes.Array[ctypes.c_int32], *, images: bool) -> None:
        """Note that a pass with rows of these sequences has succeeded."""
        for seq in set(sequences) if images and self._has_state else ():
            if self._made is None:
                self._made = Checkpoints(self._max_sequences, n_checkpoints(self._size(seq)))
            self._made.note_image(seq, lengths[seq])

    def _size(self, seq: int) -> int:
        n_bytes: int = self._llama.llama_state_seq_get_size_ext(self._context, seq, _ONLY_STATE)
        return n_bytes

    def _save(self, made: Checkpoints, seq: int, n: int) -> None:
        if made.newest(seq) == n or (slot := made.slot_for(seq)) is None:
            return
        n_bytes = self._size(seq)
        state = self._states.get(slot)
        if state is None or len(state) != n_bytes:
            state = self._states[slot] = (ctypes.c_uint8 * n_bytes)()
        if self._llama.llama_state_seq_get_data_ext(self._context, state, n_bytes, seq, _ONLY_STATE) == n_bytes:
            made.add(seq, n, after_image=True)

    def restore(self, seq: int, n: int) -> int:
        """Restore the last state of a sequence up to n rows, and return its number of rows, or 0 if there is none."""
        found = self._made.up_to(seq, n) if self._made is not None else []
        if self._made is None or not found:
            return 0
        state = self._states[found[-1].slot]
        if self._llama.llama_state_seq_set_data_ext(self._context, state, len(state), seq, _ONLY_STATE) != len(state):
            return 0
        self._made.use(found[-1])
        return found[-1].position

    def cut(self, seq: int, n: int) -> None:
        """Note that a sequence has been shortened to n rows."""
        if self._made is not None:
            self._made.cut(seq, n)

    def share(self, src: int, dst: int, n: int) -> None:
        """Note that dst, which was empty, is a copy of the first n rows of src."""
        if self._made is not None:
            self._made.share(src, dst, n)
