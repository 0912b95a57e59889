import os

from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.llama.messages import answer_line, read_answer, read_request, read_soon, request_line

NUMBERS = st.integers(0, 2**40)


@given(NUMBERS, NUMBERS, NUMBERS, st.integers(0, 1), st.integers(0, 2))
def test_a_forward_pass_is_asked_for_without_json(
    number: int, rows: int, wanted: int, hidden: int, images: int
) -> None:
    fields = {"rows": rows, "wanted": wanted, "hidden": hidden, "images": images}
    line = request_line("forward", number, fields)
    assert b"{" not in line
    assert line.endswith(b"\n")
    assert read_request(line) == ("forward", number, fields)


@given(NUMBERS, st.text(), st.booleans())
def test_other_requests_arrive_with_every_field_on_one_line(number: int, text: str, special: bool) -> None:
    fields = {"text": text, "add_special": special}
    line = request_line("tokenize", number, fields)
    assert line.count(b"\n") == 1
    assert read_request(line) == ("tokenize", number, fields)


@given(NUMBERS, st.dictionaries(st.text().filter(lambda key: key != "number"), st.text() | st.integers()))
def test_answers_arrive_as_they_were_given(number: int, answer: dict[str, object]) -> None:
    line = answer_line(number, answer)
    assert line.count(b"\n") == 1
    assert read_answer(line) == {"number": number, **answer}


@given(NUMBERS)
def test_a_pass_that_went_well_is_answered_without_json(number: int) -> None:
    assert b"{" not in answer_line(number, {"status": 0})
    assert read_answer(answer_line(number, {"status": 0})) == {"number": number, "status": 0}


@given(st.sampled_from(["forward", "tokenize"]), NUMBERS, st.data())
def test_the_beginning_of_a_request_is_left_out_or_lacks_only_digits(
    operation: str, number: int, data: st.DataObject
) -> None:
    """A line of a forward pass is written at once and arrives whole, so only other requests can be cut."""
    line = request_line(operation, number, {"rows": 1, "wanted": 1, "hidden": 0, "images": 0})
    part = line[: data.draw(st.integers(0, len(line) - 3))]
    assert read_request(part) is None


@given(st.binary() | st.sampled_from([b"", b"7", b"null", b"[1]", b"done", b"done x", b"nearly", b'"number": 1}']))
def test_noise_is_no_answer_to_anything_and_no_request(noise: bytes) -> None:
    assert read_answer(noise) == {}
    assert read_request(noise) is None


def test_reading_soon_returns_what_is_there_and_nothing_at_the_end() -> None:
    source, sink = os.pipe()
    try:
        os.write(sink, b"one\n")
        assert read_soon(source) == b"one\n"
        os.close(sink)
        assert read_soon(source) == b""
    finally:
        os.close(source)
