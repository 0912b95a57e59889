"""Servers for tests with other programs' clients.

The clients of OpenAI and Anthropic are also installed in .venv, so their tests run in both environments, with different
versions. The other tests run only in .venv-clients; see scripts/test_clients.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.cli.tool_chats import RESULT, call, tool_script_file
from tests.support.models.downloads import smollm2
from tests.support.serving.serve_process import Served, served

_PACKAGES = {
    "test_langchain.py": "langchain_openai",
    "test_litellm.py": "litellm",
    "test_llm.py": "llm",
    "test_ollama.py": "ollama",
    "test_open_responses.py": "openresponses_types",
}
_AGENTS = {"test_claude_code.py": "claude", "test_codex.py": "codex", "test_launch.py": "claude"}
_PROGRAMS = Path(sys.prefix) / "npm" / "node_modules" / ".bin"
collect_ignore = [file for file, package in _PACKAGES.items() if find_spec(package) is None]
collect_ignore += [file for file, program in _AGENTS.items() if not (_PROGRAMS / program).exists()]


@pytest.fixture(scope="session")
def real() -> Iterator[Served]:
    """A server with a real model, which is too small for tools."""
    with served(str(smollm2())) as running:
        yield running


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a scripted model that calls tools, with the chat template of Qwen3."""
    script = tool_script_file(
        tmp_path_factory.mktemp("tools"),
        ("Weather?", call("get_weather", city="Paris", days=2)),
        ("Both?", call("get_weather", city="Paris", days=1) + "\n" + call("get_weather", city="Rome", days=1)),
        ("Think?", "<think>\nIt is easy.\n</think>\n\nYes."),
        (RESULT, "It is sunny."),
        ("Hello?", "Hello!"),
    )
    with served(script, "--backend", "scripted") as running:
        yield running


@pytest.fixture(scope="session")
def seeing() -> Iterator[Served]:
    """A server with a scripted model that reads images."""
    with served("scripted", "--backend", "scripted", "--mmproj", "scripted") as running:
        yield running


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Served]:
    """A server that answers one request at a time, slowly, and lets one more wait."""
    script = tmp_path / "slow.json"
    script.write_text(json.dumps({"step_seconds": 0.02}))
    flags = ("--backend", "scripted", "--parallel", "1", "--max-queue", "1", "--drain", "0")
    with served(str(script), *flags) as running:
        yield running
