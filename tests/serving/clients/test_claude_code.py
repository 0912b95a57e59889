"""Tests with Claude Code, an agent that uses Anthropic's API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.tool_chats import RESULT, call, tool_script_file
from tests.support.serving.serve_process import Served, served

pytestmark = pytest.mark.clients

CLAUDE_CODE = Path(sys.prefix) / "npm" / "node_modules" / ".bin" / "claude"
ENDING = "</system-reminder>"  # its first prompt ends with a system message
THOUGHT = "<think>\nIt is easy.\n</think>\n\n"
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokens are bytes, of which the first prompt has 77,000."""
    command = call("Bash", command="echo written > made.txt", description="Write a file")
    answers = ((ENDING, THOUGHT + command), (RESULT, f"{THOUGHT}The file is there."))
    return tool_script_file(tmp_path_factory.mktemp("script"), *answers)


@pytest.fixture(scope="module")
def server(script: str) -> Iterator[Served]:
    with served(script, "--backend", "scripted", "--ctx-size", "200000") as running:
        yield running


def run(server: Served, folder: Path, model: str) -> tuple[int, dict[str, Any]]:
    """Let the agent do a task in a folder, and return its exit code and what it reports."""
    environment = {
        "HOME": str(folder / "home"),
        "ANTHROPIC_BASE_URL": server.url.removesuffix("/v1"),
        "ANTHROPIC_AUTH_TOKEN": "unused",
        "ANTHROPIC_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    done = subprocess.run(
        [CLAUDE_CODE, "-p", "Make a file.", "--allowedTools", "Bash", "--output-format", "json"],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def test_the_agent_runs_a_tool_and_uses_its_result(server: Served, tmp_path: Path) -> None:
    code, report = run(server, tmp_path, server.model)
    assert (code, report["result"], report["num_turns"]) == (0, "The file is there.", 2)
    assert (tmp_path / "made.txt").read_text() == "written\n"
    usage = report["usage"]
    assert usage["cache_read_input_tokens"] > 70_000, "the second request reuses the prompt of the first one"


def test_the_agent_understands_that_a_model_is_missing(server: Served, tmp_path: Path) -> None:
    code, report = run(server, tmp_path, "claude-opus-4-8")
    assert (code, report["is_error"], report["api_error_status"]) == (1, True, 404)


def test_the_agent_reads_how_much_too_long_its_prompt_is(script: str, tmp_path: Path) -> None:
    with served(script, "--backend", "scripted", "--ctx-size", "20000") as small:
        _, report = run(small, tmp_path, small.model)
    assert report["result"].startswith("Prompt is too long")
    assert "limit 20000" in report["result"]
