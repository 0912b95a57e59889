"""Tests with curl and llmrun's own commands as clients of `llmrun serve`."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli.commands import TIMEOUT_S, llmrun
from tests.support.serving.serve_process import Served, served

pytestmark = pytest.mark.push

# Makes the noise of the scripted model as likely as its text, so that the sampling decides about the answer.
NOISE = ("--temp", "5", "--top-k", "0", "--top-p", "1", "--min-p", "0")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served("scripted", "--backend", "scripted") as running:
        yield running


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_line_of_the_banner_works(server: Served) -> None:
    (line,) = [line for line in server.lines if line.startswith("try: ")]
    command = shlex.split(line.removeprefix("try: "))
    done = subprocess.run([*command, "--fail", "--silent"], capture_output=True, check=True, timeout=TIMEOUT_S)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "You said: Hello"


@pytest.mark.night
def test_generate_answers_over_http(server: Served) -> None:
    for model in (server.url, f"{server.url}#{server.model}"):
        assert llmrun("generate", "-q", "-m", model, "Hello").stdout == b"You said: Hello\n"


@pytest.mark.night
def test_generate_gives_the_same_text_here_and_over_http(server: Served) -> None:
    flags = ("-q", "--raw", "--seed", "7", "-n", "20", *NOISE, "--repeat-penalty", "1.2", "abc")
    there = llmrun("generate", "-m", server.url, *flags).stdout
    assert there == llmrun("generate", "--backend", "scripted", *flags).stdout != b""


def test_samples_over_http_are_those_of_this_machine(server: Served) -> None:
    flags = ("--json", "--seed", "7", "-n", "12", *NOISE, "--samples", "3")
    there = json.loads(llmrun("generate", "-q", "-m", server.url, *flags, "Hello").stdout)["samples"]
    here = json.loads(llmrun("generate", "-q", "--backend", "scripted", *flags, "Hello").stdout)["samples"]
    assert [sample["text"] for sample in there] == [sample["text"] for sample in here]
    assert len({sample["text"] for sample in there}) > 1


def test_a_chat_continues_over_http(server: Served, tmp_path: Path) -> None:
    done = llmrun("chat", "-q", "-m", server.url, stdin=b"One\nTwo\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"You said: ") == 2
    assert server.metric("llmrun_cached_tokens_total") > 0


def test_a_benchmark_measures_the_server(server: Served) -> None:
    flags = ("--endpoint", server.url, "--requests", "4", "--rate", "20", "-p", "16", "-n", "8", "--json")
    done = llmrun("bench", *flags)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


@pytest.mark.night
def test_the_first_model_of_our_servers_is_the_default() -> None:
    with served("one", "two", "--backend", "scripted") as several:
        assert json.loads(llmrun("generate", "--json", "-m", several.url, "Hello").stdout)["model"] == "one"
        assert json.loads(llmrun("generate", "--json", "-m", f"{several.url}#two", "Hello").stdout)["model"] == "two"
