"""Tests of tools files: both formats, and one clear error for every mistake."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.engine.tools.tools_file import (
    CommandDeclaration,
    ServerDeclaration,
    ToolsFile,
    parse_tools_file,
    read_tools_file,
)

PYTHON = json.dumps(sys.executable)
PROGRAM = sys.executable
PARAMETERS = '{ type = "object", properties = { city = { type = "string" } }, required = ["city"] }'
SERVER = f"[servers.time]\ncommand = [{PYTHON}]\n"
COMMAND = f'[commands.weather]\ndescription = "The weather."\ncommand = [{PYTHON}, "{{city}}"]\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tools.toml"


def parsed(path: Path, text: str) -> ToolsFile:
    return parse_tools_file(text.encode(), path)


def refusal(path: Path, text: str) -> str:
    """Return the message without the file's name, and the hint in brackets."""
    with pytest.raises(UsageError) as refused:
        parsed(path, text)
    message = str(refused.value)
    assert message.startswith(f"tools: {path}: ")
    assert "\n" not in message
    hint = f" [{refused.value.hint}]" if refused.value.hint else ""
    return message.removeprefix(f"tools: {path}: ").replace(PROGRAM, "PYTHON") + hint


def test_toml_declares_servers_and_commands(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    text = f"""
    [servers.time]
    command = [{PYTHON}, "-m", "time"]
    env = {{ TZ = "UTC", TOKEN = "$MY_TOKEN", KEY = "${{MY_TOKEN}}", PRICE = "5$" }}
    cwd = "."
    timeout = 20
    start_timeout = 1.5
    safe = ["now"]

    [commands.weather]
    description = "The weather."
    command = [{PYTHON}, "--city={{city}}"]
    parameters = {PARAMETERS}
    stdin = "json"
    safe = true
    """
    declared = parsed(path, text)
    environment = {"TZ": "UTC", "TOKEN": "secret", "KEY": "secret", "PRICE": "5$"}
    server = ServerDeclaration("time", (PROGRAM, "-m", "time"), environment, path.parent, 20.0, 1.5, ("now",))
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    command = CommandDeclaration(
        "weather", "The weather.", (PROGRAM, "--city={city}"), schema, json_stdin=True, is_safe=True
    )
    assert declared == ToolsFile(path, (server,), (command,))
    assert "secret" not in repr(declared)


def test_the_json_of_other_hosts_is_read(path: Path) -> None:
    servers: dict[str, Any] = {
        "time": {"command": PROGRAM, "args": ["-m", "time"], "env": {"TZ": "UTC"}, "type": "stdio"},
        "off": {"command": "no-such-program", "disabled": True},
        "plain": {"command": PROGRAM, "autoApprove": ["everything"], "alwaysAllow": ["everything"]},
    }
    declared = parsed(path, json.dumps({"theme": "dark", "mcpServers": servers}))
    assert declared.servers == (
        ServerDeclaration("time", (PROGRAM, "-m", "time"), {"TZ": "UTC"}),
        ServerDeclaration("plain", (PROGRAM,)),
    )


def test_programs_are_searched_for_on_the_path_of_the_child(path: Path, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "my-tool"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = f'[servers.a]\ncommand = ["my-tool"]\nenv = {{ PATH = {json.dumps(str(program.parent))} }}\n'
    assert parsed(path, text).servers[0].command == (str(program),)
    assert parsed(path, '[servers.a]\ncommand = ["bin/my-tool"]\n').servers[0].command == (str(program),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "declares no tools [add a table [servers.NAME] or [commands.NAME]]"),
        ("[server.time]", "server: no such key [did you mean servers?]"),
        ("servers = 5", "servers: 5 is not a table"),
        ("[servers]\ntime = 5", "servers.time: 5 is not a table"),
        (
            "[servers.time]",
            'servers.time.command: missing; it must be a list of strings such as ["uvx", "mcp-server-time"]',
        ),
        (
            '[servers.time]\ncommand = "uvx time"',
            'servers.time.command: \'uvx time\' is not a list of strings such as ["uvx", "mcp-server-time"]',
        ),
        ("[servers.time]\ncommand = []", 'servers.time.command: empty [as in command = ["uvx", "mcp-server-time"]]'),
        (
            '[servers.time]\ncommand = ["no-such-program"]',
            "servers.time.command: 'no-such-program': no such program [install it, or give its path]",
        ),
        ('[servers.time]\ncommand = ["a\\u0000"]', "servers.time.command: contains a NUL character"),
        (SERVER + "timeot = 5", "servers.time.timeot: no such key [did you mean timeout?]"),
        (SERVER + "timeout = 0", "servers.time.timeout: 0 is not a number of seconds up to 3600"),
        (SERVER + 'timeout = "5"', "servers.time.timeout: '5' is not a number of seconds up to 3600"),
        (SERVER + "timeout = nan", "servers.time.timeout: nan is not a number of seconds up to 3600"),
        (SERVER + "timeout = true", "servers.time.timeout: True is not a number of seconds up to 3600"),
        (SERVER + "safe = true", 'servers.time.safe: True is not a list of strings such as ["get_current_time"]'),
        (SERVER + 'safe = ["a", "a"]', "servers.time.safe: 'a' is listed twice"),
        (SERVER + "env = 5", "servers.time.env: 5 is not a table"),
        (
            SERVER + "env = { A = 5 }",
            'servers.time.env.A: must be text without NUL characters [as in env = { TZ = "UTC" }]',
        ),
        (
            SERVER + 'env = { "A B" = "" }',
            "servers.time.env.A B: not a valid variable name [names are made of letters, digits and _]",
        ),
        (
            SERVER + 'env = { A = "$NO_VARIABLE" }',
            "servers.time.env.A: the environment variable NO_VARIABLE is not set [export NO_VARIABLE=... first]",
        ),
        (SERVER + 'cwd = "/no/such"', "servers.time.cwd: '/no/such' is not a folder"),
        (f'[servers."a\\n"]\ncommand = [{PYTHON}]', "servers.a\\n: 'a\\n' cannot be the name of a server"),
        (
            f'[commands."a b"]\ncommand = [{PYTHON}]',
            "commands.a b: not a valid name [use up to 64 letters, digits, _ and -]",
        ),
        (f"[commands.a]\ncommand = [{PYTHON}]", "commands.a.description: missing; it must be text"),
        (
            COMMAND,
            "commands.weather.command: {city} is not in parameters.properties "
            "[known: none; write {{city}} for the text {city}]",
        ),
        (
            COMMAND + 'parameters = { type = "object", properties = { town = {} } }',
            "commands.weather.command: {city} is not in parameters.properties "
            "[known: town; write {{city}} for the text {city}]",
        ),
        (
            COMMAND + 'parameters = { type = "object", properties = { city = {} } }',
            "commands.weather.command: {city} may have no value "
            "[add city to parameters.required, or give it a default]",
        ),
        (COMMAND + "parameters = 5", "commands.weather.parameters: 5 is not a table"),
        (COMMAND + 'parameters = { type = "string" }', 'commands.weather.parameters.type: must be "object"'),
        (
            COMMAND + 'parameters = { type = "object", properties = { city = 5 } }',
            "commands.weather.parameters.properties.city: 5 is not a table",
        ),
        (
            COMMAND + 'parameters = { type = "object", properties = { city = {} }, required = ["cty"] }',
            "commands.weather.parameters.required: 'cty' is not in properties [did you mean city?]",
        ),
        (
            COMMAND + 'parameters = { type = "object", properties = { city = { default = inf } } }',
            "commands.weather.parameters: contains a value that JSON cannot represent",
        ),
        (COMMAND + f'parameters = {PARAMETERS}\nstdin = "text"', "commands.weather.stdin: 'text' is not \"json\""),
        (COMMAND + f"parameters = {PARAMETERS}\nsafe = 1", "commands.weather.safe: 1 is not true or false"),
        (
            '[commands.a]\ndescription = "d"\ncommand = ["{a}"]',
            "commands.a.command: '{a}': the program cannot be a placeholder",
        ),
        ('{"servers": {}}', 'mcpServers: missing [as in {"mcpServers": {"time": {"command": "uvx", "args": []}}}]'),
        ('{"mcpServers": {}}', "mcpServers: declares no enabled servers"),
        ('{"mcpServers": {"a": {"comand": "x"}}}', "mcpServers.a.comand: no such key [did you mean command?]"),
        ('{"mcpServers": {"a": {"command": ["x"]}}}', "mcpServers.a.command: ['x'] is not text"),
        (
            '{"mcpServers": {"a": {"url": "http://x"}}}',
            "mcpServers.a: llmrun supports only stdio servers [use a bridge as the server's command]",
        ),
        ('{"mcpServers": {"a": {}, "a": {}}}', "not valid JSON: the key 'a' occurs twice"),
        ('{"mcpServers": ' + "[" * 100_000, "not valid JSON: nested too deeply"),
    ],
)
def test_mistakes_are_named(path: Path, text: str, message: str) -> None:
    assert refusal(path, text) == message


