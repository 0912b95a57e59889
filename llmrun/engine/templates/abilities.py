"""The results of probing a chat template (see probing.py). This module does not import Jinja2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
class TemplateAbilities:
    """The abilities of a template. All fields are empty or None if the template rejects every test conversation.

    reasoning_on   variables for `ChatPrompt.template_kwargs` that switch thinking on; may be empty if thinking is on by
                   default
    reasoning_off  variables that switch thinking off; empty if the template has no switch
    thinking_tags  the tags around thinking; None if the template does not reveal them
    """

    reasoning_on: Mapping[str, object] = field(default_factory=dict)
    reasoning_off: Mapping[str, object] = field(default_factory=dict)
    thinking_tags: ThinkingTags | None = None
