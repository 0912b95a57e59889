"""The results of probing a chat template (see probing.py). This module does not import Jinja2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llmrun.engine.templates.tool_format import ToolCallFormat


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The tags around thinking and, if the template has them, the tags around the answer that follows.

    Tags have no leading or trailing whitespace, but whitespace may surround them. A tag may be several tokens long.

    opening         "<think>", "[THINK]", "<|channel|>analysis<|message|>" (gpt-oss), "<|channel>thought" (Gemma 4)
    closing         "</think>", "[/THINK]", "<|end|>", "<channel|>"
    answer_opening  "", "<|START_RESPONSE|>", "<|start|>assistant<|channel|>final<|message|>"
    answer_closing  "", "<|END_RESPONSE|>": the text after the answer, before the token that ends the turn
    """

    opening: str
    closing: str
    answer_opening: str = ""
    answer_closing: str = ""


@dataclass(frozen=True, slots=True)
class ToolAbilities:
    """What a template can do with tools.

    takes_tools        True if the prompt shows the tools
    takes_results      True if the prompt shows messages with the role "tool"
    tool_format        the format of calls; None if it is unclear
    shows_calls        True if the prompt shows the calls of past messages
    arguments_as_text  True if past calls must have arguments as JSON text, not as an object
    null_content       True if a message with calls and without text must have the content None, not ""
    """

    takes_tools: bool = False
    takes_results: bool = False
    shows_calls: bool = False
    tool_format: ToolCallFormat | None = None
    arguments_as_text: bool = False
    null_content: bool = False

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ToolAbilities:
        """Return the abilities that `dataclasses.asdict` converted to `value`. Raises KeyError or TypeError."""
        from llmrun.engine.templates.tool_format import ToolCallFormat  # few requests need it

        found = value["tool_format"]
        return cls(**{**value, "tool_format": ToolCallFormat.from_json(found) if found else None})


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """The abilities of a template. All fields are empty, None or False if it rejects every test conversation.

    reasoning_on   variables for `ChatPrompt.template_kwargs` that switch thinking on; may be empty if thinking is on by
                   default
    reasoning_off  variables that switch thinking off; empty if the template has no such variable
    is_off_by_default  True if a prompt that does not set these variables is the same as with `reasoning_off`
    off_word       the word that switches thinking off at the end of the last user message, such as "/no_think"; "" if
                   there is none, or if the template has variables for this
    thinking_tags  the tags around thinking; None if the template does not reveal them
    tools          what the template can do with tools
    """

    reasoning_on: Mapping[str, object] = field(default_factory=dict)
    reasoning_off: Mapping[str, object] = field(default_factory=dict)
    is_off_by_default: bool = False
    off_word: str = ""
    thinking_tags: ThinkingTags | None = None
    tools: ToolAbilities = ToolAbilities()
