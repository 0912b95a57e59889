"""Tests with Codex, an agent that uses the Responses API."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli.tool_chats import RESULT, call, tool_script_file
from tests.support.serving.serve_process import Served, served

pytestmark = pytest.mark.clients

CODEX = Path(sys.prefix) / "npm" / "node_modules" / ".bin" / "codex"
THOUGHT = "<think>\nIt is easy.\n</think>\n\n"
PATCH = '*** Begin Patch\n*** Add File: patched.txt\n+say "é"\n*** End Patch\n'
SEARCH = {"name": "find.all", "description": "Finds.", "inputSchema": {"type": "object", "properties": {}}}
SEARCH_SERVER = f"""
import json, sys

INFO = {{"name": "search", "version": "1"}}
RESULTS = {{
    "initialize": {{"protocolVersion": "2025-06-18", "capabilities": {{"tools": {{}}}}, "serverInfo": INFO}},
    "tools/list": {{"tools": [{SEARCH!r}]}},
    "tools/call": {{"content": [{{"type": "text", "text": "found it"}}]}},
}}
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = RESULTS.get(message["method"], {{}})
        print(json.dumps({{"jsonrpc": "2.0", "id": message["id"], "result": result}}), flush=True)
"""
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a scripted model whose tokens are bytes. The first prompt has 40,000 tokens."""
    write, search = call("exec_command", cmd="echo written > made.txt"), call("mcp__search__find.all")
    answers = (
        ("Make a file.", f"{THOUGHT}{write}\n{search}"),
        ("Patch a file.", THOUGHT + call("apply_patch", input=PATCH)),
        (RESULT, f"{THOUGHT}The file is there."),
    )
    script = tool_script_file(tmp_path_factory.mktemp("script"), *answers)
    with served(script, "--backend", "scripted", "--ctx-size", "200000") as running:
        yield running


def run(server: Served, folder: Path, question: str, *flags: str) -> list[dict[str, Any]]:
    """Let the agent do a task in a folder, and return the items that it reports."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    (folder / "search.py").write_text(SEARCH_SERVER)
    (home / "config.toml").write_text(f"""
model = "{server.model}"
model_provider = "llmrun"

[model_providers.llmrun]
name = "llmrun"
base_url = "{server.url}"
wire_api = "responses"

[mcp_servers.search]
command = {json.dumps(sys.executable)}
args = [{json.dumps(str(folder / "search.py"))}]
startup_timeout_sec = {TIMEOUT_S}
""")
    done = subprocess.run(
        [CODEX, "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access", *flags, question],
        cwd=folder,
        env={**os.environ, "CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return [event["item"] for event in events if event["type"] == "item.completed"]


def test_the_agent_runs_tools_and_uses_their_results(server: Served, tmp_path: Path) -> None:
    """Codex offers the tools of MCP servers in namespaces, and by default also tools that OpenAI's servers run."""
    items = {item["type"]: item for item in run(server, tmp_path, "Make a file.")}
    search = items["mcp_tool_call"]
    assert items["command_execution"]["exit_code"] == 0
    assert (search["server"], search["tool"]) == ("search", "find.all")
    assert search["result"]["content"][0]["text"] == "found it"
    assert items["agent_message"]["text"] == "The file is there."
    assert (tmp_path / "made.txt").read_text() == "written\n"
    assert "without web_search" in server.lines[-1]


def test_the_agent_applies_a_patch(server: Served, tmp_path: Path) -> None:
    """`apply_patch` is a custom tool with a Lark grammar, which Codex offers for models in a catalog."""
    known = subprocess.run([CODEX, "debug", "models"], capture_output=True, timeout=TIMEOUT_S, check=True)
    models = json.loads(known.stdout)["models"]
    usual = next(model for model in models if model["apply_patch_tool_type"] and not model["use_responses_lite"])
    catalog = tmp_path / "catalog.json"
    catalog.write_text(json.dumps({"models": [{**usual, "slug": server.model}]}))
    changes, answer = run(server, tmp_path, "Patch a file.", "-c", f"model_catalog_json={shlex.quote(str(catalog))}")
    assert (changes["type"], changes["status"], answer["text"]) == ("file_change", "completed", "The file is there.")
    assert (tmp_path / "patched.txt").read_text() == 'say "é"\n'
