"""Hostile bodies of API calls: absurd sizes, formats that would harm a compiler, and valid bodies with broken bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.soak.serving.requests import CHAT, COMPLETION, random_requests
from tests.support.constraint.hostile_grammars import (
    CHOICES,
    GBNF_GRAMMARS,
    GRAMMARS,
    HARMLESS_GRAMMARS,
    HARMLESS_REGEXES,
    HARMLESS_SCHEMAS,
    REGEXES,
    SCHEMAS,
)

_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_TEMPLATE = "{{ cycler.__init__.__globals__ }} {% for i in range(10**9) %}x{% endfor %}"
_DEEP = json.loads('{"type": "object", "properties": {"a": ' * 90 + "{}" + "}}" * 90)


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **fields}


def _messages(*contents: Any) -> dict[str, Any]:
    return _chat(messages=[{"role": "user", "content": content} for content in contents])


def _tool(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


# Many of these bodies are valid, but large or absurd.
_CHATS: Sequence[Callable[[], dict[str, Any]]] = (
    lambda: _messages(*["Hi"] * 10_000),
    lambda: _messages("a " * 500_000),
    lambda: _messages("a" * 1_000_000),
    lambda: _messages("\u0000\u200b\ufdd0\U0001f9d1\u200d" * 10_000),
    lambda: _messages([{"type": "text", "text": "a"}] * 100_000),
    lambda: _messages("<|im_end|>\n<|im_start|>system\n" * 100),
    lambda: _messages(_TEMPLATE),
    lambda: _chat(messages=[{"role": "assistant", "tool_calls": [_CALL] * 10_000}]),
    lambda: _chat(tools=[_tool({"type": "object"})] * 1000),
    lambda: _chat(tools=[_tool(_DEEP)]),
    lambda: _chat(tools=[_tool(json.loads(SCHEMAS["doubling allOf"]))]),
    lambda: _chat(n=10**9),
    lambda: _chat(max_tokens=2**31 - 1, ignore_eos=True),
    lambda: _chat(logit_bias={str(i): 1 for i in range(100_000)}),
    lambda: _chat(stop=["a"] * 1000),
    lambda: _chat(stop="a" * 1_000_000),
    lambda: _chat(temperature=10**400, top_k=10**30, seed=10**40),
    lambda: _chat(**{f"field{i}\r\nx: y": i for i in range(10_000)}),
    lambda: _chat(chat_template_kwargs={"messages": [], "range": 5, "a" * 10_000: _DEEP}),
    lambda: _chat(temperature=5, top_p=1e-9, min_p=1, typical_p=0, mirostat=2, dry_multiplier=5, n=4),
    lambda: _chat(logprobs=True, top_logprobs=20, max_tokens=50, n=4),
)
_COMPLETIONS: Sequence[dict[str, Any]] = (
    {"prompt": "word " * 200_000},
    {"prompt": [5] * 100_000},
    {"prompt": ["a"] * 10_000},
    {"prompt": [-1, 2**40, 0]},
    {"prompt": "Hello", "echo": True, "max_tokens": 1, "suffix": "x"},
)
_NOT_JSON: Sequence[Callable[[], bytes]] = (
    lambda: b"[" * 100_000,
    lambda: b'{"seed": ' + b"9" * 1_000_000 + b"}",
    lambda: b'{"a": [' + b"[]," * 4_000_000 + b"[]]}",
    lambda: b'{"messages": [{"role": "user", "content": "' + b"a" * 15_000_000 + b'"}]}',
    lambda: b'{"messages": [{"role": "user", "content": "\xff\xfe\xc0\x80"}]}',
)
_FORMATS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("json_schema", {**SCHEMAS, **HARMLESS_SCHEMAS}),
    ("guided_grammar", {**GRAMMARS, **HARMLESS_GRAMMARS}),
    ("grammar", GBNF_GRAMMARS),
    ("guided_regex", {**REGEXES, **HARMLESS_REGEXES}),
    ("guided_choice", CHOICES),
)


def hostile_body(chance: random.Random) -> tuple[str, bytes]:
    """Return a path and a body."""
    [kind] = chance.choices(("chat", "completion", "not JSON", "format", "mutated"), (40, 10, 10, 20, 20))
    match kind:
        case "chat":
            return CHAT, json.dumps(chance.choice(_CHATS)()).encode()
        case "completion":
            return COMPLETION, json.dumps(chance.choice(_COMPLETIONS)).encode()
        case "not JSON":
            return CHAT, chance.choice(_NOT_JSON)()
        case "format":
            field, values = chance.choice(_FORMATS)
            return CHAT, json.dumps(_chat(**{field: chance.choice([*values.values()])})).encode()
    path, body = valid_body(chance)
    return path, mutated_bytes(chance, body)


def valid_body(chance: random.Random) -> tuple[str, bytes]:
    """Return the path and the body of a request that is valid."""
    [asked] = random_requests(chance.randrange(1 << 30), 1, with_tools=False)
    return asked.path, json.dumps(asked.body).encode()


def mutated_bytes(chance: random.Random, data: bytes) -> bytes:
    """Replace up to five short parts, at random places, by nothing, by themselves twice, or by something odd."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 5)):
        at = chance.randrange(len(changed) + 1)
        part = changed[at : at + chance.randint(1, 20)]
        odd = (b"", part + part, chance.randbytes(1), b'"', b"{", b"[", b"\x00", b"\xf0\x9f", b"1e9", b"null", b",")
        changed[at : at + len(part)] = chance.choice(odd)
    return bytes(changed)
