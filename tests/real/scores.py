"""Stores which answers of each group were right, and compares new answers with the stored scores."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.real.answers import Choice
from tests.real.groups import Group, Task, judge

_SCORES = Path(__file__).with_name("scores.json")
_ANSWERS = Path(__file__).parents[2] / ".tests-cache" / "real"


def check_score(group: Group, tasks: Sequence[Task], choices: Sequence[Choice], *, is_new: bool) -> None:
    """Judge all answers of a group, save the answers, and compare the score with the stored score.

    If `is_new` is true, the stored score is replaced instead.
    """
    right = judge(tasks, choices)
    _keep_answers(group, tasks, choices, right)
    score = {task.name: is_right for task, is_right in zip(tasks, right, strict=True)}
    if is_new:
        _store_score(group.name, score)
        return
    stored = _stored_scores().get(group.name, {})
    assert stored.keys() == score.keys(), "no score of these tasks is stored: run scripts/test_real --record"
    lost = sorted(name for name in score if stored[name] and not score[name])
    won = sorted(name for name in score if score[name] and not stored[name])
    fewer = len(lost) - len(won)
    assert fewer <= group.tolerance, (
        f"{group.name}: {sum(right)} of {len(right)} answers are right, which is {fewer} fewer than stored.\n"
        f"now wrong: {lost}\nnow right: {won}"
    )


def _stored_scores() -> dict[str, dict[str, bool]]:
    """Return the stored scores: for each group, the names of the tasks and whether their answers were right."""
    scores: dict[str, dict[str, bool]] = {}
    if _SCORES.exists():
        for name, record in json.loads(_SCORES.read_text(encoding="utf-8")).items():
            scores[name] = {**dict.fromkeys(record["right"], True), **dict.fromkeys(record["wrong"], False)}
    return scores


def _store_score(group: str, score: Mapping[str, bool]) -> None:
    scores = {**_stored_scores(), group: dict(score)}
    records = {
        name: {
            "score": f"{sum(answers.values())} of {len(answers)}",
            "wrong": [task for task, is_right in answers.items() if not is_right],
            "right": [task for task, is_right in answers.items() if is_right],
        }
        for name, answers in sorted(scores.items())
    }
    _SCORES.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _keep_answers(group: Group, tasks: Sequence[Task], choices: Sequence[Choice], right: Sequence[bool]) -> None:
    _ANSWERS.mkdir(parents=True, exist_ok=True)
    with (_ANSWERS / f"{group.name.replace(' ', '-')}.jsonl").open("w", encoding="utf-8") as file:
        for task, choice, is_right in zip(tasks, choices, right, strict=True):
            record = {"task": task.name, "right": is_right, "body": task.body, "choice": choice}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
