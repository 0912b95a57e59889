"""Tests of the house rules: imports only go down, no cycles, fast start-up.

Rooms and floors come from the diagram in docs/architecture.md, which must match the folders.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llmrun"
ARCHITECTURE = ROOT / "docs" / "architecture.md"

ONLY_ROOM_FOR = {
    "numba": {"kernels"},
    "llvmlite": {"kernels", "base/compiled"},
    "psutil": {"base/machine", "base/processes"},
    "pynvml": {"base/machine"},
    "rich": {"cli"},
    "prompt_toolkit": {"cli"},
    "llama_cpp": {"backends"},
    "jinja2": {"jobs/bench", "engine"},
    "jsonschema": {"engine"},
    "llguidance": {"engine"},
    "referencing": {"engine"},
    "huggingface_hub": {"hub"},
    "starlette": {"serving"},
    "uvicorn": {"serving"},
    "h11": {"jobs/bench", "serving"},
    "ray": {"jobs/batching"},
    "click": set(),  # Typer has its own copy, and another Click would raise other exceptions
}
Saw = Callable[[int, str, int], None]  # see conftest.py
FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({path.parent for path in FILES})


def drawing(heading: str) -> list[str]:
    """Return the lines of the fenced block that follows a heading of docs/architecture.md."""
    text = ARCHITECTURE.read_text(encoding="utf-8").split(f"## {heading}\n", 1)[1]
    return text.split("```", 2)[1].splitlines()[1:]


def drawn_floors() -> dict[str, int]:
    """Return room -> floor, counted from the bottom. Each line is a floor; names end in / or .py."""
    lines = [re.match(r"((?:\w+(?:/|\.py)\s*)+)", line) for line in drawing("Rooms and floors")]
    floors = [re.sub(r"/|\.py", "", line[1]).split() for line in lines if line]
    return {room: floor for floor, rooms in enumerate(reversed(floors)) for room in rooms}


def drawn_inner_rooms() -> dict[str, list[str]]:
    """Return the path of a room -> the folders inside it, highest first."""
    lines = [line.split("/ ", 1) for line in drawing("Rooms inside rooms") if "/ " in line]
    return {room: [name.strip() for name in inner.split(">")] for room, inner in lines}


FLOORS = drawn_floors()
INNER_ROOMS = drawn_inner_rooms()
UNORDERED = {"backends/cpu", "cli/answers"}  # whose folders may import each other


@cache
def imported_modules(source: str, package: tuple[str, ...]) -> Sequence[tuple[str, int]]:
    """Return every module that a file imports, including lazy, type-only and string imports.

    Each is an absolute name with its line.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            found += [(module, node.lineno), *((f"{module}.{alias.name}", node.lineno) for alias in node.names)]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                found.append((node.args[0].value, node.lineno))
    return found


def broken_rules(source: str, module: tuple[str, ...]) -> list[str]:
    """Return the imports of one file that break the rules. `module` is its dotted path below `llmrun`."""
    room = module[0] if module[0] in FLOORS else ""
    broken = []
    for imported, line in imported_modules(source, ("llmrun", *module[:-1])):
        head, *below = imported.split(".")
        if head in ONLY_ROOM_FOR and not any("/".join(module).startswith(f"{place}/") for place in ONLY_ROOM_FOR[head]):
            broken.append(f"line {line}: {head} may not be imported here")
        if head != "llmrun" or not room or not below or below[0] not in FLOORS:
            continue
        if below[0] != room:
            if FLOORS[below[0]] > FLOORS[room]:
                broken.append(f"line {line}: {room} is below {below[0]}")
            elif FLOORS[below[0]] == FLOORS[room]:
                broken.append(f"line {line}: {room} and {below[0]} share a floor")
        else:
            same = [here == there for here, there in zip(module, below, strict=False)]
            common = [*same, False].index(False)
            order = INNER_ROOMS.get("/".join(module[:common]), [])
            here, there = ([path[common]] if path[common:] else [] for path in (module, below))
            if {*here, *there} <= {*order} and here and there and order.index(there[0]) < order.index(here[0]):
                broken.append(f"line {line}: {'/'.join(module[: common + 1])} is below {'/'.join(below[: common + 1])}")
    return broken


def wrong_imports(package: Path = PACKAGE) -> dict[str, list[str]]:
    """Return the imports that break the rules, by file."""
    paths = {path.relative_to(package).with_suffix(""): path for path in package.rglob("*.py")}
    broken = {str(name): broken_rules(path.read_text(encoding="utf-8"), name.parts) for name, path in paths.items()}
    return {name: lines for name, lines in broken.items() if lines}


def module_name(path: Path, package: Path = PACKAGE) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(package: Path = PACKAGE) -> Mapping[str, set[str]]:
    """Return module -> imported modules of the package for all files, including type-only and lazy imports."""
    names = {path: module_name(path, package) for path in package.rglob("*.py")}
    known = set(names.values()) - {package.name}  # the package itself has the version, and provides Engine on demand
    graph: dict[str, set[str]] = {}
    for path, name in names.items():
        if name in known:
            folder = path.relative_to(package.parent).parts[:-1]
            imported = {module for module, _ in imported_modules(path.read_text(encoding="utf-8"), folder)}
            graph[name] = (imported & known) - {name}
    return graph


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return modules that import each other in a cycle, if there are any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_go_down(saw: Saw) -> None:
    assert wrong_imports() == {}
    saw(len(FILES), "files", 560)


