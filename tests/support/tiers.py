"""The tiers of the test suite: which tests run after an edit, before a push, and at night (docs/testing.md).

The mark on a test says where it first runs: unmarked tests run after every edit, tests marked `push` before every push,
and tests marked `night` at night. `cover(n)` and `sample(n)` leave out cases of a parametrized test in quick and push
runs.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import heapq
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent.parent
# Marks of tests that take hours or need special machines or programs. They run only with -m, as in scripts/test_gpu.
ELSEWHERE = ("arm", "clients", "gpu", "real", "rpc", "soak", "vulkan", "wheels", "x86")
TESTED_AT_NIGHT = ROOT / "tests" / "night.json"  # written by the night tier
# If one of these rooms of llmrun/ has changed, push runs include all night tests in these folders.
ROOMS: dict[str, tuple[str, ...]] = {
    "kernels": ("tests/kernels/", "tests/backends/cpu/"),
    "formats/layouts": ("tests/formats/layouts/", "tests/formats/quants/", "tests/kernels/"),
    "model/plan": ("tests/model/plan/", "tests/model/archs/"),
    "formats/quants": ("tests/formats/quants/", "tests/jobs/quantizing/"),
}


class Tier(enum.IntEnum):
    """The tiers that `scripts/test` can run."""

    EDIT = 0
    PUSH = 1
    NIGHT = 2


# How many examples a property test tries in each tier, unless it sets a number. They differ from run to run.
EXAMPLES = {Tier.EDIT: 10, Tier.PUSH: 25, Tier.NIGHT: 100}


def examples(at_night: int) -> int:
    """Scale a property test's number of examples at night to this run's tier. The result is at least 5."""
    return max(5, at_night * settings().max_examples // EXAMPLES[Tier.NIGHT])


def chosen_tier(config: pytest.Config) -> Tier:
    if config.getoption("quick") and config.getoption("night"):
        raise pytest.UsageError("--quick and --night exclude each other")
    return Tier.EDIT if config.getoption("quick") else Tier.NIGHT if config.getoption("night") else Tier.PUSH


def first_tier(marks: Iterable[pytest.Mark]) -> Tier:
    """Return the first tier that runs a test with these marks, without regard to `cover` and `sample`."""
    names = {mark.name for mark in marks}
    return Tier.NIGHT if "night" in names else Tier.PUSH if "push" in names else Tier.EDIT


def leaves_out(tier: Tier, source: str) -> bool:
    """Return whether a test file has a `pytestmark` that excludes all of its tests from a tier.

    A list of marks is seen only if it is in one line. Otherwise, the file is imported for nothing.
    """
    later = [name for name in ("push", "night") if Tier[name.upper()] > tier]
    marks = "|".join((*later, *ELSEWHERE))
    return re.search(rf"^pytestmark = .*\bpytest\.mark\.({marks})\b", source, re.MULTILINE) is not None


def folders_of(rooms: Iterable[str]) -> tuple[str, ...]:
    """Return the folders whose tests run as at night if these rooms have changed."""
    return tuple(itertools.chain.from_iterable(ROOMS[room] for room in rooms))


def selected(items: Sequence[pytest.Item], tier: Tier, changed: Iterable[str] = ()) -> list[pytest.Item]:
    """Return the tests of a tier. The tests of `changed` rooms run as at night in the push tier."""
    if tier is Tier.NIGHT:
        return list(items)
    folders = folders_of(changed) if tier is Tier.PUSH else ()
    left_out = left_out_cases(items)
    return [
        item
        for item in items
        if (folders and item.nodeid.startswith(folders))
        or (first_tier(item.iter_markers()) <= tier and item not in left_out)
    ]


def left_out_cases(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that `cover` and `sample` leave out of quick and push runs."""
    functions: dict[tuple[str, str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("cover") or item.get_closest_marker("sample")  # not both
        if mark and isinstance(item, pytest.Function):
            functions[item.nodeid.split("[")[0], mark.name, mark.args[0]].append(item)
    left_out: set[pytest.Item] = set()
    for (_, name, argument), cases in functions.items():
        if name == "cover":
            chosen = covering([factors(case.callspec.params) for case in cases], argument)
        else:
            chosen = set(Random(0).sample(range(len(cases)), min(argument, len(cases))))
        left_out.update(case for number, case in enumerate(cases) if number not in chosen)
    return left_out


def factors(params: Mapping[str, object]) -> dict[str, str]:
    """Return the values of a case by name. The elements of a tuple are values of their own."""
    found = {}
    for name, value in params.items():
        parts = dict(enumerate(value)) if isinstance(value, tuple) else {"": value}
        found.update({f"{name}{place}": repr(part) for place, part in parts.items()})
    return found


def covering(cases: Sequence[Mapping[str, str]], strength: int) -> set[int]:
    """Return the numbers of few cases that together contain each combination of `strength` values that occurs.

    This is the greedy algorithm: each step takes the case with the most new combinations. The counts of waiting cases
    only fall, so a case whose count is up to date when it reaches the top of the heap is best. Ties are broken at
    random. Otherwise, nearly all cases would have the first value of the first parameter.
    """
    random = Random(0)
    combinations = [set(itertools.combinations(sorted(case.items()), min(strength, len(case)))) for case in cases]
    waiting = [(-len(found), random.random(), number) for number, found in enumerate(combinations)]
    heapq.heapify(waiting)
    covered: set[tuple[tuple[str, str], ...]] = set()
    chosen = set()
    while waiting:
        count, tie, number = heapq.heappop(waiting)
        new = len(combinations[number] - covered)
        if new == -count > 0:
            chosen.add(number)
            covered |= combinations[number]
        elif new:
            heapq.heappush(waiting, (-new, tie, number))
    return chosen


def digests() -> dict[str, str]:
    """Return a digest of the sources of each room in ROOMS."""
    found = {}
    for room in ROOMS:
        digest = hashlib.sha256()
        for path in sorted((ROOT / "llmrun" / room).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
        found[room] = digest.hexdigest()
    return found


@functools.cache
def changed_rooms() -> list[str]:
    """Return the rooms whose sources differ from those that the night tier last tested."""
    tested = json.loads(TESTED_AT_NIGHT.read_text(encoding="utf-8"))
    return [room for room, digest in digests().items() if tested.get(room) != digest]


def record_night(sources: Mapping[str, str]) -> None:
    """Record that the night tier has passed with sources that have these digests."""
    TESTED_AT_NIGHT.write_text(json.dumps(sources, indent=4) + "\n", encoding="utf-8")
