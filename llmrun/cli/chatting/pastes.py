"""Shows a short label at the prompt instead of a long paste.

Hundreds of pasted lines would push everything else off the screen and fill the scrollback. A long paste is therefore
represented in the edit buffer by one private-use character. The user can move over it and delete it like any other
character.
"""

from __future__ import annotations

from prompt_toolkit.formatted_text.base import OneStyleAndTextTuple
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.layout.utils import explode_text_fragments

MOST_LINES = 8
MOST_CHARACTERS = 1000
_FIRST, _LAST = 0x10_0000, 0x10_FFFD  # Unicode's Supplementary Private Use Area-B


class Pastes:
    """The long pastes in the prompt. Each of them is represented by one placeholder character."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._foreign: set[str] = set()  # private-use characters in pasted text, which must not be used as placeholders

    def folded(self, text: str) -> str:
        """Return a placeholder character if the text is long, or the text itself if it is short."""
        foreign = {character for character in text if character >= chr(_FIRST)}
        short = text.count("\n") < MOST_LINES and len(text) <= MOST_CHARACTERS
        if short and not foreign & self._texts.keys():
            self._foreign |= foreign
            return text
        for code in range(_FIRST, _LAST):
            sign = chr(code)
            if sign not in self._texts and sign not in self._foreign and sign not in foreign:
                self._texts[sign] = text
                return sign
        return text

    def unfolded(self, text: str) -> str:
        """Return the text with each placeholder replaced by the paste it represents."""
        return "".join(self._texts.get(character, character) for character in text)

    def about(self, sign: str) -> str | None:
        """Return the label that is shown for a placeholder, or None for any other character."""
        text = self._texts.get(sign)
        if text is None:
            return None
        lines = text.count("\n") + 1
        return f"[{lines:,} lines pasted]" if lines > 1 else f"[{len(text):,} characters pasted]"

    def clear(self) -> None:
        self._texts.clear()
        self._foreign.clear()


class ShownPastes(Processor):
    """A prompt_toolkit processor that shows the label of each paste instead of its placeholder."""

    def __init__(self, pastes: Pastes) -> None:
        self._pastes = pastes

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        line = transformation_input.document.lines[transformation_input.lineno]
        if not any(self._pastes.about(character) for character in line if ord(character) >= _FIRST):
            return Transformation(transformation_input.fragments)
        fragments: list[OneStyleAndTextTuple] = []
        columns = [0]  # the screen column at which each character of the line starts
        for style, character, *_ in explode_text_fragments(transformation_input.fragments):
            words = self._pastes.about(character)
            fragments.append((style, character) if words is None else (f"{style} class:paste", words))
            columns.append(columns[-1] + len(fragments[-1][1]))

        def on_screen(position: int) -> int:
            return columns[position] if position < len(columns) else columns[-1] + position - len(columns) + 1

        def in_text(position: int) -> int:
            before = [at for at, column in enumerate(columns) if column <= position]
            return before[-1] + max(0, position - columns[-1])

        return Transformation(fragments, on_screen, in_text)
