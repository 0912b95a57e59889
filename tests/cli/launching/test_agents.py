"""Tests of the set-up of each coding agent: what it says, where it is, and what it leaves alone."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.launching.agents import AGENTS, Agent, Served, SetUp, around_proxies
from llmrun.options.settings import PREFIX

PAGE = Path(__file__).resolve().parents[3] / "docs" / "agents.md"
FOLDER = Path("/folder of ours")
SERVED = Served("http://127.0.0.1:8099", "secret-key", 'own"/name:Q4_K_M', 24_000, FOLDER)
HOME = {"HOME": "/home/user", "PATH": "/usr/bin"}


def set_up(agent: Agent, **environment: str) -> SetUp:
    return agent.set_up(SERVED, {**HOME, **environment})


def values_of(value: Any) -> Iterator[str]:
    """Yield the keys and the values inside a JSON value, as texts."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from values_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from values_of(inner)
    else:
        yield str(value)


def read(text: str) -> Iterator[str]:
    """Yield the texts in a setting, which is JSON, a TOML assignment, JavaScript with JSON in it, or plain text."""
    if text.startswith("{"):
        yield from values_of(json.loads(text))
    elif text.startswith("-c") and "=" in text:
        yield from values_of(tomllib.loads(text.removeprefix("-c")))
    elif text.startswith("export default"):
        yield from values_of(json.loads(text[text.index("{") : text.rindex("}") + 1]))
    else:
        yield text


def texts_of(found: SetUp) -> set[str]:
    settings = (*found.arguments, *found.variables.values(), *(file.text for file in found.files))
    return {text for setting in settings for text in read(setting)}


@pytest.fixture(params=[*AGENTS.values()], ids=[*AGENTS])
def agent(request: pytest.FixtureRequest) -> Agent:
    found: Agent = request.param
    return found


def test_the_connection_reaches_the_agent(agent: Agent) -> None:
    """The model's name has characters that need escapes."""
    texts = texts_of(set_up(agent))
    assert {SERVED.key, SERVED.url if agent.name == "claude" else f"{SERVED.url}/v1"} <= texts
    assert any(text == SERVED.model or text.endswith(f"/{SERVED.model}") for text in texts)


def test_the_context_reaches_the_agent(agent: Agent) -> None:
    """Claude Code reserves 13,000 tokens of the number that it gets."""
    expected = SERVED.context + 13_000 if agent.name == "claude" else SERVED.context
    assert str(expected) in texts_of(set_up(agent))


def test_arguments_do_not_contain_the_key(agent: Agent) -> None:
    """Other users of the machine can see the arguments of all processes."""
    assert not any(SERVED.key in argument for argument in set_up(agent).arguments)


def test_files_are_below_the_folder_of_the_run(agent: Agent) -> None:
    found = set_up(agent)
    assert all(file.path.is_relative_to(FOLDER) for file in found.files)
    used = " ".join((*found.arguments, *found.variables.values()))
    assert all(str(file.path) in used for file in found.files)


def test_the_users_settings_do_not_change_the_set_up(agent: Agent) -> None:
    others = dict.fromkeys(("OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY"), "another provider")
    assert set_up(agent, **others) == set_up(agent)


def test_agents_can_run_llmrun(agent: Agent) -> None:
    """Commands that an agent runs inherit its variables, and llmrun refuses unknown variables with its own prefix."""
    assert not any(name.startswith(PREFIX) for name in set_up(agent).variables)


def test_agents_wait_an_hour_for_the_first_token(agent: Agent) -> None:
    """pi has no limit of its own."""
    texts = texts_of(set_up(agent))
    assert agent.name == "pi" or "3600000" in texts or "3600" in texts or "False" in texts


def test_contexts_are_larger_than_first_prompts(agent: Agent) -> None:
    assert agent.context >= 1.5 * agent.first_prompt


def test_opencode_keeps_the_settings_in_the_users_variable() -> None:
    name = "OPENCODE_CONFIG_CONTENT"
    given = {"theme": "system", "model": "other/model", "provider": {"other": {"name": "Other"}}}
    merged = json.loads(set_up(AGENTS["opencode"], **{name: json.dumps(given)}).variables[name])
    assert merged["theme"] == "system"
    assert merged["model"] == f"llmrun/{SERVED.model}"
    assert [*merged["provider"]] == ["other", "llmrun"]
    for text in ("{", "[]"):
        with pytest.raises(UsageError, match=name):
            set_up(AGENTS["opencode"], **{name: text})


def test_other_providers_of_claude_code_are_switched_off() -> None:
    found = set_up(AGENTS["claude"])
    assert "CLAUDE_CODE_USE_BEDROCK" in found.removed
    assert found.variables["ANTHROPIC_API_KEY"] == ""
    assert not {*found.removed} & found.variables.keys()


def test_env_files_do_not_redirect_aider() -> None:
    """aider lets .env files override variables, but arguments and the last of these files take precedence."""
    found = set_up(AGENTS["aider"])
    given = dict(zip(found.arguments, found.arguments[1:], strict=False))
    assert given["--openai-api-base"] == SERVED.v1
    texts = {str(file.path): file.text for file in found.files}
    assert texts[given["--env-file"]] == f"OPENAI_API_KEY={SERVED.key}\n"


def test_proxies_do_not_get_requests_to_this_machine() -> None:
    assert around_proxies(HOME) == {}
    assert around_proxies({"HTTPS_PROXY": "http://proxy:1"})["NO_PROXY"] == "127.0.0.1"
    found = around_proxies({"http_proxy": "http://proxy:1", "NO_PROXY": "intranet"})
    assert found == dict.fromkeys(("no_proxy", "NO_PROXY"), "intranet,127.0.0.1")


def test_answers_take_at_most_a_quarter_of_the_context() -> None:
    assert [Served("", "", "", context, FOLDER).output for context in (8192, 16_384, 131_072)] == [2048, 4096, 8192]


def test_the_page_lists_all_agents() -> None:
    rows = re.findall(r"^\| (.+?) \| `([\w-]+)` \| ([\d,]+) \| ([\d,]+) \| `(.+?)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [
        (agent.title, agent.name, f"{agent.first_prompt:,}", f"{agent.context:,}", agent.install)
        for agent in AGENTS.values()
    ]
