"""Tests of reading multiple-choice questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.jobs.evaluation.choices import Question, read_questions

GOOD = {"prompt": "2 + 2 =", "choices": ["4", "5"], "answer": 0}


def read(folder: Path, *bodies: object) -> list[Question]:
    path = folder / "questions.jsonl"
    path.write_text("\n".join(json.dumps(body) for body in bodies))
    return read_questions(path)


def test_a_space_is_added_only_where_there_is_none(tmp_path: Path) -> None:
    choices = ["4", "\tfive"]
    plain, spaced, line = read(
        tmp_path,
        {"prompt": "2 + 2 =", "choices": choices, "answer": 0},
        {"question": "2 + 2 = ", "choices": choices, "answer": 0},
        {"prompt": "2 + 2 =\n", "choices": choices, "answer": 0},
    )
    assert {one.prompt for one in (plain, spaced, line)} == {"2 + 2 ="}
    assert plain.endings == (" 4", "\tfive")
    assert spaced.endings == (" 4", " \tfive")
    assert line.endings == ("\n4", "\n\tfive")
    assert plain.lengths == (1, 5)


@pytest.mark.parametrize(("answer", "index"), [(1, 1), ("B", 1), ("yes", 0), ("no", 1), ("A", 0)])
def test_answers_are_indices_letters_or_texts(tmp_path: Path, answer: object, index: int) -> None:
    [question] = read(tmp_path, {"prompt": "Is it?", "choices": ["yes", "no"], "answer": answer})
    assert question.answer == index


def test_a_choice_that_is_a_letter_means_itself(tmp_path: Path) -> None:
    [question] = read(tmp_path, {"prompt": "Which?", "choices": ["B", "A"], "answer": "A"})
    assert question.answer == 1


def test_questions_keep_the_numbers_of_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(f"\n{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}\n")
    assert [question.line for question in read_questions(path)] == [2, 4]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": ""}, "prompt: must be a non-empty string"),
        ({"prompt": 5}, "prompt: must be a non-empty string"),
        ({"question": "Which?"}, 'must have either "prompt" or "question"'),
        ({"choices": ["4"]}, "choices: must be a list of 2 to 26 strings"),
        ({"choices": "45"}, "choices: must be a list of 2 to 26 strings"),
        ({"choices": ["4"] * 27}, "choices: must be a list of 2 to 26 strings"),
        ({"choices": ["4", " "]}, "choices: must be a non-empty string"),
        ({"answer": 2}, "answer: 2 is not an index from 0 to 1, a letter from A to B, or one of the choices"),
        ({"answer": -1}, "answer: -1 is not"),
        ({"answer": True}, "answer: True is not"),
        ({"answer": "C"}, "answer: 'C' is not"),
        ({"answer": None}, "answer: None is not"),
        ({"choices": ["4", "4"], "answer": "4"}, "answer: '4' is not"),
    ],
)
def test_a_bad_question_is_named(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        read(tmp_path, GOOD, {**GOOD, **changes})
    assert f"line 2: {words}" in str(refused.value)


@pytest.mark.parametrize("line", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_bad_json_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_bytes(line)
    with pytest.raises(UsageError, match="line 1: not"):
        read_questions(path)


def test_a_byte_order_mark_is_ignored_and_utf_16_refused(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(GOOD), "utf-8-sig")
    assert read_questions(path) == read(tmp_path, GOOD)
    path.write_text(json.dumps(GOOD), "utf-16")
    with pytest.raises(UsageError, match="not UTF-8, but UTF-16"):
        read_questions(path)


def test_files_without_questions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no questions") as refused:
        read(tmp_path)
    assert '"answer"' in refused.value.hint
    with pytest.raises(UsageError, match="cannot be read"):
        read_questions(tmp_path / "missing.jsonl")


@pytest.mark.push
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda some: st.lists(some), max_leaves=9))
def test_any_values_are_a_question_or_a_usage_error(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    for field in GOOD:
        try:
            [question] = read(tmp_path_factory.mktemp("q"), {**GOOD, field: value})
        except UsageError:
            continue
        assert 0 <= question.answer < len(question.endings)
