"""Tests that no byte of an answer changes, however many clients an engine has, and whenever engines are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("Python has no Unix sockets on Windows", allow_module_level=True)

from tests.support.background import BackgroundHome, background_home
from tests.support.cli.commands import LLMRUN, ROOT
from tests.support.models.downloads import smollm2
from tests.support.models.tiny_adapters import tiny_adapter
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.push

PATIENCE_S = 120.0
NOTE = b"note: the background engine ended unexpectedly, so this process continues the answer itself\n"
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}'
# Flags that take turns. Each of them meets several prompts and seeds.
FLAGS: list[Sequence[str]] = [
    (),
    ("--temp", "0"),
    ("--temp", "1.5", "--top-k", "0", "--repeat-penalty", "1.2"),
    ("--json-schema", SCHEMA, "-n", "40"),
    ("--choice", "yes,no,maybe"),
    ("--regex", "[a-z ]{3,20}"),
    ("--logprobs", "2", "-n", "6"),
    ("--samples", "3", "-n", "6"),
    ("--raw",),
    ("--system", "You are a pirate.", "--stop", "e"),
    ("--mirostat", "2"),
    ("--speculate", "off"),
    ("--lora", "ADAPTER"),
]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[BackgroundHome]:
    with background_home(tmp_path / "home") as made:
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundHome]:
    with background_home(tmp_path_factory.mktemp("home") / "home") as made:
        yield made


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_adapter(tmp_path_factory.mktemp("adapter") / "adapter.gguf", smollm2())


def popen(home: BackgroundHome, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*LLMRUN, "generate", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**home.env},
        cwd=ROOT,
    )


def prompts(count: int) -> list[list[str]]:
    things = ("the sea", "a red fox", "prime numbers", "breakfast", "the moon", "a long night", "bees")
    return [
        [*FLAGS[number % len(FLAGS)], "--seed", str(number), f"Write line {number} about {things[number % 7]}."]
        for number in range(count)
    ]


@pytest.mark.parametrize("count", [2, pytest.param(100, marks=pytest.mark.night)])
def test_warm_answers_are_cold_answers(count: int, shared: BackgroundHome, adapter: Path) -> None:
    """The engines answer the later prompts with the prefixes of the earlier ones in their caches."""
    for arguments in prompts(count):
        words = ["generate", "-m", str(smollm2()), "-n", "12", *arguments]
        words = [str(adapter) if word == "ADAPTER" else word for word in words]
        warm = shared.llmrun(*words, "-v")
        cold = shared.llmrun(*words, "--no-warm")
        assert b"the background engine" in warm.stderr, warm.stderr.decode()
        assert (warm.returncode, warm.stdout) == (cold.returncode, cold.stdout), words


@pytest.mark.night
def test_fifty_clients_at_once_get_their_own_answers(home: BackgroundHome) -> None:
    count, model = 50, str(smollm2())
    flags = ["-v", "-m", model, "-n", "12"]
    asked = [[*flags, "--seed", str(number), f"Write line {number} about bees."] for number in range(count)]
    clients = [popen(home, *each) for each in asked]
    found = [client.communicate(timeout=PATIENCE_S) for client in clients]
    assert [client.returncode for client in clients] == [0] * count
    assert sum(b"started the background engine" in errors for _, errors in found) == 1
    assert sum(b"joined the background engine" in errors for _, errors in found) == count - 1
    assert len(home.engines()) == 1
    for each, (answer, _) in list(zip(asked, found, strict=True))[::5]:
        assert home.llmrun("generate", *each, "--no-warm").stdout == answer


def killed_after(home: BackgroundHome, seconds: float, *arguments: str) -> tuple[bytes, bytes]:
    """Ask, and kill the engine this many seconds after its process has started. Returns stdout and stderr."""
    client = popen(home, *arguments)

    def kill() -> None:
        while client.poll() is None and not (found := home.engines()):
            time.sleep(0.005)
        time.sleep(seconds)
        for each in found:
            with suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    output, errors = client.communicate(timeout=PATIENCE_S)
    killer.join()
    assert client.returncode == 0, errors.decode()
    assert errors.count(NOTE) == errors.count(b"note:") <= 1, errors.decode()
    home.kill()
    return output, errors


@pytest.mark.parametrize("moments", [3, pytest.param(60, marks=pytest.mark.night)])
def test_kill_9_changes_no_byte(moments: int, home: BackgroundHome) -> None:
    """The moments are spread over the load, the prefill and the decode."""
    prompt = "Tell me about bees. " * 20
    words = ["-m", str(smollm2()), "-n", "50", "--seed", "7", prompt]
    began = time.monotonic()
    expected = home.llmrun("generate", *words).stdout
    whole = time.monotonic() - began
    home.kill()
    n_notes = 0
    for moment in range(moments):
        output, errors = killed_after(home, whole * (moment + 0.5) / moments, *words)
        assert output == expected
        n_notes += NOTE in errors
    if moments > 20:
        assert n_notes > moments // 8


@pytest.mark.night
def test_kill_9_of_a_small_engine_changes_no_byte(home: BackgroundHome, tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "F32")
    words = ["-m", str(model), "--raw", "-n", "400", "--temp", "3", "--seed", "7", "Once"]
    began = time.monotonic()
    expected = home.llmrun("generate", *words).stdout
    whole = time.monotonic() - began
    home.kill()
    for moment in range(140):
        assert killed_after(home, whole * (moment + 0.5) / 140, *words)[0] == expected
