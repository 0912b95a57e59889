"""The commands and programs in README.md and docs/, and a new user's home in which they run."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from llmrun.hub.local.paths import own_model, reference_file, snapshot_file
from llmrun.hub.names import HubSource
from llmrun.hub.resolve.model_file import LocalPath, understand
from tests.support.models.downloads import smollm2

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TIMEOUT_S = 300  # for a command on a busy machine

_SERVER = "127.0.0.1:8080"  # in the pages; here, each server has a free port
_MODELS = (  # the names of models that the pages use
    "qwen2.5-coder:1.5b",
    "qwen3:0.6b",
    "qwen3:4b",
    "qwen3:4b-q8_0",
    "qwen3:8b",
    *(f"hf:org/repo/{file}.gguf" for file in ("repo-Q4_K_M", "repo-Q5_K_M", "repo-Q8_0")),
    "hf:org/repo/folder/file.gguf@v1.0",
)
_FILES = {
    "after.py": "\nprint(add(1, 2))\n",
    "article.txt": "Ada Lovelace was born in 1815.",
    "before.py": "def add(a, b):\n",
    "book.txt": "Call me Ishmael. Ahab is the captain of the Pequod.\n" * 60,
    "calibration.txt": "The quick brown fox jumps over the lazy dog.\n" * 60,
    "lines.txt": "Good day\n",
    "main.py": "x = 3\nprint(x * x)\n",
    "moves.gbnf": "root ::= [a-h] [1-8] [a-h] [1-8]\n",
    "other.txt": "Call me Ishmael. Some years ago, I thought I would sail about a little.\n" * 60,
    "prompts.jsonl": '{"prompt": "Name a color."}\n',
    "report.txt": "Sales rose by 3 % in the north.\n",
    "questions": "Why is the sky blue?\n",
    "questions.txt": "Why is the sky blue?\n",
    "README.md": "The sky is blue, and the grass is green in spring.\n" * 60,
    "reviews.csv": "text\nI loved it.\n",
    "sales.csv": "region,growth\nnorth,3\nsouth,-2\n",
    "texts.txt": "The sky is blue.\nGrass is green.\n",
    "tools.toml": '[commands.date]\ndescription = "Show the date."\ncommand = ["date"]\n',
    "wiki.test.raw": "The sky is blue, and the grass is green in spring.\n" * 60,
}
_PRESET = '[presets.label]\nprompt = "Is this review good or bad? $text"\n'  # batch.md shows the end of the file


def blocks(page: Path, language: str) -> list[str]:
    """Return the blocks of a page with code in this language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[str]:
    """Yield the commands of a page. Lines that bash cannot parse alone, such as those of a loop, stay together."""
    for block in blocks(page, "sh"):
        session = re.findall(r"^\$ (.*)$", block, re.MULTILINE)  # otherwise, every line is a command
        command = ""
        for line in session or block.splitlines():
            command += re.sub(r"(^|\s+)#\s.*$", "", line)
            if command and (command.endswith("\\") or not _is_complete(command)):
                command += "\n"
            elif command:
                yield command
                command = ""
        assert not command, command


def _is_complete(command: str) -> bool:
    is_compound = re.match(r"(while|for|if|case)\b|\w+\(\)", command)
    return not is_compound or subprocess.run(["bash", "-nc", command], capture_output=True, check=False).returncode == 0


