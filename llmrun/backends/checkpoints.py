"""The checkpoints of recurrent states: which positions a sequence can go back to, and which checkpoints are dropped.

A checkpoint is a copy of a sequence's state, in a slot of memory that the backend owns. All sequences share the slots.
Two rules limit the checkpoints:

- Apart from its last checkpoint, a sequence keeps only one checkpoint after an image and one other checkpoint within
  512 tokens. Conversations with many images therefore keep at most twice as many checkpoints as other texts.
- If all slots are in use, the sequence with the most checkpoints loses the least recently used of them. A single long
  conversation therefore never displaces the last checkpoints of all other sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Final

from msgspec import Struct

from llmrun.backends.base import CHECKPOINT_DISTANCE, CHECKPOINT_PART, SavedPart

_BUDGET: Final = 256 << 20  # bytes for checkpoints
_MOST: Final = 64  # checkpoints; the memory would hold more for small models


def n_within_budget(n_bytes: int) -> int:
    """Return how many checkpoints of this size fit in 256 MiB, but at most 64."""
    return min(_MOST, _BUDGET // n_bytes)


class Checkpoint(Struct, eq=False):
    """The state after the first `position` tokens, which several sequences may own.

    slot         the index of the checkpoint's memory
    used         when the checkpoint was made or last restored, as a count of such uses
    after_image  whether the last token before the position is a row of an image
    """

    slot: int
    position: int
    used: int
    after_image: bool = False
    owners: int = 1


class Checkpoints:
    """The checkpoints of all sequences.

    owned  the checkpoints of each sequence, in order of position
    free   the slots that hold no checkpoint
    """

    def __init__(self, n_sequences: int, n_slots: int) -> None:
        self.owned: list[list[Checkpoint]] = [[] for _ in range(n_sequences)]
        self.free = list(range(n_slots - 1, -1, -1))
        self._image_ends = [0] * n_sequences  # see `note_image`
        self._uses = 0

    def up_to(self, seq: int, n: int) -> list[Checkpoint]:
        """Return the checkpoints of a sequence up to position n."""
        return self.owned[seq][: self._count(seq, n)]

    def newest(self, seq: int) -> int:
        """Return the position of a sequence's last checkpoint, or 0 if the sequence has no checkpoint."""
        return self.owned[seq][-1].position if self.owned[seq] else 0

    def cut(self, seq: int, n: int) -> None:
        """Forget everything about a sequence after position n."""
        if n < self._image_ends[seq]:
            self._image_ends[seq] = 0
        count = self._count(seq, n)
        for checkpoint in self.owned[seq][count:]:
            self._release(checkpoint)
        del self.owned[seq][count:]

    def share(self, src: int, dst: int, n: int) -> None:
        """Let dst, which has no checkpoints, own the checkpoints of src up to position n, too."""
        self._image_ends[dst] = self._image_ends[src] if self._image_ends[src] <= n else 0
        self.owned[dst] = self.up_to(src, n)
        for checkpoint in self.owned[dst]:
            checkpoint.owners += 1

    def note_image(self, seq: int, n: int) -> None:
        """Record that the last of a sequence's first n tokens is a row of an image. The image may have further rows."""
        self._image_ends[seq] = n

    def follows_image(self, seq: int, n: int) -> bool:
        """Return whether position n follows the last row of an image, as far as the sequence was run."""
        return 0 < n == self._image_ends[seq]

    def slot_for(self, seq: int) -> int | None:
        """Return a free slot for the next checkpoint of a sequence, or None if there are no slots.

        The slot stays free until `add`, so an interrupted copy loses no memory.
        """
        self._thin(seq)
        return self.free[-1] if self.free or self._drop() else None

    def add(self, seq: int, position: int, *, after_image: bool = False) -> None:
        """Record that the slot of the last `slot_for` holds the state of a sequence at this position."""
        checkpoint = Checkpoint(self.free.pop(), position, 0, after_image)
        self.use(checkpoint)
        self.owned[seq].insert(self._count(seq, position), checkpoint)

    def loadable(self, parts: Iterable[SavedPart], n: int, n_bytes: int) -> Iterator[SavedPart]:
        """Yield the saved checkpoints of this size up to position n, the last ones first, as long as slots are free."""
        found = [part for part in parts if part.kind == CHECKPOINT_PART and 0 < part.end <= n]
        for part in sorted(found, key=attrgetter("end"), reverse=True):
            if self.free and part.n_bytes == n_bytes:
                yield part

    def use(self, checkpoint: Checkpoint) -> None:
        """Mark a checkpoint as used."""
        self._uses += 1
        checkpoint.used = self._uses

    def _count(self, seq: int, n: int) -> int:
        """Return how many checkpoints a sequence has up to position n."""
        return bisect_right(self.owned[seq], n, key=attrgetter("position"))

    def _thin(self, seq: int) -> None:
        """Drop the checkpoints that the sequence's last checkpoint replaces, because it is about to get another one.

        Otherwise, short turns of a chat would use more memory than `footprint` counts, and displace other checkpoints.
        """
        if not self.owned[seq]:
            return
        *earlier, last = self.owned[seq]
        stretch = last.position // CHECKPOINT_DISTANCE
        for each in earlier:
            if each.position // CHECKPOINT_DISTANCE == stretch and each.after_image == last.after_image:
                self.owned[seq].remove(each)
                self._release(each)

    def _release(self, checkpoint: Checkpoint) -> None:
        checkpoint.owners -= 1
        if not checkpoint.owners:
            self.free.append(checkpoint.slot)

    def _drop(self) -> bool:
        """Drop a checkpoint to make room, or return False if there is no checkpoint."""
        most = max(map(len, self.owned))
        if not most:
            return False
        largest = [each for owned in self.owned if len(owned) == most for each in owned]
        oldest = min(largest, key=attrgetter("used"))
        for owned in self.owned:
            if oldest in owned:
                owned.remove(oldest)
        self.free.append(oldest.slot)
        return True
