"""Decides whether two workers give the same answers, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llmrun.engine.remote.listed_models import OWNER
from llmrun.jobs.batching.workers.base import COMPLETION, RefusedWorker, Worker

# The log-probabilities of these tokens have all digits of the logits, so that a single different bit would show.
_PROOF: Final[Mapping[str, Any]] = {
    "prompt": "Once upon a time, there were three machines. The first one said: 1, 2, 3, 5, 8, 13,",
    "max_tokens": 16,
    "temperature": 0,
    "logprobs": 5,
    "seed": 1,
}
_DIGITS: Final = 16
_OK: Final = 200


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a worker, as far as it decides its answers.

    model        the name of its model
    context_size  the most tokens of a prompt and its answer together, or None if it is unknown
    fingerprint  equal for workers that give the same answers if their contexts have the same size
    is_certain   whether answers do not depend on concurrent requests, so that equal fingerprints mean equal answers
    is_foreign   whether the worker is another program than llmrun, so that nothing about its answers is known
    """

    model: str
    context_size: int | None
    fingerprint: str
    is_certain: bool = True
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """A worker that is open. `fingerprint` is for its records, or None if all workers have the same."""

    fingerprint: str | None


class Admission:
    """Opens workers, and refuses those whose answers may differ from those of the others.

    mixed     accept all workers
    is_alone  whether the run has only one worker
    expected  the identity that all workers must have; the first worker that is opened sets it if it is None
    """

    def __init__(self, *, mixed: bool, is_alone: bool, expected: Identity | None = None) -> None:
        self._mixed = mixed
        self._is_alone = is_alone
        self.expected = expected

    async def open(self, worker: Worker) -> Admitted:
        """Open a worker. Raises RefusedWorker, and the errors of `Worker.start`."""
        identity = await identify(worker, await worker.start())
        if self.expected is None:
            self.expected = identity
        if self._mixed:
            return Admitted(identity.fingerprint)
        hint = "add --mixed to accept such workers"
        if identity.is_foreign:
            words = "the server is not llmrun, so its answers may change from run to run"
            raise RefusedWorker(f"{worker.name}: {words}", hint=hint)
        if not identity.is_certain and not self._is_alone:
            words = "its answers depend on which other requests run at the same time; those of the CPU engine do not"
            raise RefusedWorker(f"{worker.name}: {words}", hint=hint)
        here, there = identity, self.expected
        if (here.fingerprint, here.context_size) != (there.fingerprint, there.context_size):
            words = f"its answers would differ from those of the first worker: {_words(here)}; expected {_words(there)}"
            hint = f"use the same model file, llmrun version and --ctx-size everywhere, or {hint}"
            raise RefusedWorker(f"{worker.name}: {words}", hint=hint)
        return Admitted(None)


async def identify(worker: Worker, card: Mapping[str, Any]) -> Identity:
    """Return the identity of an open worker. Raises WorkerLost and RefusedWorker.

    card  its entry of /v1/models

    The fingerprint covers the model, the default sampling and the answer to a known prompt.
    """
    name, said, context = str(card.get("id", "")), card.get("system_fingerprint"), card.get("max_model_len")
    size = context if type(context) is int else None
    if card.get("owned_by") != OWNER or not isinstance(said, str):
        return Identity(name, size, _foreign_fingerprint(worker, card), is_certain=False, is_foreign=True)
    if not card.get("batch_invariant"):
        return Identity(name, size, said, is_certain=False)
    reply = await worker.answer(COMPLETION, _PROOF)
    if reply.status != _OK:
        error = reply.body.get("error")
        reason = error.get("message") if isinstance(error, Mapping) else None
        hint = "if the context is too small, set --ctx-size"
        raise RefusedWorker(f"{worker.name}: rejected the test prompt: {reason or f'HTTP {reply.status}'}", hint=hint)
    decisive = [said, card.get("default_sampling"), reply.body.get("choices")]
    return Identity(name, size, f"bits_{_digest(decisive)}")


def _words(identity: Identity) -> str:
    context = "" if identity.context_size is None else f", {identity.context_size:,} tokens of context"
    return f"{identity.model}{context}, fingerprint {identity.fingerprint}"


def _foreign_fingerprint(worker: Worker, card: Mapping[str, Any]) -> str:
    """Return a name for a server of which only its entry of /v1/models is known, without the times in it."""
    said = {name: value for name, value in card.items() if name != "created"}
    return f"foreign_{_digest([worker.name, said])}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:_DIGITS]
