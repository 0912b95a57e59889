"""The workloads that a benchmark repeats, and the configurations to measure.

A workload contains random tokens, conversations or prompts from a file. Each combination of the values listed in flags
is one configuration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, cast

from llmrun.base.amounts import counted
from llmrun.base.errors import UsageError
from llmrun.base.folders import refuse_utf_16
from llmrun.engine.remote.request import parse_endpoint
from llmrun.jobs.bench.documents.document import WorkloadFacts
from llmrun.options.settings import RULES, SPECULATE_OFF

Message = Mapping[str, str]

CHAT_CONTEXT = 4096  # The longest built-in conversation uses about 2,500 tokens.
_ANSWER_TOKENS = 128  # The default length of an answer to a prompt from a file.
_MOST_FILE_BYTES = 64 << 20
_LONGEST_NAME = 40
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation, with all messages so far."""

    messages: tuple[Message, ...]
    max_tokens: int = _ANSWER_TOKENS
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one repetition.

    A repetition runs `facts.concurrency` sessions at a time, or that many synthetic sessions if `sessions` is empty.
    """

    facts: WorkloadFacts
    sessions: tuple[tuple[Turn, ...], ...] = ()

    @property
    def context_size(self) -> int | None:
        """The required context size in tokens, or None if the size depends on the tokenizer."""
        if self.facts.kind == "synthetic":
            return self.facts.depth + max(1, self.facts.prompt) + self.facts.generate + 1
        return CHAT_CONTEXT if self.facts.kind == "chat" else None


def synthetic(prompt: int, generate: int, depth: int, concurrency: int) -> Workload:
    """Return a workload of random tokens, which differ between repetitions. Raises UsageError for an empty workload."""
    if prompt == 0 and generate == 0:
        raise UsageError("nothing to measure: -p and -n are both 0")
    label = ", ".join(
        words
        for words, number in (
            (f"{depth:,} before", depth),
            (f"{prompt:,} in", prompt),
            (f"{generate:,} out", generate),
            (f"{concurrency} at once", concurrency - 1),
        )
        if number
    )
    return Workload(WorkloadFacts("synthetic", label, prompt, generate, depth, concurrency))


def chats(concurrency: int) -> list[Workload]:
    """Return the workloads of the built-in conversations."""
    text = files("llmrun.jobs.bench").joinpath("chats.json").read_text(encoding="utf-8")
    return [_chat(one["label"], one["messages"], one["max_tokens"], concurrency) for one in json.loads(text)]


def _chat(label: str, messages: Sequence[Message], max_tokens: int, concurrency: int) -> Workload:
    """Return the workload of one conversation, with a request for each user message.

    The assistant's earlier messages are fixed, so that all models read the same text.
    """
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    session = tuple(Turn(tuple(messages[: number + 1]), max_tokens=max_tokens) for number in asked)
    facts = WorkloadFacts("chat", _with_others(f"chat: {label}", concurrency), concurrency=concurrency)
    return Workload(facts, (session,) * concurrency)


def cold_starts() -> Workload:
    """Return a workload that starts a new process for each request."""
    return Workload(WorkloadFacts("cold", "cold starts"))


def from_file(path: Path, concurrency: int) -> list[Workload]:
    """Read workloads from a JSON Lines file: one workload per name, in the order of the names' first lines.

    Each line has "prompt" or "messages", and optionally "name", "max_tokens" and "temperature". Lines without a name
    form a workload that is named after the file. Raises UsageError, which names the invalid line.
    """
    try:
        size = path.stat().st_size
        if size > _MOST_FILE_BYTES:
            raise UsageError(f"prompts: {path}: too large: {size:,} bytes, limit {_MOST_FILE_BYTES:,}")
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"prompts: {path}: cannot be read: {error.strerror}") from error
    refuse_utf_16(data, f"prompts: {path}")
    turns: dict[str, list[Turn]] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            name, turn = _turn(line, f"{path}: line {number}")
            turns.setdefault(name or path.name, []).append(turn)
    if not turns:
        raise UsageError(
            f"prompts: {path}: the file has no prompts", hint='write one JSON object per line: {"prompt": "..."}'
        )
    return [_prompts(name, some, concurrency) for name, some in turns.items()]


def _prompts(name: str, turns: Sequence[Turn], concurrency: int) -> Workload:
    label = _with_others(f"{name}: {counted(len(turns), 'prompt')}", concurrency)
    return Workload(WorkloadFacts("prompts", label, concurrency=concurrency), tuple((turn,) for turn in turns))


def _turn(line: bytes, where: str) -> tuple[str, Turn]:
    """Parse one line of a prompts file. Return the name (or "" if the line has no name) and the request."""
    try:
        body = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"prompts: {where}: not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise UsageError(f"prompts: {where}: not a JSON object")
    name = body.get("name", "")
    if not isinstance(name, str) or len(name) > _LONGEST_NAME:
        raise UsageError(f"prompts: {where}: name: must be a string of at most {_LONGEST_NAME} characters")
    return name, Turn(_messages(body, where), _max_tokens(body, where), _temperature(body, where))


def _max_tokens(body: Mapping[str, Any], where: str) -> int:
    value = body.get("max_tokens", _ANSWER_TOKENS)
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise UsageError(f"prompts: {where}: max_tokens: {value!r} is not an integer from 1 to {1 << 20:,}")
    return value


def _messages(body: Mapping[str, Any], where: str) -> tuple[Message, ...]:
    messages, text = body.get("messages"), body.get("prompt")
    if (messages is None) == (text is None):
        raise UsageError(f'prompts: {where}: must have either "prompt" or "messages"')
    if messages is not None:
        return _checked_messages(messages, where)
    if not isinstance(text, str) or not text:
        raise UsageError(f"prompts: {where}: prompt: must be a non-empty string")
    return ({"role": "user", "content": text},)


def _temperature(body: Mapping[str, Any], where: str) -> float:
    rule = RULES["temperature"]
    try:
        return cast("float", rule.check(body.get("temperature", 0.0)))
    except ValueError:
        raise UsageError(f"prompts: {where}: temperature: {body['temperature']!r:.60} is not {rule.words}") from None


def _checked_messages(messages: object, where: str) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"prompts: {where}: messages: must be a non-empty list")
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise UsageError(f"prompts: {where}: messages: each needs one of these roles: {', '.join(_ROLES)}")
        if not isinstance(message.get("content"), str):
            raise UsageError(f"prompts: {where}: messages: each needs a string as content")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _with_others(label: str, concurrency: int) -> str:
    return f"{label}, {concurrency} at once" if concurrency > 1 else label


MOST_CONFIGURATIONS = 1000
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+)(?:([+*])([0-9]+))?)?")


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A model with its backend and settings, or an endpoint. Equal targets share an engine.

    model      the model's name as the user gave it
    path       the model file; empty for an endpoint
    threads    the number of threads; None to let the backend choose
    kv_type    the precision of the KV cache; None to let the backend choose
    speculate  auto, off, or the name of the draft model
    draft      the file of the draft model; empty without a draft model
    adapters   LoRA adapters, in the notation of --lora
    """

    model: str
    path: str = ""
    endpoint: str = ""
    backend: str = "auto"
    threads: int | None = None
    kv_type: str | None = None
    gpu_layers: int | str = "auto"
    speculate: str = SPECULATE_OFF
    draft: str = ""
    adapters: Sequence[str] = ()
    offline: bool = False  # True to refuse endpoints on other machines


