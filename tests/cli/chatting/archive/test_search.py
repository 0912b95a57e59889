"""Tests of which lines match a search, and how lines are shortened."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.cli.chatting.archive import MOST_LINES, Hit, Line, hit_lines, matching_lines, search_store, words_of
from llmrun.cli.chatting.conversation import Conversation, new_conversation
from llmrun.cli.chatting.events import AnswerBegan, AnswerWent, QuestionAsked, Undone
from llmrun.cli.chatting.saying import ConversationRecord
from llmrun.cli.chatting.store import Store
from llmrun.cli.console.terminal import width


def held(*exchanges: tuple[str, str]) -> Conversation:
    conversation = new_conversation("m")
    for question, answer in exchanges:
        for event in (QuestionAsked(question, ""), AnswerBegan(1), AnswerWent(answer)):
            conversation.apply(event)
    return conversation


def found(conversation: Conversation, *words: str) -> list[str]:
    return [line.text for line in matching_lines(conversation, words)]


def test_a_message_must_have_all_words_and_its_lines_with_any_are_shown() -> None:
    conversation = held(("Blue?", "the sky\nis not\nBLUE today"), ("sky?", "none"))
    assert found(conversation, "blue") == ["Blue?", "BLUE today"]
    assert found(conversation, "sky", "blue") == ["the sky", "BLUE today"]
    assert found(conversation, "blue", "none") == []
    assert found(conversation, "not blue") == []


def test_words_are_text_and_no_patterns() -> None:
    conversation = held(("a.c (x", "abc"))
    assert found(conversation, "a.c") == ["a.c (x"]
    assert found(conversation, "(x") == ["a.c (x"]


def test_composed_and_decomposed_letters_are_the_same() -> None:
    assert found(held(("Gro\u0308\u00dfe", "")), "GRÖSSE") == []  # only letters match: ß is not ss
    assert found(held(("Gro\u0308\u00dfe", "")), "grö\u00df") == ["Grö\u00dfe"]


def test_what_was_taken_back_is_not_found() -> None:
    conversation = held(("gone", "gone"))
    conversation.apply(Undone())
    assert found(conversation, "gone") == []


@pytest.mark.parametrize(
    ("argument", "words"),
    [("blue sky", ["blue", "sky"]), ('"blue sky" x', ["blue sky", "x"]), ("it's", ["it's"]), (' "" ', []), ("", [])],
)
def test_words_are_split_at_blanks_outside_quotes(argument: str, words: list[str]) -> None:
    assert words_of(argument) == words


@pytest.mark.push
@given(st.text(min_size=1, max_size=60), st.text("ab 日\u0301\x1b", min_size=1, max_size=3), st.integers(1, 60))
def test_a_line_is_cut_to_its_columns_and_keeps_nothing_dangerous(text: str, word: str, most: int) -> None:
    hit = Hit("name", 0.0, matching_lines(held((text, "")), [word]))
    for line in [*hit_lines(hit, most)][1:]:
        shown = "".join(piece for piece, _ in line)
        assert width(shown) <= max(most, 5)
        assert "\x1b" not in shown


def test_a_match_far_to_the_right_is_still_shown() -> None:
    hit = Hit("name", 0.0, matching_lines(held(("x" * 500 + " needle " + "y" * 500, "")), ["needle"]))
    _, line = hit_lines(hit, 60)
    assert ("needle", True) in line
    shown = "".join(text for text, _ in line)
    assert shown.startswith("  > …xxx")
    assert shown.endswith("yyy…")
    assert len(shown) == 60


def test_many_lines_are_counted() -> None:
    hit = Hit("name", 0.0, [Line(True, (f"{n}",)) for n in range(MOST_LINES + 2)])
    lines = ["".join(text for text, _ in line) for line in hit_lines(hit, 80, "just now")]
    assert lines[0] == "name  just now"
    assert lines[-1] == "    … 2 more lines"


def test_a_copy_is_shown_only_where_it_differs(tmp_path: Path) -> None:
    store = Store(tmp_path / "conversations")
    record = ConversationRecord(store, new_conversation("m"))
    record.add(QuestionAsked("the first fox", ""))
    record.add(AnswerBegan(1))
    store.save("same", record.conversation)
    record.add(AnswerWent("a fox"))
    assert [hit.name for hit in search_store(store, ["fox"])[0]] == ["the-first-fox", "same"]
    store.save("same", record.conversation)
    assert [hit.name for hit in search_store(store, ["fox"])[0]] == ["the-first-fox"]
    assert search_store(store, ["fox"], without=record.path)[0][0].name == "same"
    record.close()
