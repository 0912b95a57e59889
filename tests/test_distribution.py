"""Tests of the distribution's name for pip.

On the package index, "llmrun" is another project, so no text may tell users to install it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from llmrun import DISTRIBUTION, __version__

ROOT = Path(__file__).resolve().parent.parent
# The contents of a source distribution, and the files that only a clone has.
TEXTS = (
    "llmrun",
    "tests",
    "scripts",
    "docs",
    ".ci",
    ".github",
    "README.md",
    "CHANGELOG.md",
    "pyproject.toml",
    "models.toml",
)
NAME = r"\bllmrun(?![\w.-]|/)"  # not llmrun-gguf, llmrun.lock or a path
STRANGER = re.compile(
    rf"(?:pip|pipx|uv tool|uv) (?:install|download|wheel|add)\b[^\n`]*[ \t\"'=]{NAME}"  # `pip install llmrun`
    rf"|\b(?:uvx|pipx run)\s+{NAME}"
    rf"|\bllmrun\[\w"  # the old name with an extra, anywhere
    rf"|\b(?:version|requires|distribution|metadata|files)\(\s*[\"']{NAME}"  # importlib.metadata
    rf"|^name = [\"']{NAME}",  # pyproject.toml
    re.MULTILINE,
)


def texts() -> Iterator[tuple[Path, str]]:
    for root in (ROOT / name for name in TEXTS):
        for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
            if path.is_file() and "__pycache__" not in path.parts and path != Path(__file__).resolve():
                try:
                    yield path, path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    continue  # an image or a vocabulary


@pytest.mark.night
def test_no_text_installs_the_stranger_of_the_same_name() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path, text in texts()
        for match in STRANGER.finditer(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "pip install llmrun",
        "`pip install llmrun` needs no compiler",
        "pip install --upgrade llmrun\n",
        "python -m pip install -U 'llmrun'",
        'pip install "llmrun[llama]"',
        'dev = ["llmrun[test]", "mypy"]',
        "uv tool install llmrun",
        "uvx llmrun chat",
        'requires("llmrun")',
        "importlib.metadata.version('llmrun')",
        'name = "llmrun"',
    ],
)
def test_the_old_name_is_seen(text: str) -> None:
    assert STRANGER.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install .",
        'pip install ".[llama]"',
        "pip install dist/llmrun_gguf-0.1.0-py3-none-any.whl",
        'pip install "llmrun-gguf[llama]"',
        "`pip install .` in a clone; `llmrun chat` starts a model",
        'version("llmrun-gguf")',
        '    name="llmrun",',
        'pip install ".[llama]"    # with CUDA\nllmrun doctor',
    ],
)
def test_the_new_name_passes(text: str) -> None:
    assert not STRANGER.search(text)


def test_the_name_is_the_projects() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == DISTRIBUTION
    assert project["scripts"] == {"llmrun": "llmrun.__main__:main"}
    assert f"{DISTRIBUTION}[test]" in project["optional-dependencies"]["dev"]
    assert version(DISTRIBUTION) == __version__


def test_the_table_of_dependencies_lists_every_package() -> None:
    """The extra `jit` is in the table, because kernels that are in no library need it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"].get("jit", ())]
    section = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("\n## Dependencies\n")[1]
    cells = re.findall(r"^\| (`.+?) \|", section.split("\n## ")[0], re.MULTILINE)
    listed = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert sorted(listed) == sorted(re.split(r"[<>=; \[]", wanted)[0] for wanted in declared)


def test_the_classifiers_name_the_supported_pythons() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    oldest, after_newest = map(int, re.findall(r"3\.(\d+)", project["requires-python"]))
    named = [int(minor) for minor in re.findall(r"Python :: 3\.(\d+)'", str(project["classifiers"]))]
    assert named == list(range(oldest, after_newest))
