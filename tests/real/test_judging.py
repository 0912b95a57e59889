"""Tests of the functions that judge answers. These tests need no model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real import edits, human_eval, infill, long_prompts, programs, schemas, tool_choice, tool_text
from tests.real import scores as scores_module
from tests.real.groups import Group, Task, judge
from tests.real.scores import check_score
from tests.support.models.downloads import human_eval as records

CALL = {"name": "set_timer", "arguments": {"minutes": 5}}
JSON = json.dumps(CALL)


def answer(text: str = "", *calls: tuple[str, dict[str, Any]], reason: str = "stop") -> dict[str, Any]:
    found = [{"function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in calls]
    return {"finish_reason": reason, "message": {"content": text, "tool_calls": found}}


@pytest.mark.parametrize(
    "text", [JSON, f"\n{JSON}\n", f"```json\n{JSON}\n```", f"```\n{json.dumps(CALL, indent=2)}\n```\n"]
)
def test_a_text_that_is_nothing_but_a_call_is_a_written_call(text: str) -> None:
    assert tool_text.written_call(answer(text)) == ("set_timer", {"minutes": 5})


@pytest.mark.parametrize(
    "text",
    [
        f"Here it is: {JSON}",
        f"```json\n{JSON}\n```\nThis starts a timer.",
        f"{JSON}\n{JSON}",
        f"[{JSON}]",
        JSON.replace("set_timer", "set_timers"),
        JSON.replace("5", '"five"'),
        JSON.replace("minutes", "seconds"),
        json.dumps({**CALL, "id": 1}),
        JSON[:-1],
    ],
)
def test_other_texts_are_not_written_calls(text: str) -> None:
    assert tool_text.written_call(answer(text)) is None


def test_an_answer_that_was_cut_off_is_no_written_call() -> None:
    assert tool_text.written_call(answer(JSON, reason="length")) is None


@pytest.mark.parametrize(
    ("calls", "is_right"),
    [
        ([("get_weather", {"city": "Madrid"}), ("get_weather", {"city": "rome", "unit": "celsius"})], True),
        ([("get_weather", {"city": "Rome"})], False),
        ([("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Rome"})], False),
        ([("get_weather", {"city": "Rome"}), ("get_time", {"city": "Madrid"})], False),
        ([("get_weather", {"city": city}) for city in ("Rome", "Madrid", "Oslo")], False),
    ],
)
def test_exactly_the_expected_calls_are_right(calls: list[tuple[str, dict[str, Any]]], is_right: bool) -> None:
    (task,) = [task for task in tool_choice.tasks() if task.name == "one-tool-4"]  # Rome and Madrid
    assert task.is_right(answer("", *calls)) == is_right


def test_an_edit_must_fit_exactly_one_place() -> None:
    edit = "<<<<<<< SEARCH\n{}\n=======\n{}\n>>>>>>> REPLACE"
    assert edits.edited("a\nb\nc\n", f"Sure:\n{edit.format('b', 'x')}\n{edit.format('c', '')}") == "a\nx\n\n"
    for text in ("b", edit.format("d", "x"), edit.format("", "x")):
        assert edits.edited("a\nb\n", text) is None
    assert edits.edited("b\nb\n", edit.format("b", "x")) is None


def test_every_task_has_a_name_of_its_own() -> None:
    modules = (edits.tasks, infill.tasks, programs.tasks, schemas.tasks, tool_choice.tasks)
    for tasks in (*modules, tool_text.needed_tasks, tool_text.shown_tasks, long_prompts.coder_tasks):
        names = [task.name for task in tasks()]
        assert len(names) == len(set(names))


@pytest.mark.night
@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_human_evals_own_solutions_are_right() -> None:
    def solution(record: dict[str, str]) -> dict[str, Any]:
        return answer(f"Certainly!\n```python\n{record['prompt']}{record['canonical_solution']}```")

    tasks = human_eval.tasks()
    right = judge(tasks, [solution(record) for record in records()])
    assert [task.name for task, is_right in zip(tasks, right, strict=True) if not is_right] == []
    assert judge(tasks[:1], [answer("```python\npass\n```")]) == [False]


@pytest.mark.push
@pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")
def test_a_program_is_judged_by_its_tests() -> None:
    tasks = [Task("sum", {}, program=lambda choice: f"assert {choice['message']['content']} == 4")] * 2
    assert judge(tasks, [answer("2 + 2"), answer("2 + 3")]) == [True, False]


@pytest.mark.parametrize(
    ("right", "tolerance", "is_enough"), [("ab", 0, True), ("a", 1, True), ("c", 1, True), ("a", 0, False)]
)
def test_lost_answers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, tolerance: int, is_enough: bool
) -> None:
    """Each answer that has become right makes up for one that has become wrong."""
    monkeypatch.setattr(scores_module, "_SCORES", tmp_path / "scores.json")
    monkeypatch.setattr(scores_module, "_ANSWERS", tmp_path)
    tasks = [Task(name, {}, lambda choice: choice["message"]["content"] == "yes") for name in "abc"]
    group = Group("letters", lambda: tasks, tolerance)

    def answers(right: str) -> list[dict[str, Any]]:
        return [answer("yes" if name in right else "no") for name in "abc"]

    check_score(group, tasks, answers("ab"), is_new=True)
    if is_enough:
        check_score(group, tasks, answers(right), is_new=False)
    else:
        with pytest.raises(AssertionError, match=r"1 of 3 .*1 fewer than stored\.\nnow wrong: \['b'\]"):
            check_score(group, tasks, answers(right), is_new=False)
