"""Tests of toolboxes with well-behaved servers: names, calls, restarts, environments and the end of processes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from llmrun.base.errors import Cancelled
from llmrun.engine.tools.mcp_server import McpServer
from llmrun.engine.tools.tool import ToolFailed
from llmrun.engine.tools.toolbox import Toolbox
from llmrun.engine.tools.tools_file import environment
from tests.support.tools.boxes import fake_server, opened, python_command

SECRETS = ("LLMRUN_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK", "PYTHONPATH")


def logged(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def is_alive(pid: int) -> bool:
    """Return whether a process runs. A zombie does not count."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_call_returns_the_text() -> None:
    with opened(fake_server("echo")) as box:
        result = box.toolbox.call("echo", {"text": "hello"})
        assert (result.text, result.is_error, result.truncated) == ("hello", False, False)
        assert 0 < result.seconds < 30
        assert box.notes == []


def test_definitions_are_openai_tools() -> None:
    with opened(fake_server("echo"), python_command("print(1)")) as box:
        command, echo = box.toolbox.definitions
        assert command["function"]["name"] == "program"
        assert echo == {
            "type": "function",
            "function": {
                "name": "echo",
                "description": "Repeat a text.",
                "parameters": {
                    "type": "object",
                    "properties": {"text": {"type": "string"}},
                    "required": ["text"],
                },
            },
        }


def test_the_handshake_follows_the_protocol(tmp_path: Path) -> None:
    with opened(fake_server("logs", str(tmp_path / "log"))) as box:
        box.toolbox.call("echo", {"text": "é\ud800"})
        first, second, third, call = logged(tmp_path / "log")
    assert first["params"]["protocolVersion"] == "2025-06-18"
    assert first["params"]["capabilities"] == {}
    assert second == {"jsonrpc": "2.0", "method": "notifications/initialized"}
    assert (third["method"], third["params"]) == ("tools/list", {})
    assert (call["method"], call["params"]) == ("tools/call", {"name": "echo", "arguments": {"text": "é\ud800"}})


@pytest.mark.parametrize("revision", ["2025-06-18", "2025-03-26", "2024-11-05"])
def test_older_revisions_are_spoken(revision: str) -> None:
    with opened(fake_server("revision", revision)) as box:
        assert box.toolbox.names == ["echo"]


def test_an_unknown_revision_is_refused() -> None:
    with opened(fake_server("revision", "2099-01-01\x1b[2J")) as box:
        assert box.toolbox.names == []
    assert box.notes == [
        "tools: fake: this server is left out: the server uses MCP revision 2099-01-01\\x1b[2J, but llmrun supports "
        "only 2025-06-18, 2025-03-26, 2024-11-05"
    ]


def test_all_pages_of_tools_are_listed() -> None:
    with opened(fake_server("pages")) as box:
        assert box.toolbox.names == ["echo-0", "echo-1", "echo-2"]


def test_one_failing_server_does_not_stop_the_others() -> None:
    with opened(fake_server("dies at start", name="broken"), fake_server("echo")) as box:
        assert box.toolbox.call("echo", {"text": "yes"}).text == "yes"
    assert box.toolbox.failures == {"broken": "it ended: exit status 3: no such module: time"}
    assert box.notes == ["tools: broken: this server is left out: it ended: exit status 3: no such module: time"]


def test_an_unexpected_error_at_the_start_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(server: McpServer, cancelled: object) -> None:
        raise RuntimeError("can't start\nnew thread\x1b[2J")

    monkeypatch.setattr(McpServer, "start", start)
    with opened(fake_server("echo")) as box:
        assert box.toolbox.names == []
    (why,) = box.toolbox.failures.values()
    assert why.startswith("unexpected error: RuntimeError: can't start")
    assert why.isprintable()
    assert box.notes == [f"tools: fake: this server is left out: {why}"]
    assert capsys.readouterr().err == ""


def test_same_names_of_two_servers_get_prefixes() -> None:
    with opened(fake_server("echo", name="one"), fake_server("echo", name="two")) as box:
        assert box.toolbox.names == ["one_echo", "two_echo"]
        assert box.toolbox.describe("two_echo").original == "echo"
        assert box.toolbox.describe("two_echo").server == "two"


def test_an_unknown_tool_gets_a_suggestion() -> None:
    with opened(fake_server("echo")) as box, pytest.raises(ToolFailed, match="no such tool") as failed:
        box.toolbox.call("ecko\x1b", {})
    assert failed.value.hint == "did you mean echo?"
    assert "\x1b" not in str(failed.value)


