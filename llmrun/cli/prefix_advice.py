"""Turns the records of the prefix log into sentences: what cost the most time, and who can change it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from llmrun.base.amounts import counted, format_seconds_roughly
from llmrun.cli.console.terminal import visible_line
from llmrun.engine.requests import PrefixCause, PrefixReport
from llmrun.serving.prefix_log import ago_words

if TYPE_CHECKING:
    from llmrun.serving.prefix_log import Record

_MONTHS: Final = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
_DAYS: Final = "mon|tue|wed|thu|fri|sat|sun"
# Kinds of texts that differ in every request, each with a pattern that the differing words of both texts match. The
# patterns are tried in this order, first on the differing words and then on all of the text.
_KINDS: Final = (
    ("a random ID", re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-|\b(?=\w*\d)(?=\w*[a-z])\w{6,}\b(?!:\d)", re.I)),
    ("the time", re.compile(r"\b\d{1,2}:\d{2}\b|\d{4}-\d\d-\d\dT\d\d|\b1[6-9]\d{8}(?:\d{3})?\b")),
    (
        "the date",
        re.compile(rf"\b\d{{4}}[-/]\d\d?[-/]\d\d?\b|\b\d\d?[./]\d\d?[./]\d{{2,4}}\b|\b(?:{_MONTHS}|{_DAYS})", re.I),
    ),
    ("a path", re.compile(r"[/\\][\w.-]+[/\\]|\b[a-z]:\\|~/", re.I)),
    ("the state of git", re.compile(r"\bgit\b|\bbranch\b|\bmodified:|\bcommit\b|^[ AMDR?]{2} \S", re.I)),
    ("a number", re.compile(r"^[^\w]*\d[\d.,]*[^\w]*$")),
)
_WORD: Final = re.compile(r"\S*$"), re.compile(r"^\S*")
_NUMBER: Final = re.compile(r"\d+")


class Problem(Struct):
    """Misses with the same cause. `example` is the latest one.

    lost, seconds  tokens that were computed again, and about how long that took
    """

    example: PrefixReport
    kind: str
    requests: int = 0
    lost: int = 0
    seconds: float = 0.0


class Client(Struct):
    """The requests of one program to one model.

    reused  requests that reused as much as possible, or waited for a running request with the same prefix
    first   requests without a similar earlier prompt
    """

    agent: str
    model: str
    requests: int = 0
    reused: int = 0
    first: int = 0
    problems: tuple[Problem, ...] = ()


def clients_of(records: Iterable[Record]) -> list[Client]:
    """Group records by program and model. The problems that cost the most time come first."""
    clients: dict[tuple[str, str], Client] = {}
    problems: dict[tuple[str, str], dict[tuple[str, ...], Problem]] = {}
    for record in records:
        report, agent = record.report, record.agent.partition(" ")[0].partition("/")[0] or "unknown program"
        client = clients.setdefault((agent, record.model), Client(agent, record.model))
        client.requests += 1
        if report.cause is PrefixCause.FIRST:
            client.first += 1
        elif report.cause in (PrefixCause.REUSED, PrefixCause.WAITED):
            client.reused += 1
        else:
            kind = kind_of(report.old, report.new) if report.cause is PrefixCause.DIFFERS else ""
            key = (report.cause, _NUMBER.sub("", report.where), report.name, report.detail, kind)
            problem = problems.setdefault((agent, record.model), {}).setdefault(key, Problem(report, kind))
            problem.example = report
            problem.requests += 1
            problem.lost += report.lost
            problem.seconds += record.seconds * min(1.0, report.lost / max(report.total - report.reused, 1))
    for name, found in problems.items():
        worst_first = sorted(found.values(), key=lambda one: (one.seconds, one.lost), reverse=True)
        clients[name].problems = tuple(worst_first)
    return sorted(clients.values(), key=lambda one: -sum(problem.seconds for problem in one.problems))


def kind_of(old: str, new: str) -> str:
    """Return what the differing words of two texts are, such as "the time", or "" if unknown."""
    start = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    before, after = _WORD
    begun = before.search(old[:start])
    first = start - len(begun[0] if begun else "")
    words = [(after.match(text[first:]) or [""])[0] for text in (old, new)]
    for texts in (words, [old, new]):
        for kind, pattern in _KINDS:
            if all(map(pattern.search, texts)):
                return kind
    return ""


def sentences_of(client: Client) -> list[str]:
    """Return lines about one program: how much was reused, then a line for each problem."""
    rest = client.requests - client.reused - client.first
    firsts = f" {counted(client.first, 'request')} had nothing to reuse yet." if client.first else ""
    name = visible_line(f"{client.agent}, {client.model}")
    lines = [f"{name}: {client.reused} of {counted(client.requests, 'request')} reused their prefix.{firsts}"]
    if rest:
        lines.append(f"{rest} did not:" if client.reused or client.first else "None did:")
    for problem in client.problems:
        cost = f"{counted(problem.lost, 'token')} computed again"
        if problem.seconds >= 1:
            cost += f", about {format_seconds_roughly(problem.seconds)}"
        times = f" ({problem.requests} times)" if problem.requests > 1 else ""
        lines.append(f"  {visible_line(_words(problem))}{times}: {cost}")
    return lines


def as_json(client: Client) -> Mapping[str, Any]:
    """Return one program's requests for --json."""
    problems = [{**msgspec.to_builtins(problem), "words": _words(problem)} for problem in client.problems]
    return {**msgspec.to_builtins(client), "problems": problems}


