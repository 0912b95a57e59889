"""The recurrent states of all sequences, and the checkpoints of these states.

A sequence can be shortened to its base or any later position at no cost (layouts/kv.py). To shorten a sequence further,
a checkpoint is restored, which is a copy of the state at an earlier position. Checkpoints are made near the end of each
prompt, after each image, and every 512 tokens. backends/checkpoints.py decides which checkpoints are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.backends.base import CHECKPOINT_DISTANCE, CHECKPOINT_PART, SavedPart
from llmrun.backends.cpu.steps import NO_RUNS, Run, StepRuns
from llmrun.base.errors import IntegrityError
from llmrun.formats.layouts.kv import REPLAY_ROWS, RUN_WORDS
from llmrun.model.plan.shapes import ConvolutionState, StateGroup

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.checkpoints import Checkpoint

# If this many rows precede the first wanted logits, the rows are a prompt. A grammar may force fewer tokens.
_LEAST_PROMPT: Final = 64


def n_checkpoints(groups: Sequence[StateGroup], max_sequences: int) -> int:
    """Return how many checkpoints to keep: as many as fit in 256 MiB, but at most 64.

    The minimum is two checkpoints for each sequence, plus one.
    """
    if not groups:
        return 0
    from llmrun.backends.checkpoints import n_within_budget

    return max(2 * max_sequences + 1, n_within_budget(checkpoint_bytes(groups)))


def checkpoint_bytes(groups: Iterable[StateGroup]) -> int:
    """Return the size of a checkpoint."""
    return sum(group.layers * group.shape.checkpoint_bytes for group in groups)


def state_bytes(groups: Iterable[StateGroup]) -> int:
    """Return the size of the states of one sequence."""
    return sum(group.layers * group.shape.n_bytes for group in groups)


def checkpoint_shapes(groups: Sequence[StateGroup], count: int) -> list[tuple[int, int, int]]:
    """Return the shape of the memory for checkpoints of each group: (checkpoints, layers, bytes)."""
    return [(count, group.layers, group.shape.checkpoint_bytes) for group in groups]


class RecurrentStates:
    """The recurrent states of a model.

    memory       uint8[layers, sequences, bytes of a state] for each group of layers
    saved        uint8[slots for checkpoints, layers, bytes] for each group of layers
    bases        each sequence's base, or None if its state was lost in a step that failed
    checkpoints  the positions in `saved`
    """

    def __init__(
        self,
        groups: Sequence[StateGroup],
        memory: Sequence[NDArray[np.uint8]],
        saved: Sequence[NDArray[np.uint8]],
        *,
        keeps_rows: bool = False,
    ) -> None:
        from llmrun.backends.checkpoints import Checkpoints

        n_sequences = memory[0].shape[1]
        self._groups, self._memory, self._saved, self._keeps_rows = groups, memory, saved, keeps_rows
        self.bases: list[int | None] = [0] * n_sequences
        self._buffers = [0] * n_sequences  # index of the replay buffer with the rows since the base
        self._reads_prompt = [True] * n_sequences
        self.checkpoints = Checkpoints(n_sequences, len(saved[0]))
        # Each run of the step, its new base, and whether the run ends a prompt whose state is not saved yet.
        self._pending: list[tuple[Run, int, bool]] = []

    def reachable(self, seq: int, n: int) -> list[int]:
        """Return the positions <= n to which a sequence of at least n tokens can be truncated, in descending order."""
        base = self.bases[seq]
        if base is not None and base <= n:
            return [n]
        return [each.position for each in reversed(self.checkpoints.up_to(seq, n))] + [0]

    def cut(self, seq: int, n: int) -> None:
        """Truncate a sequence to a reachable position."""
        self.checkpoints.cut(seq, n)
        base = self.bases[seq]
        if base is not None and base <= n and n:
            return
        self._restart(seq, n)
        if n:
            self._restore(self.checkpoints.owned[seq][-1], seq)

    def expect_prompt(self, seq: int) -> None:
        """Record that a sequence's next rows, up to the first row whose logits are wanted, are a prompt."""
        self._reads_prompt[seq] = True

    def share(self, src: int, dst: int, n: int) -> None:
        """Copy the state of src at a reachable position to dst, which must be empty."""
        self.checkpoints.share(src, dst, n)
        base = self.bases[src]
        self._restart(dst, n)
        if base is not None and base <= n:
            for memory in self._memory:
                memory[:, dst] = memory[:, src]
            self.bases[dst], self._buffers[dst] = base, self._buffers[src]
        else:
            self._restore(self.checkpoints.owned[dst][-1], dst)

    def begin(self, runs: Sequence[Run]) -> StepRuns:
        """Return a step's runs for the kernels. Call `finish` after the step, or `lose` if the step failed."""
        self._pending = []
        words = np.zeros((len(runs), RUN_WORDS), np.int64)
        first = 0
        for index, run in enumerate(runs):
            base = self.bases[run.sequence]
            assert base is not None, "a sequence whose state was lost must be cut before the next step"
            after_image = self.checkpoints.follows_image(run.sequence, base)
            if after_image and not run.begins_in_image and base > self.checkpoints.newest(run.sequence):
                self._save(run.sequence, base, after_image=True)
            reads_prompt = self._reads_prompt[run.sequence] or run.lead >= _LEAST_PROMPT
            commit = run.commit(reads_prompt=reads_prompt or not run.is_last)
            if self._keeps_rows:
                commit = max(base, run.end - REPLAY_ROWS)
            ends_prompt = reads_prompt and run.is_last
            if ends_prompt and commit > run.certain - REPLAY_ROWS:
                # The step begins too close to the end of the prompt. Save the state before the step instead.
                if base > self.checkpoints.newest(run.sequence) and not after_image:
                    self._save(run.sequence, base)
                ends_prompt = False
            words[index, :7] = (
                *(first, len(run.rows), run.sequence, base, run.start, commit),
                self._buffers[run.sequence],
            )
            first += len(run.rows)
            self._pending.append((run, commit, ends_prompt))
        return StepRuns(words, np.array([row for run in runs for row in run.rows], np.int32)) if runs else NO_RUNS

    def finish(self) -> None:
        """Mark the step as completed, and save the checkpoints that are due."""
        for run, commit, ends_prompt in self._pending:
            seq = run.sequence
            self.bases[seq] = commit
            self._buffers[seq] = 1 - self._buffers[seq]
            self._reads_prompt[seq] = not run.is_last
            if run.ends_in_image:
                self.checkpoints.note_image(seq, commit)
                continue  # more rows of the image may follow; the state is saved when text follows
            newest = self.checkpoints.newest(seq)
            if commit > newest and (ends_prompt or commit // CHECKPOINT_DISTANCE > newest // CHECKPOINT_DISTANCE):
                self._save(seq, commit)
        self._pending = []

    def lose(self) -> None:
        """Mark the step as failed: the states of its sequences may be incomplete."""
        for run, _, _ in self._pending:
            self.bases[run.sequence] = None
        self._pending = []

    def save(self, seq: int, n: int) -> list[SavedPart]:
        """Return the checkpoints up to position n as parts, and the state at the base.

        The contents of a part are 1 after an image, and otherwise 0.
        """
        reads: dict[int, tuple[bool, Callable[[], memoryview]]] = {
            each.position: (each.after_image, partial(self._checkpoint_bytes, each))
            for each in self.checkpoints.up_to(seq, n)
        }
        base = self.bases[seq]
        if base is not None and 0 < base <= n and base not in reads:
            reads[base] = self.checkpoints.follows_image(seq, base), partial(self._state_bytes, seq, base)
        n_bytes = checkpoint_bytes(self._groups)
        return [
            SavedPart(CHECKPOINT_PART, at, at, int(after_image), n_bytes, read)
            for at, (after_image, read) in sorted(reads.items())
        ]

    def load(self, seq: int, n: int, parts: Iterable[SavedPart]) -> None:
        """Load the last checkpoints up to position n of a sequence that has none. Damaged checkpoints are skipped.

        The state of the sequence is lost, so the sequence must be truncated before the next step.
        """
        self.bases[seq] = None
        for part in self.checkpoints.loadable(parts, n, checkpoint_bytes(self._groups)):
            with suppress(IntegrityError):
                data = np.frombuffer(part.read(), np.uint8)
                slot = self.checkpoints.free[-1]
                for saved in self._saved:
                    state, data = np.split(data, [saved[0].size])
                    saved[slot] = state.reshape(saved[0].shape)
                self.checkpoints.add(seq, part.end, after_image=bool(part.contents))

    def _checkpoint_bytes(self, checkpoint: Checkpoint) -> memoryview:
        return _joined([saved[checkpoint.slot] for saved in self._saved])

    def _state_bytes(self, seq: int, base: int) -> memoryview:
        return _joined(self._state_at(seq, base))

    def _restart(self, seq: int, n: int) -> None:
        self.bases[seq] = n
        self.expect_prompt(seq)

    # --- checkpoints ---

    def _save(self, seq: int, position: int, *, after_image: bool = False) -> None:
        slot = self.checkpoints.slot_for(seq)
        if slot is None:
            return
        for saved, state in zip(self._saved, self._state_at(seq, position), strict=True):
            saved[slot] = state
        self.checkpoints.add(seq, position, after_image=after_image)

    def _state_at(self, seq: int, base: int) -> list[NDArray[np.uint8]]:
        """Return a sequence's state at its base in the form of a checkpoint: uint8[layers, bytes] for each group."""
        states = []
        for group, memory in zip(self._groups, self._memory, strict=True):
            if isinstance(group.shape, ConvolutionState):
                rows = _ring(group.shape, memory, seq)[:, _before(group.shape, base)]
                states.append(rows.reshape(group.layers, -1))
            else:
                states.append(memory[:, seq, : group.shape.matrix_bytes])
        return states

    def _restore(self, checkpoint: Checkpoint, seq: int) -> None:
        self.checkpoints.use(checkpoint)
        for group, memory, saved in zip(self._groups, self._memory, self._saved, strict=True):
            state = saved[checkpoint.slot]
            if isinstance(group.shape, ConvolutionState):
                ring = _ring(group.shape, memory, seq)
                ring[:, _before(group.shape, checkpoint.position)] = state.reshape(
                    group.layers, group.shape.taps - 1, -1
                )
            else:
                memory[:, seq, : group.shape.matrix_bytes] = state


def _joined(states: Sequence[NDArray[np.uint8]]) -> memoryview:
    return np.concatenate([state.reshape(-1) for state in states]).data


def _ring(shape: ConvolutionState, memory: NDArray[np.uint8], seq: int) -> NDArray[np.uint8]:
    """Return a view of a sequence's ring buffers: uint8[layers, ring rows, bytes per row]."""
    return memory[:, seq].reshape(len(memory), shape.ring_rows, shape.row_bytes)


def _before(shape: ConvolutionState, position: int) -> NDArray[np.int64]:
    """Return the ring rows with the earlier inputs on which the row at this position depends."""
    return np.arange(position - shape.taps + 1, position) % shape.ring_rows
