"""Turns messages into the prompts of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrun.engine.requests import ChatPrompt

if TYPE_CHECKING:
    from llmrun.tools.toolbox import Toolbox


@dataclass(slots=True)
class Prompting:
    """The template variables and the tools that all prompts of a chat share.

    variables     extra variables for the chat template
    toolbox       the tools of the chat, or None
    offers_tools  whether the prompts include the tools
    """

    variables: Mapping[str, Any]
    toolbox: Toolbox | None = None
    offers_tools: bool = True

    def prompt(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> ChatPrompt:
        tools = self.toolbox.definitions if self.toolbox is not None and self.offers_tools else None
        return ChatPrompt(
            messages, tools or None, add_generation_prompt=add_generation_prompt, template_kwargs=self.variables
        )
