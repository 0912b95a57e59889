"""Tests of commands as tools: placeholders, standard input, limits and Ctrl-C."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import Cancelled
from llmrun.engine.tools.command import run_command
from llmrun.engine.tools.tool import Limits, ToolFailed, ToolResult
from llmrun.engine.tools.tools_file import CommandDeclaration, filled_command, placeholders
from tests.support.tools.boxes import LIMITS, python_command

ARGUMENTS = "import json, sys; print(json.dumps(sys.argv[1:]))"
STDIN = "import sys; sys.stdout.write(sys.stdin.read())"
WAIT = "import time; time.sleep(600)"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "string"}, "n": {"default": 5}},
}


def run(declared: CommandDeclaration, limits: Limits = LIMITS, **arguments: Any) -> ToolResult:
    return run_command(declared, arguments, limits, lambda: False)


def test_placeholders_fill_single_arguments() -> None:
    hostile = "x; rm -rf ~ $(id) `id` \"' {b} \n--all *"
    result = run(python_command(ARGUMENTS, "--", "{a}", "--b={b}", "{{a}}", "{", '{"a": {}}'), a=hostile, b="")
    assert json.loads(result.text) == ["--", hostile, "--b=", "{a}", "{", '{"a": {}}']


@given(st.text(), st.text())
def test_a_value_never_becomes_another_argument(a: str, b: str) -> None:
    command = ["program", "--a={a}", "--", "{b}", "{a}{b}"]
    if "\0" in a + b:
        with pytest.raises(ValueError, match="NUL"):
            filled_command(command, SCHEMA, {"a": a, "b": b})
        return
    assert filled_command(command, SCHEMA, {"a": a, "b": b}) == ["program", f"--a={a}", "--", b, a + b]


@pytest.mark.parametrize(
    ("value", "text"),
    [("x", "x"), (5, "5"), (-1.5, "-1.5"), (True, "true"), (None, "null"), ([1, "é"], '[1, "\\u00e9"]'), ({}, "{}")],
)
def test_values_become_json_unless_they_are_text(value: object, text: str) -> None:
    assert filled_command(["p", "{a}"], SCHEMA, {"a": value}) == ["p", text]


def test_defaults_fill_missing_arguments() -> None:
    assert filled_command(["p", "{n}"], SCHEMA, {}) == ["p", "5"]
    assert filled_command(["p", "{n}"], SCHEMA, {"n": 6}) == ["p", "6"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "'a' is missing"),
        ({"a": "--output=/etc/passwd"}, "'a' must not begin with '-'"),
        ({"a": "-"}, "'a' must not begin with '-'"),
        ({"a": "x\0y"}, "'a' contains a NUL character"),
        ({"a": "\udcff"}, "a lone surrogate"),
    ],
)
def test_unusable_arguments_are_an_error_result(arguments: dict[str, Any], message: str) -> None:
    result = run(python_command(ARGUMENTS, "{a}"), **arguments)
    assert result.is_error
    assert message in result.text


def test_values_may_begin_with_a_dash_after_a_double_dash() -> None:
    assert filled_command(["p", "--", "{a}"], SCHEMA, {"a": "--all"}) == ["p", "--", "--all"]
    assert filled_command(["p", "--x={a}"], SCHEMA, {"a": "--all"}) == ["p", "--x=--all"]


def test_placeholders_are_found() -> None:
    assert placeholders("{a}{b_1} {{c}} {} {1} {d e}") == ["a", "b_1"]


def test_standard_input_is_json_or_empty() -> None:
    assert json.loads(run(python_command(STDIN, json_stdin=True), a="é\n", c=[1]).text) == {"a": "é\n", "c": [1]}
    assert run(python_command(STDIN)).text == ""


def test_a_command_need_not_read_its_input() -> None:
    assert run(python_command("print(1)", json_stdin=True), a="x" * 1_000_000).text == "1\n"


def test_a_failing_command_is_an_error_result() -> None:
    result = run(python_command("import sys; print('half'); sys.exit('no \\x1b[2J city')"))
    assert result == ToolResult("half\nno \\x1b[2J city\n[exit status 1]", is_error=True)


def test_output_is_cleaned() -> None:
    result = run(python_command(r"import os; os.write(1, b'\xff\x1b[31mred\x00\r\n')"))
    assert result.text == "\ufffd\\x1b[31mred\\x00\n"


def test_long_output_is_cut() -> None:
    result = run(python_command("print('x' * 100_000)"), replace(LIMITS, result=1000))
    assert result.truncated
    assert not result.is_error
    assert result.text.startswith("x" * 1000 + "\n[cut: these are the first 1,000 of ")


def test_endless_output_ends() -> None:
    result = run(python_command("while True: print('x' * 1000)"), replace(LIMITS, result=1000))
    assert result.is_error
    assert result.text.endswith("[the command was stopped because it wrote more than 1,048,576 bytes]")


def test_endless_standard_error_is_drained() -> None:
    result = run(python_command("import os, sys; os.write(2, b'x' * 1_000_000); sys.exit(1)"))
    assert len(result.text) < 5000


def test_a_command_that_takes_too_long_is_killed() -> None:
    with pytest.raises(ToolFailed, match=r"did not end within 0\.2 s"):
        run(python_command(WAIT, timeout_s=0.2))


def test_a_command_that_ignores_sigterm_is_killed() -> None:
    program = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAIT}"
    with pytest.raises(ToolFailed, match="did not end"):
        run(python_command(program, timeout_s=0.2))


def test_descendants_that_hold_the_output_do_not_delay_the_result() -> None:
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAIT!r}]); print('done')"
    started = time.monotonic()
    assert run(python_command(program)).text == "done\n"
    assert time.monotonic() - started < 20


def test_ctrl_c_ends_a_command() -> None:
    event = threading.Event()
    threading.Timer(0.1, event.set).start()
    with pytest.raises(Cancelled):
        run_command(python_command(WAIT), {}, LIMITS, event.is_set)


def test_a_missing_program_is_a_failure() -> None:
    with pytest.raises(ToolFailed, match="cannot start /nowhere/x: No such file"):
        run(replace(python_command(""), command=("/nowhere/x",)))


def test_a_too_long_argument_is_a_failure() -> None:
    with pytest.raises(ToolFailed, match="Argument list too long"):
        run(python_command(ARGUMENTS, "{a}"), a="x" * 10_000_000)


def test_commands_run_in_their_folder(tmp_path: Any) -> None:
    declared = CommandDeclaration("p", "d", (sys.executable, "-c", "import os; print(os.getcwd())"), SCHEMA)
    assert run(replace(declared, folder=tmp_path)).text.strip() == str(tmp_path)
