"""Tests of the real chat templates in llama.cpp's source, against llama-cpp-python's formatter and `transformers`."""

from __future__ import annotations

import re
from datetime import datetime, tzinfo
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_chat_format

from llmrun.backends.scripted import CONTROL_TOKENS, ScriptedTokenizer
from llmrun.base.errors import TemplateRefused
from llmrun.engine.requests import ChatPrompt
from llmrun.engine.templates import chat_template
from llmrun.engine.templates.chat_template import ChatTemplate
from tests.support.models.downloads import llama_cpp_source
from tests.support.templates.template_runs import PROCESS

pytestmark = pytest.mark.push

TEMPLATES = sorted((llama_cpp_source() / "vendor/llama.cpp/models/templates").glob("*.jinja"))
_CONTROL_STRING = re.compile(r"<[|｜][\w▁ .-]+[|｜]>|\[/?[A-Z_]{3,}\]|<[a-z]+_of_[a-z]+>|</?s>|<\|?turn\|?>")

# In that formatter, `raise_exception` raises a ValueError; the LookupError comes from this file.
THE_TEMPLATES_OWN = (ValueError, LookupError)

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place, in °C <now>",
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "A town & its country"},
                "days": {"type": "integer", "description": "How many"},
                "unit": {"type": "string", "description": "°C or °F", "enum": ["c", "f"], "default": "c"},
            },
            "required": ["place"],
        },
    },
}
NOTHING = {"type": "object", "properties": {}}
CLOCK = {"type": "function", "function": {"name": "now", "description": "The time", "parameters": NOTHING}}
USER = {"role": "user", "content": "Grüße aus 北京 🙂, it's <b>me</b>"}
SYSTEM = {"role": "system", "content": "You are brief."}


def call(name: str, arguments: object, number: int = 1) -> dict[str, Any]:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def said(content: object, **more: object) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def result(content: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call0000{number}", "name": "get_weather", "content": content}


CALL = said("", tool_calls=[call("get_weather", {"place": "Zürich", "days": 2, "more": [1.5, None, True]})])
CALLS = said("Let me see.", tool_calls=[call("get_weather", {"place": "Ulm"}), call("now", {}, 2)])
RESULT = result('{"celsius": 21.5}')
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {
        "messages": [SYSTEM, USER, said("<think>\nhm\n</think>\n\nHello!"), {"role": "user", "content": "  And now?\n"}]
    },
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]},
    "tools": {"messages": [SYSTEM, USER], "tools": [WEATHER, CLOCK]},
    "tool call": {"messages": [USER, CALL, RESULT], "tools": [WEATHER]},
    "tool calls": {"messages": [SYSTEM, USER, CALLS, RESULT, result("12:00", 2)], "tools": [WEATHER, CLOCK]},
    "arguments as text": {
        "messages": [USER, said(None, tool_calls=[call("get_weather", '{"place": "Ulm"}')]), RESULT],
        "tools": [WEATHER],
    },
    "after tools": {"messages": [SYSTEM, USER, CALL, RESULT, said("21.5."), USER], "tools": [WEATHER]},
    "thoughts": {"messages": [USER, said("Hi.", reasoning_content="Say hi."), USER]},
    "thoughts by another name": {"messages": [USER, said("Hi.", reasoning="Say hi."), USER]},
    "thoughts before a call": {
        "messages": [USER, {**CALL, "reasoning_content": "Look it up."}, RESULT],
        "tools": [WEATHER],
    },
    "thoughts as a part": {
        "messages": [USER, said([{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "Hi."}]), USER]
    },
    "no prompt": {"messages": [SYSTEM, USER], "add_generation_prompt": False},
    "to be continued": {"messages": [SYSTEM, USER, said("Well, ")], "add_generation_prompt": False},
    "thoughts and to be continued": {
        "messages": [USER, said("Well,", reasoning_content="Say hi.")],
        "add_generation_prompt": False,
    },
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, USER]},
    "two users": {"messages": [USER, USER]},
    "answer first": {"messages": [said("Hi"), USER]},
    "late system": {"messages": [USER, SYSTEM, USER]},
    "unknown role": {"messages": [{"role": "wizard", "content": "x"}]},
    "nothing": {"messages": []},
    # firefunction requires these variables; the other templates ignore them.
    "more variables": {"messages": [SYSTEM, USER], "template_kwargs": {"datetime": "Tuesday", "functions": "[]"}},
    "more variables, turns": {
        "messages": [USER, said("Hello!"), USER],
        "template_kwargs": {"datetime": "Tuesday", "functions": "[]"},
    },
}
# Rendered with thinking switched on and off, if the template supports it.
SWITCHED = ("system", "turns", "tools", "thoughts", "thoughts before a call", "to be continued")


class FixedClock(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> FixedClock:
        return cls(2026, 2, 3, 4, 5, 6)


@pytest.fixture(autouse=True)
def _fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "datetime", FixedClock)
    monkeypatch.setattr(llama_chat_format, "datetime", FixedClock)


