"""Tests that real models answer as many tasks as the stored scores say.

`scripts/test_real --record` stores new scores, in scores.json. The answers of the last run are in
.tests-cache/real/GROUP.jsonl.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real import edits, human_eval, infill, long_prompts, programs, schemas, tool_choice, tool_text
from tests.real.conftest import Servers
from tests.real.groups import Group, ask_server, judge
from tests.real.scores import keep_answers, store_score, stored_scores
from tests.support.models.downloads import CODER, GEMMA, assembled

pytestmark = pytest.mark.real

GROUPS = [
    Group("tool choice", tool_choice.tasks, tolerance=2),
    Group("tool needed", tool_text.needed_tasks, tolerance=1),
    Group("JSON shown", tool_text.shown_tasks, tolerance=1),
    Group("infill", infill.tasks, tolerance=1),
    Group("schemas", schemas.tasks, tolerance=1),
    Group("edits", edits.tasks, tolerance=1),
    Group("programs", programs.tasks, tolerance=1),
    Group("long prompts", long_prompts.coder_tasks, tolerance=1),
    Group("long prompts of a base model", long_prompts.base_tasks, tolerance=1, model=GEMMA),
]
HUMAN_EVAL = Group("HumanEval", human_eval.tasks, tolerance=2)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name.replace(" ", "-"))
def test_no_answers_are_lost(group: Group, servers: Servers, pytestconfig: pytest.Config) -> None:
    tasks = group.tasks()
    choices = ask_server(servers.of(group.model), tasks)
    compare(group, keep_answers(group, tasks, choices, judge(tasks, choices)), pytestconfig)


def test_no_answers_of_human_eval_are_lost(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    tasks = HUMAN_EVAL.tasks()
    choices = human_eval.ask_batch(assembled(CODER), tasks, tmp_path)
    compare(HUMAN_EVAL, keep_answers(HUMAN_EVAL, tasks, choices, judge(tasks, choices)), pytestconfig)


def compare(group: Group, right: dict[str, bool], config: pytest.Config) -> None:
    """Compare answers with the stored scores, or store them if --record was given."""
    if config.getoption("record"):
        store_score(group.name, right)
        return
    stored = stored_scores()[group.name]
    assert stored.keys() == right.keys(), "the tasks have changed: run scripts/test_real --record"
    lost = sorted(name for name in right if stored[name] and not right[name])
    won = sorted(name for name in right if right[name] and not stored[name])
    fewer = len(lost) - len(won)
    assert fewer <= group.tolerance, (
        f"{group.name}: {sum(right.values())} of {len(right)} answers are right, which is {fewer} fewer than stored.\n"
        f"now wrong: {lost}\nnow right: {won}"
    )
