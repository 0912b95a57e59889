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

Relative paths to programs and working directories start at the folder of the file. Every error message contains the
file, the key, the value and the valid values.

{city} stands for the argument `city`, and {{city}} for the text {city}. Braces in any other text are kept as written. A
value always remains within one argument of the program, whatever the value contains.

Tools receive the environment variables listed in this module and the variables that the user declares, but no others.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmrun.base.errors import UsageError, nearest, shown
from llmrun.base.folders import decoded_text, read_user_file
from llmrun.engine.tools.tool import decode_json

# The MCP SDK's list, plus the variables for language, time zone and temporary files.
_POSIX = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "TMPDIR")
_WINDOWS = (
    *("APPDATA", "HOMEDRIVE", "HOMEPATH", "LOCALAPPDATA", "PATH", "PATHEXT", "PROCESSOR_ARCHITECTURE", "SYSTEMDRIVE"),
    *("SYSTEMROOT", "TEMP", "TMP", "USERNAME", "USERPROFILE"),
)
_LANGUAGE = (
    *("LANG", "LANGUAGE", "LC_ALL", "LC_COLLATE", "LC_CTYPE", "LC_MESSAGES", "LC_MONETARY", "LC_NUMERIC", "LC_TIME"),
    "TZ",
)


def environment(declared: Mapping[str, str]) -> dict[str, str]:
    """Return the listed variables of this process together with `declared`, which takes precedence."""
    listed = (*(_WINDOWS if sys.platform == "win32" else _POSIX), *_LANGUAGE)
    return {name: os.environ[name] for name in listed if name in os.environ} | dict(declared)


NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)  # the names that OpenAI's API allows
_LONGEST = 64
_OTHERS = re.compile(r"[^a-zA-Z0-9_-]", re.ASCII)


def exposed_names(tools: Sequence[tuple[str, str]]) -> list[str]:
    """Return a distinct name for each pair (server, tool), in the order of the pairs. For a command, the server is "".

    Commands keep their names, which must be valid and distinct. The name of a server's tool does not depend on the
    order of the tools. If several tools would have the same name, each is prefixed with its server's name, as in
    `time_now`. If the prefixed name is not distinct, or is too long, the name ends with part of a hash.
    """
    taken = {tool for server, tool in tools if not server}
    names = {key: _OTHERS.sub("_", key[1]) or "tool" for key in tools if key[0]}
    shared = Counter(names.values())
    for (server, tool), name in names.items():
        if shared[name] > 1 or name in taken:
            names[server, tool] = f"{_OTHERS.sub('_', server)}_{name}"
    shared = Counter(names.values())
    unusual = sorted(key for key, name in names.items() if shared[name] > 1 or name in taken or len(name) > _LONGEST)
    taken |= {name for key, name in names.items() if key not in set(unusual)}
    for key in unusual:
        names[key] = _distinct(names[key], key, taken)
        taken.add(names[key])
    return [names[key] if key[0] else key[1] for key in tools]


def _distinct(name: str, key: tuple[str, str], taken: set[str]) -> str:
    attempt = 0
    while True:
        digest = hashlib.sha256(json.dumps([*key, attempt]).encode()).hexdigest()[:8]
        distinct = f"{name[: _LONGEST - 9]}_{digest}"
        if distinct not in taken:
            return distinct
        attempt += 1


_PLACEHOLDER = re.compile(r"\{(\{[A-Za-z_]\w*\})\}|\{([A-Za-z_]\w*)\}", re.ASCII)
_NUMBER = re.compile(r"-\d+(\.\d+)?", re.ASCII)
_NO_ARGUMENT = re.compile("[\0\ud800-\udfff]")


def placeholders(argument: str) -> list[str]:
    """Return the names of the placeholders in an argument of a command."""
    return [match[2] for match in _PLACEHOLDER.finditer(argument) if match[2]]


