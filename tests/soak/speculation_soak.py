"""Compares answers with drafts to answers without, for many random prompts of one model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmrun.engine.drafting.base import DraftSource
from llmrun.engine.drafting.lookup import LookupSource
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TokenPrompt
from llmrun.sampling_params import SamplingParams
from tests.support.engine.contract import forget_all, plain_tokens
from tests.support.engine.drafts import (
    PROPOSALS,
    Plain,
    adversary,
    answer_plainly,
    assert_same,
    drafting_engine,
)

if TYPE_CHECKING:
    from llmrun.backends.base import Backend

CONTEXT = 160
SEQUENCES = 8
TEMPERATURES = (0.0, 0.8)

# The drafters, by name. "mixed" is another kind of draft at each position: right, wrong, past the end, too long, noise.
DRAFTERS: dict[str, Callable[[Backend, Sequence[Plain]], DraftSource]] = {
    "lookup": lambda backend, known: LookupSource(),
    **{
        name: lambda backend, known, name=name: adversary(backend, PROPOSALS[name], known)  # type: ignore[misc]
        for name in PROPOSALS
    },
}


@dataclass
class Tally:
    """Counts what was compared: texts, their tokens, and the draft tokens that ran and that were right."""

    texts: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    different: list[str] = field(default_factory=list)


def requests_of(backend: Backend, count: int, temperature: float, seed: int) -> list[Request]:
    """Return requests whose prompts are random tokens, most of them with repetitions."""
    chance = random.Random(seed)
    requests = []
    for _ in range(count):
        phrase = plain_tokens(backend, chance.randint(1, 30), seed=chance.randrange(1 << 30))
        prompt = (phrase * chance.randint(1, 4))[: CONTEXT // 2]
        sampling = SamplingParams(
            temperature=temperature,
            seed=chance.randrange(1 << 30),
            repeat_penalty=chance.choice([1.0, 1.0, 1.3]),
        )
        requests.append(
            Request(TokenPrompt(prompt), chance.randint(4, 24), sampling=sampling, logprobs=chance.choice([None, 0, 2]))
        )
    return requests


def compare(backend: Backend, drafters: Sequence[str], count: int, seed: int) -> Tally:
    """Answer `count` prompts at each temperature, without drafts and with those of each drafter, several at once."""
    tally = Tally()
    for temperature in TEMPERATURES:
        forget_all(backend)
        requests = requests_of(backend, count, temperature, seed)
        known = answer_plainly(Engine(backend), requests)
        for name in drafters:
            forget_all(backend)
            drafted = answer_plainly(drafting_engine(backend, DRAFTERS[name](backend, known)), requests)
            for number, (plain, found) in enumerate(zip(known, drafted, strict=True)):
                timings = found.gathered.finished.timings
                tally.texts += 1
                tally.tokens += timings.generated_tokens
                tally.drafted += timings.drafted_tokens
                tally.accepted += timings.accepted_tokens
                try:
                    assert_same(found.gathered, plain.gathered)
                except AssertionError:
                    tally.different.append(f"{name}, temperature {temperature}, prompt {number} of seed {seed}")
    return tally