@dataclass(frozen=True, slots=True)
class Room:
    """The size of the engine that a target's configurations require."""

    context_size: int | None  # None for the largest context that fits in memory
    max_sequences: int
    to_the_limit: bool  # True if answers must continue to the requested length, past any end token


@dataclass(frozen=True, slots=True)
class Configuration:
    """A target and the workload to run on it.

    `name` is a short label that distinguishes the target from the sweep's other targets, or "" for a single target.
    """

    name: str
    target: BenchTarget
    workload: Workload


def configurations(targets: Sequence[BenchTarget], workloads: Sequence[Workload]) -> list[Configuration]:
    """Combine each target with each workload, grouped by workload. Raises UsageError for too many combinations."""
    count = len(targets) * len(workloads)
    if count > MOST_CONFIGURATIONS:
        raise UsageError(f"too many configurations: {count:,}, limit {MOST_CONFIGURATIONS:,}")
    names = _names(targets)
    return [
        Configuration(name, target, workload)
        for workload in workloads
        for name, target in zip(names, targets, strict=True)
    ]


def local_targets(
    models: Sequence[tuple[str, str]],
    backends: Sequence[str],
    threads: Sequence[int | None],
    kv_types: Sequence[str | None],
    gpu_layers: Sequence[int | str],
    speculations: Sequence[tuple[str, str]] = ((SPECULATE_OFF, ""),),
    adapters: tuple[str, ...] = (),
) -> list[BenchTarget]:
    """Return a target for every combination, in command-line order.

    models        (name, path) pairs
    speculations  (auto, off or the draft model's name; path of the draft model or "") pairs
    adapters      LoRA adapters for all targets, in the notation of --lora
    """
    return [
        BenchTarget(
            model=model,
            path=path,
            backend=backend,
            threads=n_threads,
            kv_type=kv_type,
            gpu_layers=layers,
            speculate=speculate,
            draft=draft,
            adapters=adapters,
        )
        for (model, path), backend, n_threads, kv_type, layers, (speculate, draft) in product(
            models, backends, threads, kv_types, gpu_layers, speculations
        )
    ]


