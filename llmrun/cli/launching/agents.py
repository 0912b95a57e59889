"""What each coding agent needs so that it uses a server of llmrun, as pure data.

The user's own settings of an agent stay in effect. Most agents take the connection from variables, from arguments, or
from a file of ours. Cline and pi read it only from a file of the user, so one entry of this file is changed while the
agent runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from llmrun.base.errors import UsageError

_ID: Final = "llmrun"  # our name as a provider in the settings of agents
_HOUR_MS: Final = 3_600_000  # for time limits: on a CPU, a first prompt takes minutes
_MOST_OUTPUT: Final = 8192


class Served(Struct, frozen=True):
    """What the agent is connected to."""

    url: str  # for example http://127.0.0.1:8080, without /v1
    key: str
    model: str  # the name that requests use
    context: int  # in tokens
    folder: Path  # a folder of ours for this run, removed at the end

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def output(self) -> int:
        """The number of tokens to reserve for an answer."""
        return min(_MOST_OUTPUT, self.context // 4)


class OwnFile(Struct, frozen=True):
    """A file below `Served.folder`, which we write with rights 0600."""

    path: Path
    text: str


class EntryEdit(Struct, frozen=True):
    """One entry of a user's file, changed while the agent runs."""

    path: Path  # the file may be missing
    changed: Callable[[bytes | None], bytes]  # the new contents; raises UsageError if the file is not understood


class SetUp(Struct, frozen=True):
    """How to start an agent."""

    arguments: tuple[str, ...] = ()  # precede the user's arguments
    variables: Mapping[str, str] = {}  # set in the agent's environment
    removed: tuple[str, ...] = ()  # variables that the agent must not inherit
    files: tuple[OwnFile, ...] = ()
    edits: tuple[EntryEdit, ...] = ()


class Agent(Struct, frozen=True):
    name: str
    title: str
    program: str  # looked for on PATH
    install: str  # the command that installs the agent
    first_prompt: int  # tokens of its first prompt, with Qwen's vocabulary
    context: int  # the smallest sensible context, in tokens
    set_up: Callable[[Served, Mapping[str, str]], SetUp]  # the second argument is the environment


def _codex(served: Served, _environment: Mapping[str, str]) -> SetUp:
    provider = f"model_providers.{_ID}"
    overrides: dict[str, object] = {
        "model": served.model,
        "model_provider": _ID,
        "model_context_window": served.context,
        f"{provider}.name": _ID,
        f"{provider}.base_url": served.v1,
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": "LLMRUN_KEY",
        f"{provider}.stream_idle_timeout_ms": _HOUR_MS,
    }
    # JSON's strings and numbers are TOML, too.
    flags = [f"-c{name}={_json(value)}" for name, value in overrides.items()]
    return SetUp(arguments=tuple(flags), variables={"LLMRUN_KEY": served.key})


def _claude(served: Served, _environment: Mapping[str, str]) -> SetUp:
    models = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        "ANTHROPIC_API_KEY": "",
        **{f"ANTHROPIC_{name}": served.model for name in models},
        "CLAUDE_CODE_SUBAGENT_MODEL": served.model,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(served.context),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.output),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_HOUR_MS),
        "API_TIMEOUT_MS": str(_HOUR_MS),
        "API_FORCE_IDLE_TIMEOUT": "0",
    }
    return SetUp(variables=variables)


def _opencode(served: Served, _environment: Mapping[str, str]) -> SetUp:
    model = f"{_ID}/{served.model}"
    settings = {
        "provider": {
            _ID: {
                "npm": "@ai-sdk/openai-compatible",
                "name": _ID,
                "options": {"baseURL": served.v1, "apiKey": served.key, "timeout": False},
                "models": {served.model: {"limit": {"context": served.context, "output": served.output}}},
            }
        },
        "model": model,
        "small_model": model,
        "autoupdate": False,
    }
    return SetUp(variables={"OPENCODE_CONFIG_CONTENT": _json(settings)})


