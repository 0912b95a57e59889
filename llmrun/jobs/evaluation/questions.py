"""Reads multiple-choice questions from JSON Lines. Any problem raises UsageError, which names the line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llmrun.base.errors import UsageError

MOST_CHOICES: Final = 26  # so that every choice has a letter
_MOST_FILE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose answer is one of several texts.

    line     the number of its line in the file
    prompt   the text before the answer, without white space at its end
    endings  the texts that may follow the prompt, beginning with the white space between prompt and choice
    lengths  the length of each choice in characters, without that white space
    answer   the index of the right choice
    """

    line: int
    prompt: str
    endings: tuple[str, ...]
    lengths: tuple[int, ...]
    answer: int


def read_questions(path: Path) -> list[Question]:
    """Read the questions of a file, one JSON object per line. docs/evaluation.md describes the fields."""
    try:
        size = path.stat().st_size
        if size > _MOST_FILE_BYTES:
            raise UsageError(f"--choices: {path}: too large: {size:,} bytes, limit {_MOST_FILE_BYTES:,}")
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"--choices: {path}: cannot be read: {error.strerror or error}") from error
    questions = [_question(line, number, path) for number, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        example = '{"prompt": "2 + 2 =", "choices": ["4", "5"], "answer": 0}'
        raise UsageError(f"--choices: {path}: no questions", hint=f"write one JSON object per line: {example}")
    return questions


def _question(line: bytes, number: int, path: Path) -> Question:
    where = f"--choices: {path}: line {number}"
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise UsageError(f"{where}: not a JSON object")
    if ("prompt" in body) == ("question" in body):
        raise UsageError(f'{where}: must have either "prompt" or "question"')
    text = _text(body.get("prompt", body.get("question")), f"{where}: prompt")
    choices = _choices(body, where)
    prompt = text.rstrip()
    between = text[len(prompt) :]
    return Question(
        number,
        prompt,
        tuple(f"{between or ('' if choice[0].isspace() else ' ')}{choice}" for choice in choices),
        tuple(len(choice) for choice in choices),
        _answer(body.get("answer"), choices, where),
    )


def _choices(body: Mapping[str, Any], where: str) -> list[str]:
    choices = body.get("choices")
    if not isinstance(choices, list) or not 2 <= len(choices) <= MOST_CHOICES:
        raise UsageError(f"{where}: choices: must be a list of 2 to {MOST_CHOICES} strings")
    return [_text(choice, f"{where}: choices") for choice in choices]


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where}: must be a string that is not empty")
    return value


def _answer(value: object, choices: list[str], where: str) -> int:
    """Return the index of the right choice, which is given as an index, as a letter from A or as the choice itself."""
    letters = [chr(ord("A") + index) for index in range(len(choices))]
    if type(value) is int and 0 <= value < len(choices):
        return value
    if isinstance(value, str) and choices.count(value) == 1:
        return choices.index(value)
    if isinstance(value, str) and value in letters:
        return letters.index(value)
    raise UsageError(
        f"{where}: answer: {value!r:.60} is not an index from 0 to {len(choices) - 1}, a letter from A to "
        f"{letters[-1]}, or one of the choices"
    )
