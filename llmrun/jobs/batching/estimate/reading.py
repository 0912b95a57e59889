"""Reads the calls of a batch as the engine does, in this process."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.engine.answer import Answer
from llmrun.engine.engine import Engine
from llmrun.engine.facts import ModelFacts
from llmrun.jobs.batching.estimate.counting import CountedCall
from llmrun.jobs.batching.requests import Call
from llmrun.jobs.batching.workers.local import parse_call


@dataclass(frozen=True, slots=True)
class CallReader:
    """Turns calls into tokens with the chat template and the tokenizer of an open model."""

    engine: Engine
    facts: ModelFacts

    def count(self, call: Call) -> CountedCall:
        """Read a call without running it. Raises the LlmrunError with which a run would answer it."""
        parsed = parse_call(call.url, call.body, self.facts)
        answers = [self.engine.prepare(request) for request in parsed.requests[:: parsed.n]]
        most = parsed.n * sum(answer.limit - answer.prompt_tokens for answer in answers)
        return CountedCall([answer.tokens for answer in answers], parsed.n, most)

    def prepare(self, call: Call) -> list[Answer]:
        """Return the answers of a call, ready to be queued. Raises the same errors."""
        parsed = parse_call(call.url, call.body, self.facts)
        return [self.engine.prepare(request) for request in parsed.requests]