def _aider(served: Served, _environment: Mapping[str, str]) -> SetUp:
    arguments = ("--model", f"openai/{served.model}", "--timeout", str(_HOUR_MS // 1000), "--no-check-update")
    variables = {"OPENAI_API_BASE": served.v1, "OPENAI_API_KEY": served.key}
    return SetUp(arguments, variables)


def _cline(served: Served, environment: Mapping[str, str]) -> SetUp:
    settings = _home(environment) / ".cline" / "data" / "settings" / "providers.json"

    def changed(old: bytes | None) -> bytes:
        document = _document(settings, old)
        provider = {
            "provider": "openai-compatible",
            "model": served.model,
            "baseUrl": served.v1,
            "apiKey": served.key,
        }
        providers = _entry(settings, document, "providers")
        providers["openai-compatible"] = {"settings": provider}
        document["lastUsedProvider"] = "openai-compatible"
        return _json(document).encode()

    return SetUp(edits=(EntryEdit(settings, changed),))


def _continue(served: Served, _environment: Mapping[str, str]) -> SetUp:
    model = {
        "name": served.model,
        "provider": "openai",
        "model": served.model,
        "apiBase": served.v1,
        "apiKey": served.key,
        "contextLength": served.context,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use"],
        "defaultCompletionOptions": {"contextLength": served.context, "maxTokens": served.output},
        "requestOptions": {"timeout": _HOUR_MS},
    }
    settings = {"name": _ID, "version": "1.0.0", "schema": "v1", "models": [model]}
    own = OwnFile(served.folder / "config.yaml", _json(settings))  # JSON is YAML, too
    return SetUp(arguments=("--config", str(own.path)), files=(own,))


def _pi(served: Served, environment: Mapping[str, str]) -> SetUp:
    folder = environment.get("PI_CODING_AGENT_DIR")
    settings = (Path(folder) if folder else _home(environment) / ".pi" / "agent") / "models.json"

    def changed(old: bytes | None) -> bytes:
        document = _document(settings, old)
        model = {"id": served.model, "contextWindow": served.context, "maxTokens": served.output}
        providers = _entry(settings, document, "providers")
        providers[_ID] = {
            "baseUrl": served.v1,
            "api": "openai-completions",
            "apiKey": served.key,
            "models": [model],
        }
        return _json(document).encode()

    arguments = ("--provider", _ID, "--model", served.model)
    return SetUp(arguments, edits=(EntryEdit(settings, changed),))


def _qwen_code(served: Served, _environment: Mapping[str, str]) -> SetUp:
    variables = {"OPENAI_API_KEY": served.key, "OPENAI_BASE_URL": served.v1, "OPENAI_MODEL": served.model}
    return SetUp(("--auth-type", "openai"), variables)


def _gptme(served: Served, _environment: Mapping[str, str]) -> SetUp:
    variables = {"OPENAI_BASE_URL": served.v1, "OPENAI_API_KEY": served.key}
    return SetUp(("--model", f"local/{served.model}"), variables)


def _home(environment: Mapping[str, str]) -> Path:
    return Path(environment["HOME"]) if environment.get("HOME") else Path.home()


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _document(path: Path, text: bytes | None) -> dict[str, Any]:
    """Parse a user's file. Raises UsageError."""
    try:
        document = json.loads(text) if text and text.strip() else {}
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} is not a JSON object")
    return document


def _entry(path: Path, document: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object in a document, which is created if it is missing. Raises UsageError."""
    entry = document.setdefault(name, {})
    if not isinstance(entry, dict):
        raise UsageError(f"{path}: {name} is not a JSON object")
    return entry


def _npm(package: str) -> str:
    return f"npm install -g {package}"


_ALL: Final = (
    Agent("codex", "Codex", "codex", _npm("@openai/codex"), 8600, 16_384, _codex),
    Agent("claude", "Claude Code", "claude", _npm("@anthropic-ai/claude-code"), 19_000, 32_768, _claude),
    Agent("opencode", "opencode", "opencode", _npm("opencode-ai"), 7200, 16_384, _opencode),
    Agent("aider", "aider", "aider", "uv tool install aider-chat", 600, 8192, _aider),
    Agent("cline", "Cline", "cline", _npm("cline"), 5300, 16_384, _cline),
    Agent("continue", "Continue", "cn", _npm("@continuedev/cli"), 1800, 8192, _continue),
    Agent("pi", "pi", "pi", _npm("@mariozechner/pi-coding-agent"), 1300, 8192, _pi),
    Agent("qwen-code", "Qwen Code", "qwen", _npm("@qwen-code/qwen-code"), 15_000, 32_768, _qwen_code),
    Agent("gptme", "gptme", "gptme", "uv tool install gptme", 8700, 16_384, _gptme),
)
AGENTS: Final[Mapping[str, Agent]] = {agent.name: agent for agent in _ALL}
