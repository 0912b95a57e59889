"""A long paste at the prompt: one character in the text that is edited, a few words on the screen.

Three hundred lines would push everything else off the screen, and be there again in the scrollback. So a long paste
is folded into a character that nothing else uses; it is moved over and deleted like any other.
"""

from __future__ import annotations

from prompt_toolkit.formatted_text.base import OneStyleAndTextTuple
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput
from prompt_toolkit.layout.utils import explode_text_fragments

MOST_LINES = 8
MOST_CHARACTERS = 1000
_FIRST, _LAST = 0x10_0000, 0x10_FFFD  # the second plane for private use


class Pastes:
    """The long texts that stand in the prompt as one character each."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._foreign: set[str] = set()  # characters that could be signs, but stand in a text for themselves

    def folded(self, text: str) -> str:
        """What to insert for a text: itself, or the character that stands for it."""
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
        """The text with every sign replaced by what it stands for."""
        return "".join(self._texts.get(character, character) for character in text)

    def about(self, sign: str) -> str | None:
        """The words shown for a sign; None for any other character."""
        text = self._texts.get(sign)
        if text is None:
            return None
        lines = text.count("\n") + 1
        return f"[{lines:,} lines pasted]" if lines > 1 else f"[{len(text):,} characters pasted]"

    def clear(self) -> None:
        self._texts.clear()
        self._foreign.clear()


class ShownPastes(Processor):
    """Shows the words in place of the signs."""

    def __init__(self, pastes: Pastes) -> None:
        self._pastes = pastes

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        line = transformation_input.document.lines[transformation_input.lineno]
        if not any(self._pastes.about(character) for character in line if ord(character) >= _FIRST):
            return Transformation(transformation_input.fragments)
        fragments: list[OneStyleAndTextTuple] = []
        columns = [0]  # where each character of the line begins on the screen
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
