"""Collects the events of one answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmrun.engine.requests import TextDelta, TokenLogprobs


@dataclass(slots=True)
class CollectedAnswer:
    """The text, thinking and log probabilities of an answer so far."""

    pieces: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def take(self, delta: TextDelta) -> None:
        """Add the next piece of the answer."""
        if delta.unopened:
            self.thoughts += self.pieces
            self.pieces = []
        self.thoughts.append(delta.reasoning)
        self.pieces.append(delta.text)
        self.logprobs += delta.logprobs

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(self.thoughts)
