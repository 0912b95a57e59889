"""A loaded model, as one call sees it: under the name that the client used, with the preset of this name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from llmrun.base.errors import Unavailable
from llmrun.engine.facts import ModelFacts
from llmrun.engine.requests import ChatPrompt, Request
from llmrun.options.presets import Preset
from llmrun.serving.models.known import KnownModel
from llmrun.serving.processes.served_model import ServedModel, State

RETRY_S: Final = 5.0  # when to ask again for a model that is loading
_SYSTEM: Final = "system"
_NO_LIMIT: Final = -1


@dataclass(frozen=True, slots=True)
class Ready:
    """A loaded model, for one call.

    facts     the facts about the model, with the name and the sampling defaults of the preset, if there is one
    preset    what the name that the client used adds to requests, or None
    adapters  the scales of LoRA adapters, by name, for requests that choose none; None for those of --lora
    """

    model: ServedModel
    facts: ModelFacts
    preset: Preset | None = None
    adapters: Mapping[str, float] | None = None

    @classmethod
    def under(cls, known: KnownModel, model: ServedModel) -> Self:
        """Return a model under one of its names. Raises Unavailable if it is not open."""
        facts = replace(facts_of(model), name=known.name)
        if known.preset is not None:
            facts = replace(facts, default_sampling=replace(facts.default_sampling, **known.preset.sampling))
        return cls(model, facts, known.preset, known.adapters)

    @property
    def signature(self) -> str:
        """A text that changes if the same request could get another answer."""
        facts = self.facts
        own = f"{facts.default_sampling} {self.preset} {self.adapters}"
        return f"{facts.name} {facts.fingerprint} {facts.info.context_size} {own}"

    def seed(self, otherwise: int) -> int:
        """Return the seed of requests that set none."""
        return int(self._values.get("seed", otherwise))

    def completed(self, request: Request) -> Request:
        """Return a request with the values of the preset and the adapters in place of those that it does not set."""
        if request.adapters is None and self.adapters is not None:
            request = replace(request, adapters=self.adapters)
        if self.preset is None:
            return request
        limit = self._values.get("max_tokens", _NO_LIMIT)
        if request.max_tokens is None and limit != _NO_LIMIT:
            request = replace(request, max_tokens=limit)
        prompt = request.prompt
        if not isinstance(prompt, ChatPrompt):
            return request
        if request.think is None and request.think_budget is None and self.facts.thinks:
            think, budget = self._values.get("think"), self._values.get("think_budget")
            request = replace(request, think=think, think_budget=budget)
        return replace(request, prompt=_completed(prompt, self.preset))

    @property
    def _values(self) -> Mapping[str, Any]:
        return {} if self.preset is None else self.preset.values


def facts_of(model: ServedModel) -> ModelFacts:
    """Return the facts about a model. Raises Unavailable if it is not open or the server is shutting down."""
    facts = model.facts
    if facts is None or model.state is State.DRAINING:
        raise Unavailable(f"the model is not available: {model.state}", state=model.state.value, retry_after=RETRY_S)
    return facts


def _completed(prompt: ChatPrompt, preset: Preset) -> ChatPrompt:
    messages = prompt.messages
    if preset.system and all(message.get("role") != _SYSTEM for message in messages):
        messages = ({"role": _SYSTEM, "content": preset.system}, *messages)
    return replace(prompt, messages=messages, template_kwargs={**preset.variables, **prompt.template_kwargs})
