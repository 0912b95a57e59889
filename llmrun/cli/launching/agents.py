"""Describes how to connect each coding agent to a server of llmrun.

Each agent takes the connection from environment variables, arguments, or a file of ours. The user's files do not
change, and the user's other settings of the agent stay in effect.
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
    """The server and the model that the agent is connected to."""

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
    """A file below `Served.folder`, which we write with mode 0600."""

    path: Path
    text: str


class SetUp(Struct, frozen=True):
    """How to start an agent."""

    arguments: tuple[str, ...] = ()  # precede the user's arguments
    variables: Mapping[str, str] = {}  # set in the agent's environment
    removed: tuple[str, ...] = ()  # variables that the agent must not inherit
    files: tuple[OwnFile, ...] = ()


class Agent(Struct, frozen=True):
    name: str
    title: str
    program: str  # looked for on PATH
    install: str  # the command that installs the agent
    first_prompt: int  # tokens of its first prompt, counted with Qwen's tokenizer
    context: int  # the smallest sensible context, in tokens
    set_up: Callable[[Served, Mapping[str, str]], SetUp]  # the second argument is the environment
    tools: bool = True  # whether the agent needs a model that can call tools


def _codex(served: Served, _environment: Mapping[str, str]) -> SetUp:
    provider = f"model_providers.{_ID}"
    key = "CODEX_LLMRUN_KEY"  # Codex's commands inherit the variable, and names that begin with LLMRUN_ are settings
    overrides: dict[str, object] = {
        "model": served.model,
        "model_provider": _ID,
        "model_context_window": served.context,
        "check_for_update_on_startup": False,
        f"{provider}.name": _ID,
        f"{provider}.base_url": served.v1,
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": key,
        f"{provider}.stream_idle_timeout_ms": _HOUR_MS,
    }
    # The values are TOML. JSON's strings, numbers and booleans are TOML, too.
    flags = [f"-c{name}={_json(value)}" for name, value in overrides.items()]
    return SetUp(arguments=tuple(flags), variables={key: served.key})


def _claude(served: Served, _environment: Mapping[str, str]) -> SetUp:
    models = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    variables = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.key,
        "ANTHROPIC_API_KEY": "",
        **{f"ANTHROPIC_{name}": served.model for name in models},
        "CLAUDE_CODE_SUBAGENT_MODEL": served.model,
        "CLAUDE_CODE_PROVIDER_MANAGED_BY_HOST": "1",  # the user's settings must not name another provider
        # Claude Code summarizes the conversation when this window has room for only 13,000 tokens and an answer. In a
        # small context, that would be at once. With a larger window, it does so when only the answer has room.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context + 13_000),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.output),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it differs in every request
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_DISABLE_TERMINAL_TITLE": "1",  # titles, suggestions and memories cost requests
        "CLAUDE_CODE_ENABLE_PROMPT_SUGGESTION": "false",
        "CLAUDE_CODE_DISABLE_AUTO_MEMORY": "1",
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_HOUR_MS),
        "API_TIMEOUT_MS": str(_HOUR_MS),
        "API_FORCE_IDLE_TIMEOUT": "0",
    }
    others = ("BEDROCK", "VERTEX", "FOUNDRY", "MANTLE", "ANTHROPIC_AWS", "ANTHROPIC_GOOGLE_CLOUD", "GATEWAY")
    removed = (
        *(f"CLAUDE_CODE_USE_{other}" for other in others),
        "ANTHROPIC_CUSTOM_HEADERS",
        "ANTHROPIC_SMALL_FAST_MODEL",
    )
    # In auto mode, the model would judge its own commands, with a prompt of more than 30,000 tokens for each command.
    settings = {"permissions": {"disableAutoMode": "disable"}}
    return SetUp(("--settings", _json(settings)), variables, removed)


def _opencode(served: Served, environment: Mapping[str, str]) -> SetUp:
    model = f"{_ID}/{served.model}"
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _ID,
        "options": {
            "baseURL": served.v1,
            "apiKey": served.key,
            "timeout": False,
            "headerTimeout": False,
            "chunkTimeout": False,
        },
        "models": {served.model: {"limit": {"context": served.context, "output": served.output}}},
    }
    settings = {
        "provider": {_ID: provider},
        "model": model,
        "small_model": model,
        "agent": {"title": {"disable": True}},
        "autoupdate": False,
    }
    name = "OPENCODE_CONFIG_CONTENT"
    return SetUp(variables={name: _json(_merged(_given(name, environment), settings))})


def _aider(served: Served, _environment: Mapping[str, str]) -> SetUp:
    model = f"openai/{served.model}"
    facts = {
        "max_tokens": served.output,
        "max_input_tokens": served.context,
        "max_output_tokens": served.output,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    own = OwnFile(served.folder / "models.json", _json({model: facts}))
    # aider lets the user's .env files override variables. It reads this file last.
    key = OwnFile(served.folder / "key.env", f"OPENAI_API_KEY={served.key}\n")
    arguments = (
        *("--model", model, "--weak-model", model),
        *("--model-metadata-file", str(own.path)),
        *("--env-file", str(key.path), "--openai-api-base", served.v1),
        *("--timeout", str(_HOUR_MS // 1000)),
        "--no-check-update",
    )
    variables = {"OPENAI_API_BASE": served.v1, "OPENAI_API_KEY": served.key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return SetUp(arguments, variables, files=(own, key))


def _cline(served: Served, _environment: Mapping[str, str]) -> SetUp:
    provider = "openai-compatible"
    settings = {
        "provider": provider,
        "model": served.model,
        "baseUrl": served.v1,
        "apiKey": served.key,
        "contextWindow": served.context,
        "maxTokens": served.output,
        "timeout": _HOUR_MS,
    }
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    stored = {"version": 1, "lastUsedProvider": provider, "modes": {}, "providers": {provider: entry}}
    own = OwnFile(served.folder / "providers.json", _json(stored))
    variables = {
        "CLINE_PROVIDER_SETTINGS_PATH": str(own.path),
        "CLINE_SESSION_BACKEND_MODE": "local",  # without the daemon that would outlive the run
        "CLINE_NO_AUTO_UPDATE": "1",
    }
    return SetUp(variables=variables, files=(own,))


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


def _pi(served: Served, _environment: Mapping[str, str]) -> SetUp:
    model = {
        "id": served.model,
        "name": served.model,
        "reasoning": False,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "contextWindow": served.context,
        "maxTokens": served.output,
    }
    provider = {"baseUrl": served.v1, "apiKey": served.key, "api": "openai-completions", "models": [model]}
    extension = f"export default (pi) => pi.registerProvider({_json(_ID)}, {_json(provider)});\n"
    own = OwnFile(served.folder / "llmrun.js", extension)
    arguments = ("--extension", str(own.path), "--provider", _ID, "--model", served.model)
    return SetUp(arguments, files=(own,))


def _qwen_code(served: Served, _environment: Mapping[str, str]) -> SetUp:
    settings = {
        "general": {"enableAutoUpdate": False},
        "ui": {"enableFollowupSuggestions": False},
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
        "tools": {"approvalMode": "default"},  # in auto mode, the model would judge its own commands
        "model": {"generationConfig": {"contextWindowSize": served.context}},
    }
    own = OwnFile(served.folder / "system-defaults.json", _json(settings))
    variables = {
        "OPENAI_API_KEY": served.key,
        "OPENAI_BASE_URL": served.v1,
        "QWEN_CODE_SYSTEM_DEFAULTS_PATH": str(own.path),  # the user's settings override this file
        "QWEN_CODE_MAX_OUTPUT_TOKENS": str(served.output),
        "QWEN_CODE_API_TIMEOUT_MS": str(_HOUR_MS),
        "QWEN_STREAM_IDLE_TIMEOUT_MS": str(_HOUR_MS),
        "QWEN_STREAM_MAX_LIFETIME_MS": "0",  # no limit; the default is 15 minutes
    }
    return SetUp(("--auth-type", "openai", "--model", served.model), variables, files=(own,))


def _gptme(served: Served, _environment: Mapping[str, str]) -> SetUp:
    variables = {
        "OPENAI_BASE_URL": served.v1,
        "OPENAI_API_KEY": served.key,
        "GPTME_CONTEXT_LENGTH": str(served.context),
        "LLM_API_TIMEOUT": str(_HOUR_MS // 1000),
    }
    return SetUp(("--model", f"local/{served.model}"), variables)


def around_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that keep an agent's requests to this machine away from the user's proxy, if there is one."""
    names = ("http_proxy", "https_proxy", "all_proxy")
    if not any(environment.get(each) for name in names for each in (name, name.upper())):
        return {}
    given = environment.get("no_proxy") or environment.get("NO_PROXY")
    hosts = f"{given},127.0.0.1" if given else "127.0.0.1"
    return {"no_proxy": hosts, "NO_PROXY": hosts}


