"""Runs a workload once: creates its requests, sends them, and collects their timings."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from llmrun.base.errors import Cancelled, LlmrunError
from llmrun.base.types import Timings
from llmrun.engine.requests import ChatPrompt, Failed, Finished, Request, TextDelta, TextPrompt, TokenPrompt
from llmrun.jobs.bench.measuring.sample import Sample
from llmrun.jobs.bench.measuring.workload import Turn, Workload
from llmrun.options.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llmrun.engine.base import Answering
    from llmrun.engine.engine import Engine
    from llmrun.model.tokenizers.base import Tokenizer

Session = Sequence[Request]


class LocalAsker:
    """Runs workloads on an engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens = _ordinary_tokens(engine.tokenizer)
        # Sample greedily and never pick an end token, so that every answer has the requested length.
        ends = dict.fromkeys(engine.tokenizer.end_of_generation, -math.inf)
        self._to_the_limit = SamplingParams(temperature=0, logit_bias=ends)

    def run(self, workload: Workload, seed: int, seconds: float = math.inf) -> Sample:
        """Run a workload once.

        Empties the KV cache first, so that only intended prefixes are reused. Each given conversation also starts with
        an empty cache and no earlier answers, because speculation could copy from them. Raises Cancelled if the run
        takes longer than `seconds`.
        """
        self._engine.forget()
        until = time.perf_counter() + seconds
        if workload.sessions:
            sessions = [[_chat_request(turn) for turn in session] for session in workload.sessions]
            return measured(self._engine, sessions, workload.facts.concurrency, until, forget=self._engine.forget)
        return measured(self._engine, self._synthetic(workload, seed, until), workload.facts.concurrency, until)

    def _synthetic(self, workload: Workload, seed: int, until: float) -> list[Session]:
        """Return sessions of random tokens. Tokens that belong in the cache are prefilled here, without timing."""
        facts = workload.facts
        random = np.random.default_rng(seed)
        before = [self._random(random, facts.depth) for _ in range(facts.concurrency)]
        if facts.depth:
            measured(self._engine, [[self._request(tokens, 1)] for tokens in before], facts.concurrency, until)
        prompts = [tokens + self._random(random, max(1, facts.prompt)) for tokens in before]
        return [[self._request(tokens, max(1, facts.generate))] for tokens in prompts]

    def _random(self, random: np.random.Generator, count: int) -> list[int]:
        chosen: list[int] = random.choice(self._tokens, count).tolist()
        return chosen

    def _request(self, tokens: list[int], max_tokens: int) -> Request:
        return Request(TokenPrompt(tokens), max_tokens, sampling=self._to_the_limit)


class RemoteAsker:
    """Runs workloads on an endpoint.

    An endpoint's tokenizer is unknown, so synthetic prompts consist of random words, and the server counts the tokens.
    """

    def __init__(self, engine: Answering) -> None:
        self._engine = engine

    def run(self, workload: Workload, seed: int, seconds: float = math.inf) -> Sample:
        """Run a workload once.

        Each given session begins with a random number, so that the server cannot reuse a cached prefix. Raises
        Cancelled if the run takes longer than `seconds`.
        """
        until = time.perf_counter() + seconds
        random = np.random.default_rng(seed)
        sessions = (
            [[_salted(turn, str(random.integers(1 << 40))) for turn in session] for session in workload.sessions]
            if workload.sessions
            else self._synthetic(workload, random, until)
        )
        return measured(self._engine, sessions, workload.facts.concurrency, until)

    def _synthetic(self, workload: Workload, random: np.random.Generator, until: float) -> list[Session]:
        facts = workload.facts
        before = [random_words(random, facts.depth) for _ in range(facts.concurrency)]
        if facts.depth:
            measured(self._engine, [[_words_request(text, 1)] for text in before], facts.concurrency, until)
        prompts = [text + random_words(random, max(1, facts.prompt)) for text in before]
        return [[_words_request(text, max(1, facts.generate))] for text in prompts]


