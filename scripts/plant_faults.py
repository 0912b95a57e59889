#!/usr/bin/env python3
"""Plant faults in the code, one at a time, and see whether the push or the night tier finds them.

    .venv/bin/python scripts/plant_faults.py --seed 1 --count 24           takes hours
    .venv/bin/python scripts/plant_faults.py --seed 1 --count 24 --list    shows the faults without running tests
    .venv/bin/python scripts/plant_faults.py --room engine --room archs    only those of the 24 in these rooms

A fault in kernels/, layouts/, plan/ or quants/ takes much longer than others, because most kernels are compiled again.

The faults are in eight rooms of llmrun/, which take turns. Each fault swaps one operator or adds 1 to one integer. The
related tests run in up to three ways, until one of them fails: as a push run that ignores changed rooms, as an ordinary
push run, and as a night run.

The first run clones the last commit into .tests-cache/faults, and all runs work there. To resume an interrupted run,
repeat its command. To test newer code, delete the folder.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".tests-cache" / "faults"
# Rooms of llmrun/, and the tests that show whether they work.
TESTS = {
    "kernels": ("kernels", "backends/cpu"),
    "model/plan": ("model/plan", "model/archs", "backends/cpu"),
    "formats/layouts": ("formats/layouts", "formats/quants", "kernels", "backends/cpu"),
    "formats/quants": ("formats", "jobs/quantizing", "backends/cpu"),
    "backends/cpu": ("backends/cpu",),
    "model/tokenizers": ("model/tokenizers",),
    "engine": ("engine",),
    "model/archs": ("model/archs",),
}
TIERS = ("push (changed rooms ignored)", "push", "night")
LIMIT_S = 2400  # for one run of the tests; a hang counts as found
_SWAPS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.And: (" and ", " or "),
    ast.Or: (" or ", " and "),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}


@dataclass(frozen=True)
class Fault:
    """One changed line."""

    room: str
    file: str
    line: int
    before: str
    after: str


def faults_in(path: Path, room: str) -> Iterator[Fault]:
    """Yield every fault that could be planted in a file's functions."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    nodes = {id(node): node for function in functions for part in function.body for node in ast.walk(part)}
    for node in nodes.values():
        for start, end, text in _changes(node, lines):
            line = node.lineno - 1  # type: ignore[attr-defined]
            after = lines[line][:start] + text + lines[line][end:]
            yield Fault(room, str(path.relative_to(FOLDER)), line + 1, lines[line], after)


