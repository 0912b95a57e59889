"""Tests of the process that runs templates: its limits, its isolation, and the messages when it dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, tzinfo
from typing import Any

import psutil
import pytest

from llmrun.backends.scripted import ScriptedBackend, echo
from llmrun.base.errors import LlmrunError, TemplateRefused
from llmrun.base.processes import commands
from llmrun.base.processes import limits as isolation
from llmrun.cli.answers.answering import open_model
from llmrun.engine.engine import Engine
from llmrun.engine.requests import ChatPrompt, Request
from llmrun.engine.templates import chat_template as module
from llmrun.engine.templates.chat_template import RenderLimits, TemplateProcess
from llmrun.engine.templates.tool_format import TemplateAbilities
from llmrun.options.settings import load_settings
from tests.support.models.downloads import llama_cpp_source
from tests.support.templates.hostile_templates import HARMLESS, HOSTILE
from tests.support.templates.template_drafts import hostile_draft
from tests.support.templates.template_runs import Ended, ended_all

QUICK = RenderLimits(cpu_s=0.05)  # tests wait until endless templates hit this limit
DRAFTS = 200  # `scripts/soak templates` renders any number
SEED = 2
FOR_EVER = "{% for i in range(99999) %}\n{% for j in range(99999) %}{% endfor %}{% endfor %}"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    made = TemplateProcess(RenderLimits(cpu_s=0.5))
    yield made
    made.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[TemplateProcess]:
    """Yield a template process with the limits that users get."""
    made = TemplateProcess()
    yield made
    made.close()


def refusal(process: TemplateProcess, source: str, **variables: Any) -> str:
    with pytest.raises(TemplateRefused) as refused:
        process.render(source, "t.jinja", variables)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 300
    assert refused.value.exit_code == 9
    return message


def child(process: TemplateProcess) -> psutil.Process:
    """Wait until the child process is ready, and return it."""
    process.render("", "t.jinja", {})
    return psutil.Process(process._running().pid)


# --- hostile templates


@pytest.fixture(scope="module")
def hostile() -> dict[str, Ended]:
    return dict(zip(HOSTILE, ended_all([*HOSTILE.values()], QUICK), strict=True))


@pytest.mark.night
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_refused_in_one_line(name: str, hostile: dict[str, Ended]) -> None:
    assert hostile[name].well, hostile[name]
    assert hostile[name].outcome == "refused" or name in HARMLESS


@pytest.mark.night
def test_random_ones_end_in_text_or_are_refused() -> None:
    paths = sorted((llama_cpp_source() / "vendor/llama.cpp/models/templates").glob("*.jinja"))
    real = [path.read_text(encoding="utf-8") for path in paths]
    results = ended_all([hostile_draft(SEED, case, real) for case in range(DRAFTS)], QUICK)
    assert [(case, result) for case, result in enumerate(results) if not result.well] == []
    # If all drafts broke at the first tag, or all were harmless, they would test nothing.
    assert sum(result.outcome == "text" for result in results) > DRAFTS // 10
    assert sum("chat template refused" in result.said for result in results) > DRAFTS // 20


# --- messages

SAID = {
    "time": (FOR_EVER, "chat template refused: t.jinja: it takes longer than 0.5 s"),
    "memory": ("{{ 'a' * 10**9 }}", "chat template refused: t.jinja: it needs more than 256 MB of memory"),
    "output": ("{{ 'a' * 20000000 }}", "chat template refused: t.jinja: its output exceeds 16,77"),
    "depth": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "it is nested too deeply, or calls itself"),
    "source": ("{{ " + "(" * 60000 + ")" * 60000 + " }}", "it is nested too deeply, or calls itself"),
    "place": ("a\n\n{{ 1 / 0 }}", "chat template failed: t.jinja: line 3: division by zero"),
    "long words": ("{{ raise_exception('\x1b a\nb' * 9999) }}", "chat template refuses this conversation: t.jinja: "),
}


@pytest.mark.push
@pytest.mark.parametrize("name", SAID)
def test_a_refusal_says_what_was_too_much_and_where(
    name: str, process: TemplateProcess, patient: TemplateProcess
) -> None:
    """Only the refusal for time has a short limit, which a busy machine might reach first in the others."""
    source, words = SAID[name]
    used = process if name == "time" else patient
    assert words in refusal(used, source)
    assert used.render("{{ 1 }}", "t.jinja", {}) == "1"


@pytest.mark.night
def test_a_template_has_six_seconds_of_processor_time(patient: TemplateProcess) -> None:
    before = time.process_time()
    assert refusal(patient, FOR_EVER).endswith("it takes longer than 6.0 s")
    assert time.process_time() - before < 1.0  # this process only polls


@pytest.mark.push
def test_memory_is_looked_at_where_the_system_has_no_limit(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate Windows in the process that sets the limits, as soon as everything is imported there."""
    found = commands.isolated_command
    on_windows = (
        "from llmrun.base.processes import worker; "
        "worker.sys = type('', (), {'platform': 'win32', 'stdin': sys.stdin, 'stdout': sys.stdout})"
    )

    def without_limits(name: str) -> list[str]:
        return [word.replace("; main()", f"; {on_windows}; main()") for word in found(name)]

    monkeypatch.setattr(commands, "isolated_command", without_limits)
    hoard = (
        "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% set ns.l = [ns.l, 'a' * 100000 ~ i] %}{% endfor %}"
    )
    slow = TemplateProcess(RenderLimits(cpu_s=60.0))
    try:
        assert refusal(slow, hoard).endswith("it needs more than 256 MB of memory")
        assert "longer than" in refusal(process, FOR_EVER)
    finally:
        slow.close()


