"""Tests that calls in plain JSON by a real model become calls, and that no other answers do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.real.answers import calls_of
from tests.real.conftest import Servers
from tests.real.groups import Group, ask_server
from tests.real.scores import check_score
from tests.real.tool_text import needed_tasks, shown_tasks, written_call

pytestmark = pytest.mark.real

_LEAST = 0.95  # the smallest accepted share of written calls that become calls


@pytest.mark.parametrize(
    "group",
    [Group("call needed", needed_tasks, tolerance=1), Group("JSON shown", shown_tasks, tolerance=1)],
    ids=["call-needed", "JSON-shown"],
)
def test_exactly_written_calls_become_calls(
    group: Group, servers: Servers, record_property: Callable[[str, object], None], pytestconfig: pytest.Config
) -> None:
    """With the same prompt and seed, the model writes the same text, whether or not the server looks for calls."""
    tasks = group.tasks()
    as_calls = ask_server(servers.of(group.model), tasks)
    as_text = ask_server(servers.of(group.model, tool_text="off"), tasks)
    written = {task.name: call for task, text in zip(tasks, as_text, strict=True) if (call := written_call(text))}
    called = {task.name: calls_of(answer) for task, answer in zip(tasks, as_calls, strict=True)}
    record_property(f"written calls ({group.name})", len(written))
    record_property(f"answers with calls ({group.name})", sum(map(bool, called.values())))
    without = {task.name: calls_of(text) for task, text in zip(tasks, as_text, strict=True)}
    assert {name: calls for name, calls in called.items() if name not in written and calls != without[name]} == {}
    assert sum(called[name] == [call] for name, call in written.items()) >= _LEAST * len(written)
    check_score(group, tasks, as_calls, is_new=pytestconfig.getoption("record"))