def enter_home(folder: Path, page: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `folder` the home and the working directory of a new user, with `llmrun` on the PATH.

    All names of models in the pages lead to `model`. The presets are those of the page.
    """
    from tests.support.gguf.gguf_files import tiny_llama  # heavy imports, which tests/test_docs.py does not need
    from tests.support.models.tiny_adapters import tiny_adapter
    from tests.support.vision.projectors import tiny_projector

    adapted = smollm2()  # found before the home changes, and with it the folder of downloads
    for name in os.environ:
        if name.startswith(("XDG_", "HF_", "LLMRUN_CONFIG", "LLMRUN_DATA_DIR")):
            monkeypatch.delenv(name)
    settings = {"LLMRUN_SEED": "1", "LLMRUN_MAX_TOKENS": "64", "HF_HUB_OFFLINE": "1"}
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    for name, value in {
        "HOME": str(folder),
        "PATH": path,
        "PYTHONPATH": str(ROOT),
        "EDITOR": "true",
        **settings,
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    _written(folder / "bin" / "llmrun", f'#!/bin/sh\nexec {sys.executable} -m llmrun "$@"\n').chmod(0o755)
    for name in ("models/any.gguf", "file.gguf", "model.gguf", "model-Q4_K_M.gguf"):
        _linked(folder / name, model)
    _linked(own_model(adapted.name), adapted)
    for name in _MODELS:
        wanted = understand(name)
        assert not isinstance(wanted, LocalPath)
        source = wanted.sources[0]
        assert isinstance(source, HubSource)
        assert source.file
        commit = hashlib.sha1(source.revision.encode()).hexdigest()
        _linked(snapshot_file(source.repository, commit, source.file), model)
        _written(reference_file(source.repository, source.revision), commit)
    tiny_llama(folder / "model-f16.gguf", weight_type="F16")
    tiny_projector(folder, "gemma3", "F16", image_size=112).rename(folder / "mmproj-gemma-3-4b-f16.gguf")
    (folder / "adapters").mkdir()
    for name in ("pirate.gguf", "short.gguf", "adapters/v2.gguf"):
        tiny_adapter(folder / name, adapted, names=["blk.0.attn_q.weight"])
    for name, text in _FILES.items():
        _written(folder / name, text)
    _written(folder / "person.json", blocks(ROOT / "docs" / "formats.md", "json")[0])
    _written(folder / "questions.jsonl", blocks(ROOT / "docs" / "evaluation.md", "json")[0])
    presets = [block for block in blocks(page, "toml") if re.match(r"\[(presets|models)\b", block)]
    _written(folder / ".config" / "llmrun" / "models.toml", "\n".join([*presets, _PRESET]))
    subprocess.run("git init -q . && git add main.py && echo >> main.py", shell=True, check=True)


def _linked(path: Path, model: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(model)


def _written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def run_commands(lines: Sequence[str]) -> None:
    """Run commands in bash, one after the other. Servers start and end; a command that names one's port gets one."""
    with ExitStack() as stack:
        server = ""
        for number, line in enumerate(lines):
            if line.startswith("llmrun serve"):
                with serving(line):
                    continue
            if _SERVER in line and not server:
                server = stack.enter_context(serving("llmrun serve qwen3:4b"))
            question = b"How are you?" if number else b"Why is the sky blue?"  # using.md finds the latter again
            stdin = question if "llmrun chat" in line else b""
            _run(["bash", "-c", f"set -o pipefail; {line.replace(_SERVER, server)}"], stdin)


def run_program(program: str, server: str) -> None:
    """Run a program in Python with this server."""
    _run([sys.executable, "-c", program.replace(_SERVER, server)], b"")


def _run(words: Sequence[str], stdin: bytes) -> None:
    done = subprocess.run(words, input=stdin, capture_output=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{words[-1]}\n{done.stderr.decode()}"


@contextmanager
def serving(command: str) -> Iterator[str]:
    """Run a server on a free port, and yield its address when it is ready. Fails if it does not end well."""
    command = "exec " + re.sub(r" --port \d+", "", command) + " --port 0"
    with subprocess.Popen(["bash", "-c", command], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        lines: list[str] = []
        ready = None
        while not ready and (line := process.stderr.readline()):
            lines.append(line)
            ready = re.match(r"ready: http://(.*)/v1", line)
        try:
            assert ready, "".join(lines)
            yield ready[1]
        finally:
            process.terminate()
            lines.append(process.stderr.read())
    assert process.returncode == 0, "".join(lines)
