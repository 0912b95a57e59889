"""Tests with the command-line program `llm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.serving.serve_process import Served

pytestmark = pytest.mark.clients

Run = Callable[..., str]


@pytest.fixture
def llm(tmp_path: Path, real: Served, tools: Served) -> Run:
    """Run `llm` with the models `ours` and `tools`, in a folder of its own."""
    entries = [
        {"model_id": name, "model_name": server.model, "api_base": server.url, "supports_schema": True, **more}
        for name, server, more in (("ours", real, {}), ("tools", tools, {"supports_tools": True}))
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(entries))  # JSON is YAML
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("llm")), *arguments],
            capture_output=True,
            text=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_prompt_is_answered(llm: Run) -> None:
    flags = ("-o", "temperature", "0", "-o", "max_tokens", "12")
    whole = llm("-m", "ours", "--no-stream", *flags, "Say hello in French.")
    assert whole.startswith("Bonjour")
    assert llm("-m", "ours", *flags, "Say hello in French.") == whole


def test_a_chat_is_continued(llm: Run) -> None:
    llm("-m", "tools", "Hello?")
    assert llm("-c", "Think?").strip() == "Yes."
    logs = json.loads(llm("logs", "--json"))
    assert [log["prompt"] for log in logs] == ["Hello?", "Think?"]
    assert logs[0]["conversation_id"] == logs[1]["conversation_id"]
    assert logs[1]["input_tokens"] > logs[0]["input_tokens"]


def test_schemas_hold(llm: Run) -> None:
    written = llm("-m", "ours", "--schema", "name, legs int", "-o", "seed", "1", "-o", "max_tokens", "200", "A fox")
    assert isinstance(json.loads(written)["legs"], int)


def test_a_tool_is_called_and_its_result_used(llm: Run) -> None:
    functions = "def get_weather(city: str, days: int) -> str:\n    return f'{city}: clear for {days} days'"
    assert "It is sunny." in llm("-m", "tools", "--functions", functions, "Weather?")
