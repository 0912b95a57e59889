"""Budgets of imports: how many modules of llmrun each command imports at its start, and which packages it may import.

Modules are counted, because times vary with the machine. If a budget is exceeded, `python -v -m llmrun ...` lists the
imports. Import what few runs need inside the function that needs it. If every run needs the new module, raise the
budget by one in the same commit, and say why in the commit's message. If a test reports fewer modules than its
budget minus SLACK, lower the budget.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from llmrun.base.amounts import format_bytes
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.images.files import png
from tests.support.models.tiny_architectures import tiny_architecture

HEAVY = (
    "PIL",
    "asyncio",
    "h11",
    "httpx2",
    "huggingface_hub",
    "jinja2",
    "jsonschema",
    "llama_cpp",
    "llguidance",
    "llvmlite",
    "numba",
    "numpy",
    "prompt_toolkit",
    "psutil",
    "pydantic",
    "ray",
    "referencing",
    "regex",
    "rich",
    "starlette",
    "uvicorn",
)
SLACK = 3
_IF_SLOW = {"psutil"}  # imported only if a process takes longer than usual to render a template
_CLIENT = (  # what the client of a background engine needs: options, requests, messages, and the display of answers
    "cli.commands.generate",
    "cli.answers.answering",
    "cli.answers.report",
    "cli.answers.thinking",
    "engine.requests",
    "engine.child.messages",
    "base.processes.frames",
)


class Processes:
    """Runs Python programs and lists what they and their Python child processes import, children first."""

    def __init__(self, folder: Path) -> None:
        self._logs = folder / "imports"
        self._logs.mkdir()
        self._python = folder / "python"  # replaces sys.executable
        real, log = shlex.quote(sys.executable), shlex.quote(str(self._logs))
        self._python.write_text(f'#!/bin/sh\nexec {real} -v "$@" 2> {log}/$$\n')
        self._python.chmod(0o755)

    def run(self, program: str, *arguments: str) -> list[set[str]]:
        """Return the names of the imported modules of each process. The program's own process is the last."""
        for log in self._logs.iterdir():
            log.unlink()
        program = f"import sys; sys.executable = {str(self._python)!r}; {program}"
        started = subprocess.Popen(
            [self._python, "-c", program, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        started.wait(120)
        logs = sorted(self._logs.iterdir(), key=lambda log: log.name == str(started.pid))
        return [set(_imported(log)) for log in logs]

    def llmrun(self, *arguments: str) -> list[set[str]]:
        """Do the same as `run` for llmrun's command line."""
        return self.run("from llmrun.__main__ import main; main()", *arguments)


def _imported(log: Path) -> list[str]:
    """Return all imports. `-X importtime` would leave out those of importlib.import_module."""
    return re.findall(r"^import '([\w.]+)' #", log.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture
def processes(tmp_path: Path) -> Processes:
    return Processes(tmp_path)


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] == "llmrun"}


def check(modules: set[str], budget: int, *allowed: str) -> None:
    """Compare a process's imports with its budget. `allowed` names the heavy packages that it needs."""
    assert modules.intersection(HEAVY) - _IF_SLOW == set(allowed)
    count = len(ours(modules))
    assert budget - SLACK <= count <= budget, f"{count} modules of llmrun: {' '.join(sorted(ours(modules)))}"


@pytest.mark.push
@pytest.mark.parametrize(
    ("arguments", "budget"),
    [
        ("--help", 19),
        ("--version", 18),
        ("no-such", 52),
        ("generate --help", 43),
        ("generate --no-such", 42),
        ("chat --help", 53),
        ("chat -m a b", 52),
        ("batch --help", 36),
        ("batch nothing.jsonl --no-such", 35),
        ("batch nothing.jsonl -o out.jsonl --workers", 35),
        ("bench --help", 44),
        ("bench -p 8-1", 53),
        ("bench --rate 2", 53),
        ("pull --help", 38),
        ("pull", 58),
        ("doctor --help", 36),
        ("doctor --no-such", 35),
        ("quantize --help", 45),
        ("quantize a.gguf b.gguf Q9", 51),
        ("imatrix --help", 45),
        ("launch --help", 38),
        ("launch --list", 39),
        ("launch no-such", 39),
        ("list", 65),
        ("ps", 54),
        ("stop --all", 54),
    ],
)
def test_quick_commands_keep_their_budgets(processes: Processes, arguments: str, budget: int) -> None:
    """Help pages, usage errors and lists start no process and import no heavy package."""
    [modules] = processes.llmrun(*arguments.split())
    check(modules, budget)


@pytest.mark.push
def test_a_cold_start_keeps_its_budget(processes: Processes, tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "tiny.gguf")
    generate = ("generate", "-m", str(model), "-n", "1", "hello")
    processes.llmrun(*generate)  # may compile kernels and check the instruction level
    *children, engine = processes.llmrun(*generate)
    for templates in children:  # a slow process for templates is replaced by another one
        check(templates, 10, "jinja2")
    assert children
    assert not {"numpy.ma", "statistics"} & engine
    check(engine, 198, "numpy", "llvmlite")


@pytest.mark.push
def test_a_cold_start_imports_only_the_ops_of_its_plan(processes: Processes, tmp_path: Path) -> None:
    ops = {}
    for name in ("qwen3", "qwen3moe", "qwen35"):
        model = tiny_architecture(tmp_path, name)
        processes.llmrun("generate", "-m", str(model), "-n", "1", "--raw", "hello")
        *_, engine = processes.llmrun("generate", "-m", str(model), "-n", "1", "--raw", "hello")
        ops[name] = {one.rpartition(".")[2] for one in engine if one.startswith("llmrun.backends.cpu.ops.")}
    assert "experts" in ops["qwen3moe"] - ops["qwen3"]
    assert "recurrences" in ops["qwen35"] - ops["qwen3"]


@pytest.mark.push
def test_a_client_keeps_its_budget(processes: Processes) -> None:
    """Clients import neither the hub nor an engine."""
    [modules] = processes.run("; ".join(f"import llmrun.{name}" for name in _CLIENT))
    check(modules, 48)
    rooms = ("llmrun.hub", "llmrun.model", "llmrun.formats.gguf", "llmrun.backends.cpu", "llmrun.engine.engine")
    assert [name for name in ours(modules) if name.startswith(rooms)] == []


@pytest.mark.push
@pytest.mark.usefixtures("engines")
def test_a_warm_run_keeps_its_budget(processes: Processes, tmp_path: Path) -> None:
    """Only the engine's process knows the model."""
    model = tiny_llama(tmp_path / "tiny.gguf")
    generate = ("generate", "--keep-alive", "1m", "-m", str(model), "-n", "1", "hello")
    processes.llmrun(*generate)
    [modules] = processes.llmrun(*generate)
    check(modules, 67)


def test_settings_import_no_files_or_folders(processes: Processes) -> None:
    [modules] = processes.run("import llmrun.options.settings")
    check(modules, 18)
    assert not {"platformdirs", "tomllib", "difflib"} & modules


@pytest.mark.push
def test_headers_of_images_import_nothing_heavy(processes: Processes) -> None:
    [modules] = processes.run("import llmrun.formats.images.header")
    check(modules, 7)


@pytest.mark.push
def test_only_the_decoding_process_imports_pillow(processes: Processes, tmp_path: Path) -> None:
    """An engine that has decoded an image has not imported Pillow either."""
    image = tmp_path / "cat.png"
    image.write_bytes(png(1, 1, 8, 0, [b"\0"]))
    decode = "from llmrun.formats.images.decoding import ImageDecoder; from pathlib import Path; "
    decode += "ImageDecoder().tiles(Path(sys.argv[1]).read_bytes(), [], 'cat')"
    child, engine = processes.run(decode, str(image))
    check(child, 15, "PIL", "numpy")
    check(engine, 16, "numpy")


@pytest.mark.push
@pytest.mark.parametrize(
    "arguments",
    [
        "generate -m {model} hello",
        "chat {model}",
        "embed -m {model} hello",
        "eval {model} --text {text}",
        "imatrix {model} --text {text} -o {text}.gguf",
        "bench -m {model}",
        "serve {model} --port 0",
        "batch -m {model} {text} --dry-run",
    ],
)
def test_the_loading_line_precedes_slow_imports(tmp_path: Path, arguments: str) -> None:
    """Importing this number of modules takes 0.2 s on an idle machine. NumPy and the engine would take as long."""
    model, text = tiny_llama(tmp_path / "tiny.gguf"), tmp_path / "text.txt"
    text.write_text('{"prompt": "hello"}\n')
    command = [sys.executable, "-c", _PROBE, *arguments.format(model=model, text=text).split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    line, imports = done.stdout.splitlines()
    assert line == f"loading tiny ({format_bytes(model.stat().st_size)}) ..."
    count, *heavy = imports.split()
    is_batch = arguments.startswith("batch")
    assert heavy == (["asyncio"] if is_batch else [])
    assert int(count) <= (390 if is_batch else 320)


_PROBE = f"""
import os, sys
from llmrun.cli.console.output import Output

def progress(self, text, *, at_once=False):
    imported = len(sys.modules)
    print(text)
    print(imported, *[name for name in {HEAVY!r} if name in sys.modules], flush=True)
    os._exit(0)

Output.progress = progress
from llmrun.__main__ import main
main()
"""
