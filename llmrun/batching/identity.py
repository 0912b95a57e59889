"""Decides whether two workers give the same answers, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llmrun.batching.workers.base import COMPLETION, Worker
from llmrun.errors import LlmrunError
from llmrun.protocol.openai.models import OWNER

# The log-probabilities of these tokens have all digits of the logits, so that a single different bit would show.
_PROOF: Final[Mapping[str, Any]] = {
    "prompt": "Once upon a time, there were three machines. The first one said: 1, 2, 3, 5, 8, 13,",
    "max_tokens": 16,
    "temperature": 0,
    "logprobs": 5,
    "seed": 1,
}
_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says and proves about its answers.

    model        the name of its model
    fingerprint  equal for workers that give the same answers
    is_certain   whether the worker gives the same answers in any company, so that equal fingerprints are a promise
    is_foreign   whether the worker is another program than llmrun, so that nothing about its answers is known
    """

    model: str
    fingerprint: str
    is_certain: bool = True
    is_foreign: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """A worker that is open. `fingerprint` is for its records, or None if all workers have the same."""

    fingerprint: str | None


class RefusedWorker(LlmrunError):
    """The worker's answers may differ from those of the run."""


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
            raise RefusedWorker(f"{worker.name}: not llmrun, so its answers may differ from run to run", hint=hint)
        if not identity.is_certain and not self._is_alone:
            raise RefusedWorker(f"{worker.name}: its answers depend on what runs at the same time", hint=hint)
        if identity.fingerprint != self.expected.fingerprint:
            differs = (
                f"{identity.model}, {identity.fingerprint}, not {self.expected.model}, {self.expected.fingerprint}"
            )
            hint = f"use the same model file, llmrun version and --ctx-size everywhere, or {hint}"
            raise RefusedWorker(f"{worker.name}: gives other answers than the run's first worker: {differs}", hint=hint)
        return Admitted(None)


async def identify(worker: Worker, card: Mapping[str, Any]) -> Identity:
    """Return the identity of an open worker. Raises WorkerLost.

    card  its entry of /v1/models

    The fingerprint covers the model, the context and the default sampling, and the answer to a known prompt.
    """
    name, said = str(card.get("id", "")), card.get("system_fingerprint")
    if card.get("owned_by") != OWNER or not isinstance(said, str):
        return Identity(name, _foreign_fingerprint(worker, card), is_certain=False, is_foreign=True)
    if not card.get("batch_invariant"):
        return Identity(name, said, is_certain=False)
    reply = await worker.answer(COMPLETION, _PROOF)
    proof = reply.body.get("choices") if reply.status == 200 else reply.status
    decisive = [said, card.get("max_model_len"), card.get("default_sampling"), proof]
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
    return Identity(name, f"bits_{digest[:_DIGITS]}")


def _foreign_fingerprint(worker: Worker, card: Mapping[str, Any]) -> str:
    """Return a name for a server of which only its entry of /v1/models is known, without the times in it."""
    said = {name: value for name, value in card.items() if name != "created"}
    digest = hashlib.sha256(json.dumps([worker.name, said], sort_keys=True).encode()).hexdigest()
    return f"foreign_{digest[:_DIGITS]}"
