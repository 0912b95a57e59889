"""Divides the rows of a batch into steps, and finds each step's sequences, wanted rows, images and RoPE rotations.

The rotations are cached. Without the cache, rotations would take 30 us per step, 0.7 % of SmolLM2's time.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

from llmrun.base.types import HIDDEN, IMAGE_ROW, LOGITS
from llmrun.formats.layouts import kv
from llmrun.formats.layouts.arena import address_of
from llmrun.formats.layouts.kv import REPLAY_ROWS
from llmrun.model.plan.elementary import rotations_of
from llmrun.model.plan.twin import Rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from llmrun.base.types import Batch
    from llmrun.model.plan.elementary import Rope
    from llmrun.model.plan.twin import Value


def steps_of(
    sequences: Sequence[int],
    most: int,
    *,
    whole: bool,
    ahead: NDArray[np.int32] | None = None,
    beginnings: Sequence[int] = (),
) -> Iterator[slice]:
    """Yield the rows of each step in order: at most `most` rows, or a longer image whose rows attend to each other.

    sequences   the sequence of each row
    whole       never divide the rows of a sequence, which must not be more than `most`
    ahead       int32[rows], as in Batch; rows that attend to each other are never divided
    beginnings  rows that must be the first of a step, in ascending order
    """
    start, n = 0, len(sequences)
    while start < n:
        end = longest = min(start + most, n)
        if (next_one := bisect_right(beginnings, start)) < len(beginnings):
            end = min(end, beginnings[next_one])
        while end < n and ((whole and sequences[end] == sequences[end - 1]) or (ahead is not None and ahead[end - 1])):
            end -= 1
            if end == start:
                assert ahead is not None, "a sequence has too many rows"
                end = longest + int(ahead[longest - 1])
        yield slice(start, end)
        start = end


def rows_after_images(batch: Batch) -> list[int]:
    """Return the rows of text that follow an image in their sequence and in the batch."""
    if batch.embeds is None:
        return []
    found = []
    after_image: dict[int, bool] = {}
    for row, (token, seq) in enumerate(zip(batch.tokens.tolist(), batch.seq.tolist(), strict=True)):
        if token != IMAGE_ROW and after_image.get(seq):
            found.append(row)
        after_image[seq] = token == IMAGE_ROW
    return found


def check_whole(sequences: Sequence[int], positions: Sequence[int]) -> None:
    """Check that the rows of each sequence follow one another and begin at position 0. Raises ValueError.

    Without a causal mask, earlier rows depend on later rows, so a sequence cannot be continued.
    """
    beginnings = [row for row, seq in enumerate(sequences) if row == 0 or sequences[row - 1] != seq]
    if len(beginnings) > len(set(sequences)) or any(positions[row] for row in beginnings):
        raise ValueError("a model without a causal mask needs all rows of a sequence together")


class StepRuns(Struct, frozen=True):
    """The runs of a step in the form that kernels read.

    words  int64[runs, RUN_WORDS] (layouts/kv.py)
    rows   int32[rows], the indices of the rows in the step, run after run
    """

    words: NDArray[np.int64]
    rows: NDArray[np.int32]


NO_RUNS: Final = StepRuns(np.zeros((0, kv.RUN_WORDS), np.int64), np.zeros(0, np.int32))


class StepImages(Struct, frozen=True):
    """The rows of images in a step.

    addresses  int64[rows], the address of the embedding of each row of an image, or 0 for other rows
    embeds     float32[rows of images, row width], the memory at these addresses
    ahead      int32[rows], as in Batch; None if no row looks ahead
    """

    addresses: NDArray[np.int64]
    embeds: NDArray[np.float32]
    ahead: NDArray[np.int32] | None

    @classmethod
    def of(cls, batch: Batch, rows: slice) -> StepImages | None:
        """Return the images in some rows of a batch, or None if these rows have none."""
        places = np.flatnonzero(batch.tokens[rows] == IMAGE_ROW)
        if batch.embeds is None or not len(places):
            return None
        first = np.count_nonzero(batch.tokens[: rows.start] == IMAGE_ROW)
        embeds = np.ascontiguousarray(batch.embeds[first : first + len(places)], np.float32)
        addresses = np.zeros(rows.stop - rows.start, np.int64)
        addresses[places] = address_of(embeds) + embeds.strides[0] * np.arange(len(places))
        ahead = batch.ahead
        return cls(addresses, embeds, None if ahead is None or not ahead[rows].any() else ahead[rows])


class Run(Struct, frozen=True):
    """The rows of one sequence in a step.

    rows     indices of the rows in the step
    start    position of the first row
    lead     number of rows before the first row whose logits are wanted, or of all rows if no logits are wanted
    is_last  whether the logits of any row are wanted, as in the last step of a prompt
    begins_in_image, ends_in_image  whether the first row and the last row are rows of images
    """

    sequence: int
    rows: list[int]
    start: int
    lead: int
    is_last: bool
    begins_in_image: bool = False
    ends_in_image: bool = False

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    @property
    def certain(self) -> int:
        """The position after the last row that no draft includes.

        The first row whose logits are wanted, and all rows before it, are tokens of the prompt or of the answer. The
        rows that follow may be a draft, which can be rejected.
        """
        return self.start + self.lead + self.is_last

    def commit(self, *, reads_prompt: bool) -> int:
        """Return the position at which the step commits the state. Rows from this position on can be removed later.

        Such rows are the rows of a draft or the last rows of a prompt, because the next turn of a chat often differs in
        the last tokens of the prompt, such as an opening thinking tag. Rows of images are never removed one by one.
        """
        if self.ends_in_image:
            return self.end
        certain = self.certain - REPLAY_ROWS if reads_prompt else self.certain
        return max(self.start, certain, self.end - REPLAY_ROWS)


def runs_of(
    sequences: list[int], positions: list[int], wanted: list[bool], images: list[bool] | None = None
) -> list[Run]:
    """Return the runs of a step, given each row's sequence, position, and whether its logits are wanted.

    images  whether each row is a row of an image, or None if no row is
    """
    rows: dict[int, list[int]] = {}
    for row, sequence in enumerate(sequences):
        rows.setdefault(sequence, []).append(row)
    runs = []
    for sequence, own in rows.items():
        lead = next((index for index, row in enumerate(own) if wanted[row]), len(own))
        ends = (False, False) if images is None else (images[own[0]], images[own[-1]])
        runs.append(Run(sequence, own, positions[own[0]], lead, lead < len(own), *ends))
    return runs


class WantedRows(Struct, frozen=True):
    """The wanted rows of a step.

    rows    int32[], the rows whose logits are wanted, followed by the rows that want only the hidden state
    scored  number of rows whose logits are wanted
    hidden  int64[], the index of each wanted hidden state in the plan's value
    """

    rows: NDArray[np.int32]
    scored: int
    hidden: NDArray[np.int64]

    @classmethod
    def of(cls, want: NDArray[np.uint8], hidden: Value | None) -> WantedRows:
        """Return the wanted rows.

        want    uint8[rows], as in Batch
        hidden  the plan's hidden state. If this value contains all rows, only the rows with logits need to be gathered
        """
        scored = np.flatnonzero(want & LOGITS)
        of_hidden = np.flatnonzero(want & HIDDEN)
        if not len(of_hidden) or hidden is None or hidden.rows is not Rows.WANTED:
            return cls(scored.astype(np.int32), len(scored), of_hidden)
        rows = np.concatenate([scored, np.flatnonzero(want == HIDDEN)])
        places = np.empty(len(want), np.int64)
        places[rows] = np.arange(len(rows))
        return cls(rows.astype(np.int32), len(scored), places[of_hidden])


_POSITIONS = 64  # positions computed together, which takes 3 to 5 times as long as one position
_MOST_BLOCKS = 64  # blocks of positions in the cache: 2 MB for 64 pairs of features


class Rotations:
    """The rotations of positions, in the layout of `rotations_of`."""

    def __init__(self, ropes: Sequence[Rope]) -> None:
        self._ropes = ropes
        self._blocks: dict[int, NDArray[np.float32]] = {}

    def of(self, positions: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the rotations of each row, float32[rows, pairs of all ropes, 2]. Only small steps use the cache.

        positions  int32[rows], or int32[rows, 3] as in Batch.rope_pos
        """
        if positions.ndim > 1 and (positions == positions[:, :1]).all():  # text after images
            positions = positions[:, 0]
        if len(positions) > _POSITIONS or positions.ndim > 1:
            return rotations_of(self._ropes, positions)
        return np.stack([self._block(position // _POSITIONS)[position % _POSITIONS] for position in positions.tolist()])

    def _block(self, number: int) -> NDArray[np.float32]:
        block = self._blocks.get(number)
        if block is None:
            if len(self._blocks) >= _MOST_BLOCKS:
                self._blocks.clear()
            first = number * _POSITIONS
            block = rotations_of(self._ropes, np.arange(first, first + _POSITIONS, dtype=np.int32))
            self._blocks[number] = block
        return block
