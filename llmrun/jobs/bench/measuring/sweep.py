"""Expands lists of flag values into the configurations to measure, one for every combination."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from llmrun.base.errors import UsageError
from llmrun.engine.remote.url import parse_endpoint
from llmrun.jobs.bench.measuring.workload import Workload
from llmrun.options.settings import SPECULATE_OFF

MOST_CONFIGURATIONS = 1000
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+)(?:([+*])([0-9]+))?)?")


@dataclass(frozen=True, slots=True)
class BenchTarget:
    """A model with its backend and settings, or an endpoint. Equal targets share an engine.

    model      the model's name as the user gave it
    path       the model file; empty for an endpoint
    threads    the number of threads; None to let the backend choose
    speculate  auto, off, or the name of the draft model
    draft      the file of the draft model; empty if there is none
    adapters   LoRA adapters, in the notation of --lora
    """

    model: str
    path: str = ""
    endpoint: str = ""
    backend: str = "auto"
    threads: int | None = None
    kv_type: str = "f16"
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

    `name` is a short label that distinguishes the target from the sweep's other targets; empty if there is only one.
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
    kv_types: Sequence[str],
    gpu_layers: Sequence[int | str],
    speculations: Sequence[tuple[str, str]] = ((SPECULATE_OFF, ""),),
    adapters: tuple[str, ...] = (),
) -> list[BenchTarget]:
    """Return a target for every combination, in command-line order.

    models        (name, path) pairs
    speculations  (auto, off or the draft model's name; path of the draft model or "") pairs
    adapters      LoRA adapters for all of them, in the notation of --lora
    """
    return [
        BenchTarget(model, path, "", backend, n_threads, kv_type, layers, speculate, draft, adapters)
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
        lambda target: "" if target.endpoint else target.kv_type,
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