def _given(variable: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the JSON object in a variable of the user. Raises UsageError."""
    try:
        given = json.loads(environment.get(variable) or "{}")
    except ValueError as error:
        raise UsageError(f"{variable} is not JSON: {error}") from error
    if not isinstance(given, dict):
        raise UsageError(f"{variable} is not a JSON object")
    return given


def _merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return both objects as one, in which the second one takes precedence."""
    merged = {**first, **second}
    for name in first.keys() & second.keys():
        if isinstance(first[name], dict) and isinstance(second[name], dict):
            merged[name] = _merged(first[name], second[name])
    return merged


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _npm(package: str) -> str:
    return f"npm install -g {package}"


_ALL: Final = (
    Agent("codex", "Codex", "codex", _npm("@openai/codex"), 11_500, 24_576, _codex),
    Agent("claude", "Claude Code", "claude", _npm("@anthropic-ai/claude-code"), 12_600, 32_768, _claude),
    Agent("opencode", "opencode", "opencode", _npm("opencode-ai"), 7500, 16_384, _opencode),
    Agent("aider", "aider", "aider", "uv tool install aider-chat", 600, 8192, _aider, tools=False),
    Agent("cline", "Cline", "cline", _npm("cline"), 5400, 16_384, _cline),
    Agent("continue", "Continue", "cn", _npm("@continuedev/cli"), 1900, 8192, _continue),
    Agent("pi", "pi", "pi", _npm("@mariozechner/pi-coding-agent"), 1400, 32_768, _pi),
    Agent("qwen-code", "Qwen Code", "qwen", _npm("@qwen-code/qwen-code"), 17_900, 32_768, _qwen_code),
    Agent("gptme", "gptme", "gptme", "uv tool install gptme", 8600, 16_384, _gptme),
)
AGENTS: Final[Mapping[str, Agent]] = {agent.name: agent for agent in _ALL}
