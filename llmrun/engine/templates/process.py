"""Sends requests to the child process that renders chat templates, and turns its failures into TemplateRefused.

A template comes with the model file, so it is an untrusted program. Jinja2's sandbox restricts its access to Python,
but not its time and memory. The isolated process limits both. Even a template that escapes the sandbox finds an empty
environment and no open files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from llmrun.base.errors import TemplateRefused
from llmrun.engine.isolation.frames import decoded, encoded
from llmrun.engine.isolation.process import IsolatedProcess, ProcessFailed, ProcessLimits
from llmrun.engine.templates.abilities import TemplateAbilities, ThinkingTags, ToolAbilities

# Additional limits per byte of a long conversation. Python stores text that contains an emoji in four bytes per
# character, and a template that splits, trims and joins text may hold ten copies of it.
_MEMORY_PER_BYTE = 40
_OUTPUT_PER_BYTE = 8
_CPU_S_PER_BYTE = 1e-7
_TOO_DEEP = "it is nested too deeply, or calls itself"
_INVALID_ANSWER = "its process sent an invalid answer"


@dataclass(frozen=True, slots=True)
class RenderLimits(ProcessLimits):
    """The resource limits for rendering one template. All except `wall_s` grow with the size of the conversation.

    The default `output` is enough for about 4 million tokens.
    """

    cpu_s: float = 6.0
    wall_s: float = 30.0
    memory: int = 256_000_000
    output: int = 1 << 24

    def for_request(self, size: int, memory: int) -> RenderLimits:
        """Return the limits for a request of `size` bytes to a process whose memory limit is already `memory` bytes."""
        return replace(
            self,
            cpu_s=self.cpu_s + size * _CPU_S_PER_BYTE,
            memory=max(self.memory, memory, size * _MEMORY_PER_BYTE),
            output=self.output + size * _OUTPUT_PER_BYTE,
        )


class TemplateProcess(IsolatedProcess):
    """The process that renders one model's templates. It starts with `start` or on first use. Not thread-safe."""

    def __init__(self, limits: RenderLimits | None = None) -> None:
        super().__init__("engine.templates.worker", "chat templates")
        self._limits = limits or RenderLimits()
        self._abilities: dict[str, TemplateAbilities] = {}

    def render(self, source: str, name: str, variables: Mapping[str, Any]) -> str:
        """Render a template. `name` identifies it in error messages. Raises TemplateRefused."""
        try:
            request = encoded({"source": source, "variables": variables, "now": datetime.now().isoformat()})
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateRefused(
                f"conversation cannot be passed to a chat template: {name}: {_one_line(error)}"
            ) from error
        text = self._request(request, name, "text")
        if not isinstance(text, str):
            raise self._rejection(name, _INVALID_ANSWER)
        return text

    def abilities(self, source: str) -> TemplateAbilities:
        """Return the abilities of a template, or empty ones if probing fails. The first call takes 20 to 200 ms."""
        if source not in self._abilities:
            self._abilities[source] = self._probe(source)
        return self._abilities[source]

    def _probe(self, source: str) -> TemplateAbilities:
        try:
            found = self._request(encoded({"probe": source}), "", "abilities")
            tags = found["thinking_tags"]
            return TemplateAbilities(
                {**found["reasoning_on"]},
                {**found["reasoning_off"]},
                bool(found["is_off_by_default"]),
                str(found["off_word"]),
                ThinkingTags(**tags) if tags else None,
                ToolAbilities.from_json(found["tools"]),
            )
        except (TemplateRefused, KeyError, TypeError):
            return TemplateAbilities()

    def _request(self, request: bytes, name: str, wanted: str) -> Any:
        """Send a request and return the answer's value. Raises TemplateRefused unless the answer's kind is `wanted`."""
        limits = self._limits.for_request(len(request), self._memory)
        try:
            answer = self._answer(request, limits)
        except ProcessFailed as failure:
            raise TemplateRefused(f"chat template refused: {name}: {failure}") from None
        try:
            kind, value = decoded(answer)
        except (ValueError, TypeError, RecursionError):
            kind = value = None
        if kind == wanted:
            return value
        if kind == "refuses":
            raise TemplateRefused(f"chat template refuses this conversation: {name}: {_one_line(value)}")
        if kind == "failed":
            raise TemplateRefused(f"chat template failed: {name}: {_one_line(value)}")
        raise self._rejection(
            name, {"memory": limits.out_of_memory, "depth": _TOO_DEEP}.get(str(value), _INVALID_ANSWER)
        )

    def _rejection(self, name: str, words: str) -> TemplateRefused:
        """Close the process, which may be in a bad state, and return the error to raise."""
        self.close()
        return TemplateRefused(f"chat template refused: {name}: {words}")


def _one_line(words: object) -> str:
    text = " ".join(str(words)[:10_000].split()) or type(words).__name__
    return text if len(text) <= 200 else text[:197] + "..."