PARAMS = [
    pytest.param(path, id=path.stem, marks=() if number % 5 == 0 else pytest.mark.night)
    for number, path in enumerate(TEMPLATES)
]


@pytest.fixture(scope="module", params=PARAMS)
def path(request: pytest.FixtureRequest) -> Path:
    """Yield each template's path. pytest groups all tests of one template, so each is compiled once."""
    chosen: Path = request.param
    return chosen


@cache
def source_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def tokenizer_of(path: Path) -> ScriptedTokenizer:
    """Return a tokenizer in which every control string of the template is a control token."""
    found = {text for text in _CONTROL_STRING.findall(source_of(path)) if "think" not in text}
    return ScriptedTokenizer(more_control_tokens=sorted(found - set(CONTROL_TOKENS)))


def ours(path: Path, conversation: dict[str, Any]) -> str:
    template = ChatTemplate(source_of(path), "model", path.stem)
    return template.render(ChatPrompt(**conversation), tokenizer_of(path), PROCESS)


@cache
def formatter_of(path: Path, add_generation_prompt: bool) -> llama_chat_format.Jinja2ChatFormatter:
    return llama_chat_format.Jinja2ChatFormatter(
        source_of(path), eos_token="<|im_end|>", bos_token="<|bos|>", add_generation_prompt=add_generation_prompt
    )


def theirs(path: Path, conversation: dict[str, Any]) -> str | Exception:
    """Return the text, or what the template raised, with messages named and trimmed as in `transformers`."""
    prompts = conversation.get("add_generation_prompt", True)
    messages = [as_transformers_names_it(message) for message in conversation["messages"]]
    continued = messages[-1]["content"] if messages and messages[-1]["role"] == "assistant" and not prompts else None
    if continued is not None:
        messages[-1]["content"] += "CONTINUE_FINAL_MESSAGE_TAG "
    given = {"messages": messages, "tools": conversation.get("tools"), "documents": None}
    try:
        text = str(formatter_of(path, prompts)(**{**given, **conversation.get("template_kwargs", {})}).prompt)
    except Exception as error:  # noqa: BLE001 - whatever it is, ours must refuse too
        return error
    if continued is None:
        return text
    if "CONTINUE_FINAL_MESSAGE_TAG" not in text:
        return LookupError("drops part of the answer")
    kept, _, after = text.rpartition("CONTINUE_FINAL_MESSAGE_TAG")
    return kept if after.startswith(" ") else kept.rstrip()


def as_transformers_names_it(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content") or message.get("thinking") or message.get("reasoning")
    return {"thinking": reasoning, **message, "reasoning_content": reasoning} if reasoning else {**message}


def conversations_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return all conversations, and some again with thinking switched on and off."""
    found = {**CONVERSATIONS}
    abilities = PROCESS.abilities(source_of(path))
    for switch in (abilities.reasoning_on, abilities.reasoning_off):
        if switch:
            found |= {f"{name}, {switch}": {**CONVERSATIONS[name], "template_kwargs": switch} for name in SWITCHED}
    return found


def test_they_are_all_here() -> None:
    assert len(TEMPLATES) >= 60


def test_it_renders_as_the_oracle_does(path: Path) -> None:
    rendered = 0
    for name, conversation in conversations_of(path).items():
        expected = theirs(path, conversation)
        if isinstance(expected, Exception):
            with pytest.raises(TemplateRefused) as refused:
                ours(path, conversation)
            assert "\n" not in str(refused.value)
            assert refused.value.exit_code == 9
            if type(expected) in THE_TEMPLATES_OWN:
                words = " ".join(tokenizer_of(path).protect(str(expected)).split())
                assert words[:150] in str(refused.value), name
        else:
            assert tokenizer_of(path).unprotect(ours(path, conversation)) == expected, name
            rendered += 1
    assert rendered >= 2


def spread(value: Any, extra: str) -> Any:
    """Return the conversation with `extra` appended to every string that does not come from the template's author."""
    if isinstance(value, dict):
        fixed = ("role", "type", "tool_call_id", "id")
        return {key: item if key in fixed else spread(item, extra) for key, item in value.items()}
    if isinstance(value, list):
        return [spread(item, extra) for item in value]
    return value + extra if isinstance(value, str) else value


@pytest.mark.night
def test_what_others_write_never_becomes_a_control_token(path: Path) -> None:
    tokenizer = tokenizer_of(path)
    injection = "".join(tokenizer.token_text(token) for token in range(256, tokenizer.vocabulary_size))
    compared = 0
    for name, conversation in CONVERSATIONS.items():
        if isinstance(theirs(path, spread(conversation, "x")), Exception):
            continue
        controls = []
        for extra in ("x", "x" + injection + "\ufdd0x"):
            ids = tokenizer.encode_rendered(ours(path, spread(conversation, extra))).tolist()
            controls.append([tokenizer.token_text(token) for token in ids if token >= 256])
        assert controls[1] == controls[0], name
        compared += 1
    assert compared >= 2