def test_duplicates_and_syntax_errors_are_refused(path: Path) -> None:
    assert refusal(path, SERVER + SERVER).startswith("not valid TOML: ")
    assert refusal(path, "{").startswith("not valid JSON: ")
    with pytest.raises(UsageError, match="not UTF-8: byte 0xff at offset 0"):
        parse_tools_file(b"\xff", path)


@pytest.mark.parametrize("text", [SERVER, '{"mcpServers": {"a": {"command": "true"}}}'])
def test_tools_files_may_have_a_byte_order_mark(path: Path, text: str) -> None:
    assert parse_tools_file(text.encode("utf-8-sig"), path) == parse_tools_file(text.encode(), path)
    with pytest.raises(UsageError, match=r"tools: .*not UTF-8, but UTF-16"):
        parse_tools_file(text.encode("utf-16"), path)


def test_a_program_that_is_not_executable_gets_a_hint(path: Path) -> None:
    (path.parent / "tool").write_text("")
    assert "[make it executable: chmod +x " in refusal(path, '[servers.a]\ncommand = ["./tool"]\n')


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_tools_file(tmp_path / "missing")
    with pytest.raises(UsageError, match="not a file"):
        read_tools_file(tmp_path)
    (tmp_path / "large").write_text("#" * (1 << 20) + "\n")
    with pytest.raises(UsageError, match="more than 1 MiB"):
        read_tools_file(tmp_path / "large")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(PROGRAM),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["command", "args", "env", "cwd", "timeout", "safe", "type", "disabled", "url", "a"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=10,
)


@given(VALUES, VALUES)
def test_any_json_is_declared_or_refused(entry: Any, whole: Any) -> None:
    messages = []
    for value in ({"mcpServers": {"a": entry}}, {"mcpServers": whole}):
        try:
            parse_tools_file(json.dumps(value).encode(), Path("/tmp/tools.json"))
        except UsageError as error:
            messages.append(str(error))
    assert not any("\n" in message for message in messages)


def test_the_examples_of_the_documentation_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrun.engine.tools.tools_file.shutil.which", lambda program, path: f"/bin/{program}")
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text("utf-8")
    toml, other = re.findall(r"```(?:toml|json)\n(.*?)```", page, re.DOTALL)
    found = parsed(path, toml)
    assert [server.name for server in found.servers] == ["time"]
    assert found.commands[0].command[1:] == ("log", "--oneline", "--grep={text}")
    assert parsed(path, other).servers[0].command[1:] == ("mcp-server-time",)
