"""Tests of response formats on platforms without llguidance."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from itertools import chain
from types import ModuleType

import pytest

from llmrun.backends.scripted import ScriptedTokenizer
from llmrun.base.errors import UsageError
from llmrun.engine.constraint.base import LLGUIDANCE, FormatKind, ResponseFormat
from llmrun.engine.constraint.matcher import ConstraintCompiler, check_format
from tests.support.cli.commands import ROOT

MESSAGE = "response formats and tools need the package llguidance, which is not installed"
FORMATS = [
    ResponseFormat(FormatKind.JSON_SCHEMA, "{}"),
    ResponseFormat(FormatKind.JSON_OBJECT),
    ResponseFormat(FormatKind.REGEX, "[ab]"),
    ResponseFormat(FormatKind.CHOICE, choices=("a", "b")),
    ResponseFormat(FormatKind.GRAMMAR, 'start: "a"'),
]


@pytest.fixture(params=[None, ModuleType("llguidance")], ids=["missing", "version 0.0.1"])
def without_llguidance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", request.param)


@pytest.mark.usefixtures("without_llguidance")
@pytest.mark.parametrize("wanted", FORMATS, ids=lambda wanted: wanted.kind)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_missing_llguidance_is_a_clear_error(wanted: ResponseFormat) -> None:
    compiler, tokenizer = ConstraintCompiler(), ScriptedTokenizer()
    try:
        compiler.prepare(tokenizer)
        with pytest.raises(UsageError, match=MESSAGE) as caught:
            compiler.compile(wanted, tokenizer)
    finally:
        compiler.close()
    assert LLGUIDANCE in caught.value.hint


@pytest.mark.usefixtures("without_llguidance")
def test_a_missing_llguidance_is_found_before_a_download() -> None:
    with pytest.raises(UsageError, match=MESSAGE):
        check_format(ResponseFormat(FormatKind.REGEX, "[ab]"))


def test_the_hint_names_the_declared_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert LLGUIDANCE in chain(project["dependencies"], *project["optional-dependencies"].values())


@pytest.mark.push
def test_the_command_ends_with_one_message() -> None:
    program = (
        "import sys; from llmrun.cli.app import main; sys.modules['llguidance'] = None\n"
        "sys.exit(main(['generate', '--backend', 'scripted', '--choice', 'yes,no', 'hi']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (UsageError.exit_code, "")
    message, hint = done.stderr.splitlines()
    assert message == f"error: {MESSAGE}"
    assert hint.startswith(f'hint: pip install "{LLGUIDANCE}"; ')
