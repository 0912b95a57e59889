"""A conversation becomes one text: the model's chat template, run in Jinja2's immutable sandbox."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template's source and where it is from.

    origin  "model" (the file's own), "user" (given by the caller) or "fallback" (chosen for the vocabulary)
    name    "tokenizer.chat_template", "--chat-template", or the family's name ("chatml")
    """

    source: str
    origin: str
    name: str
