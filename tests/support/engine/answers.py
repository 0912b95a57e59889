"""Run requests through an engine and collect their events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from llmrun.engine.engine import Engine
from llmrun.engine.requests import (
    Event,
    Failed,
    Finished,
    PrefillProgress,
    PromptDelta,
    Request,
    TextDelta,
    TokenLogprobs,
)


@dataclass
class Gathered:
    """The events of one request, collected."""

    text: str = ""
    reasoning: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    deltas: list[TextDelta] = field(default_factory=list)
    prompt: list[PromptDelta] = field(default_factory=list)
    progress: list[PrefillProgress] = field(default_factory=list)
    last: Finished | Failed | None = None
    ended_in: int = 0  # the number of the step that returned the last event

    @property
    def finished(self) -> Finished:
        assert isinstance(self.last, Finished), self.last
        return self.last

    @property
    def failed(self) -> Failed:
        assert isinstance(self.last, Failed), self.last
        return self.last


def run_to_the_end(
    engine: Engine, ids: Sequence[int], most_steps: int = 5000, *, events: Sequence[Event] = ()
) -> list[Gathered]:
    """Step the engine until it is idle. Return what each request produced, in the order of `ids`.

    `events` are events that the engine returned earlier.
    """
    answers = {request_id: Gathered() for request_id in ids}
    for step in range(most_steps):
        for event in [*events, *engine.step()]:
            answer = answers[event.request_id]
            assert answer.last is None, f"{event} after {answer.last}"
            if isinstance(event, TextDelta):
                answer.deltas.append(event)
                if event.unopened:
                    answer.reasoning, answer.text = answer.text, ""
                answer.reasoning += event.reasoning
                answer.text += event.text
                answer.tokens += event.tokens
                answer.logprobs += event.logprobs
            elif isinstance(event, PrefillProgress):
                answer.progress.append(event)
            elif isinstance(event, PromptDelta):
                assert not answer.deltas, "the prompt precedes the answer"
                answer.prompt.append(event)
            else:
                answer.last, answer.ended_in = event, step
        events = ()
        if engine.idle:
            return [answers[request_id] for request_id in ids]
    raise AssertionError(f"not idle after {most_steps} steps")


def answer_all(engine: Engine, requests: Sequence[Request]) -> list[Gathered]:
    """Submit all requests at once and run them to the end."""
    return run_to_the_end(engine, [engine.submit(request) for request in requests])
