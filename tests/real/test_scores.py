"""Tests that real models answer as many tasks correctly as in the stored scores.

`scripts/test_real --record` stores new scores, in scores.json. The answers of the last run are in
.tests-cache/real/GROUP.jsonl.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real import edits, human_eval, infill, long_prompts, programs, schemas, tool_choice
from tests.real.conftest import Servers
from tests.real.groups import Group, ask_server
from tests.real.scores import check_score
from tests.support.models.downloads import CODER, GEMMA, assembled

pytestmark = pytest.mark.real

GROUPS = [
    Group("tool choice", tool_choice.tasks, tolerance=2),
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
    check_score(group, tasks, choices, is_new=pytestconfig.getoption("record"))


def test_no_answers_of_human_eval_are_lost(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    tasks = HUMAN_EVAL.tasks()
    choices = human_eval.ask_batch(assembled(CODER), tasks, tmp_path)
    check_score(HUMAN_EVAL, tasks, choices, is_new=pytestconfig.getoption("record"))
