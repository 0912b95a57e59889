"""Reads whether and how long the model may think, and the variables of its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from llmrun.engine.facts import ModelFacts
from llmrun.serving.protocol.fields import Fields, agreed

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
BUDGETS: Final = ("thinking_budget_tokens", "thinking_budget", "think_budget")
_OFF: Final = EFFORTS[0]
_NO_LIMIT: Final = -1
_VARIABLES: Final = "chat_template_kwargs"
_SWITCHES: Final = ("enable_thinking", "thinking")  # the names that most templates use


@dataclass(frozen=True, slots=True)
class ThinkingOptions:
    """The thinking options of a Request, and the variables of its ChatPrompt.

    without_effect  the names of the fields that have no effect because the model cannot think
    """

    think: bool | None
    budget: int | None
    variables: Mapping[str, Any]
    without_effect: tuple[str, ...]


def read_thinking(fields: Fields, facts: ModelFacts, reasoning: Fields | None = None) -> ThinkingOptions:
    """Read the fields about thinking. Raises InvalidField, also if two of them contradict each other.

    reasoning  the object of the Responses API that has the effort, which is a field of its own in chat completions
    """
    variables = dict(fields.object(_VARIABLES) or {})
    if reasoning is None:
        effort_name, effort = "reasoning_effort", fields.word("reasoning_effort", EFFORTS)
    else:
        effort_name, effort = "reasoning.effort", reasoning.word("effort", EFFORTS)
    wishes: dict[str, bool] = {}  # by the field that asks for thinking or for none
    if effort is not None:
        wishes[effort_name] = effort != _OFF
    switch = fields.boolean("enable_thinking")
    if switch is not None:
        wishes["enable_thinking"] = switch
    for name in _SWITCHES:
        if type(variables.get(name)) is bool:
            wishes[f"{_VARIABLES}.{name}"] = variables[name]
    think = agreed(wishes)
    if effort is not None and effort != _OFF:
        variables.setdefault("reasoning_effort", effort)  # some templates write the effort into the prompt
    limits = {name: value for name in BUDGETS if (value := fields.integer(name, _NO_LIMIT)) is not None}
    budget = agreed(limits)
    if budget == _NO_LIMIT:
        limits, budget = {}, None
    if facts.thinks:
        return ThinkingOptions(think, budget, variables, ())
    in_vain = (*wishes, *limits) if think else (*limits,)
    return ThinkingOptions(None if think else think, None, variables, in_vain)
