"""The base classes of drafters that run a network, whose own KV cache contains a sequence for each answer.

Draft tokens are drawn as the target model draws its own tokens: with the request's sampling parameters and the same
random numbers, which are hashes of (seed, position). If both networks predict similar probabilities, they draw the same
token even at high temperatures.

The networks read conversations without the rows of images, at positions of their own. Their drafts are worse if an
answer depends on an image, but the answer stays the same, because every draft is verified.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.base.errors import Cancelled, KVFull
from llmrun.base.types import LOGITS, Batch
from llmrun.engine.drafting.base import ANY, NO_DRAFT, Draft, Drafter, DraftSource, Kind, Worth
from llmrun.engine.sampling import penalizes, sample
from llmrun.engine.slots import SequenceSlots, Slot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import KVCache
    from llmrun.base.types import ModelInfo
    from llmrun.engine.requests import Request

CHUNK: Final = 256  # the maximum number of tokens in a pass, so that Ctrl-C need not wait for long
_KEPT_SECONDS: Final = 0.9  # weight of older times per token after each new one
# Lower bounds of the classes of a token's probability under the network, in percent, and the assumed acceptance.
# Until there are counts, a network is assumed to be right about as often as its probabilities predict.
_EXPECTED: Final = {0: 0.2, 20: 0.3, 40: 0.5, 60: 0.65, 80: 0.8, 95: 0.92}


class SequenceSource(DraftSource):
    """A network that drafts, with one sequence of its KV cache for each answer in progress.

    name             the name of its drafters
    info             the network's sizes
    vocabulary_size  number of tokens that can be drafted, which are the first ones
    token_seconds    the time to draft a token, or 0 until it has been measured
    """

    name: str

    def __init__(self, info: ModelInfo, kv: KVCache, vocabulary_size: int) -> None:
        self.info = info
        self.slots = SequenceSlots(kv, info.max_sequences)
        self.vocabulary_size = vocabulary_size
        self.token_seconds = 0.0
        self.expected = {(self.name, bound): rate for bound, rate in _EXPECTED.items()} | {(self.name, ANY): 0.6}

    def observe_token(self, seconds: float) -> None:
        """Record how long it took to draft a token."""
        kept = _KEPT_SECONDS if self.token_seconds else 0.0
        self.token_seconds = kept * self.token_seconds + (1 - kept) * seconds

    def fail(self, why: str) -> None:
        """Stop drafting permanently. `error` reports the first reason."""
        self.error = self.error or f"draft {self.name} stopped: {self.info.path}: {why}"

    def forget(self) -> None:
        while not self.error and self.slots.forget_oldest_idle():
            pass


class SequenceDrafter(Drafter):
    """Drafts the tokens of one answer. The drafter's sequence in the network's cache follows the answer.

    run_together    number of tokens at the end of an answer that are run with the first token of a draft
    wanted_outputs  the outputs of a row whose logits are needed (Batch.want)
    """

    run_together = 2  # the last token of a draft has not been run, so usually two tokens are missing
    wanted_outputs = LOGITS

    def __init__(self, source: SequenceSource, request: Request) -> None:
        self.name = source.name
        self._source = source
        bias = {token: value for token, value in request.sampling.logit_bias.items() if token < source.vocabulary_size}
        self._sampling = replace(request.sampling, logit_bias=bias)
        self._tenant = request.tenant
        self._slot: Slot | None = None
        self._in_step = 0  # number of the slot's tokens that are known to equal the prompt and the answer
        self._skipped = 0  # number of tokens at the start of the answer that the network does not receive
        self._stopped = False

    @property
    def token_seconds(self) -> float:
        return self._source.token_seconds

    @abstractmethod
    def _forward(self, batch: Batch) -> NDArray[np.float32]:
        """Run rows of the slot's sequence, and return the requested logits."""

    def draft(self, tokens: Sequence[int], most: int, worth: Worth) -> Draft:
        most = min(most, self._source.info.context_size - len(tokens))
        return self._attempt(lambda: self._draft(list(tokens), most, worth)) or NO_DRAFT

    def _attempt(self, run: Callable[[], Draft | None]) -> Draft | None:
        """Return the result of `run`, or None if it fails, because a failed drafter must not end the answer."""
        if self._stopped or self._source.error:
            return None
        try:
            return run()
        except Cancelled:
            self._recount()
        except KVFull:
            self._make_room()
        except Exception as error:  # noqa: BLE001
            self._source.fail(str(error) or type(error).__name__)
        return None

    def release(self) -> None:
        if self._slot is not None and not self._source.error:
            self._source.slots.release(self._slot)
        self._slot = None
        self._in_step = 0

    def _draft(self, tokens: list[int], most: int, worth: Worth) -> Draft:
        if most < 1 or not self._knows(tokens[self._in_step :]):
            return NO_DRAFT
        slot = self._slot or self._acquire(tokens)
        if not self._cut_back(slot, tokens):
            return NO_DRAFT
        started = time.perf_counter()
        self._run_all_but(self.run_together, slot, tokens)
        self._in_step = len(tokens) - 1
        known, drafted = tokens, self._source.vocabulary_size
        penalized = [token for token in tokens if token < drafted] if penalizes(self._sampling) else []
        kinds: list[Kind] = []
        while len(kinds) < most and worth(kinds):
            token_started = time.perf_counter()
            [logits] = self._run(slot, known[len(slot.tokens) :], wanted=1)
            token = sample(logits, penalized, self._sampling, position=self._skipped + self.image_rows + len(known))
            known.append(token)
            penalized.append(token)
            kinds.append((self.name, _class_of(logits, token)))
            self._source.observe_token(time.perf_counter() - token_started)
        return Draft(tuple(known[len(known) - len(kinds) :]), tuple(kinds), time.perf_counter() - started)

    def _knows(self, tokens: Sequence[int]) -> bool:
        """Return whether the network's vocabulary contains these tokens; otherwise, stop drafting for the answer."""
        self._stopped = max(tokens, default=0) >= self._source.info.vocabulary_size
        return not self._stopped

    def _acquire(self, tokens: list[int]) -> Slot:
        """Take a slot and prefill the prompt. There is a slot for each running answer."""
        self._slot = slot = self._source.slots.acquire(tokens, self._tenant)
        self._run_all_but(1, slot, tokens)
        return slot

    def _run_all_but(self, n: int, slot: Slot, tokens: list[int]) -> None:
        """Run the tokens that are not in the slot yet, except for the last n."""
        while (rest := len(tokens) - n - len(slot.tokens)) > 0:
            held = len(slot.tokens)
            self._run(slot, tokens[held : held + min(rest, CHUNK)], wanted=0)

    def _run(self, slot: Slot, tokens: Sequence[int], wanted: int) -> NDArray[np.float32]:
        """Run the next tokens of a slot, and return the logits of the last ones, float32[wanted, vocabulary]."""
        held, n = len(slot.tokens), len(tokens)
        want = np.zeros(n, np.uint8)
        want[n - wanted :] = self.wanted_outputs
        positions = np.arange(held, held + n, dtype=np.int32)
        logits = self._forward(Batch(np.array(tokens, np.int32), np.full(n, slot.index, np.int32), positions, want))
        slot.tokens += tokens
        return logits[:, : self._source.vocabulary_size]

    def _cut_back(self, slot: Slot, tokens: list[int]) -> bool:
        """Remove wrong tokens from the slot. Returns False if the tokens cannot be removed.

        Only tokens since the last draft have to be compared.
        """
        held = slot.tokens
        n = min(self._in_step, len(held))
        while n < min(len(held), len(tokens) - 1) and held[n] == tokens[n]:
            n += 1
        return self._truncate(slot, n)

    def _truncate(self, slot: Slot, n: int) -> bool:
        """Shorten the slot to n tokens. Returns False if the slot cannot be shortened."""
        if n < len(slot.tokens) and self._source.slots.truncate(slot, n) < n:
            self._source.fail("its recurrent state cannot drop wrong tokens")
            return False
        return True

    def _recount(self) -> None:
        """After a cancelled pass, keep only the tokens that the cache still holds."""
        if self._slot is not None:
            self._source.slots.recount([self._slot])
            self._in_step = min(self._in_step, len(self._slot.tokens))

    def _make_room(self) -> None:
        """After KVFull, drop a cached prefix. Without cached prefixes, drop this answer's tokens and stop drafting."""
        if not self._source.slots.forget_oldest_idle():
            self._stopped = True
            if self._slot is not None:
                self._source.slots.forget(self._slot)
                self._slot = None


def _class_of(logits: NDArray[np.float32], token: int) -> int:
    """Return the lower bound of the class of a token's probability, in percent."""
    weights = np.exp(logits - logits.max())
    percent = 100 * float(weights[token]) / float(weights.sum())
    return max(bound for bound in _EXPECTED if bound <= max(percent, 0.0))
