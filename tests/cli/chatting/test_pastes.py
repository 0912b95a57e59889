"""Tests of long pastes, which are folded into one character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.document import Document
from prompt_toolkit.layout.controls import BufferControl
from prompt_toolkit.layout.processors import TransformationInput

from llmrun.cli.chatting.draft_images import DraftImages
from llmrun.cli.chatting.keyboard import Pastes, ShownPastes

LONG = "a line\n" * 20


@given(st.lists(st.text() | st.text().map(lambda text: text + LONG) | st.just("\U00100000"), max_size=5))
def test_whatever_is_pasted_is_what_is_sent(texts: list[str]) -> None:
    pastes = Pastes()
    typed = "".join(pastes.folded(text) for text in texts)
    assert pastes.unfolded(typed) == "".join(texts)


def test_a_short_paste_is_seen() -> None:
    assert Pastes().folded("two\nlines") == "two\nlines"


def test_a_paste_that_holds_the_sign_of_another_stays_itself() -> None:
    pastes = Pastes()
    first = pastes.folded(LONG)
    second = pastes.folded(first + LONG)
    assert len(second) == 1
    assert pastes.unfolded(second + first) == first + LONG + LONG


def test_words_stand_in_for_it_and_the_cursor_knows_where() -> None:
    pastes = Pastes()
    line = "a" + pastes.folded(LONG) + "b"
    document = Document(line)
    control = BufferControl(Buffer(document=document))
    shown = ShownPastes(pastes, DraftImages()).apply_transformation(
        TransformationInput(control, document, 0, lambda at: at, [("", line)], 80, 24)
    )
    words = "[21 lines pasted]"
    assert "".join(text for _, text, *_ in shown.fragments) == f"a{words}b"
    assert [shown.source_to_display(at) for at in range(4)] == [0, 1, 1 + len(words), 2 + len(words)]
    assert [shown.display_to_source(at) for at in (0, 1, 5, 1 + len(words), 2 + len(words))] == [0, 1, 1, 2, 3]
