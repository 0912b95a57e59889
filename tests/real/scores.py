"""Stored scores: which answers of each group were right."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.real.answers import Choice
from tests.real.groups import Group, Task

_SCORES = Path(__file__).with_name("scores.json")
_ANSWERS = Path(__file__).parents[2] / ".tests-cache" / "real"


def stored_scores() -> dict[str, dict[str, bool]]:
    """Return, for each group, whether the answer to each task was right."""
    scores: dict[str, dict[str, bool]] = {}
    if _SCORES.exists():
        for name, record in json.loads(_SCORES.read_text(encoding="utf-8")).items():
            scores[name] = {**dict.fromkeys(record["right"], True), **dict.fromkeys(record["wrong"], False)}
    return scores


def store_score(group: str, right: Mapping[str, bool]) -> None:
    """Replace the stored score of a group."""
    scores = {**stored_scores(), group: dict(right)}
    records = {
        name: {
            "score": f"{sum(answers.values())} of {len(answers)}",
            "wrong": [task for task, is_right in answers.items() if not is_right],
            "right": [task for task, is_right in answers.items() if is_right],
        }
        for name, answers in sorted(scores.items())
    }
    _SCORES.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def keep_answers(
    group: Group, tasks: Sequence[Task], choices: Sequence[Choice], right: Sequence[bool]
) -> dict[str, bool]:
    """Write all answers to a file for readers, and return whether the answer to each task is right."""
    _ANSWERS.mkdir(parents=True, exist_ok=True)
    with (_ANSWERS / f"{group.name.replace(' ', '-')}.jsonl").open("w", encoding="utf-8") as file:
        for task, choice, is_right in zip(tasks, choices, right, strict=True):
            record = {"task": task.name, "right": is_right, "body": task.body, "choice": choice}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return {task.name: is_right for task, is_right in zip(tasks, right, strict=True)}
