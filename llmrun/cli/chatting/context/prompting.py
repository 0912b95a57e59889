"""Turns messages into the prompts of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmrun.engine.requests import ChatPrompt

if TYPE_CHECKING:
    from llmrun.engine.tools.toolbox import Toolbox


@dataclass(slots=True)
class Prompting:
    """The template variables and the tools that all prompts of a chat share.

    variables     extra variables for the chat template
    toolbox       the tools of the chat, or None
    offers_tools  whether the prompts include the tools
    preset        the variables of the preset in use; those of the chat take precedence
    """

    variables: Mapping[str, Any]
    toolbox: Toolbox | None = None
    offers_tools: bool = True
    preset: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> ChatPrompt:
        tools = self.toolbox.definitions if self.toolbox is not None and self.offers_tools else None
        variables = {**self.preset, **self.variables}
        return ChatPrompt(
            messages, tools or None, add_generation_prompt=add_generation_prompt, template_kwargs=variables
        )