def filled_command(command: Sequence[str], schema: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """Return the command with its placeholders replaced. Raises ValueError if a value cannot be used.

    schema  the JSON schema of the values; its properties may have defaults
    """
    defaults = {name: rule["default"] for name, rule in schema["properties"].items() if "default" in rule}
    texts = {name: _text(value) for name, value in {**defaults, **values}.items()}
    arguments = list(command[:1])
    for argument in command[1:]:
        names = placeholders(argument)
        for name in names:
            if name not in texts:
                raise ValueError(f"the argument {name!r} is missing")
            if _NO_ARGUMENT.search(texts[name]):
                raise ValueError(f"the argument {name!r} contains a NUL character or a lone surrogate")
        text = _PLACEHOLDER.sub(lambda match: match[1] or texts[match[2]], argument)
        # Otherwise, a model could pass any option, such as --output=FILE. After "--", programs expect no options.
        may_be_option = not argument.startswith("-") and "--" not in command[: len(arguments)]
        if names and may_be_option and text.startswith("-") and not _NUMBER.fullmatch(text):
            raise ValueError(f"the argument {names[0]!r} must not begin with '-'")
        arguments.append(text)
    return arguments


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


TIMEOUT_S = 60.0
START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ServerDeclaration:
    """An MCP server.

    command          the program's absolute path and its arguments
    environment      variables in addition to the variables that all tools receive (see `environment`)
    folder           working directory; None for llmrun's own
    timeout_s        seconds for each call
    start_timeout_s  seconds to start; `uvx` and `npx` may have to download the server first
    safe             the server's own names of the tools that run without confirmation
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)  # may contain keys
    folder: Path | None = None
    timeout_s: float = TIMEOUT_S
    start_timeout_s: float = START_TIMEOUT_S
    safe: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandDeclaration:
    """A command that is offered as a tool.

    command     the program's absolute path and its arguments, in which {name} stands for an argument of the call
    parameters  the JSON schema of the call's arguments, whose type is "object"
    json_stdin  True if the call's arguments are written to standard input as a JSON object
    """

    name: str
    description: str
    command: tuple[str, ...]
    parameters: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    folder: Path | None = None
    timeout_s: float = TIMEOUT_S
    json_stdin: bool = False
    is_safe: bool = False


@dataclass(frozen=True, slots=True)
class ToolsFile:
    """The contents of a tools file. `path` is used in messages."""

    path: Path
    servers: tuple[ServerDeclaration, ...] = ()
    commands: tuple[CommandDeclaration, ...] = ()


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PASSED_ON = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_LONGEST_S = 3600.0


class Table:
    """A table of the user's file. `where` is the table's dotted name, or "" for the whole file."""

    def __init__(self, path: Path, where: str, values: Mapping[str, Any]) -> None:
        self.values = values
        self.path = path
        self._where = where

    def error(self, key: str, words: str, hint: str = "") -> UsageError:
        """Return the error for a key. If `key` is empty, the error is about the whole table."""
        names = shown(".".join(name for name in (self._where, key) if name), 200)
        return UsageError(": ".join(part for part in (f"tools: {self.path}", names, words) if part), hint=hint)

    def check_keys(self, known: Iterable[str]) -> None:
        for key in self.values:
            if key not in known:
                raise self.error(key, "no such key", nearest(key, known))

    def table(self, key: str) -> Table:
        """Return the table with the given key, or an empty table if the key is missing."""
        where = f"{self._where}.{key}" if self._where else key
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "a table")
        return Table(self.path, where, value)

    def text(self, key: str) -> str:
        value = self._needed(key, "text")
        if not isinstance(value, str) or not value.strip():
            raise self._wrong(key, "text")
        return value

    def texts(self, key: str, example: str) -> list[str]:
        value = self._needed(key, f"a list of strings such as {example}")
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._wrong(key, f"a list of strings such as {example}")
        if any("\0" in one for one in value):
            raise self.error(key, "contains a NUL character")
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def seconds(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        number = float(value) if type(value) in (int, float) else math.nan
        if not 0 < number <= _LONGEST_S:
            raise self._wrong(key, f"a number of seconds up to {_LONGEST_S:g}")
        return number

    def folder(self, key: str) -> Path | None:
        """Return a folder. A relative path starts at the folder of the file."""
        if key not in self.values:
            return None
        folder = self.path.absolute().parent / os.path.expanduser(self.text(key))  # noqa: PTH111
        if not folder.is_dir():
            raise self.error(key, f"{str(folder)!r} is not a folder")
        return folder

    def environment(self, key: str) -> dict[str, str]:
        """Return a table of variables. A value such as "$NAME" stands for the variable NAME of llmrun's environment."""
        table = self.table(key)
        for name, value in table.values.items():
            if not _VARIABLE.fullmatch(name):
                raise table.error(name, "not a valid variable name", "names are made of letters, digits and _")
            if not isinstance(value, str) or "\0" in value:
                # The value itself is not shown, because it may be an API key.
                raise table.error(name, "must be text without NUL characters", 'as in env = { TZ = "UTC" }')
        return {name: _passed_on(table, name, value) for name, value in table.values.items()}

    def _needed(self, key: str, valid: str) -> Any:
        if key not in self.values:
            raise self.error(key, f"missing; it must be {valid}")
        return self.values[key]

    def _wrong(self, key: str, valid: str) -> UsageError:
        return self.error(key, f"{self.values[key]!r:.60} is not {valid}")


def _passed_on(table: Table, name: str, value: str) -> str:
    match = _PASSED_ON.fullmatch(value)
    if match is None:
        return value
    variable = match[1] or match[2]
    if variable not in os.environ:
        raise table.error(name, f"the environment variable {variable} is not set", f"export {variable}=... first")
    return os.environ[variable]


_DEEPEST = 64
_SERVER_KEYS = ("command", "env", "cwd", "timeout", "start_timeout", "safe")
_COMMAND_KEYS = ("description", "command", "parameters", "stdin", "env", "cwd", "timeout", "safe")
_JSON_SERVERS = "mcpServers"
_JSON_KEYS = ("command", "args", "type", "disabled", *_SERVER_KEYS[1:])
# Keys of other hosts that do not change how a server runs. Tools approved by another host still need a mark in llmrun.
_IGNORED_KEYS = ("alwaysAllow", "autoApprove", "description", "disabledTools", "trust")
_EXAMPLE = '["uvx", "mcp-server-time"]'
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def read_tools_file(path: Path) -> ToolsFile:
    """Read a tools file. Raises UsageError."""
    return parse_tools_file(read_user_file(path, "tools"), path)


def parse_tools_file(data: bytes, path: Path) -> ToolsFile:
    """Parse the bytes of a tools file, which is JSON if the first character is a brace. Raises UsageError.

    The programs must exist, because a misspelled name is a mistake in the file.
    """
    text = decoded_text(data, f"tools: {path}")
    if text.lstrip().startswith("{"):
        return _from_json(text.encode(), path)
    import tomllib  # imported late, because the import takes 5 ms

    try:
        whole = Table(path, "", tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # ValueError means invalid TOML or too many digits
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
    if _JSON_SERVERS not in whole.values:  # other keys are allowed, because the file may contain the settings of a host
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
        raise table.error("", "llmrun supports only stdio servers", "use a bridge as the server's command")
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
        name=name,
        command=_with_program(table, command, variables),
        environment=variables,
        folder=folder,
        timeout_s=table.seconds("timeout", TIMEOUT_S),
        start_timeout_s=table.seconds("start_timeout", START_TIMEOUT_S),
        safe=tuple(safe),
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
        name=name,
        description=table.text("description"),
        command=_with_program(table, command, variables),
        parameters=parameters,
        environment=variables,
        folder=folder,
        timeout_s=table.seconds("timeout", TIMEOUT_S),
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
    except (TypeError, ValueError, RecursionError):  # TOML supports dates and infinity, but JSON does not
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
    """Return the command with the absolute path of its program, which is looked up on the child's PATH."""
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
    """Raise ValueError if a JSON object contains a key twice."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) < len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} occurs twice")
        return table

    json.loads(data.decode("utf-8"), object_pairs_hook=distinct)
