"""Groups of tasks for real models, and functions that generate and judge all answers of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.real.answers import Choice
from tests.real.sandbox import run_all_untrusted
from tests.support.models.downloads import CODER, PartedModel
from tests.support.serving.serve_process import Served

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GREEDY = {"temperature": 0, "seed": 1}
PARALLEL = 16  # answers at a time


@dataclass(frozen=True)
class Task:
    """A request, and a way to judge its answer.

    name      unique in its group; the stored scores contain this name
    body      the request, without the sampling parameters
    is_right  returns whether the answer's only choice is right
    program   if given, turns a choice for which `is_right` is true into a program that fails if the answer is wrong
    path      the route
    """

    name: str
    body: Mapping[str, Any]
    is_right: Callable[[Choice], bool] = lambda _: True
    program: Callable[[Choice], str] | None = None
    path: str = CHAT


@dataclass(frozen=True)
class Group:
    """Tasks of one kind.

    tasks      returns the tasks
    tolerance  how many fewer answers may be right than in the stored scores. The same code always gives the same
               answers, but new prompts or numerics, for example, change a few answers by chance
    """

    name: str
    tasks: Callable[[], Sequence[Task]]
    tolerance: int
    model: PartedModel = CODER


def ask_server(server: Served, tasks: Sequence[Task]) -> list[Choice]:
    """Return the server's answer to each task."""

    def ask(task: Task) -> Choice:
        choice: Choice = server.post(task.path, **GREEDY, **task.body)["choices"][0]
        return choice

    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(ask, tasks))


def judge(tasks: Sequence[Task], choices: Sequence[Choice]) -> list[bool]:
    """Return whether each answer is right."""
    right = [task.is_right(choice) for task, choice in zip(tasks, choices, strict=True)]
    numbers = [number for number, task in enumerate(tasks) if task.program is not None and right[number]]
    programs = [program(choices[number]) for number in numbers if (program := tasks[number].program)]
    for number, verdict in zip(numbers, run_all_untrusted(programs), strict=True):
        right[number] = verdict.passed
    return right
