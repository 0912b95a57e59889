"""Drafts by a small model with the same vocabulary, which runs on a backend of its own.

Draft tokens are drawn as the target model draws its own: with the request's sampling parameters and the same random
numbers, which are hashes of (seed, position). If both models predict similar probabilities, they draw the same token
even at high temperatures.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.engine.drafting.base import ANY, NO_DRAFT, Draft, Drafter, DraftSource, Kind, Worth
from llmrun.engine.drafting.vocabularies import check_same_vocabulary
from llmrun.engine.sampling import sample
from llmrun.engine.slots import SequenceSlots, Slot
from llmrun.errors import Cancelled, KVFull
from llmrun.types import Batch

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from llmrun.backends.base import Backend, OpenOptions
    from llmrun.engine.requests import Request

_NAME: Final = "model"
_CHUNK: Final = 256  # the maximum number of tokens in a pass, so that Ctrl-C need not wait for long
_KEPT_SECONDS: Final = 0.9  # weight of older times per token after each new one
# Lower bounds of the classes of a token's probability under the draft model, in percent, and the assumed acceptance.
# A draft model is assumed to be right about as often as its probabilities say, until there are counts.
_EXPECTED: Final = {0: 0.2, 20: 0.3, 40: 0.5, 60: 0.65, 80: 0.8, 95: 0.92}


def open_draft_model(path: Path, options: OpenOptions, target: Backend) -> ModelSource:
    """Open a draft model for `target`, with the same backend, context size, number of sequences and threads.

    On the CPU engine, the KV cache of `target` still counts as free memory, because none of it has been used yet. The
    draft model leaves this memory free. Raises UsageError if the vocabularies differ, and the errors of `Engine.open`.
    """
    from llmrun.backends.select import open_backend

    info = target.info
    opened = open_backend(
        path,
        replace(
            options.without_rpc(),  # A server has one client, and a draft model fits on this machine.
            backend=info.backend,
            context_size=info.context_size,
            threads=info.threads,
            keeps_rows=True,
            reserved_memory=info.kv_bytes if info.backend == "cpu" else 0,  # llama.cpp has zeroed its cache
        ),
    )
    try:
        check_same_vocabulary(opened, target)
        return ModelSource(opened, info.vocabulary_size)
    except BaseException:
        opened.close()
        raise


class ModelSource(DraftSource):
    """A draft model, with one sequence of its KV cache for each answer in progress.

    vocabulary_size  number of tokens that can be drafted, which are those that both models have
    token_seconds    the time to draft a token, or 0 until it has been measured
    """

    expected = {(_NAME, bound): rate for bound, rate in _EXPECTED.items()} | {(_NAME, ANY): 0.6}

    def __init__(self, backend: Backend, vocabulary_size: int) -> None:
        """Create a source that owns an open backend."""
        self.backend = backend
        self.slots = SequenceSlots(backend.kv, backend.info.max_sequences)
        self.vocabulary_size = min(vocabulary_size, backend.info.vocabulary_size)
        self.token_seconds = 0.0

    def drafter(self, request: Request) -> ModelDrafter:
        return ModelDrafter(self, request)

    def run(self, slot: Slot, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run tokens that follow those in the slot. Returns float32[vocabulary], the logits of the last one."""
        held, n = len(slot.tokens), len(tokens)
        want = np.zeros(n, np.bool_)
        want[-1] = True
        positions = np.arange(held, held + n, dtype=np.int32)
        logits = self.backend.forward(
            Batch(np.array(tokens, np.int32), np.full(n, slot.index, np.int32), positions, want)
        )
        slot.tokens += tokens
        return logits[0, : self.vocabulary_size]

    def observe_token(self, seconds: float) -> None:
        """Record how long it took to draft a token."""
        kept = _KEPT_SECONDS if self.token_seconds else 0.0
        self.token_seconds = kept * self.token_seconds + (1 - kept) * seconds

    def fail(self, why: str) -> None:
        """Stop drafting for good. `error` reports the first reason."""
        self.error = self.error or f"draft model stopped: {self.backend.info.path}: {why}"

    def forget(self) -> None:
        while not self.error and self.slots.forget_oldest_idle():
            pass

    def cancel(self) -> None:
        self.backend.cancel()

    def close(self) -> None:
        self.backend.close()


