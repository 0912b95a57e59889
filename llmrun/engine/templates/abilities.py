"""What trying a chat template tells about it. Nothing here imports Jinja2; probing.py does the trying."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The text around thinking and, where the template marks that too, around the answer after it.

    No tag begins or ends with whitespace, but any whitespace may surround it. A tag can be several tokens.

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
class TemplateAbilities:
    """What a template can do. All fields are empty or None for a template that refuses every conversation tried.

    reasoning_on   variables that switch thinking on, for `ChatPrompt.template_kwargs`; may be empty if it is on by
                   default
    reasoning_off  variables that switch it off; empty if the template has no switch
    thinking_tags  None if the template does not show them
    """

    reasoning_on: Mapping[str, object] = field(default_factory=dict)
    reasoning_off: Mapping[str, object] = field(default_factory=dict)
    thinking_tags: ThinkingTags | None = None
