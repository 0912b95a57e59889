"""The recurrent states of all sequences, and the checkpoints of these states.

A sequence can be shortened to its base or any later position at no cost (layouts/kv.py). To shorten a sequence further,
a checkpoint is restored, which is a copy of the state at an earlier position. Checkpoints are made near the end of each
prompt and every 512 tokens, but apart from its last checkpoint, a sequence keeps only one checkpoint within 512 tokens.
All sequences share the memory for checkpoints. When this memory is full, the least recently used checkpoint is dropped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

from llmrun.backends.base import CHECKPOINT_PART, SavedPart
from llmrun.backends.cpu.steps import NO_RUNS, Run, StepRuns
from llmrun.base.errors import IntegrityError
from llmrun.formats.layouts.kv import REPLAY_ROWS, RUN_WORDS
from llmrun.model.plan.shapes import ConvolutionState, StateGroup

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHECKPOINT_DISTANCE: Final = 512  # tokens
_BUDGET: Final = 256 << 20  # bytes for checkpoints
_MOST: Final = 64  # checkpoints; the memory would hold more for small models
# If this many rows precede the first wanted logits, the rows are a prompt. A grammar may force fewer tokens.
_LEAST_PROMPT: Final = 64


def n_checkpoints(groups: Sequence[StateGroup], max_sequences: int) -> int:
    """Return how many checkpoints to keep: as many as fit in 256 MiB, but at most 64.

    The minimum is two checkpoints for each sequence, plus one.
    """
    if not groups:
        return 0
    return max(2 * max_sequences + 1, min(_MOST, _BUDGET // checkpoint_bytes(groups)))


def checkpoint_bytes(groups: Iterable[StateGroup]) -> int:
    """Return the size of a checkpoint."""
    return sum(group.layers * group.shape.checkpoint_bytes for group in groups)


def state_bytes(groups: Iterable[StateGroup]) -> int:
    """Return the size of the states of one sequence."""
    return sum(group.layers * group.shape.n_bytes for group in groups)


def checkpoint_shapes(groups: Sequence[StateGroup], count: int) -> list[tuple[int, int, int]]:
    """Return the shape of the memory for checkpoints of each group: (checkpoints, layers, bytes)."""
    return [(count, group.layers, group.shape.checkpoint_bytes) for group in groups]


class _Checkpoint(Struct, eq=False):
    """The state after the first `position` tokens, which several sequences may own.

    slot  the checkpoint's index in the memory for checkpoints
    used  when the checkpoint was made or last restored, as a count of such uses
    """

    slot: int
    position: int
    used: int
    owners: int = 1


class RecurrentStates:
    """The recurrent states of a model.

    memory       uint8[layers, sequences, bytes of a state] for each group of layers
    checkpoints  uint8[checkpoints, layers, bytes] for each group of layers
    bases        each sequence's base, or None if its state was lost in a step that failed
    """

    def __init__(
        self,
        groups: Sequence[StateGroup],
        memory: Sequence[NDArray[np.uint8]],
        checkpoints: Sequence[NDArray[np.uint8]],
        *,
        keeps_rows: bool = False,
    ) -> None:
        n_sequences = memory[0].shape[1]
        self._groups, self._memory, self._checkpoints, self._keeps_rows = groups, memory, checkpoints, keeps_rows
        self.bases: list[int | None] = [0] * n_sequences
        self._buffers = [0] * n_sequences  # index of the replay buffer with the rows since the base
        self._reads_prompt = [True] * n_sequences
        self._owned: list[list[_Checkpoint]] = [[] for _ in range(n_sequences)]  # checkpoints in order of position
        self._free = list(range(len(checkpoints[0]) - 1, -1, -1))
        self._uses = 0
        # Each run of the step, its new base, and whether the run ends a prompt whose state is not saved yet.
        self._pending: list[tuple[Run, int, bool]] = []

    def reachable(self, seq: int, n: int) -> list[int]:
        """Return the positions <= n to which a sequence of at least n tokens can be truncated, in descending order."""
        base = self.bases[seq]
        if base is not None and base <= n:
            return [n]
        owned = self._owned[seq]
        return [each.position for each in reversed(owned[: self._count(seq, n)])] + [0]

    def cut(self, seq: int, n: int) -> None:
        """Truncate a sequence to a reachable position."""
        self._disown(seq, self._count(seq, n))
        base = self.bases[seq]
        if base is not None and base <= n and n:
            return
        self._restart(seq, n)
        if n:
            self._restore(self._owned[seq][-1], seq)

    def expect_prompt(self, seq: int) -> None:
        """Record that a sequence's next rows, up to the first row whose logits are wanted, are a prompt."""
        self._reads_prompt[seq] = True

    def share(self, src: int, dst: int, n: int) -> None:
        """Copy the state of src at a reachable position to dst, which must be empty."""
        self._owned[dst] = self._owned[src][: self._count(src, n)]
        for checkpoint in self._owned[dst]:
            checkpoint.owners += 1
        base = self.bases[src]
        self._restart(dst, n)
        if base is not None and base <= n:
            for memory in self._memory:
                memory[:, dst] = memory[:, src]
            self.bases[dst], self._buffers[dst] = base, self._buffers[src]
        else:
            self._restore(self._owned[dst][-1], dst)

    def begin(self, runs: Sequence[Run]) -> StepRuns:
        """Return a step's runs for the kernels. Call `finish` after the step, or `lose` if the step failed."""
        self._pending = []
        words = np.zeros((len(runs), RUN_WORDS), np.int64)
        first = 0
        for index, run in enumerate(runs):
            base = self.bases[run.sequence]
            assert base is not None, "a sequence whose state was lost must be cut before the next step"
            reads_prompt = self._reads_prompt[run.sequence] or run.lead >= _LEAST_PROMPT
            commit = run.commit(reads_prompt=reads_prompt or not run.is_last)
            if self._keeps_rows:
                commit = max(base, run.end - REPLAY_ROWS)
            ends_prompt = reads_prompt and run.is_last
            if ends_prompt and commit > run.certain - REPLAY_ROWS:
                # The step begins too close to the end of the prompt. Save the state before the step instead.
                if base > self._newest(run.sequence):
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
            newest = self._newest(seq)
            if commit > newest and (ends_prompt or commit // CHECKPOINT_DISTANCE > newest // CHECKPOINT_DISTANCE):
                self._save(seq, commit)
        self._pending = []

    def lose(self) -> None:
        """Mark the step as failed: the states of its sequences may be incomplete."""
        for run, _, _ in self._pending:
            self.bases[run.sequence] = None
        self._pending = []

    def save(self, seq: int, n: int) -> list[SavedPart]:
        """Return the checkpoints up to position n as parts, and the state at the base."""
        owned = self._owned[seq][: self._count(seq, n)]
        reads: dict[int, Callable[[], memoryview]] = {
            each.position: partial(self._checkpoint_bytes, each) for each in owned
        }
        base = self.bases[seq]
        if base is not None and 0 < base <= n and base not in reads:
            reads[base] = partial(self._state_bytes, seq, base)
        n_bytes = checkpoint_bytes(self._groups)
        return [SavedPart(CHECKPOINT_PART, at, at, 0, n_bytes, read) for at, read in sorted(reads.items())]

    def load(self, seq: int, n: int, parts: Iterable[SavedPart]) -> None:
        """Load the last checkpoints up to position n of a sequence that has none. Damaged checkpoints are skipped.

        The state of the sequence is lost, so the sequence must be truncated before the next step.
        """
        self.bases[seq] = None
        usable = [part for part in parts if part.kind == CHECKPOINT_PART and 0 < part.end <= n]
        n_bytes = checkpoint_bytes(self._groups)
        for part in sorted(usable, key=attrgetter("end"), reverse=True):
            if not self._free or part.n_bytes != n_bytes:
                continue
            with suppress(IntegrityError):
                data = np.frombuffer(part.read(), np.uint8)
                self._uses += 1
                checkpoint = _Checkpoint(self._free.pop(), part.end, self._uses)
                for checkpoints in self._checkpoints:
                    state, data = np.split(data, [checkpoints[0].size])
                    checkpoints[checkpoint.slot] = state.reshape(checkpoints[0].shape)
                self._owned[seq].insert(0, checkpoint)

    def _checkpoint_bytes(self, checkpoint: _Checkpoint) -> memoryview:
        return _joined([checkpoints[checkpoint.slot] for checkpoints in self._checkpoints])

    def _state_bytes(self, seq: int, base: int) -> memoryview:
        return _joined(self._state_at(seq, base))

    def _newest(self, seq: int) -> int:
        """Return the position of a sequence's last checkpoint, or 0 if the sequence has no checkpoint."""
        return self._owned[seq][-1].position if self._owned[seq] else 0

    def _count(self, seq: int, n: int) -> int:
        """Return how many checkpoints a sequence has up to position n."""
        return bisect_right(self._owned[seq], n, key=attrgetter("position"))

    def _restart(self, seq: int, n: int) -> None:
        self.bases[seq] = n
        self.expect_prompt(seq)

    # --- checkpoints ---

    def _save(self, seq: int, position: int) -> None:
        self._thin(seq)
        if not self._free and not self._drop_oldest():
            return
        self._uses += 1
        checkpoint = _Checkpoint(self._free[-1], position, self._uses)
        for checkpoints, state in zip(self._checkpoints, self._state_at(seq, position), strict=True):
            checkpoints[checkpoint.slot] = state
        self._free.pop()  # removed after the copy, so that an interrupted copy loses no memory
        self._owned[seq].append(checkpoint)

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

    def _restore(self, checkpoint: _Checkpoint, seq: int) -> None:
        self._uses += 1
        checkpoint.used = self._uses
        for group, memory, checkpoints in zip(self._groups, self._memory, self._checkpoints, strict=True):
            saved = checkpoints[checkpoint.slot]
            if isinstance(group.shape, ConvolutionState):
                ring = _ring(group.shape, memory, seq)
                ring[:, _before(group.shape, checkpoint.position)] = saved.reshape(
                    group.layers, group.shape.taps - 1, -1
                )
            else:
                memory[:, seq, : group.shape.matrix_bytes] = saved

    def _disown(self, seq: int, kept: int) -> None:
        """Keep only the first `kept` checkpoints of a sequence."""
        for checkpoint in self._owned[seq][kept:]:
            self._release(checkpoint)
        del self._owned[seq][kept:]

    def _thin(self, seq: int) -> None:
        """Make room for a sequence's next checkpoint: if the last two are close, keep only the later checkpoint.

        Otherwise, short turns of a chat would use more memory than `footprint` counts, and displace other checkpoints.
        """
        earlier = self._owned[seq][-2:-1]
        if earlier and earlier[0].position // CHECKPOINT_DISTANCE == self._newest(seq) // CHECKPOINT_DISTANCE:
            del self._owned[seq][-2]
            self._release(earlier[0])

    def _release(self, checkpoint: _Checkpoint) -> None:
        checkpoint.owners -= 1
        if not checkpoint.owners:
            self._free.append(checkpoint.slot)

    def _drop_oldest(self) -> bool:
        """Drop the least recently used checkpoint, or return False if there is no checkpoint."""
        everything = {id(each): each for owned in self._owned for each in owned}
        if not everything:
            return False
        oldest = min(everything.values(), key=attrgetter("used"))
        for owned in self._owned:
            if oldest in owned:
                owned.remove(oldest)
        self._free.append(oldest.slot)
        return True


def _joined(states: Sequence[NDArray[np.uint8]]) -> memoryview:
    return np.concatenate([state.reshape(-1) for state in states]).data


def _ring(shape: ConvolutionState, memory: NDArray[np.uint8], seq: int) -> NDArray[np.uint8]:
    """Return a view of a sequence's ring buffers: uint8[layers, ring rows, bytes per row]."""
    return memory[:, seq].reshape(len(memory), shape.ring_rows, shape.row_bytes)


def _before(shape: ConvolutionState, position: int) -> NDArray[np.int64]:
    """Return the ring rows with the earlier inputs on which the row at this position depends."""
    return np.arange(position - shape.taps + 1, position) % shape.ring_rows
