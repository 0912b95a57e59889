"""Tests that thinking and answer depend only on the whole text, not on its pieces, and that nothing else is lost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmrun.engine.thinking import Phase, ThinkingSplitter, ThinkingStyle

TAGS = ThinkingStyle("<t>", ("</t>",))
WRAPPED = ThinkingStyle("<t>", ("</t>",), headers=("<a>",), trailers=("</a>",))
MESSAGES = ThinkingStyle("<c>x<m>", ("<e>", "<c>y<m>"), headers=("<e>", "<s>", "<c>y<m>", "<c>z<m>"), anywhere=True)


def whole(text: str, marks: ThinkingStyle = TAGS, *, opened: bool = False, may_close: bool = True) -> tuple[str, str]:
    return pieces([text], marks, opened=opened, may_close=may_close)


def pieces(
    texts: Sequence[str], marks: ThinkingStyle = TAGS, *, opened: bool = False, may_close: bool = True
) -> tuple[str, str]:
    """Return (thinking, answer) as a reader of the pieces receives them."""
    splitter = ThinkingSplitter(marks, opened=opened, may_close=may_close)
    thought = answer = ""
    for split in [*map(splitter.feed, texts), splitter.finish()]:
        if split.unopened:
            thought, answer = answer, ""
        thought, answer = thought + split.thought, answer + split.answer
    return thought, answer


def cut(text: str, at: Sequence[int]) -> list[str]:
    places = [0, *sorted(place % (len(text) + 1) for place in at), len(text)]
    return [text[start:end] for start, end in pairwise(places)]


parts = st.sampled_from(
    [
        "<t>",
        "</t>",
        "<a>",
        "</a>",
        "<c>",
        "x",
        "y",
        "z",
        "<m>",
        "<e>",
        "<s>",
        "\n",
        " ",
        "```\n",
        "ab",
        "<",
        "</",
        ">",
        "t",
    ]
)
texts = st.lists(parts, max_size=14).map("".join)
cuts = st.lists(st.integers(0, 100), max_size=30)


@given(texts, cuts, st.sampled_from([TAGS, WRAPPED, MESSAGES]), st.booleans(), st.booleans())
@example("ab\n</t>ab", [1, 3, 5], TAGS, False, True)
def test_how_the_text_is_cut_makes_no_difference(
    text: str, at: list[int], marks: ThinkingStyle, opened: bool, may_close: bool
) -> None:
    assert pieces(cut(text, at), marks, opened=opened, may_close=may_close) == whole(
        text, marks, opened=opened, may_close=may_close
    )


@given(texts, cuts, st.sampled_from([TAGS, WRAPPED, MESSAGES]), st.booleans())
def test_nothing_is_lost_but_marks_and_white_space(
    text: str, at: list[int], marks: ThinkingStyle, opened: bool
) -> None:
    thought, answer = pieces(cut(text, at), marks, opened=opened)
    numbers = sorted(re.findall("[0-9]", thought + answer))  # no tag has a digit
    assert numbers == sorted(re.findall("[0-9]", text))


@given(texts, st.booleans())
def test_thinking_in_tags_is_what_a_pattern_finds(text: str, opened: bool) -> None:
    """The pattern states the rule in one line, for a prompt that says whether the model thinks."""
    begun = text if opened else None
    if begun is None and (found := re.match(r"\s*<t>", text)):
        begun = text[found.end() :]
    if begun is None:
        expected = ("", re.sub(r"\A\s*</t>", "", text)) if not re.match(r"\s*</t>", text) else None
    else:
        thought, closed, rest = begun.partition("</t>")
        expected = (thought.strip(), rest.lstrip()) if closed else (thought.strip(), "")
        if re.match(r"<t>|</t>", expected[1]):
            expected = None  # repeated tags are left to the other tests
    if expected is not None:
        assert whole(text, opened=opened, may_close=False) == expected


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("<t>\nhm\n</t>\n\nYes.", "hm", "Yes."),
        ("\n <t>hm</t>Yes.\n", "hm", "Yes.\n"),
        ("<t>\n\n</t>\n\nYes.", "", "Yes."),
        ("Yes.", "", "Yes."),
        ("\n\nYes.\n\n", "", "\n\nYes.\n\n"),
        ("", "", ""),
        ("<t>a </t", "a </t", ""),
        ("<t", "", "<t"),
        ("<t>one</t><t>two</t>Yes.", "one\n\ntwo", "Yes."),
    ],
)
def test_tags_at_the_beginning_are_tags(text: str, thought: str, answer: str) -> None:
    assert whole(text) == (thought, answer)


@pytest.mark.parametrize(
    "text",
    [
        "Write <t>so</t> or\nso: `</t>`",
        "See:\n```\n<t>\nhm\n</t>\n```\nThat is it.",
        "<t>hm</t>Now ```\n</t>\n``` and <t>more</t>\n</t>\n",
    ],
)
def test_tags_in_the_answer_are_text(text: str) -> None:
    assert whole(text)[1] == text.removeprefix("<t>hm</t>")


def test_a_prompt_may_have_begun_the_thinking() -> None:
    assert whole("hm\n</t>\nYes.", opened=True) == ("hm", "Yes.")
    assert whole("hm", opened=True) == ("hm", "")


def test_what_is_closed_but_was_never_opened_was_thinking_all_the_same() -> None:
    assert whole("hm,\n\nlet me see.\n</t>\n\nYes.") == ("hm,\n\nlet me see.\n", "Yes.")
    assert whole("hm\n</t>\nYes.", may_close=False) == ("", "hm\n</t>\nYes.")
    assert whole("</t>\nYes.", may_close=False) == ("", "Yes.")


def test_a_reader_is_told_when_what_was_given_out_as_answer_was_thinking() -> None:
    splitter = ThinkingSplitter(TAGS)
    assert splitter.feed("hm\n").answer == "hm\n"
    split = splitter.feed("so\n</t>\nYes.")
    assert (split.unopened, split.thought, split.answer) == (True, "so\n", "Yes.")
    assert not ThinkingSplitter(TAGS).feed("hm\n</t>\nYes.").unopened


def test_texts_around_the_answer_are_no_part_of_it() -> None:
    assert whole("<t>hm</t>\n<a>Yes.</a>\n", WRAPPED) == ("hm", "Yes.")
    assert whole("<a>Yes.</a>", WRAPPED) == ("", "Yes.")
    assert whole("<t>hm</t>An </a> in the middle.", WRAPPED) == ("hm", "An </a> in the middle.")


def test_messages_that_say_what_they_are_may_come_in_any_order() -> None:
    assert whole("<c>x<m>hm<e><s><c>y<m>Yes.", MESSAGES) == ("hm", "Yes.")
    assert whole("<c>z<m>I look.<e><s><c>x<m>hm<e><s><c>y<m>Yes.", MESSAGES) == ("hm", "I look.\n\nYes.")
    assert whole("<c>z to=f<m>{}", MESSAGES) == ("", "<c>z to=f<m>{}")


@given(st.text(alphabet="ab </t>", max_size=20))
def test_no_part_of_an_end_of_thinking_is_given_out(thought: str) -> None:
    splitter = ThinkingSplitter(TAGS, opened=True)
    given_out = ""
    for character in thought + "</t>":
        if splitter.phase is not Phase.THINKING:
            break
        given_out += splitter.feed(character).thought
    assert given_out == thought.partition("</t>")[0].strip()


def test_a_text_is_given_out_at_once_unless_it_may_be_a_mark() -> None:
    splitter = ThinkingSplitter(TAGS)
    assert splitter.feed("Y").answer == "Y"
    assert splitter.feed(" ").answer == " "
    assert splitter.feed("<").answer == ""
    assert splitter.feed("3").answer == "<3"
