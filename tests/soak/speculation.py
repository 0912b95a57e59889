"""Compares answers with drafts to answers without drafts, for random prompts and every architecture.

tests/engine/test_speculation.py does the same with the scripted backend, which can imitate recurrent models.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from llmrun.backends.base import OpenOptions
from llmrun.backends.registry import open_backend
from llmrun.engine.drafting.lookup import LookupSource
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TokenPrompt
from llmrun.options.sampling_params import SamplingParams
from tests.soak.driver import Broken, Case, Soak
from tests.support.engine.contract import forget_all, plain_tokens
from tests.support.engine.drafts import PROPOSALS, adversary, answer_plainly, assert_same, drafting_engine
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES, tiny_architecture

if TYPE_CHECKING:
    from llmrun.backends.base import Backend

_CONTEXT = 160
_SEQUENCES = 8
_PROMPTS = 4  # in a case
NAMES = tuple(TINY_ARCHITECTURES)  # the first cases use them in this order, and later cases start over


def speculation(soak: Soak) -> Iterator[Case]:
    """Compare text, logprobs and finish reasons. The models are tiny unless --model names one."""

    def case(number: int) -> str:
        name, chance = soak.model or NAMES[number % len(NAMES)], soak.random(number)
        path = soak.path() if soak.model else tiny_architecture(soak.folder, name)
        backend = open_backend(path, OpenOptions("cpu", context_size=_CONTEXT, max_sequences=_SEQUENCES, threads=2))
        try:
            for temperature in (0.0, 0.8):
                _compare(backend, _requests(backend, temperature, chance), soak.counts)
        except AssertionError as error:
            raise Broken(f"{name}: {error}") from error
        finally:
            backend.close()
        return "models"

    yield case


def _requests(backend: Backend, temperature: float, chance: random.Random) -> list[Request]:
    """Return requests whose prompts are random tokens, most of them with repetitions."""
    requests = []
    for _ in range(_PROMPTS):
        phrase = plain_tokens(backend, chance.randint(1, 30), seed=chance.randrange(1 << 30))
        prompt = (phrase * chance.randint(1, 4))[: _CONTEXT // 2]
        penalty = chance.choice([1.0, 1.0, 1.3])
        sampling = SamplingParams(temperature=temperature, seed=chance.randrange(1 << 30), repeat_penalty=penalty)
        logprobs = chance.choice([None, 0, 2])
        requests.append(Request(TokenPrompt(prompt), chance.randint(4, 24), sampling=sampling, logprobs=logprobs))
    return requests


def _compare(backend: Backend, requests: Sequence[Request], counts: Counter[str]) -> None:
    """Answer the requests without drafts and with each source of drafts, several at once."""
    forget_all(backend)
    known = answer_plainly(Engine(backend), requests)
    # "mixed" drafts in another way at each position: right, wrong, too long, past the end or noise.
    for source in (LookupSource(), adversary(backend, PROPOSALS["mixed"], known)):
        forget_all(backend)
        drafted = answer_plainly(drafting_engine(backend, source), requests)
        for plain, found in zip(known, drafted, strict=True):
            timings = found.gathered.finished.timings
            counts.update(texts=1, drafted=timings.drafted_tokens, accepted=timings.accepted_tokens)
            assert_same(found.gathered, plain.gathered)
