"""The checkpoints of short convolutions after images, for models such as LFM2-VL.

The KV cache keeps the last inputs of short convolutions like a sliding window, which moves on while the model answers.
A checkpoint is a copy of the few earlier inputs that the row at a position depends on. Text needs no checkpoints: the
window has 256 more tokens than the convolution needs, and turns of a chat differ near their ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np

from llmrun.backends.base import CHECKPOINT_PART, SavedPart
from llmrun.backends.checkpoints import Checkpoints, n_within_budget
from llmrun.base.errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.cpu.steps import Run


class InputPool(Protocol):
    """A pool of the KV cache whose layers are short convolutions."""

    @property
    def before_bytes(self) -> int:
        """The size of the earlier inputs that a row depends on."""

    def read_before(self, seq: int, n: int) -> NDArray[np.uint8]:
        """Return the earlier inputs that the row at position n depends on, uint8[before_bytes]."""


class ConvolutionCheckpoints:
    """The checkpoints of the pools whose layers are short convolutions.

    checkpoints  the positions of the saved inputs
    """

    def __init__(self, pools: Sequence[InputPool], n_sequences: int) -> None:
        self._pools = pools
        self._n_bytes = sum(pool.before_bytes for pool in pools)
        n_slots = n_within_budget(self._n_bytes)
        self.checkpoints = Checkpoints(n_sequences, n_slots)
        self._saved = np.zeros((n_slots, self._n_bytes), np.uint8)

    def reachable(self, seq: int, n: int) -> list[int]:
        """Return n and the earlier positions with checkpoints, in descending order."""
        return [n, *(each.position for each in reversed(self.checkpoints.up_to(seq, n)))]

    def inputs(self, pool: InputPool, seq: int, n: int) -> NDArray[np.uint8] | None:
        """Return a pool's inputs before position n of a sequence, or None if they are not saved."""
        found = self.checkpoints.up_to(seq, n)[-1:]
        if pool not in self._pools or not found or found[0].position != n:
            return None
        self.checkpoints.use(found[0])
        ends = [*accumulate(each.before_bytes for each in self._pools)]
        index = self._pools.index(pool)
        return self._saved[found[0].slot, ends[index] - pool.before_bytes : ends[index]]

    def cut(self, seq: int, n: int) -> None:
        """Forget the checkpoints after position n."""
        self.checkpoints.cut(seq, n)

    def share(self, src: int, dst: int, n: int) -> None:
        """Let dst, which must be empty, own the checkpoints of src up to position n, too."""
        self.checkpoints.share(src, dst, n)

    def expect_prompt(self, seq: int) -> None:
        """Do nothing, because the ends of prompts need no checkpoints."""

    def begin(self, runs: Iterable[Run]) -> None:
        """Save the inputs before the runs of a step that continue with text after an image."""
        for run in runs:
            seq, n = run.sequence, run.start
            if not run.begins_in_image and self.checkpoints.follows_image(seq, n) and n > self.checkpoints.newest(seq):
                slot = self.checkpoints.slot_for(seq)
                if slot is not None:
                    self._saved[slot] = np.concatenate([pool.read_before(seq, n) for pool in self._pools])
                    self.checkpoints.add(seq, n, after_image=True)

    def finish(self, runs: Iterable[Run]) -> None:
        """Note the images at the ends of the runs of a completed step."""
        for run in runs:
            if run.ends_in_image:
                self.checkpoints.note_image(run.sequence, run.end)

    def save(self, seq: int, n: int) -> list[SavedPart]:
        """Return the checkpoints up to position n as parts."""
        return [
            SavedPart(CHECKPOINT_PART, at, at, 1, self._n_bytes, partial(self._read, each.slot))
            for each in self.checkpoints.up_to(seq, n)
            for at in [each.position]
        ]

    def _read(self, slot: int) -> memoryview:
        return memoryview(self._saved[slot].copy())

    def load(self, seq: int, n: int, parts: Iterable[SavedPart]) -> None:
        """Load the last checkpoints up to position n of a sequence that has none. Damaged checkpoints are skipped."""
        for part in self.checkpoints.loadable(parts, n, self._n_bytes):
            with suppress(IntegrityError):
                self._saved[self.checkpoints.free[-1]] = np.frombuffer(part.read(), np.uint8)
                self.checkpoints.add(seq, part.end, after_image=True)
