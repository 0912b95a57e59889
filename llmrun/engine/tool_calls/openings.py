"""The texts that begin a tool call, and the parts of a call before its arguments.

Control tokens in a format are replaced with placeholders, as in the tags of the thinking decoder.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from msgspec import Struct
from msgspec.structs import replace

from llmrun.engine.templates.tool_format import NAME, SLOTS, ToolCallFormat, ValueForm
from llmrun.engine.thinking import Placeholders


class ToolSpelling(Struct, frozen=True):
    """A tool-call format as spelled in a vocabulary.

    format      the format with control tokens replaced by single placeholder characters
    characters  maps the id of a control token to the placeholder that a decoder passes to the parser for this token
    texts       maps the code point of a placeholder to the token's text
    ends        the tokens that end an answer, which are not part of the format
    """

    format: ToolCallFormat
    characters: Mapping[int, str]
    texts: Mapping[int, str]
    ends: Collection[int]

    @property
    def tokens(self) -> dict[str, int]:
        """The token id for each placeholder."""
        return {character: token for token, character in self.characters.items()}


def spelled_tools(found: ToolCallFormat, placeholders: Placeholders, ends: Collection[int] = ()) -> ToolSpelling:
    """Return a format as spelled in the vocabulary of the given placeholders, which thinking tags may share.

    ends  the tokens that end an answer. Some templates write such a token after calls. The token never appears in the
          text of an answer, so `call_end` and `section_end` stop before it.
    """
    write = placeholders.spelled
    form, separator = found.arguments, write(found.separator)
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
        call_end=_before_end(write(found.call_end), placeholders, ends),
        arguments=arguments,
        section_start=write(found.section_start),
        separator=separator,
        section_end=_before_end(write(found.section_end), placeholders, ends),
        parallel=found.parallel and separator == _before_end(separator, placeholders, ends),
        other_starts=tuple(map(write, found.other_starts)),
        after_plain=write(found.after_plain),
    )
    return ToolSpelling(format_, placeholders.characters, placeholders.texts, ends)


def _before_end(text: str, placeholders: Placeholders, ends: Collection[int]) -> str:
    """Return a text up to the first token that ends the answer."""
    last = {character for token, character in placeholders.characters.items() if token in ends}
    return text[: next((at for at, letter in enumerate(text) if letter in last), len(text))]


_TAG = r"(?:<[^<>\n]{1,80}>|\[/?[A-Z_]{2,40}\]|[\ud800-\udfff])"
_TAGS = re.compile(rf"{_TAG}(?=\s*{_TAG})")
_FIRST_TAG = re.compile(_TAG)
_SLOT = re.compile(f"([{SLOTS}])")
_SURE = 8  # A text without tags begins a call only if it has this many characters; "{" also begins other answers.


class Opening(Struct, frozen=True):
    """A text after which the model writes a call.

    text  the text that begins the call; may be empty if `sure` is False
    sure  False if the text also occurs elsewhere, so that the name of a tool must follow
    """

    text: str
    sure: bool


def openings(found: ToolCallFormat) -> list[Opening]:
    """Return the texts that begin a call, in any order."""
    heads = [found.section_start + start for start in call_starts(found)]
    heads += call_starts(found) if found.section_start else []
    texts = dict.fromkeys(_trigger(head) for head in heads)
    all_ = [Opening(text, is_sure(text)) for text in texts]
    if found.after_plain.strip():
        after = found.after_plain.strip()
        all_ += [Opening(after + each.text, is_sure(each.text)) for each in all_]
    return all_


def call_starts(found: ToolCallFormat) -> list[str]:
    """Return the texts that may precede the arguments of a call.

    Where a call begins with two tags, models sometimes omit the first tag, such as "<tool_call>" before "<function=".
    """
    starts = [found.call_start, *found.other_starts]
    first = _TAGS.match(found.call_start)
    if first and NAME in found.call_start[first.end() :]:
        starts.append(found.call_start[first.end() :].lstrip())
    return starts


def at_first_tag(text: str) -> tuple[str, str]:
    """Split a text before its first tag."""
    tag = _FIRST_TAG.search(text)
    return (text[: tag.start()], text[tag.start() :]) if tag else (text, "")


def first_tag(text: str) -> str:
    """Return a text up to its first tag if another tag follows. Otherwise, return the whole text without whitespace."""
    two = _TAGS.search(text)
    return text[: two.end()] if two else text.strip()


def parts(text: str) -> list[str]:
    """Split a text of a format into slots and the texts between them, which may be empty."""
    return _SLOT.split(text)


def is_sure(text: str) -> bool:
    """Return True if a text is unlikely to occur outside of calls."""
    return bool(_FIRST_TAG.search(text)) or len("".join(text.split())) >= _SURE


def _trigger(head: str) -> str:
    """Return the shortest prefix that identifies a text; it ends at the first of two tags, a slot or JSON."""
    fixed = parts(head)[0]
    two = _TAGS.search(fixed)
    fixed = fixed[: two.end()] if two else fixed
    json_at = re.search(r"\[?\s*\{", fixed)
    cut = fixed[: json_at.start()] if json_at else fixed
    return cut.strip() if is_sure(cut) else ""
