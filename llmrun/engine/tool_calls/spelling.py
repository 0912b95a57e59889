"""Replaces the control tokens in a tool-call format with placeholders, as the thinking decoder does for its tags."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from llmrun.engine.templates.tool_format import ToolCallFormat, ValueForm
from llmrun.engine.thinking.decoder import Placeholders


@dataclass(frozen=True, slots=True)
class ToolSpelling:
    """A tool-call format as spelled in a vocabulary.

    format      the format with control tokens replaced by single placeholder characters
    characters  maps the id of a control token to its placeholder. A decoder passes the parser this character for it.
    texts       maps the code point of a placeholder to the token's text
    """

    format: ToolCallFormat
    characters: Mapping[int, str]
    texts: Mapping[int, str]

    @property
    def tokens(self) -> dict[str, int]:
        """The token id for each placeholder."""
        return {character: token for token, character in self.characters.items()}


def spelled_tools(found: ToolCallFormat, placeholders: Placeholders, ends: Collection[int] = ()) -> ToolSpelling:
    """Return a format as spelled in the vocabulary of these placeholders, which thinking tags may share.

    ends  the tokens that end an answer. Some templates write one right after the calls, but it never appears in the
          text of an answer, so `section_end` stops before it.
    """
    write = placeholders.spelled
    form = found.arguments
    arguments = replace(
        form,
        opening=write(form.opening),
        closing=write(form.closing),
        key_prefix=write(form.key_prefix),
        separator=write(form.separator),
        quote=write(form.quote),
        forms={kind: ValueForm(write(each.prefix), write(each.suffix)) for kind, each in form.forms.items()},
    )
    format_ = replace(
        found,
        call_start=write(found.call_start),
        call_end=write(found.call_end),
        arguments=arguments,
        section_start=write(found.section_start),
        separator=write(found.separator),
        section_end=_before_end(write(found.section_end), placeholders, ends),
        other_starts=tuple(map(write, found.other_starts)),
        plain_start=write(found.plain_start),
        after_plain=write(found.after_plain),
    )
    return ToolSpelling(format_, placeholders.characters, placeholders.texts)


def _before_end(text: str, placeholders: Placeholders, ends: Collection[int]) -> str:
    """Return a text up to the first token that ends the answer."""
    last = {character for token, character in placeholders.characters.items() if token in ends}
    return text[: next((at for at, letter in enumerate(text) if letter in last), len(text))]
