"""House rules that would otherwise be hopes: imports go down, files stay small, start-up is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "llmrun"
FLOORS = {
    "cli": 8,
    "doctor": 7,
    "bench": 6,
    "engine": 5,
    "hub": 5,
    "backends": 4,
    "archs": 3,
    "tokenizers": 3,
    "kernels": 2,
    "gguf": 2,
    "quants": 1,
    "amounts": 0,
    "child_processes": 0,
    "errors": 0,
    "kernel_warnings": 0,
    "types": 0,
    "settings": 0,
}
ONLY_ROOM_FOR = {
    "numba": {"kernels"},
    "llvmlite": {"kernels"},
    "psutil": {"bench"},
    "pynvml": {"bench"},
    "rich": {"cli"},
    "prompt_toolkit": {"cli"},
    "llama_cpp": {"backends"},
    "jinja2": {"bench", "engine"},
    "huggingface_hub": {"hub"},
    "click": set(),  # Typer carries its own copy: another Click's exceptions would not be the ones it raises
}
HEAVY = (  # what no --help, --version or usage error may import
    "asyncio",
    "httpx2",
    "huggingface_hub",
    "jinja2",
    "llama_cpp",
    "llvmlite",
    "numba",
    "numpy",
    "prompt_toolkit",
    "psutil",
    "pydantic",
    "regex",
    "rich",
)
MOST_LINES = 420
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(parts: tuple[str, ...]) -> str:
    """The room that a dotted path below `llmrun` lies in; empty for the package itself and its `__main__`."""
    return parts[0] if parts and parts[0] in FLOORS else ""


def imported_modules(source: str, package: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Every module a file imports, absolute, with its line: lazy ones and those given as a string too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module, node.lineno
            for alias in node.names:
                yield f"{module}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.args[0].value, node.lineno


def broken_rules(source: str, module: tuple[str, ...]) -> list[str]:
    """The imports of one file that the house forbids. `module` is its dotted path below `llmrun`."""
    room = room_of(module)
    broken = []
    for imported, line in imported_modules(source, ("llmrun", *module[:-1])):
        head, *below = imported.split(".")
        if room not in ONLY_ROOM_FOR.get(head, {room}):
            broken.append(f"line {line}: {head} may not be imported here")
        target = room_of(tuple(below)) if head == "llmrun" else ""
        if not (room and target) or target == room:
            continue
        if FLOORS[target] > FLOORS[room]:
            broken.append(f"line {line}: {room} is below {target}")
        elif FLOORS[target] == FLOORS[room] > 0:
            broken.append(f"line {line}: {room} and {target} share a floor")
    return broken


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(PACKAGE)) for path in FILES])
def test_imports_go_down_and_files_stay_small(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    module = path.relative_to(PACKAGE).with_suffix("").parts
    if path.parent != PACKAGE:
        assert room_of(module), f"{module[0]} is in no floor of the house"
    assert broken_rules(source, module) == []
    assert source.count("\n") <= MOST_LINES


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from llmrun.engine.engine import Engine", "backends.cpu"),
        ("from llmrun import engine", "hub.store"),
        ("def f():\n    import llmrun.cli.app", "gguf.reader"),
        ("from llmrun.gguf import reader", "kernels.team"),
        ("from ..cli import output", "quants.q4"),
        ("from .. import cli", "quants.q4"),
        ("importlib.import_module('llmrun.backends.cpu')", "archs.llama"),
        ("import numba", "archs.llama"),
        ("from llvmlite import binding", "backends.cpu"),
        ("from rich.console import Console", "engine.stats"),
        ("from huggingface_hub import hf_hub_url", "cli.list"),
        ("import click", "cli.app"),
        ("import click.testing", "__main__"),
    ],
)
def test_a_forbidden_import_is_seen(source: str, module: str) -> None:
    assert broken_rules(source, tuple(module.split(".")))


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from llmrun.errors import LlmrunError", "settings"),
        ("from llmrun import __version__", "gguf.reader"),
        ("from . import base\nfrom .base import Backend", "backends.cpu"),
        ("from llmrun.hub.resolve import resolve\nimport rich", "cli.generate"),
        ("from llmrun.cli.app import main", "__main__"),
        ("from llvmlite import binding\nimport numba", "kernels.compiler"),
    ],
)
def test_an_allowed_import_passes(source: str, module: str) -> None:
    assert broken_rules(source, tuple(module.split("."))) == []


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "--version",
        "generate --help",
        "generate --no-such",
        "chat --help",
        "chat -m a b",
        "bench --help",
        "pull --help",
        "pull",
        "bench -p 8-1",
        "doctor --help",
        "doctor --no-such",
    ],
)
def test_help_imports_no_library_it_does_not_use(arguments: str) -> None:
    program = f"""
import sys
from llmrun.__main__ import main
try:
    main()
except SystemExit:
    pass
print("imported:", *[name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments.split()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "imported:"


def test_no_test_is_skipped_for_a_missing_library_or_model() -> None:
    here = Path(__file__)
    files = [path for path in here.parent.rglob("*.py") if path != here]
    assert [str(path) for path in files if "importorskip" in path.read_text(encoding="utf-8")] == []