def remote_target(url: str, *, offline: bool = False) -> BenchTarget:
    """Return the target for `URL#MODEL`. `#MODEL` is optional if the server has one model. Raises UsageError."""
    endpoint = parse_endpoint(url)
    return BenchTarget(endpoint.model or endpoint.host, endpoint=endpoint.address, backend="remote", offline=offline)


def _names(targets: Sequence[BenchTarget]) -> list[str]:
    """Return a name for each target, composed of the settings that differ between the targets."""
    axes: list[Callable[[BenchTarget], str]] = [
        lambda target: target.model,
        lambda target: parse_endpoint(target.endpoint).host if target.endpoint else target.backend,
        lambda target: "" if target.threads is None else f"{target.threads} thread{'s'[: target.threads != 1]}",
        lambda target: target.kv_type or "",
        lambda target: "" if target.endpoint else f"ngl {target.gpu_layers}",
        lambda target: "" if target.endpoint else f"speculate {target.speculate}",
    ]
    telling = [axis for axis in axes if len({axis(target) for target in targets} - {""}) > 1]
    return [", ".join(dict.fromkeys(filter(None, (axis(target) for axis in telling)))) for target in targets]


def numbers(text: str, flag: str, minimum: int = 0) -> list[int]:
    """Parse a list like `"1,2,8"`, `"1-8"`, `"0-512+128"` or `"64-512*2"`.

    Returns the integers in the given order without duplicates. Raises UsageError.
    """
    found: dict[int, None] = {}
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or len(part) > 40:
            raise UsageError(
                f"{flag}: {text!r}: {part!r} is not a number or range",
                hint="examples: 4 or 1,2,8 or 1-8 or 0-512+128 or 64-512*2",
            )
        for number in _between(match, flag, text):
            if not minimum <= number < 1 << 31:
                raise UsageError(f"{flag}: {text!r}: {number} is not between {minimum} and {(1 << 31) - 1}")
            found[number] = None
    return list(found)


def _between(match: re.Match[str], flag: str, text: str) -> list[int]:
    first = int(match[1])
    if match[2] is None:
        return [first]
    last, operator, step = int(match[2]), match[3] or "+", int(match[4] or 1)
    if last < first:
        raise UsageError(f"{flag}: {text!r}: the range ends before it begins")
    if step == 0 or (operator == "*" and (step == 1 or first == 0)):
        raise UsageError(f"{flag}: {text!r}: the range never ends")
    values = []
    while first <= last:
        values.append(first)
        if len(values) > MOST_CONFIGURATIONS:
            raise UsageError(f"{flag}: {text!r}: more than {MOST_CONFIGURATIONS:,} values")
        first = first + step if operator == "+" else first * step
    return values


def words(text: str, flag: str, known: Sequence[str], hidden: Sequence[str] = ()) -> list[str]:
    """Parse a list like `"cpu,llama"` and remove duplicates. Raises UsageError for unknown words."""
    found = dict.fromkeys(word.strip() for word in text.split(","))
    for word in found:
        if word not in (*known, *hidden):
            raise UsageError(f"{flag}: {text!r}: {word!r} is not one of {', '.join(known)}")
    return list(found)
