"""Drafters that know the right answers and draft anything from them to noise, and the comparison with plain answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from llmrun.base.types import Timings
from llmrun.engine.drafting.base import Draft, Drafter, DraftSource, Kind, Worth
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Failed, Finished, Request
from tests.support.engine.answers import Gathered, run_to_the_end
from tests.support.engine.eager_speculation import speculate_eagerly

if TYPE_CHECKING:
    from llmrun.backends.base import Backend

_KIND: Kind = ("test", 0)


@dataclass(frozen=True)
class Place:
    """A place in an answer where a draft begins.

    position    position of the next token in its sequence
    rest        the plain answer's tokens from there on, with the end-of-generation token
    most        the maximum length of the draft
    vocabulary  number of tokens
    end         an end-of-generation token
    """

    position: int
    rest: list[int]
    most: int
    vocabulary: int
    end: int

    def wrong(self, tokens: Sequence[int]) -> list[int]:
        return [(token + 1) % self.vocabulary for token in tokens]

    def noise(self, n: int) -> list[int]:
        tokens: list[int] = np.random.default_rng(self.position).integers(0, self.vocabulary, n).tolist()
        return tokens


def _right_then_wrong(place: Place) -> list[int]:
    """Draft from 0 to `most` right tokens, a wrong one, and right ones again."""
    n = place.position % (place.most + 1)
    return [*place.rest[:n], *place.wrong(place.rest[n : n + 1]), *place.rest[n + 1 :]]


def _mixed(place: Place) -> list[int]:
    """Draft in a different way at each position."""
    ways = [propose for name, propose in PROPOSALS.items() if name != "mixed"]
    return list(ways[int(np.random.default_rng(place.position).integers(len(ways)))](place))


Propose = Callable[[Place], Sequence[int]]

# Some return more than `most` tokens, and the engine has to cut them.
PROPOSALS: dict[str, Propose] = {
    "nothing": lambda place: [],
    "right": lambda place: place.rest[: place.most],
    "one right token": lambda place: place.rest[:1],
    "wrong": lambda place: place.wrong(place.rest[: place.most]),
    "right, then wrong": _right_then_wrong,
    "too long": lambda place: place.rest + place.noise(100),
    "past the end": lambda place: [*place.rest, place.end, place.end, *place.noise(5)],
    "ends": lambda place: [place.end] * place.most,
    "the same token": lambda place: place.rest[:1] * place.most,
    "noise": lambda place: place.noise(place.most),
    "mixed": _mixed,
}


class Adversary(DraftSource):
    """A source whose drafts `propose` makes from the plain answers.

    sequence_of  returns the tokens of a request's prompt and plain answer, with the end-of-generation token
    """

    def __init__(self, backend: Backend, propose: Propose, sequence_of: Callable[[Request], Sequence[int]]) -> None:
        self.expected = {_KIND: 0.5}
        self.propose, self.sequence_of = propose, sequence_of
        self.vocabulary = backend.info.vocabulary_size
        self.end = min(backend.tokenizer.end_of_generation, default=0)

    def drafter(self, request: Request) -> AdverseDrafter:
        return AdverseDrafter(self, list(self.sequence_of(request)))


class AdverseDrafter(Drafter):
    name = _KIND[0]

    def __init__(self, source: Adversary, sequence: list[int]) -> None:
        self._source, self._sequence = source, sequence
        self._before: list[int] = []  # the tokens of the previous call

    def draft(self, tokens: Sequence[int], most: int, worth: Worth) -> Draft:
        assert most > 0
        assert list(tokens[: len(self._before)]) == self._before
        self._before = list(tokens)
        place = Place(len(tokens), self._sequence[len(tokens) :], most, self._source.vocabulary, self._source.end)
        proposed = tuple(self._source.propose(place))
        return Draft(proposed, (_KIND,) * len(proposed))


def drafting_engine(backend: Backend, *sources: DraftSource, **options: Any) -> Engine:
    """Return an engine that runs every draft in full."""
    engine = Engine(backend, drafts=sources, **options)
    speculate_eagerly(engine, sources)
    return engine


@dataclass(frozen=True)
class Plain:
    """A request's answer without drafts. `sequence` are the tokens of prompt and answer, with any end token."""

    request: Request
    gathered: Gathered
    sequence: list[int]


def answer_plainly(engine: Engine, requests: Sequence[Request]) -> list[Plain]:
    """Run all requests to the end."""
    ids = [engine.submit(request) for request in requests]
    sequences = [answer.tokens for answer in engine._requests.waiting]
    gathered = run_to_the_end(engine, ids)
    return [Plain(*parts) for parts in zip(requests, gathered, sequences, strict=True)]


def adversary(backend: Backend, propose: Propose, known: Sequence[Plain]) -> Adversary:
    """Return a source that knows these answers."""
    return Adversary(backend, propose, lambda request: next(p.sequence for p in known if p.request == request))


def assert_same(drafted: Gathered, plain: Gathered) -> None:
    """Check that two answers are equal in everything but their timings, delta by delta."""
    assert [structs.replace(delta, request_id=0) for delta in drafted.deltas] == [
        structs.replace(delta, request_id=0) for delta in plain.deltas
    ]
    if isinstance(plain.last, Failed):
        assert str(drafted.failed.error) == str(plain.last.error)
        return
    expected = plain.finished
    assert _outcome(drafted) == _outcome(plain)
    assert drafted.finished.timings.generated_tokens == expected.timings.generated_tokens
    assert_counts_add_up(drafted.finished.timings)


def _outcome(gathered: Gathered) -> Finished:
    """Return the last event without its request id and its times."""
    finished = gathered.finished
    return structs.replace(
        finished, request_id=0, timings=_NO_TIMINGS, first_answer_s=float(finished.first_answer_s > 0)
    )


_NO_TIMINGS = Timings(0, 0, 0, 0, 0, 0, 0, 0)


def assert_counts_add_up(timings: Timings) -> None:
    """Check that each step yielded its forced tokens, the draft tokens that were right and one more token.

    The last step yields no other token if the answer ended with a forced or a draft token.
    """
    assert 0 <= timings.accepted_tokens <= timings.drafted_tokens
    in_vain = timings.forced_tokens + timings.accepted_tokens + timings.steps - timings.generated_tokens
    assert in_vain in (0, 1)
    assert timings.steps <= timings.generated_tokens
    assert len(timings.gaps_s) == max(timings.steps - 1, 0)
    assert math.isclose(sum(timings.gaps_s), timings.decode_s, abs_tol=1e-9)
