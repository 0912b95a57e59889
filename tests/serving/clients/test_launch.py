"""Tests of `llmrun launch` with real agents and a scripted model whose tokens are bytes.

The user's settings of each agent name another provider, which does not exist.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.tool_chats import RESULT, call, tool_script_file
from tests.support.serving.serve_process import PYTHON, ROOT

pytestmark = pytest.mark.clients

PLACES = [Path(sys.prefix, *folders, "bin") for folders in ((), ("aider",), ("gptme",))]
PATH = os.pathsep.join(map(str, (Path(sys.prefix, "npm", "node_modules", ".bin"), *PLACES, os.environ["PATH"])))
QUESTION, ANSWER = "Make a file.", "<think>\nIt is easy.\n</think>\n\nThe file is there."
OTHER = "http://127.0.0.1:9/v1"
COMMAND = "echo written > made.txt"
TIMEOUT_S = 240


@dataclass
class Case:
    """How to use an agent without a terminal.

    arguments  for the agent; {} stands for the question
    tool       the name of the tool that runs commands, and its arguments
    settings   the user's settings: files below the home, and their contents
    ending     what the first prompt ends with
    """

    program: str
    arguments: tuple[str, ...]
    tool: tuple[str, dict[str, Any]]
    settings: dict[str, str] = field(default_factory=dict)
    ending: str = QUESTION


_PROVIDER = {"baseUrl": OTHER, "api": "openai-completions", "apiKey": "other", "models": [{"id": "other"}]}
_ENTRY = {
    "settings": {"provider": "openai-compatible", "model": "other", "baseUrl": OTHER, "apiKey": "other"},
    "updatedAt": "2026-01-01T00:00:00.000Z",
    "tokenSource": "manual",
}
_OPENCODE = {"$schema": "https://opencode.ai/config.json", "model": "other/other", "small_model": "other/other"}
_QWEN_CODE = {"model": {"name": "other"}, "security": {"auth": {"baseUrl": OTHER}}, "$version": 4}
CASES = {
    "codex": Case(
        "codex",
        ("exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "{}"),
        ("exec_command", {"cmd": COMMAND}),
        {
            ".codex/config.toml": 'model = "other"\nmodel_provider = "other"\n\n[model_providers.other]\n'
            f'name = "other"\nbase_url = "{OTHER}"\nwire_api = "responses"\n'
        },
    ),
    "claude": Case(
        "claude",
        ("-p", "{}", "--allowedTools", "Bash"),
        ("Bash", {"command": COMMAND, "description": "Write a file"}),
        {
            ".claude/settings.json": json.dumps(
                {"env": {"ANTHROPIC_BASE_URL": OTHER, "ANTHROPIC_AUTH_TOKEN": "other"}, "model": "other"}
            )
        },
        ending="</system-reminder>",  # the end of a later system message
    ),
    "opencode": Case(
        "opencode",
        ("run", "{}"),
        ("bash", {"command": COMMAND}),
        {".config/opencode/opencode.json": json.dumps(_OPENCODE)},
        ending=f'{QUESTION}"',
    ),
    "cline": Case(
        "cline",
        ("{}",),
        ("run_commands", {"commands": [COMMAND]}),
        {
            ".cline/data/settings/providers.json": json.dumps(
                {
                    "version": 1,
                    "lastUsedProvider": "openai-compatible",
                    "modes": {},
                    "providers": {"openai-compatible": _ENTRY},
                }
            )
        },
    ),
    "continue": Case(
        "cn",
        ("-p", "--auto", "{}"),
        ("Bash", {"command": COMMAND}),
        {
            ".continue/config.yaml": "name: other\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: other\n"
            f"    provider: openai\n    model: other\n    apiBase: {OTHER}\n    apiKey: other\n"
        },
    ),
    "pi": Case(
        "pi",
        ("-p", "{}"),
        ("bash", {"command": COMMAND}),
        {
            ".pi/agent/models.json": json.dumps({"providers": {"other": _PROVIDER}}),
            ".pi/agent/settings.json": json.dumps({"defaultProvider": "other", "defaultModel": "other"}),
        },
    ),
    "qwen-code": Case(
        "qwen",
        ("--yolo", "-p", "{}"),
        ("run_shell_command", {"command": COMMAND, "is_background": False}),
        {".qwen/settings.json": json.dumps(_QWEN_CODE)},
    ),
    "gptme": Case(
        "gptme",
        ("--non-interactive", "{}"),
        ("shell", {"command": COMMAND}),
        {".config/gptme/config.toml": f'[env]\nMODEL = "local/other"\nOPENAI_BASE_URL = "{OTHER}"\n'},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_agents_use_our_model_and_leave_the_users_files_alone(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if shutil.which(case.program, path=PATH) is None:
        pytest.skip(f"{case.program} is not installed; scripts/test_clients installs it")
    home, project = tmp_path / "home", tmp_path / "project"
    project.mkdir()
    for path, text in case.settings.items():
        (home / path).parent.mkdir(parents=True, exist_ok=True)
        (home / path).write_text(text)
    tool, arguments = case.tool
    done = call("complete") if name == "gptme" else ANSWER
    script = tool_script_file(tmp_path, (case.ending, call(tool, **arguments)), (RESULT, done))
    environment = {key: os.environ[key] for key in ("LANG", "PYTHONPATH") if key in os.environ}
    agent_arguments = [argument.format(QUESTION) for argument in case.arguments]
    run = subprocess.run(
        [PYTHON, "-m", "llmrun", "launch", name, "-m", script, "-c", "200000", "--", *agent_arguments],
        cwd=project,
        env={
            **environment,
            "HOME": str(home),
            "PATH": PATH,
            "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
            "LLMRUN_BACKEND": "scripted",
            "LLMRUN_DATA_DIR": str(tmp_path / "data"),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert (project / "made.txt").exists(), run.stdout + run.stderr
    assert "The file is there." in run.stdout or name == "gptme"
    assert {path: (home / path).read_text() for path in case.settings} == case.settings
    left = {path.name for path in (tmp_path / "data").rglob("*")}
    assert not left & {"providers.json", "config.yaml", "llmrun.js", "system-defaults.json"}, "our files are removed"