def test_invalid_arguments_are_not_sent(tmp_path: Path) -> None:
    def validate(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str | None:
        return None if set(schema["required"]) <= set(arguments) else "text\nis missing"

    with opened(fake_server("logs", str(tmp_path / "log")), validate=validate) as box:
        result = box.toolbox.call("echo", {})
        assert (result.text, result.is_error) == ("invalid arguments: text\\nis missing", True)
        assert not any(message["method"] == "tools/call" for message in logged(tmp_path / "log"))
        assert box.toolbox.call("echo", {"text": "there"}).text == "there"


@pytest.mark.parametrize("arguments", [[], "text", {"text": float("nan")}, {"text": object()}])
def test_arguments_that_are_not_json_are_not_sent(arguments: Any) -> None:
    with opened(fake_server("echo")) as box:
        assert box.toolbox.call("echo", arguments).is_error


def test_no_key_of_ours_reaches_a_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "a secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    dump = python_command("import json, os; print(json.dumps(dict(os.environ)))")
    with opened(fake_server("environment", environment={"TZ": "UTC"}), dump) as box:
        for name in ("echo", "program"):
            seen = json.loads(box.toolbox.call(name, {}).text)
            assert "a secret" not in seen.values()
            assert (seen["PATH"], seen["LANG"]) == (os.environ["PATH"], "C.UTF-8")
            assert set(seen) <= set(environment({})) | {"TZ", "LC_CTYPE"}  # Python itself may set LC_CTYPE
        assert json.loads(box.toolbox.call("echo", {}).text)["TZ"] == "UTC"


def test_declared_variables_win() -> None:
    assert environment({"PATH": "/nowhere", "HF_TOKEN": "mine"})["PATH"] == "/nowhere"
    assert environment({"PATH": "/nowhere", "HF_TOKEN": "mine"})["HF_TOKEN"] == "mine"


def test_a_dead_server_is_restarted_for_the_next_call(tmp_path: Path) -> None:
    with opened(fake_server("dies once", str(tmp_path / "died"))) as box:
        with pytest.raises(ToolFailed, match="tool echo: it ended: exit status 4"):
            box.toolbox.call("echo", {"text": "first"})
        assert box.toolbox.call("echo", {"text": "second"}).text == "second"
        assert (tmp_path / "died").exists()


def test_changed_tools_are_listed_again(tmp_path: Path) -> None:
    tools = tmp_path / "tools.json"
    first: dict[str, Any] = {"name": "one", "inputSchema": {"type": "object"}}
    tools.write_text(json.dumps([first]))
    with opened(fake_server("tools in a file", str(tools))) as box:
        assert not box.toolbox.refresh()
        tools.write_text(json.dumps([first, {**first, "name": "two"}]))
        announce = next(iter(box.toolbox._servers))._connection
        assert announce is not None
        announce.tools_changed.set()
        assert box.toolbox.names == ["one"]
        assert box.toolbox.refresh()
        assert box.toolbox.names == ["one", "two"]


def test_a_server_can_report_changed_tools() -> None:
    with opened(fake_server("changes")) as box:
        box.toolbox.call("echo", {})
        assert box.toolbox.refresh()
        assert not box.toolbox.refresh()


@pytest.mark.push
def test_servers_start_at_the_same_time() -> None:
    slow = [fake_server("never answers", name=f"slow-{number}", start_timeout_s=0.5) for number in range(4)]
    started = time.monotonic()
    with opened(*slow) as box:
        assert len(box.toolbox.failures) == 4
    assert time.monotonic() - started < 2 * 4 * 0.5


def test_progress_names_the_servers_that_are_starting() -> None:
    seen: list[str] = []
    with opened(fake_server("echo", name="time"), progress=seen.append):
        assert seen[0] == "starting tool servers: time"


@pytest.mark.push
@pytest.mark.parametrize("use_event", [True, False])
def test_a_call_can_be_cancelled(tmp_path: Path, use_event: bool) -> None:
    event = threading.Event()
    with opened(fake_server("hangs", str(tmp_path / "log"))) as box:
        threading.Timer(0.1, event.set).start()
        with pytest.raises(Cancelled, match="tool echo: cancelled"):
            box.toolbox.call("echo", {}, event if use_event else event.is_set)
    last = logged(tmp_path / "log")[-1]
    assert last["method"] == "notifications/cancelled"
    assert last["params"] == {"requestId": 3, "reason": "cancelled by the user"}


@pytest.mark.push
def test_ctrl_c_while_servers_start_kills_them() -> None:
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), opened(fake_server("never answers"), progress=interrupt):
        pass
    assert time.monotonic() - started < 20


def test_closing_kills_the_whole_process_group() -> None:
    with opened(fake_server("grandchild")) as box:
        pid = int(box.toolbox.call("echo", {}).text)
        assert is_alive(pid)
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


@pytest.mark.push
def test_closing_ends_servers_that_ignore_sigterm() -> None:
    with opened(fake_server("stubborn")) as box:
        server = next(iter(box.toolbox._servers))
        connection = server._connection
        assert connection is not None
        started = time.monotonic()
    assert time.monotonic() - started < 20
    assert connection._child.status == -9
    box.toolbox.close()


def test_a_missing_program_is_a_failure(tmp_path: Path) -> None:
    with opened(fake_server("echo", command=(str(tmp_path / "gone"),))) as box:
        assert "No such file or directory" in box.toolbox.failures["fake"]


def test_a_path_opens_the_file(tmp_path: Path) -> None:
    server = fake_server("echo")
    path = tmp_path / "tools.toml"
    path.write_text(f"[servers.fake]\ncommand = {json.dumps(list(server.command))}\n")
    with Toolbox.open(path) as toolbox:
        assert toolbox.names == ["echo"]
