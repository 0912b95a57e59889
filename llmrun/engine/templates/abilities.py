"""What trying a chat template tells about it. Nothing here imports Jinja2: see probing.py for how it is found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """The text around thinking and, where the template marks that too, around the answer after it.

    No tag begins or ends with whitespace; around them there may be any. Any of them can be several tokens.

    opening         "<think>", "[THINK]", "<|channel|>analysis<|message|>" (gpt-oss), "<|channel>thought" (Gemma 4)
    closing         "</think>", "[/THINK]", "<|end|>", "<channel|>"
    answer_opening  "", "<|START_RESPONSE|>", "<|start|>assistant<|channel|>final<|message|>"
    answer_closing  "", "<|END_RESPONSE|>": what comes after the answer, before the token that ends the turn
    """

    opening: str
    closing: str
    answer_opening: str = ""
    answer_closing: str = ""


@dataclass(frozen=True, slots=True)
class TemplateAbilities:
    """Empty and None for a template that refuses every conversation tried.

    reasoning_on      variables that switch thinking on, for `ChatPrompt.template_kwargs`; may be empty where it is on
                      when nothing is said
    reasoning_off     variables that switch it off; empty: the template knows no switch
    thinking_tags     None: the template does not tell
    """

    reasoning_on: Mapping[str, object] = field(default_factory=dict)
    reasoning_off: Mapping[str, object] = field(default_factory=dict)
    thinking_tags: ThinkingTags | None = None