# --- large but valid inputs


@pytest.mark.push
@pytest.mark.parametrize("letter", ["a", "\n", "é", "🙂"])
def test_a_message_of_five_million_characters_is_rendered(letter: str, patient: TemplateProcess) -> None:
    content = letter * 5_000_000
    source = (
        "{% for m in messages %}{% if 'x' in m.content or m.content.startswith('</think>') %}{% break %}{% endif %}"
        "{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] + '｜' }}{{ m.content | trim ~ '' }}{% endfor %}"
    )
    text = patient.render(source, "t.jinja", {"messages": [{"role": "user", "content": content}]})
    assert text.startswith("<|user|>" + content + "｜")
    assert patient.render("{{ m | tojson }}", "t.jinja", {"m": letter * 1_000_000})[-1] == '"'


def test_texts_arrive_and_return_as_they_are(patient: TemplateProcess) -> None:
    odd = "\x00\r\n\u2028\ufdd0\udcff\ud83d\U0010ffff"
    assert patient.render("{{ t }}|{{ d['" + "k" + "'] }}", "t.jinja", {"t": odd, "d": {"k": odd}}) == f"{odd}|{odd}"
    values = {"i": 2**70, "f": 1e-300, "n": None, "b": True, "l": [1, [2]], "inf": float("inf")}
    expected = f"{2**70} 1e-300 None True [1, [2]] inf"
    assert patient.render("{{ i }} {{ f }} {{ n }} {{ b }} {{ l }} {{ inf }}", "t.jinja", values) == expected


@pytest.mark.night
def test_looking_back_through_a_thousand_messages_is_allowed(patient: TemplateProcess) -> None:
    source = (
        "{% for m in messages %}{% set ns = namespace(n=0) %}{% for i in range(loop.index0, -1, -1) %}"
        "{% if ns.n %}{% if messages[i].role == 'user' %}{% set ns.n = i %}{% endif %}{% endif %}{% endfor %}"
        "{{ ns.n }},{% endfor %}"
    )
    messages = [{"role": "user", "content": "x"}] * 1000
    assert patient.render(source, "t.jinja", {"messages": messages}) == "0," * 1000


# --- the life of the process


def test_one_process_runs_many_templates(process: TemplateProcess) -> None:
    first = child(process).pid
    for source in ("{{ 1 / 0 }}", "{% if %}", "{{ raise_exception('no') }}"):
        refusal(process, source)
    assert child(process).pid == first


@pytest.mark.push
def test_a_longer_conversation_gets_a_process_with_more_memory(process: TemplateProcess) -> None:
    first = child(process).pid
    process.render("{{ m | length }}", "t.jinja", {"m": "a" * 10_000_000})
    second = child(process).pid
    assert second != first
    assert "more than 400 MB" in refusal(process, "{{ 'a' * 10**9 }}")


@pytest.mark.push
def test_it_starts_again_when_somebody_has_ended_it(process: TemplateProcess) -> None:
    for _ in range(2):
        running = child(process)
        running.kill()
        running.wait()
        assert process.render("{{ 1 }}", "t.jinja", {}) == "1"