@dataclass(slots=True)
class _Running:
    """A session in progress: its remaining requests, and the tokens and the text of its answers so far."""

    requests: Iterator[Request]
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)


def measured(
    engine: Answering,
    sessions: Sequence[Session],
    concurrency: int,
    until: float = math.inf,
    forget: Callable[[], None] = lambda: None,
) -> Sample:
    """Run up to `concurrency` sessions at a time. Within a session, each request waits for the previous answer.

    until   the deadline, as a value of `time.perf_counter`; requests still running at the deadline are cancelled after
            the engine's current step, which processes at most one prompt chunk
    forget  called before each session; must not affect the sessions in progress

    Raises the error of a failed request, because the remaining timings would describe a different workload. Raises
    Cancelled at the deadline.
    """
    begun = [_Running(iter(session)) for session in sessions]
    waiting = deque(begun)
    running: dict[int, _Running] = {}
    ended: list[Timings] = []
    started = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < concurrency:
            forget()
            session = waiting.popleft()
            running[engine.submit(next(session.requests))] = session
        for event in engine.step():
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, TextDelta):
                running[event.request_id].tokens += event.tokens
                running[event.request_id].text += [event.reasoning, event.text]
            if isinstance(event, Finished):
                session = running.pop(event.request_id)
                ended.append(event.timings)
                following = next(session.requests, None)
                if following is not None:
                    running[engine.submit(following)] = session
        if (waiting or running) and time.perf_counter() > until:
            _cancel_all(engine)
            raise Cancelled("benchmark run cancelled: it reached its time limit")
    seconds = time.perf_counter() - started
    if not all(timings.generated_tokens for timings in ended):
        raise LlmrunError("nothing to measure: an answer had no tokens")
    return Sample(tuple(ended), seconds, answers=tuple(map(_digest, begun)))


def _digest(session: _Running) -> str:
    """Return the sha256 of a session's answers, which does not depend on how events split them."""
    return hashlib.sha256(json.dumps([session.tokens, "".join(session.text)]).encode()).hexdigest()


def _cancel_all(engine: Answering) -> None:
    engine.cancel_current()
    while not engine.idle:
        engine.step()


def _ordinary_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the IDs of text tokens. Control tokens are left out, because one could end the prompt."""
    ends = tokenizer.end_of_generation
    return [token for token in range(tokenizer.vocabulary_size) if token not in ends and tokenizer.token_bytes(token)]


def _salted(turn: Turn, salt: str) -> Request:
    first, *others = turn.messages
    messages = ({**first, "content": f"[{salt}] {first['content']}"}, *others)
    return _chat_request(replace(turn, messages=messages))


def _chat_request(turn: Turn) -> Request:
    """Return the request of a turn. All repetitions have the same seed, so that they generate the same text."""
    return Request(ChatPrompt(turn.messages), turn.max_tokens, sampling=SamplingParams(temperature=turn.temperature))


def _words_request(text: str, max_tokens: int) -> Request:
    return Request(TextPrompt(text), max_tokens, sampling=SamplingParams(temperature=0))


def random_words(random: np.random.Generator, count: int) -> str:
    """Return `count` random common words. In most vocabularies, nearly every one of these words is a single token."""
    return "".join(f" {word}" for word in random.choice(_WORDS, count)) if count else ""


# fmt: off
_WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they", "at",
    "be", "this", "from", "have", "or", "by", "one", "had", "not", "but", "what", "all", "were", "when", "we", "there",
    "can", "an", "your", "which", "their", "said", "if", "do", "will", "each", "about", "how", "up", "out", "them",
    "then", "she", "many", "some", "so", "these", "would", "other", "into", "has", "more", "her", "two", "like", "him",
    "see", "time", "could", "no", "make", "than", "first", "been", "its", "who", "now", "people", "my", "made", "over",
    "did", "down", "only", "way", "find", "use", "may", "water", "long", "little", "very", "after", "called", "just",
)
# fmt: on