def _changes(node: ast.AST, lines: list[str]) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, new text) for changes to a node that lies on one line of ASCII."""
    if not isinstance(node, ast.expr) or node.lineno != node.end_lineno or not lines[node.lineno - 1].isascii():
        return
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield node.col_offset, node.end_col_offset or 0, str(node.value + 1)
    pairs: list[tuple[ast.AST, ast.expr, ast.expr]] = []
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        pairs = [(node.ops[0], node.left, node.comparators[0])]
    elif isinstance(node, ast.BinOp):
        pairs = [(node.op, node.left, node.right)]
    elif isinstance(node, ast.BoolOp):
        pairs = [(node.op, *node.values[:2])]  # type: ignore[list-item]
    for operator, left, right in pairs:
        start, end = left.end_col_offset or 0, right.col_offset
        old, new = _SWAPS.get(type(operator), ("", ""))
        between = lines[node.lineno - 1][start:end]
        if old and between.count(old) == 1:
            yield start, end, between.replace(old, new)


def draw(seed: int, count: int) -> list[Fault]:
    """Draw faults from each room in turn. Within a room, every line that can hold a fault is equally likely."""
    numbers = random.Random(seed)
    drawn: list[Fault] = []
    rooms = {room: sorted((FOLDER / "llmrun" / room).rglob("*.py")) for room in TESTS}
    choices = {room: [fault for path in paths for fault in faults_in(path, room)] for room, paths in rooms.items()}
    for number in range(count):
        room = list(TESTS)[number % len(TESTS)]
        line = numbers.choice(sorted({(fault.file, fault.line) for fault in choices[room]}))
        drawn.append(numbers.choice([fault for fault in choices[room] if (fault.file, fault.line) == line]))
    return drawn


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=FOLDER,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=LIMIT_S,
        check=False,
    )


def failing_test(fault: Fault, tier: str) -> str | None:
    """Run the tests related to the planted fault. Return the first that fails, or None if all pass.

    If the output names no test, return its end. After a timeout, return a message with the limit.
    """
    if tier == TIERS[0]:
        pretend_night()
    options = ["--night"] if tier == TIERS[2] else []
    tests = [f"tests/{room}" for room in TESTS[fault.room]]
    try:
        done = python("-m", "pytest", "-x", "-q", "-n", "3", "--dist", "worksteal", *options, *tests)
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT_S} s"
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return found[1] if found else done.stdout[-300:] + done.stderr[-300:]


def pretend_night() -> None:
    """Make the clone believe that its present sources have passed the night tier."""
    python("-c", "from tests.support.tiers import digests, record_night; record_night(digests())").check_returncode()


def try_fault(fault: Fault) -> dict[str, str | None]:
    """Plant a fault, run the tiers until one finds it, and remove it. Returns the first failing test of each tier."""
    pretend_night()
    tested = (FOLDER / "tests" / "night.json").read_bytes()
    path = FOLDER / fault.file
    original = path.read_text(encoding="utf-8")
    lines = original.splitlines(keepends=True)
    assert lines[fault.line - 1].rstrip("\n") == fault.before
    lines[fault.line - 1] = fault.after + "\n"
    path.write_text("".join(lines), encoding="utf-8")
    results: dict[str, str | None] = {}
    try:
        for tier in TIERS:
            (FOLDER / "tests" / "night.json").write_bytes(tested)
            results[tier] = failing_test(fault, tier)
            if results[tier]:
                break
    finally:
        path.write_text(original, encoding="utf-8")
    return results


def make_copy() -> None:
    """Clone the last commit, unless there is a clone. The clone shares the compiled kernels of this folder."""
    if not FOLDER.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(FOLDER)], check=True)
        kept = ROOT / ".tests-cache" / "cache" / "kernels"
        kept.mkdir(parents=True, exist_ok=True)
        (FOLDER / ".tests-cache" / "cache").mkdir(parents=True)
        (FOLDER / ".tests-cache" / "cache" / "kernels").symlink_to(kept.resolve())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="seed for choosing the faults [default: 1]")
    parser.add_argument("--count", type=int, default=24, help="number of faults [default: 24]")
    parser.add_argument(
        "--room",
        action="append",
        choices=TESTS,
        metavar="ROOM",
        help=f"only the faults in this room: {', '.join(TESTS)}",
    )
    parser.add_argument("--list", action="store_true", help="show the faults without running tests")
    arguments = parser.parse_args()
    make_copy()
    rooms = arguments.room or list(TESTS)
    faults = [fault for fault in draw(arguments.seed, arguments.count) if fault.room in rooms]
    if arguments.list:
        for fault in faults:
            print(f"{fault.file}:{fault.line}\n- {fault.before.strip()}\n+ {fault.after.strip()}")
        return
    record = FOLDER / ".tests-cache" / f"faults-{arguments.seed}.jsonl"
    lines = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    done = {(line["file"], line["line"], line["after"]): line["results"] for line in lines}
    found = []
    for fault in faults:
        results = done.get((fault.file, fault.line, fault.after))
        if results is None:
            results = try_fault(fault)
            with record.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**asdict(fault), "results": results}) + "\n")
        tier, test = next(((tier, test) for tier, test in results.items() if test), ("no tier", ""))
        print(f"{fault.file}:{fault.line}: {fault.after.strip()}\n   {tier} {test}", flush=True)
        found.append(tier)
    counts = ", ".join(f"{found.count(tier)} found by {tier}" for tier in TIERS)
    print(f"seed {arguments.seed}: {len(found)} faults: {counts}, {found.count('no tier')} not found")


if __name__ == "__main__":
    main()