@pytest.mark.push
def test_what_asks_can_be_interrupted(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    running = child(process)

    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(isolation, "_watch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.render(FOR_EVER, "t.jinja", {})
    assert not running.is_running()
    assert process.render("{{ 1 }}", "t.jinja", {}) == "1"


def test_an_engine_ends_it() -> None:
    process = TemplateProcess()
    running = child(process)
    with Engine(ScriptedBackend(echo), templates=process) as engine:
        engine.submit(Request(ChatPrompt([{"role": "user", "content": "hi"}])))
        assert running.is_running()
    assert not running.is_running()


def test_a_model_that_cannot_be_opened_leaves_none(tmp_path: Any) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    before = psutil.Process().children()
    settings = load_settings({"model": str(tmp_path / "bad.gguf"), "backend": "cpu"})
    with pytest.raises(LlmrunError), open_model(settings, chat_template=None, will_chat=True):
        pass
    assert psutil.Process().children() == before


@pytest.mark.push
def test_it_does_not_outlive_the_one_that_started_it() -> None:
    program = (
        "import os; from llmrun.engine.templates.chat_template import TemplateProcess; process = TemplateProcess();"
        "process.render('', 't', {}); print(process._running().pid, flush=True); os._exit(1)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    running = int(done.stdout)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(running) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not psutil.pid_exists(running)


# --- isolation


@linux
def test_it_has_no_environment_no_files_and_the_systems_limits(
    process: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.platform != "linux":
        pytest.skip("reads the limits of another process")
    monkeypatch.setenv("LLMRUN_SECRET", "x")
    with open(os.devnull) as held:  # noqa: PTH123
        os.set_inheritable(held.fileno(), True)
        running = child(process)
    assert {*running.environ()} <= {"LC_CTYPE", *commands._NEEDED_TO_START}
    assert sorted(os.listdir(f"/proc/{running.pid}/fd")) == ["0", "1", "2"]  # noqa: PTH208
    assert os.getsid(running.pid) == running.pid  # a terminal's Ctrl-C must not reach it
    assert running.rlimit(psutil.RLIMIT_AS) == (256_000_000, 256_000_000)
    assert running.rlimit(psutil.RLIMIT_FSIZE) == (0, 0)
    assert 0 < running.rlimit(psutil.RLIMIT_CPU)[0] < 10


def test_its_clock_is_ours(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child process does not see the user's TZ."""

    class FixedClock(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> FixedClock:
            return cls(2026, 2, 3, 4, 5, 6)

    monkeypatch.setattr(module, "datetime", FixedClock)
    assert process.render("{{ strftime_now('%d %b %Y %H:%M') }}", "t.jinja", {}) == "03 Feb 2026 04:05"


# --- a misbehaving process, replaced by a program

ODD = {
    "is never ready": ("time.sleep(60)", "it did not finish within 1 s"),
    "dies before it is ready": ("sys.exit(3)", "its process ended: exit status 3"),
    "is ready with a flood": ("out(b'hello' * 99)", "its output exceeds"),
    "says nothing": ("ready(); read(); read(); time.sleep(60)", "it did not finish within 1 s"),
    "does not listen": ("ready(); time.sleep(60)", "it did not finish within 1 s"),
    "is killed": ("ready(); read(); read(); os.kill(os.getpid(), 9)", "its process ended: SIGKILL"),
    "says half of it": ("ready(); read(); read(); out(b'[')", "its process ended: exit status 0"),
    "says no JSON": ("answer(b'{')", "sent an invalid answer"),
    "says no text": ("answer(b'\\xff')", "sent an invalid answer"),
    "says JSON too deep": ("answer(b'[' * 99999)", "sent an invalid answer"),
    "says a number": ("answer(b'7')", "sent an invalid answer"),
    "says no kind": ("answer(b'[[], {}]')", "sent an invalid answer"),
    "says another kind": ("answer(b'[\"abilities\", {}]')", "sent an invalid answer"),
    "says a text that is none": ("answer(b'[\"text\", 7]')", "sent an invalid answer"),
    "says a refusal that is none": ("answer(b'[\"failed\", [[]]]')", "chat template failed: t.jinja: [[]]"),
}
HELPERS = """
import os, sys, time
def read(): return sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), 'big'))
def out(data): sys.stdout.buffer.write(data); sys.stdout.buffer.flush()
def ready(): out(bytes(8))
def answer(data): ready(); read(); read(); out(len(data).to_bytes(8, 'big') + data); read()
"""


@pytest.mark.push
@pytest.mark.parametrize("name", ODD)
def test_whatever_it_does_is_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, words = ODD[name]
    command = [sys.executable, "-c", HELPERS + program]
    monkeypatch.setattr(commands, "isolated_command", lambda _: command)
    process = TemplateProcess(RenderLimits(wall_s=1.0 if "within 1 s" in words else 30.0))
    assert words in refusal(process, "{{ x }}", x="a" * 100_000)  # more than a pipe holds
    assert process.abilities("{{ x }}") == TemplateAbilities()
    process.close()


@pytest.mark.push
def test_a_process_that_cannot_be_started_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "isolated_command", lambda _: ["/no/such/python"])
    with pytest.raises(LlmrunError, match=r"cannot start the process for chat templates: .*No such file"):
        TemplateProcess().start()
