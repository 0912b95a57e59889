"""Reads the file that declares tools, in TOML or in the JSON format of other MCP hosts.

    [servers.time]
    command = ["uvx", "mcp-server-time"]
    env = { TZ = "UTC" }
    safe = ["get_current_time"]

    [commands.weather]
    description = "Get the weather of a city."
    command = ["weather", "--city", "{city}"]
    parameters = { type = "object", properties = { city = { type = "string" } }, required = ["city"] }

    {"mcpServers": {"time": {"command": "uvx", "args": ["mcp-server-time"]}}}

Relative paths to programs and working directories start at the folder of the file.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmrun.base.errors import UsageError
from llmrun.engine.tools.declared import START_TIMEOUT_S, TIMEOUT_S, CommandDeclaration, ServerDeclaration, ToolsFile
from llmrun.engine.tools.environment import environment
from llmrun.engine.tools.file_checks import Table, nearest
from llmrun.engine.tools.names import NAME
from llmrun.engine.tools.placeholders import placeholders
from llmrun.engine.tools.untrusted import decode_json

_LARGEST = 1 << 20  # bytes
_DEEPEST = 64
_SERVER_KEYS = ("command", "env", "cwd", "timeout", "start_timeout", "safe")
_COMMAND_KEYS = ("description", "command", "parameters", "stdin", "env", "cwd", "timeout", "safe")
_JSON_SERVERS = "mcpServers"
_JSON_KEYS = ("command", "args", "type", "disabled", *_SERVER_KEYS[1:])
# Keys of other hosts that do not change how a server runs. Tools that are approved there still need a mark here.
_IGNORED_KEYS = ("alwaysAllow", "autoApprove", "description", "disabledTools", "trust")
_EXAMPLE = '["uvx", "mcp-server-time"]'
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def read_tools_file(path: Path) -> ToolsFile:
    """Read a tools file. Raises UsageError."""
    try:
        if path.exists() and not path.is_file():  # reading from a pipe might never end
            raise UsageError(f"tools: {path}: not a file")
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError(f"tools: {path}: {error.strerror or error}") from error
    if len(data) > _LARGEST:
        raise UsageError(f"tools: {path}: more than {_LARGEST >> 20} MiB")
    return parse_tools_file(data, path)


def parse_tools_file(data: bytes, path: Path) -> ToolsFile:
    """Parse the bytes of a tools file, which is JSON if it begins with a brace. Raises UsageError.

    The programs must exist, because a misspelled name is a mistake in the file.
    """
    data = data.removeprefix(b"\xef\xbb\xbf")
    if data.lstrip().startswith(b"{"):
        return _from_json(data, path)
    import tomllib  # imported here, because it takes 5 ms

    try:
        whole = Table(path, "", tomllib.loads(data.decode("utf-8")))
    except (ValueError, RecursionError) as error:  # ValueError means invalid TOML or UTF-8, or too many digits
        raise UsageError(f"tools: {path}: not valid TOML: {error}") from None
    whole.check_keys(("servers", "commands"))
    servers, commands = whole.table("servers"), whole.table("commands")
    if not servers.values and not commands.values:
        raise whole.error("", "declares no tools", "add a table [servers.NAME] or [commands.NAME]")
    return ToolsFile(
        path,
        tuple(_server(name, servers.table(name)) for name in servers.values),
        tuple(_command(name, commands) for name in commands.values),
    )


def _from_json(data: bytes, path: Path) -> ToolsFile:
    try:
        values = decode_json(data, _DEEPEST)
        _refuse_duplicates(data)
    except ValueError as error:
        raise UsageError(f"tools: {path}: not valid JSON: {error}") from None
    whole = Table(path, "", values)
    if _JSON_SERVERS not in whole.values:  # other keys are allowed, because the file may be the settings of a host
        raise whole.error(_JSON_SERVERS, "missing", 'as in {"mcpServers": {"time": {"command": "uvx", "args": []}}}')
    servers = whole.table(_JSON_SERVERS)
    declared = [_json_server(name, servers.table(name)) for name in servers.values]
    found = tuple(one for one in declared if one is not None)
    if not found:
        raise servers.error("", "declares no enabled servers")
    return ToolsFile(path, found)


def _json_server(name: str, table: Table) -> ServerDeclaration | None:
    """Return a server that is declared in the format of other hosts, or None if it is disabled."""
    if "url" in table.values or table.values.get("type", "stdio") != "stdio":
        raise table.error("", "not a stdio server; llmrun supports no others", "use a bridge as its command")
    table.check_keys((*_JSON_KEYS, *_IGNORED_KEYS))
    arguments = table.texts("args", '["mcp-server-time"]') if "args" in table.values else []
    if table.flag("disabled"):
        return None
    return _declared_server(name, table, [table.text("command"), *arguments])


def _server(name: str, table: Table) -> ServerDeclaration:
    table.check_keys(_SERVER_KEYS)
    return _declared_server(name, table, table.texts("command", _EXAMPLE))


def _declared_server(name: str, table: Table, command: Sequence[str]) -> ServerDeclaration:
    if not name.strip() or not name.isprintable():
        raise table.error("", f"{name!r} cannot be the name of a server")
    safe = table.texts("safe", '["get_current_time"]') if "safe" in table.values else []
    if twice := next((one for one in safe if safe.count(one) > 1), None):
        raise table.error("safe", f"{twice!r} is listed twice")
    variables, folder = table.environment("env"), table.folder("cwd")
    return ServerDeclaration(
        name,
        _with_program(table, command, variables),
        variables,
        folder,
        table.seconds("timeout", TIMEOUT_S),
        table.seconds("start_timeout", START_TIMEOUT_S),
        tuple(safe),
    )


def _command(name: str, commands: Table) -> CommandDeclaration:
    table = commands.table(name)
    if not NAME.fullmatch(name):
        raise commands.error(name, "not a valid name", "use up to 64 letters, digits, _ and -")
    table.check_keys(_COMMAND_KEYS)
    if "stdin" in table.values and table.values["stdin"] != "json":
        raise table.error("stdin", f'{table.values["stdin"]!r:.60} is not "json"')
    command, parameters = table.texts("command", '["weather", "--city={city}"]'), _parameters(table)
    _check_placeholders(table, command, parameters)
    variables, folder = table.environment("env"), table.folder("cwd")
    return CommandDeclaration(
        name,
        table.text("description"),
        _with_program(table, command, variables),
        parameters,
        variables,
        folder,
        table.seconds("timeout", TIMEOUT_S),
        json_stdin="stdin" in table.values,
        is_safe=table.flag("safe"),
    )


def _parameters(table: Table) -> Mapping[str, Any]:
    """Return the JSON schema of a command's arguments."""
    if "parameters" not in table.values:
        return _NO_PARAMETERS
    schema = table.table("parameters")
    if schema.values.get("type") != "object":
        raise schema.error("type", 'must be "object"')
    properties = schema.table("properties")
    for name in properties.values:
        properties.table(name)
    for name in schema.texts("required", '["city"]') if "required" in schema.values else ():
        if name not in properties.values:
            raise schema.error("required", f"{name!r:.60} is not in properties", nearest(name, properties.values))
    try:
        json.dumps(schema.values, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # TOML has dates and infinity, but JSON does not
        raise table.error("parameters", "contains a value that JSON cannot represent") from None
    return schema.values


def _check_placeholders(table: Table, command: Sequence[str], parameters: Mapping[str, Any]) -> None:
    properties, required = parameters.get("properties", {}), parameters.get("required", ())
    if command and placeholders(command[0]):
        raise table.error("command", f"{command[0]!r:.60}: the program cannot be a placeholder")
    for name in (name for argument in command for name in placeholders(argument)):
        if name not in properties:
            escape = f"write {{{{{name}}}}} for the text {{{name}}}"
            raise table.error(
                "command", f"{{{name}}} is not in parameters.properties", f"{nearest(name, properties)}; {escape}"
            )
        if name not in required and "default" not in properties[name]:
            raise table.error(
                "command", f"{{{name}}} may have no value", f"add {name} to parameters.required, or give it a default"
            )


def _with_program(table: Table, command: Sequence[str], variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command with the absolute path of its program, which is searched for on the child's PATH."""
    if not command or not command[0].strip():
        raise table.error("command", "empty", f"as in command = {_EXAMPLE}")
    program, *arguments = command
    wanted = os.path.expanduser(program)  # noqa: PTH111
    if os.path.dirname(wanted):  # noqa: PTH120
        wanted = str(table.path.absolute().parent / wanted)
    found = shutil.which(wanted, path=environment(variables).get("PATH"))
    if found is None:
        hint = f"make it executable: chmod +x {wanted}" if Path(wanted).is_file() else "install it, or give its path"
        raise table.error("command", f"{program!r}: no such program", hint)
    if sys.platform == "win32" and found.lower().endswith((".bat", ".cmd")) and any(map(placeholders, arguments)):
        raise table.error("command", f"{program!r} is a batch file, whose arguments a shell would interpret")
    return (os.path.abspath(found), *arguments)  # noqa: PTH100


def _refuse_duplicates(data: bytes) -> None:
    """Raise ValueError if a JSON object has a key twice."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
        return table

    json.loads(data.decode("utf-8"), object_pairs_hook=distinct)
