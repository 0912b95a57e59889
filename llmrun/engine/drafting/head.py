"""Drafts with the model's own head for multi-token prediction.

The inputs of the head are a token and the model's hidden state at the previous position. Each step of the model
supplies the hidden states of the step's tokens. For draft tokens, which the model has not run yet, the head uses its
own hidden states. After the next step, the rows of draft tokens in the head's cache are computed again.

The hidden states of cached prefixes are not kept, so for tokens missing from its own cache, the head runs with zeros
instead. Usually, only the first token after a prefix is affected. Running a long prefix, such as one from a file, would
delay the answer, so the head runs only the end of a long prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.base.types import HIDDEN, LOGITS
from llmrun.engine.drafting.base import Draft, Worth
from llmrun.engine.drafting.sequence import CHUNK, SequenceDrafter, SequenceSource

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import DraftHead
    from llmrun.base.types import Batch
    from llmrun.engine.requests import Request
    from llmrun.engine.slots import Slot


_MOST_WITHOUT_STATES: Final = 512  # tokens; with 256 rows, the head takes 5 % of the time of the model


class HeadSource(SequenceSource):
    """The draft head of a model, which the model's backend owns."""

    name = "head"

    def __init__(self, head: DraftHead) -> None:
        super().__init__(head.info, head.kv, head.drafted_tokens)
        self.head = head

    def drafter(self, request: Request) -> HeadDrafter:
        return HeadDrafter(self, request)

    def cancel(self) -> None:
        self.head.cancel()


class HeadDrafter(SequenceDrafter):
    """Drafts the tokens of one answer with the model's draft head.

    The hidden states of steps are kept until the next draft, or until there are enough states for a pass.
    """

    run_together = CHUNK  # the right tokens of the last draft and the new token are run in one pass
    wanted_outputs = LOGITS | HIDDEN

    def __init__(self, source: HeadSource, request: Request) -> None:
        super().__init__(source, request)
        self._head = source.head
        self._first = 0  # the position of the first kept state
        self._states: NDArray[np.float32] = np.empty((0, source.info.hidden_size), np.float32)

    @property
    def takes_hidden(self) -> bool:  # type: ignore[override]
        return not self._stopped and not self._source.error

    def observe_hidden(self, tokens: Sequence[int], first: int, hidden: NDArray[np.float32]) -> None:
        if self._slot is None and not len(self._states):
            missing = first - self._source.slots.cached(list(tokens[:first]), self._tenant)
            self._skipped = first - _MOST_WITHOUT_STATES if missing > _MOST_WITHOUT_STATES else 0
        tokens, first = tokens[self._skipped :], first - self._skipped
        self._keep(first, hidden)
        if len(self._states) >= CHUNK:
            end = min(self._first + len(self._states) + 1, len(tokens))
            self._attempt(lambda: self._catch_up(list(tokens[:end])))

    def draft(self, tokens: Sequence[int], most: int, worth: Worth) -> Draft:
        return super().draft(tokens[self._skipped :], most, worth)

    def release(self) -> None:
        if self._slot is not None and not self._source.error:
            self._truncate(self._slot, self._in_step)
        super().release()
        self._states = self._states[:0]

    def _keep(self, first: int, states: NDArray[np.float32]) -> None:
        """Keep the states of the positions from `first` on, replacing any older states of these positions."""
        n = first - self._first
        if 0 < n <= len(self._states):
            self._states = np.concatenate([self._states[:n], states])
        else:
            self._first, self._states = first, states

    def _catch_up(self, tokens: list[int]) -> None:
        """Run all tokens except the last one, which drafts need to run again."""
        slot = self._slot or self._acquire(tokens)
        self._cut_back(slot, tokens)
        self._run_all_but(1, slot, tokens)
        self._in_step = len(slot.tokens)
        self._forget_old_states()

    def _draft(self, tokens: list[int], most: int, worth: Worth) -> Draft:
        n = len(tokens)
        draft = super()._draft(tokens, most, worth)
        if draft.tokens:
            self._in_step = n
            self._forget_old_states()
        return draft

    def _acquire(self, tokens: list[int]) -> Slot:
        slot = super()._acquire(tokens)
        self._in_step = len(slot.tokens)
        return slot

    def _cut_back(self, slot: Slot, tokens: list[int]) -> bool:
        """Remove all tokens of the last draft, even right ones, because the head ran on its own hidden states."""
        return self._truncate(slot, min(self._in_step, len(tokens) - 1, len(slot.tokens)))

    def _forward(self, batch: Batch) -> NDArray[np.float32]:
        outputs = self._head.forward(batch, self._states_before(int(batch.pos[0]), len(batch.pos)))
        if len(outputs.hidden):
            self._keep(int(batch.pos[-1]), outputs.hidden)
        return outputs.logits

    def _states_before(self, position: int, n: int) -> NDArray[np.float32]:
        """Return the hidden state before each of n positions. States that were not kept are zero."""
        states = np.zeros((n, self._states.shape[1]), np.float32)
        begin = max(position - 1, self._first)
        end = min(position - 1 + n, self._first + len(self._states))
        if begin < end:
            states[begin - position + 1 : end - position + 1] = self._states[begin - self._first : end - self._first]
        return states

    def _forget_old_states(self) -> None:
        """Forget the states of tokens that the head has run. The last state is kept in case its token runs again."""
        n = min(max(self._in_step - 2 - self._first, 0), len(self._states))
        self._first, self._states = self._first + n, self._states[n:]
