"""Tests with real MCP servers from PyPI, which scripts/test_clients installs."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

if sys.platform == "win32":
    pytest.skip("needs a POSIX terminal", allow_module_level=True)

import termios

from llmrun.base.errors import Cancelled
from llmrun.engine.tools.tool import Limits, ToolFailed
from llmrun.engine.tools.tools_file import ServerDeclaration, environment
from tests.support.cli.commands import modes_of_a_new_terminal, on_terminal
from tests.support.cli.tool_chats import RESULT, call, tool_script_file
from tests.support.tools.boxes import OpenBox, opened

BIN = Path(__file__).parents[3] / ".venv-clients" / "bin"
SDK_SERVER = Path(__file__).parents[2] / "support" / "servers" / "sdk_server.py"

PROMPT = "\x1b[?2004h"

pytestmark = pytest.mark.clients


def server(name: str, *command: str, timeout_s: float = 60.0) -> ServerDeclaration:
    return ServerDeclaration(name, (str(BIN / command[0]), *command[1:]), timeout_s=timeout_s)


@pytest.fixture
def sdk() -> Iterator[OpenBox]:
    """Yield a toolbox with a server that uses the official SDK."""
    with opened(server("sdk", "python", str(SDK_SERVER), timeout_s=2.0), limits=Limits()) as box:
        yield box


def test_the_time_server_answers() -> None:
    with opened(server("time", "mcp-server-time", "--local-timezone", "UTC")) as box:
        assert box.toolbox.names == ["get_current_time", "convert_time"]
        assert box.toolbox.describe("get_current_time").schema["required"] == ["timezone"]
        result = box.toolbox.call("get_current_time", {"timezone": "Asia/Tokyo"})
        assert json.loads(result.text)["timezone"] == "Asia/Tokyo"
        wrong = box.toolbox.call("get_current_time", {"timezone": "Mars/Olympus"})
        assert wrong.is_error
        assert "Mars/Olympus" in wrong.text
    assert box.notes == []


def test_the_fetch_server_runs_beside_another() -> None:
    with opened(server("fetch", "mcp-server-fetch"), server("time", "mcp-server-time")) as box:
        assert "fetch" in box.toolbox.names
        assert box.toolbox.call("fetch", {"url": "http://127.0.0.1:1/"}).is_error


def test_the_sdk_gets_and_gives_values(sdk: OpenBox) -> None:
    assert sdk.toolbox.names == ["add", "picture", "fail", "red", "sleep", "secrets", "crash"]
    assert sdk.toolbox.call("add", {"a": 2, "b": 3}).text == "5"
    assert sdk.toolbox.call("picture", {}).text == "[image: image/png, 3 bytes; not shown]"
    assert sdk.toolbox.call("add", {"a": "two"}).is_error


def test_errors_of_the_sdk_are_results(sdk: OpenBox) -> None:
    failed = sdk.toolbox.call("fail", {})
    assert failed.is_error
    assert "fail" in failed.text


def test_control_sequences_of_the_sdk_are_harmless_text(sdk: OpenBox) -> None:
    assert sdk.toolbox.call("red", {}).text == "\\x1b[31mred"


def test_a_call_to_the_sdk_times_out_and_the_next_works(sdk: OpenBox) -> None:
    with pytest.raises(ToolFailed, match="no answer within 2 s"):
        sdk.toolbox.call("sleep", {"seconds": 3})
    assert sdk.toolbox.call("add", {"a": 2, "b": 3}).text == "5"


def test_a_call_to_the_sdk_can_be_cancelled(sdk: OpenBox) -> None:
    event = threading.Event()
    threading.Timer(0.2, event.set).start()
    with pytest.raises(Cancelled):
        sdk.toolbox.call("sleep", {"seconds": 1}, event)
    assert sdk.toolbox.call("add", {"a": 2, "b": 3}).text == "5"


def test_the_sdk_sees_no_variable_of_ours(sdk: OpenBox) -> None:
    names = sdk.toolbox.call("secrets", {}).text.split()
    assert "PATH" in names
    assert not any("LLMRUN" in name for name in names)
    assert len(names) <= len(environment({})) + 2


CHAT_TOOLS = f"""
    [servers.time]
    command = [{str(BIN / "mcp-server-time")!r}, "--local-timezone", "UTC"]

    [servers.sdk]
    command = [{str(BIN / "python")!r}, {str(SDK_SERVER)!r}]
    timeout = 1.0
"""
CHAT_SCRIPT = (
    ("Time?", call("get_current_time", timezone="Asia/Tokyo")),
    ("Sleep?", call("sleep", seconds=30)),
    ("Crash?", call("crash")),
    ("Add?", call("add", a=2, b=3)),
    (RESULT, "I have seen it."),
)


def test_a_chat_on_a_terminal_calls_real_servers(tmp_path: Path) -> None:
    file = tmp_path / "tools.toml"
    file.write_text(CHAT_TOOLS)
    script = tool_script_file(tmp_path, *CHAT_SCRIPT)
    chat = on_terminal(
        "chat", "--backend", "scripted", script, "--tools", str(file), LLMRUN_DATA_DIR=str(tmp_path), NO_COLOR="1"
    )
    before = modes_of_a_new_terminal()
    chat.expect_exact("/help lists the commands")
    chat.expect_exact(PROMPT)
    chat.send("/tools\r")
    chat.expect_exact("get_current_time (server time)")
    chat.expect_exact("add (server sdk)  Add two numbers.")
    for question, answer, shown in (
        ("Time?", "y", 'result: { "timezone": "Asia/Tokyo"'),
        ("Time?", "n", "not run"),
        ("Sleep?", "y", "failed: tool sleep: no answer within 1 s"),
        ("Crash?", "y", "failed: tool crash: it ended: exit status 5"),
        ("Add?", "y", "result: 5 (1 characters, "),
    ):
        chat.expect_exact(PROMPT)
        chat.send(f"{question}\r")
        chat.expect_exact("[s]how details: ")
        chat.send(f"{answer}\r")
        chat.expect_exact(shown)
        chat.expect_exact("I have seen it.")
    chat.expect_exact(PROMPT)
    chat.send("\x04")
    chat.expect(pexpect.EOF)
    assert termios.tcgetattr(chat.child_fd) == before
    chat.close()
    assert chat.exitstatus == 0