def test_the_drawing_is_the_house(saw: Saw) -> None:
    entries = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))}
    assert set(FLOORS) == entries - {"__init__", "__main__", "__pycache__"}
    for room, inner in INNER_ROOMS.items():
        folders = {path.name for path in (PACKAGE / room).iterdir() if path.is_dir() and any(path.glob("*.py"))}
        assert set(inner) == folders, room
    outer = {path.parent.relative_to(PACKAGE).as_posix() for path in FOLDERS if path != PACKAGE} - {"."}
    assert outer - set(INNER_ROOMS) == UNORDERED
    saw(len(FLOORS), "rooms", 11)
    saw(max(FLOORS.values()) + 1, "floors", 9)


def test_no_imports_go_in_circles(saw: Saw) -> None:
    graph = import_graph()
    assert circle(graph) == []
    saw(sum(map(len, graph.values())), "imports between files", 3200)


@pytest.mark.push
def test_the_graph_has_every_import_that_a_search_finds() -> None:
    graph = import_graph()
    found = [
        (module_name(path), module)
        for path in FILES
        if path != PACKAGE / "__init__.py"
        for module in re.findall(r"^ *from (llmrun(?:\.\w+)+) import", path.read_text(encoding="utf-8"), re.MULTILINE)
        if (ROOT / f"{module.replace('.', '/')}.py").exists()
    ]
    assert [(name, module) for name, module in found if module not in graph[name]] == []
    assert len(found) > 3000


@pytest.mark.parametrize(
    "last", ["from llmrun.a.one import One", "if TYPE_CHECKING:\n    from llmrun.a import one", ""]
)
def test_a_circle_in_files_is_found(tmp_path: Path, last: str) -> None:
    sources = {"a/one": "from llmrun.b.two import Two", "b/two": "import llmrun.c.three", "c/three": last}
    for name, source in sources.items():
        path = tmp_path / "llmrun" / f"{name}.py"
        path.parent.mkdir(parents=True)
        path.write_text(source)
    assert bool(circle(import_graph(tmp_path / "llmrun"))) == bool(last)


def test_a_forbidden_import_in_a_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "llmrun" / "formats" / "gguf" / "reader.py"
    path.parent.mkdir(parents=True)
    path.write_text("import struct\n\n\ndef read():\n    from llmrun.engine.engine import Engine\n")
    assert wrong_imports(tmp_path / "llmrun") == {"formats/gguf/reader": ["line 5: formats is below engine"] * 2}


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("from llmrun.engine.engine import Engine", "backends.registry"),
        ("from llmrun import engine", "hub.store"),
        ("def f():\n    import llmrun.cli.app", "formats.gguf.reader"),
        ("from llmrun.formats.layouts import records", "formats.gguf.reader"),
        ("from llmrun.formats.layouts import records", "formats.quants.legacy_quants"),
        ("from llmrun.jobs.batching.run import run", "jobs.bench.measuring.pool"),
        ("from llmrun.jobs.bench.measuring.pool import Pool", "jobs.bench.documents.rows"),
        ("from llmrun.kernels import team", "model.plan.plan"),
        ("from ...cli import output", "formats.quants.legacy_quants"),
        ("from ... import cli", "formats.quants.legacy_quants"),
        ("if TYPE_CHECKING:\n    from llmrun.backends.base import Backend", "model.archs.llama"),
        ("importlib.import_module('llmrun.backends.registry')", "model.archs.llama"),
        ("import numba", "model.archs.llama"),
        ("import numba", "model.plan.reference"),
        ("from llvmlite import binding", "backends.cpu.backend"),
        ("from rich.console import Console", "engine.base"),
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
        ("from llmrun.base.errors import LlmrunError", "options.settings"),
        ("from llmrun.backends.registry import CHOICES", "options.settings"),
        ("from llmrun import __version__", "formats.gguf.reader"),
        ("from . import base\nfrom .base import Backend", "backends.registry"),
        ("from llmrun.hub.resolve.model_file import resolve\nimport rich", "cli.generate"),
        ("from llmrun.cli.app import main", "__main__"),
        ("from llvmlite import binding\nimport numba", "kernels.compiler"),
        ("from llmrun.model.plan import ops", "kernels.rows.rowwise"),
    ],
)
def test_an_allowed_import_passes(source: str, module: str) -> None:
    assert broken_rules(source, tuple(module.split("."))) == []


def test_no_test_is_skipped_for_a_missing_library_or_model() -> None:
    here = Path(__file__)
    files = [path for path in here.parent.rglob("*.py") if path != here]
    assert [str(path) for path in files if "importorskip" in path.read_text(encoding="utf-8")] == []


def test_the_compiler_ends_at_once_in_a_quick_run() -> None:
    """A quick test that needs a kernel therefore fails."""
    folder = Path(__file__).parent / "support" / "no_compiling"
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-m", "llmrun.kernels.compiler"]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, "a quick test compiles a kernel: mark it `push`\n")
