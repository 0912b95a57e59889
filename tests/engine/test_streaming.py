"""Tests that the text depends only on the bytes and the stop strings, not on how tokens split them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.engine.streaming import StreamingDecoder


def reference(data: bytes, stops: Sequence[str]) -> tuple[str, str | None]:
    """Return the text up to the stop string that completes first, and that stop string; the longer wins a tie."""
    text = data.decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def stream(pieces: Sequence[bytes], stops: Sequence[str]) -> tuple[list[str], str | None]:
    decoder = StreamingDecoder(stops)
    texts = []
    for piece in pieces:
        texts.append(decoder.feed(piece))
        if decoder.stopped_by is not None:
            return texts, decoder.stopped_by
    texts.append(decoder.finish())
    return texts, decoder.stopped_by


def cut(data: bytes, at: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(place % (len(data) + 1) for place in at), len(data)]
    return [data[start:end] for start, end in pairwise(places)]


few_letters = st.text(alphabet="abé🙂\n", min_size=1, max_size=5)
some_bytes = st.lists(
    st.one_of(few_letters.map(str.encode), st.binary(max_size=3), st.sampled_from([b"\xf0\x9f", b"\xe9", b"\xff"])),
    max_size=12,
).map(b"".join)


@given(data=some_bytes, at=st.lists(st.integers(0, 100), max_size=30), stops=st.lists(few_letters, max_size=4))
def test_any_cut_and_any_stop_strings_give_the_reference(data: bytes, at: list[int], stops: list[str]) -> None:
    texts, stopped_by = stream(cut(data, at), stops)
    expected, expected_stop = reference(data, stops)
    assert "".join(texts) == expected
    assert stopped_by == expected_stop


@given(data=some_bytes, stops=st.lists(few_letters, max_size=4))
def test_nothing_shown_is_ever_taken_back_or_part_of_a_stop_string(data: bytes, stops: list[str]) -> None:
    expected, _ = reference(data, stops)
    shown = ""
    for text in stream([data[i : i + 1] for i in range(len(data))], stops)[0]:
        shown += text
        assert expected.startswith(shown)


def test_text_is_held_no_longer_than_it_must() -> None:
    decoder = StreamingDecoder(["stop!"])
    assert decoder.feed(b"no st") == "no "
    assert decoder.feed(b"o") == ""
    assert decoder.feed(b"ry") == "story"
    assert decoder.feed(b" stop") == " "
    assert decoder.finish() == "stop"


def test_a_character_is_shown_when_it_is_whole() -> None:
    decoder = StreamingDecoder()
    assert [decoder.feed(bytes([byte])) for byte in "🙂".encode()] == ["", "", "", "🙂"]


@pytest.mark.parametrize("data", [b"\xf0\x9f\x99", b"\xc3", b"a\xe2\x82"])
def test_an_unfinished_character_at_the_end_is_replaced(data: bytes) -> None:
    decoder = StreamingDecoder()
    assert decoder.feed(data) + decoder.finish() == data.decode("utf-8", "replace")


def test_a_stop_string_across_tokens_and_inside_one() -> None:
    assert stream([b"one ##", b"# two"], ["###"]) == (["one ", ""], "###")
    assert stream([b"one ### two"], ["###"]) == (["one "], "###")


def test_the_first_one_completed_wins_over_the_first_one_begun() -> None:
    assert stream([b"xxabcd"], ["xxabcd", "abc"]) == (["xx"], "abc")
    assert stream([b"xxab", b"cd"], ["xxabcd", "abc"]) == (["", "xx"], "abc")
    assert stream([b"xxabc"], ["bc", "abc"]) == (["xx"], "abc")
