"""Tests that calls which a real model writes as text become calls, and that nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.real.answers import calls_of
from tests.real.conftest import Servers
from tests.real.groups import Task, ask_server
from tests.real.tool_text import needed_tasks, shown_tasks, written_call
from tests.support.models.downloads import CODER

pytestmark = pytest.mark.real

_LEAST = 0.95  # share of the written calls that become calls


@pytest.mark.parametrize("tasks", [needed_tasks, shown_tasks])
def test_exactly_written_calls_become_calls(
    servers: Servers, tasks: Callable[[], list[Task]], record_property: Callable[[str, object], None]
) -> None:
    """With the same prompt and seed, the model writes the same text, whether or not the server reads calls in it."""
    asked = tasks()
    as_calls = ask_server(servers.of(CODER), asked)
    as_text = ask_server(servers.of(CODER, tool_text="off"), asked)
    written = kept = 0
    for task, call, text in zip(asked, as_calls, as_text, strict=True):
        expected = written_call(text)
        if expected is not None:
            written += 1
            kept += calls_of(call) == [expected]
        else:
            assert calls_of(call) == calls_of(text), task.name
    record_property(f"answers of {len(asked)} {tasks.__name__} are written calls", written)
    record_property(f"answers of {len(asked)} {tasks.__name__} became calls", sum(bool(calls_of(c)) for c in as_calls))
    assert kept >= _LEAST * written
