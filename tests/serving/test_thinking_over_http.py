"""Tests that every route answers requests with any combination of the fields for thinking."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cli.tool_chats import tool_script_file
from tests.support.serving.serve_process import Served, served

USER = {"messages": [{"role": "user", "content": "Why?"}]}
EFFORTS = (None, "none", "low")
SWITCHES = (None, False, True)
BUDGETS = (None, 5)
VARIABLES: tuple[dict[str, Any] | None, ...] = (
    None,
    {"thinking": True, "enable_thinking": False},
    {"enable_thinking": "no", "reasoning_effort": "high"},
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    script = tool_script_file(tmp_path_factory.mktemp("script"), ("Why?", "<think>\nHm.\n</think>\n\nSo."))
    with served(script, "--backend", "scripted") as running:
        yield running


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the route and the body of each request."""
    for effort, switch, budget, variables in itertools.product(EFFORTS, SWITCHES, BUDGETS, VARIABLES):
        more = {"enable_thinking": switch, "think_budget": budget, "chat_template_kwargs": variables}
        yield "/v1/chat/completions", {**USER, **more, "reasoning_effort": effort}
        yield "/v1/responses", {"input": "Why?", **more, "reasoning": {"effort": effort}}
    for effort, kind in itertools.product(EFFORTS, ({"type": "disabled"}, {"type": "adaptive"}, None)):
        body = {**USER, "model": "script", "max_tokens": 30, "thinking": kind}
        yield "/v1/messages", {**body, "output_config": {} if effort in (None, "none") else {"effort": effort}}
    for think in (None, False, True, "low", "high"):
        yield "/api/chat", {**USER, "model": "script", "think": think}
        yield "/api/generate", {"prompt": "Why?", "model": "script", "think": think}


@pytest.mark.push
def test_no_combination_fails(server: Served) -> None:
    for route, body in bodies():
        status, _, received = server.call("POST", route, {**body, "stream": False})
        assert status == 200, (route, body, received)