def _words(problem: Problem) -> str:
    report = problem.example
    return _WORDS[report.cause](report, problem.kind)


def _differing(report: PrefixReport, kind: str) -> str:
    place = f"{report.where} ({report.name})" if report.name else report.where
    change = f"('{report.old}' became '{report.new}')"
    if report.where.startswith("the template"):
        return f"the chat template writes {kind or 'a text'} that changes {change}"
    if kind:
        return f"the client puts {kind} into {_its(place)} {change}"
    return f"the client changed {_its(place)} {change}"


def _its(place: str) -> str:
    return f"its {place}" if place in ("system prompt", "prompt") else place


def _tools(report: PrefixReport, kind: str) -> str:
    if report.detail == "order":
        return f"the client changed the order of its tools, from {report.where} ({report.name}) on"
    return f"the client {report.detail or 'changed'} {report.where} ({report.name})"


def _thinking(report: PrefixReport, kind: str) -> str:
    if report.detail.startswith("left out"):
        return f"the chat template leaves out earlier thinking, here in {report.where}"
    return f"the client did not send back the thinking of {report.where}"


def _evicted(report: PrefixReport, kind: str) -> str:
    ago = f" {ago_words(report.ago_s)}" if report.ago_s else ""
    return f"the prefix was removed{ago} to make room for other requests; a larger --kv-tokens keeps more"


_WORDS: Final[Mapping[PrefixCause, Callable[[PrefixReport, str], str]]] = {
    PrefixCause.DIFFERS: _differing,
    PrefixCause.TOOLS: _tools,
    PrefixCause.THINKING: _thinking,
    PrefixCause.EVICTED: _evicted,
    PrefixCause.ANSWER: lambda report, kind: (
        f"the client changed the model's answer, {report.where} ('{report.old}' became '{report.new}')"
    ),
    PrefixCause.RETOKENIZED: lambda report, kind: (
        f"{report.where} came back unchanged, but the model had generated other tokens for this text"
    ),
    PrefixCause.OTHER_KEY: lambda report, kind: "only another API key has this prefix; --share-prefixes would share it",
    PrefixCause.ADAPTER: lambda report, kind: "the prefix was computed with other LoRA adapters or scales",
    PrefixCause.STATES: lambda report, kind: "the model can continue a prefix only at some positions",
    PrefixCause.UNFINISHED: lambda report, kind: "the earlier request was cancelled before its prompt was processed",
    PrefixCause.RESTARTED: lambda report, kind: (
        f"the engine was restarted {ago_words(report.ago_s)}; --save-prefixes keeps prefixes on disk"
    ),
    PrefixCause.LOGPROBS: lambda report, kind: "the client asked for the log-probabilities of the whole prompt",
}
