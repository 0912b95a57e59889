"""Tests of `llmrun doctor` as a user runs it: on any machine, it ends with a report without secrets."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pexpect
import pytest

from llmrun.backends.llama.gpu_check import PATIENCE_S
from llmrun.cli import doctoring
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import LiveReporter
from llmrun.cli.console.terminal import width
from llmrun.cli.doctoring import look_at_terminal, show_report
from llmrun.jobs.doctor.examine import NOTE, OK, PROBLEM, Finding, Machine, Report
from tests.support.backends.fake_llama import DIES, HANGS, fake_llama, without_llama
from tests.support.cli.commands import ROOT, llmrun, on_terminal, screen_of

pytestmark = pytest.mark.push

NOWHERE = "http://127.0.0.1:1"
NAMES = [
    *("python", "llmrun", "cpu", "kernels_level", "prefetching", "memory", "speed"),
    *("llama_cpp", "kernels", "models", "hub_cache", "engines", "settings", "hub", "token", "terminal"),
]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name.startswith("LLMRUN_")}
    return {**kept, "PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "HF_ENDPOINT": NOWHERE, **more}


def checks(stdout: bytes) -> dict[str, Mapping[str, Any]]:
    return {check["name"]: check for check in json.loads(stdout)["checks"]}


# The command


@pytest.mark.night
def test_json_has_every_check_in_a_form_that_stays() -> None:
    done = llmrun("doctor", "--json", "-q", env=environment())
    assert (done.returncode, done.stderr) == (0, b"")
    body = json.loads(done.stdout)
    assert list(body) == ["schema", "llmrun", "works", "checks"]
    assert (body["schema"], body["works"]) == (1, True)
    found = checks(done.stdout)
    assert [name for name in found if not name.startswith("gpu_")] == NAMES
    for check in body["checks"]:
        assert list(check) == ["section", "name", "status", "words", "advice", "command", "facts"]
        assert check["status"] in (OK, NOTE)
    assert found["speed"]["facts"]["read_bytes_per_second"] > 1e8
    assert found["llama_cpp"]["facts"]["failure"] is None
    assert found["hub"]["facts"]["trouble"] == "unreachable (Connection refused)"
    assert found["terminal"]["facts"]["stdout_is_terminal"] is False


@pytest.mark.night
def test_what_is_broken_is_exit_code_1_and_no_secret_is_told(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("thread = 2\n")
    secrets = {
        "HF_TOKEN": "hf_verysecret",
        "LLMRUN_API_KEY": "sk-alsosecret",
        "HTTPS_PROXY": "http://me:proxypass@127.0.0.1:1",
        "HF_ENDPOINT": "https://user:hubpass@127.0.0.1:1",
    }
    done = llmrun("doctor", "-v", "--debug", env=environment(LLMRUN_CONFIG=str(config), **secrets))
    assert done.returncode == 1
    text = done.stdout.decode()
    assert f"✗ invalid: config: {config}: thread: no such setting" in " ".join(text.split())
    assert "Did you mean threads?" in text
    assert text.endswith("1 problem to fix, 1 note.\n")
    assert "\x1b" not in text
    assert "a Hugging Face token is set up" in text
    for secret in ("verysecret", "alsosecret", "proxypass", "hubpass"):
        assert secret not in text + done.stderr.decode()


@pytest.mark.night
def test_with_nothing_in_the_environment_no_llama_and_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = without_llama(tmp_path / "modules")
    home = tmp_path / "home"
    home.write_bytes(b"a file, in which no folder can be made")
    done = llmrun("doctor", "--json", "--offline", env={"PYTHONPATH": f"{blocked}:{ROOT}", "HOME": str(home)})
    assert done.returncode == 0, done.stderr
    found = checks(done.stdout)
    assert [name for name in found if not name.startswith("gpu_")] == NAMES
    assert found["llama_cpp"]["facts"] == {"installed": False}
    assert "pip install" in found["llama_cpp"]["command"]
    for name in ("models", "hub_cache"):
        assert (found[name]["status"], found[name]["facts"]["writable"]) == (NOTE, False)
    assert found["hub"]["facts"]["offline"] is True


@pytest.mark.night
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGILL", "SIGABRT"])
def test_a_llama_cpp_that_dies_while_it_multiplies_is_named_and_ends_nothing(name: str, tmp_path: Path) -> None:
    fake = fake_llama(tmp_path, when_decoding=DIES.format(name))
    done = llmrun("doctor", "--json", env=environment(PYTHONPATH=f"{fake}:{ROOT}"))
    assert done.returncode == 0, done.stderr
    found = checks(done.stdout)["llama_cpp"]
    assert found["status"] == NOTE
    assert found["words"].endswith(f"crashes on this machine: llama.cpp died while multiplying: {name}")
    assert "pip install --force-reinstall" in found["command"]


@pytest.mark.night
def test_ctrl_c_ends_it_at_once_while_llama_cpp_hangs(tmp_path: Path) -> None:
    fake = fake_llama(tmp_path, when_decoding=HANGS)
    process = on_terminal("doctor", HF_ENDPOINT=NOWHERE, PYTHONPATH=f"{fake}:{ROOT}")
    process.expect_exact("checking llama.cpp")
    time.sleep(1)  # it hangs by now
    started = time.monotonic()
    process.sendintr()
    process.expect_exact(pexpect.EOF)
    process.close()
    assert process.exitstatus == 130
    assert time.monotonic() - started < PATIENCE_S / 2  # without Ctrl-C, it would take all of it


@pytest.mark.night
@pytest.mark.parametrize("columns", [40, 80, 120])
def test_on_a_terminal_it_fits_and_is_colored_unless_it_must_not_be(columns: int) -> None:
    more = {"HF_ENDPOINT": NOWHERE} | ({"NO_COLOR": "1"} if columns == 120 else {})
    written, code = screen_of("doctor", columns=columns, **more)
    assert code == 0
    assert ("\x1b[" in written) == (columns != 120)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", written[written.index("Python") :]).splitlines()
    # Commands are excluded, because they stay unbroken on the line after a colon.
    fitting = [line for before, line in zip(["", *lines], lines, strict=False) if not before.endswith(":")]
    assert max(map(width, fitting)) <= columns
    assert f"{'•' if columns == 40 else '✓'} {columns} columns" in "\n".join(lines)
    if columns == 120:
        assert len(lines) <= 30  # one screen


# The report


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "60")
    before = out.quiet, out.verbose, out.color
    yield
    out.quiet, out.verbose, out.color = before


@pytest.mark.usefixtures("plain")
def test_long_lines_are_wrapped_under_themselves_and_commands_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    command = "CMAKE_ARGS='-DGGML_CUDA=on' python -m pip install --force-reinstall --no-cache-dir llama-cpp-python"
    findings = [
        Finding("Python", "a", OK, "short"),
        Finding("Python", "b", NOTE, "word " * 20, "advice " * 20 + "end:", command),
        Finding("GPU", "c", PROBLEM, "bad \x1b[31m name\n", "Fix it."),
    ]
    show_report(Report(findings))
    assert capsys.readouterr().out.splitlines() == [
        "Python  ✓ short",
        "        • " + " ".join(["word"] * 10),
        "          " + " ".join(["word"] * 10),
        "GPU     ✗ bad ␛[31m name",
        "",
        "✗ GPU: Fix it.",
        "",
        "• Python: " + " ".join(["advice"] * 7),
        "  " + " ".join(["advice"] * 8),
        "  " + " ".join(["advice"] * 5) + " end:",
        f"  {command}",
        "",
        "1 problem to fix, 1 note.",
    ]


@pytest.mark.usefixtures("plain")
def test_a_machine_on_which_all_is_well_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(Report([Finding("Python", "a", OK, "short")]))
    assert capsys.readouterr().out == "Python  ✓ short\n\nEverything that llmrun needs works; 0 notes.\n"


@pytest.mark.usefixtures("plain")
def test_verbose_tells_every_fact_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    out.verbose = True
    show_report(Report([Finding("Python", "a", OK, "short", facts={"bits": 64})]))
    assert capsys.readouterr().err == 'a: {"bits": 64}\n'


# The terminal


def looked_at(monkeypatch: pytest.MonkeyPatch, *, columns: str = "100", **variables: str) -> Finding:
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"COLUMNS": columns, "TERM": "xterm", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctoring, "is_terminal", lambda stream: True)
    monkeypatch.setattr(doctoring, "can_color", lambda stream, choice: "NO_COLOR" not in os.environ)
    (found,) = look_at_terminal(Machine())
    return found


@pytest.mark.parametrize(
    ("variables", "status", "words"),
    [
        ({}, OK, "100 columns, colors, UTF-8"),
        ({"LANG": "de_DE.UTF-8", "NO_COLOR": "1"}, OK, "100 columns, no colors, UTF-8"),
        ({"LANG": "de_DE.utf8", "LC_ALL": "C"}, OK, "100 columns, colors, UTF-8"),
        ({"LANG": "de_DE.ISO-8859-1"}, NOTE, "100 columns, colors, not UTF-8"),
        ({"columns": "40"}, NOTE, "40 columns, colors, UTF-8; tables need at least 60"),
    ],
)
def test_what_a_terminal_can_show_is_told(
    variables: dict[str, str], status: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = looked_at(monkeypatch, **variables)
    assert (found.status, found.words) == (status, words)


def test_an_output_that_is_no_terminal_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctoring, "is_terminal", lambda stream: False)
    (found,) = look_at_terminal(Machine())
    assert (found.status, found.facts["columns"]) == (OK, None)


# The progress line


def test_what_is_going_on_is_told_until_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    twice = threading.Event()

    def progress(words: str) -> None:
        told.append(words)
        if len(told) == 2:
            twice.set()

    monkeypatch.setattr(out, "progress", progress)
    with LiveReporter() as waiting:
        waiting.progress("looking …")
        assert twice.wait(10)
    assert set(told) <= {"looking …"}
    count = len(told)
    assert not waiting._thread.is_alive()
    assert len(told) == count


def test_an_interrupt_leaves_no_line_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[bool] = []
    monkeypatch.setattr(out, "clear_progress", lambda: cleared.append(True))
    with pytest.raises(KeyboardInterrupt), LiveReporter() as waiting:
        raise KeyboardInterrupt
    assert cleared == [True]
    assert not waiting._thread.is_alive()
