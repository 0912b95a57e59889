"""Tests of the manual page docs/llmrun.1, which scripts/manpage generates from the commands' texts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from llmrun.cli.registry import command_names
from tests.cli.test_messages import CODES

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "llmrun.1"
NOT_FOR_USERS = {"LLMRUN_TEST_CACHE"}


def text() -> str:
    """Return the page with hyphens unescaped."""
    return PAGE.read_text(encoding="utf-8").replace(r"\-", "-")


@pytest.mark.push
def test_the_page_is_current() -> None:
    made = subprocess.run([sys.executable, "scripts/manpage"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert PAGE.read_text(encoding="utf-8") == made.stdout, "type: scripts/manpage > docs/llmrun.1"


def test_it_has_every_command_exit_code_and_variable() -> None:
    page = text()
    assert [name for name in command_names() if f"\n.SS llmrun {name} [OPTIONS]" not in page] == []
    assert "\n.SS llmrun bench compare [OPTIONS] BEFORE AFTER\n" in page
    assert [code for code in {0, 141, 143, *CODES.values()} if f"\n.TP\n\\fB{code}\\fR\n" not in page] == []
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "llmrun").rglob("*.py")]
    variables = {name for source in sources for name in re.findall(r"\bLLMRUN_[A-Z_]*[A-Z]\b", source)}
    assert len(variables) > 5
    assert [name for name in variables - NOT_FOR_USERS if name not in page] == []


def test_a_line_of_an_example_is_no_request_of_roff() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    requests = {line.split()[0] for line in lines if line.startswith((".", "'"))}
    assert requests <= {".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".RS", ".RE", ".nf", ".fi", '.\\"'}
    assert all(line.isascii() for line in lines)


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_mandoc_has_nothing_to_say_but_that_it_has_no_date() -> None:
    """A date would change with every release, even if the page did not."""
    done = subprocess.run(["mandoc", "-T", "lint", str(PAGE)], capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if "missing date" not in line] == []


def test_wheels_install_it_where_man_looks() -> None:
    hatch = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    assert hatch["wheel"]["shared-data"] == {"docs/llmrun.1": "share/man/man1/llmrun.1"}
    assert "docs" in hatch["sdist"]["include"]