class ModelDrafter(Drafter):
    """Drafts the tokens of one answer. Its sequence in the draft model's cache follows the answer."""

    name = _NAME

    def __init__(self, source: ModelSource, request: Request) -> None:
        self._source = source
        bias = {token: value for token, value in request.sampling.logit_bias.items() if token < source.vocabulary_size}
        self._sampling = replace(request.sampling, logit_bias=bias)
        self._tenant = request.tenant
        self._slot: Slot | None = None
        self._in_step = 0  # number of the slot's tokens that are known to equal the prompt and the answer
        self._stopped = False

    @property
    def token_seconds(self) -> float:
        return self._source.token_seconds

    def draft(self, tokens: Sequence[int], most: int, worth: Worth) -> Draft:
        if self._stopped or self._source.error:
            return NO_DRAFT
        try:
            return self._draft(list(tokens), min(most, self._source.backend.info.context_size - len(tokens)), worth)
        except Cancelled:
            self._recount()
        except KVFull:
            self._make_room()
        except Exception as error:  # noqa: BLE001 - an answer must not end because its draft model fails
            self._source.fail(str(error) or type(error).__name__)
        return NO_DRAFT

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
        self._run_all_but(2, slot, tokens)  # the last token of a draft has not been run, so usually two are missing
        self._in_step = len(tokens) - 1
        known = tokens
        kinds: list[Kind] = []
        while len(kinds) < most and worth(kinds):
            token_started = time.perf_counter()
            logits = self._source.run(slot, known[len(slot.tokens) :])
            token = sample(logits, known, self._sampling, position=len(known))
            known.append(token)
            kinds.append((_NAME, _class_of(logits, token)))
            self._source.observe_token(time.perf_counter() - token_started)
        return Draft(tuple(known[len(known) - len(kinds) :]), tuple(kinds), time.perf_counter() - started)

    def _knows(self, tokens: Sequence[int]) -> bool:
        """Return whether the draft model has all of these tokens. If not, stop drafting for this answer."""
        self._stopped = max(tokens) >= self._source.backend.info.vocabulary_size
        return not self._stopped

    def _acquire(self, tokens: list[int]) -> Slot:
        """Take a slot and prefill the prompt. There is a slot for each running answer."""
        self._slot = slot = self._source.slots.acquire(tokens, self._tenant)
        self._run_all_but(1, slot, tokens)
        return slot

    def _run_all_but(self, n: int, slot: Slot, tokens: list[int]) -> None:
        """Run the tokens that follow those in the slot, except for the last n."""
        while (rest := len(tokens) - n - len(slot.tokens)) > 0:
            held = len(slot.tokens)
            self._source.run(slot, tokens[held : held + min(rest, _CHUNK)])

    def _cut_back(self, slot: Slot, tokens: list[int]) -> bool:
        """Remove wrong tokens from the slot. Returns False if that is impossible.

        Only tokens since the last draft have to be compared.
        """
        held = slot.tokens
        n = min(self._in_step, len(held))
        while n < min(len(held), len(tokens) - 1) and held[n] == tokens[n]:
            n += 1
        if n < len(held) and self._source.slots.truncate(slot, n) < n:
            self._source.fail("its recurrent state cannot drop wrong tokens")
            return False
        return True

    def _recount(self) -> None:
        """After a cancelled pass, keep only the tokens that the cache still holds."""
        if self._slot is not None:
            self._source.slots.recount([self._slot])
            self._in_step = min(self._in_step, len(self._slot.tokens))

    def _make_room(self) -> None:
        """After KVFull, drop a cached prefix. If there is none, drop this answer's tokens and stop drafting for it."""
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
