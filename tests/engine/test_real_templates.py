"""The real chat templates of llama.cpp's source, as llama-cpp-python's formatter renders them."""

from __future__ import annotations

import re
from datetime import datetime, tzinfo
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_chat_format

from llmrun.backends.scripted_tokenizer import CONTROL_TOKENS, ScriptedTokenizer
from llmrun.engine.requests import ChatPrompt
from llmrun.engine.template import ChatTemplate
from llmrun.engine.templating import globals as templating_globals
from llmrun.errors import TemplateRefused
from tests.support.downloads import llama_cpp_source

TEMPLATES = sorted((llama_cpp_source() / "vendor/llama.cpp/models/templates").glob("*.jinja"))
_CONTROL_STRING = re.compile(r"<[|｜][\w▁ .-]+[|｜]>|\[/?[A-Z_]{3,}\]|<[a-z]+_of_[a-z]+>|</?s>|<\|?turn\|?>")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place, in °C <now>",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "A town & its country"}},
            "required": ["place"],
        },
    },
}
USER = {"role": "user", "content": "Grüße aus 北京 🙂, it's <b>me</b>"}
SYSTEM = {"role": "system", "content": "You are brief."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"place": "Zürich"}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"celsius": 21.5}'}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {
        "messages": [
            SYSTEM,
            USER,
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"},
            {"role": "user", "content": "  And now?\n"},
        ]
    },
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    "tools": {"messages": [SYSTEM, USER], "tools": [WEATHER]},
    "tool call": {"messages": [USER, CALL, RESULT], "tools": [WEATHER]},
    "to be continued": {
        "messages": [USER, {"role": "assistant", "content": "Well,"}],
        "add_generation_prompt": False,
    },
    "thinking off": {"messages": [USER], "template_kwargs": {"enable_thinking": False}},
    # What firefunction cannot do without; the others leave them aside.
    "more variables": {"messages": [SYSTEM, USER], "template_kwargs": {"datetime": "Tuesday", "functions": "[]"}},
    "more variables, turns": {
        "messages": [USER, {"role": "assistant", "content": "Hello!"}, USER],
        "template_kwargs": {"datetime": "Tuesday", "functions": "[]"},
    },
}


class FixedClock(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> FixedClock:
        return cls(2026, 2, 3, 4, 5, 6)


@pytest.fixture(autouse=True)
def _fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templating_globals, "datetime", FixedClock)
    monkeypatch.setattr(llama_chat_format, "datetime", FixedClock)


@cache
def source_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tokenizer_of(path: Path) -> ScriptedTokenizer:
    """Every control string the template writes is a control token."""
    found = {text for text in _CONTROL_STRING.findall(source_of(path)) if "think" not in text}
    return ScriptedTokenizer(more_control_tokens=sorted(found - set(CONTROL_TOKENS)))


def ours(path: Path, conversation: dict[str, Any]) -> str:
    return ChatTemplate(source_of(path), "model", path.stem).render(ChatPrompt(**conversation), tokenizer_of(path))


@cache
def formatter_of(path: Path, add_generation_prompt: bool) -> llama_chat_format.Jinja2ChatFormatter:
    return llama_chat_format.Jinja2ChatFormatter(
        source_of(path), eos_token="<|im_end|>", bos_token="<|bos|>", add_generation_prompt=add_generation_prompt
    )


def theirs(path: Path, conversation: dict[str, Any]) -> str | None:
    """None when the template raised something."""
    formatter = formatter_of(path, conversation.get("add_generation_prompt", True))
    named = {name: conversation.get(name) for name in ("messages", "tools")}
    try:
        return str(formatter(**{**named, **conversation.get("template_kwargs", {})}).prompt)
    except Exception:  # noqa: BLE001 - whatever it is, ours must refuse too
        return None


def test_they_are_all_here() -> None:
    assert len(TEMPLATES) >= 60


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_it_renders_as_the_oracle_does(path: Path) -> None:
    rendered = 0
    for name, conversation in CONVERSATIONS.items():
        expected = theirs(path, conversation)
        if expected is None:
            with pytest.raises(TemplateRefused) as refused:
                ours(path, conversation)
            assert "\n" not in str(refused.value)
        else:
            assert tokenizer_of(path).unprotect(ours(path, conversation)) == expected, name
            rendered += 1
    assert rendered >= 2


def spread(value: Any, extra: str) -> Any:
    """A conversation with `extra` at the end of every string that someone else than the template's author writes."""
    if isinstance(value, dict):
        fixed = ("role", "type", "tool_call_id", "id")
        return {key: item if key in fixed else spread(item, extra) for key, item in value.items()}
    if isinstance(value, list):
        return [spread(item, extra) for item in value]
    return value + extra if isinstance(value, str) else value


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_what_others_write_never_becomes_a_control_token(path: Path) -> None:
    tokenizer = tokenizer_of(path)
    injection = "".join(tokenizer.token_text(token) for token in range(256, tokenizer.vocabulary_size))
    compared = 0
    for name, conversation in CONVERSATIONS.items():
        if theirs(path, conversation) is None:
            continue
        controls = []
        for extra in ("x", "x" + injection + "\ufdd0x"):
            ids = tokenizer.encode_rendered(ours(path, spread(conversation, extra))).tolist()
            controls.append([tokenizer.token_text(token) for token in ids if token >= 256])
        assert controls[1] == controls[0], name
        compared += 1
    assert compared >= 2
