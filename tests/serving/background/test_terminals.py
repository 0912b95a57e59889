"""Tests of background engines with terminals (Ctrl-C, Ctrl-Z, closed windows), and with two versions of llmrun."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

if sys.platform == "win32":
    pytest.skip("Python has no Unix sockets on Windows", allow_module_level=True)

from tests.support.background import BackgroundHome, background_home
from tests.support.cli.commands import LLMRUN, ROOT
from tests.support.models.downloads import smollm2
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.night

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "F32")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[BackgroundHome]:
    with background_home(tmp_path / "home") as made:
        yield made


@pytest.fixture(scope="module")
def slow() -> Path:
    """A model whose answers take seconds."""
    return smollm2()


def answer(home: BackgroundHome, model: Path) -> tuple[bytes, str]:
    done = home.llmrun("generate", "-v", "--raw", "-n", "8", "--seed", "3", "-m", str(model), "Once")
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout, done.stderr.decode()


def endless(home: BackgroundHome, model: Path) -> pexpect.spawn[bytes]:
    """Start an answer that does not end, on a terminal."""
    words = ["generate", "--raw", "-n", "3000", "--temp", "3", "-m", str(model), "Once"]
    return pexpect.spawn(
        sys.executable,
        [*LLMRUN[1:], *words],
        cwd=str(ROOT),
        env={"TERM": "xterm-256color", **home.env},
        timeout=PATIENCE_S,
    )


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def drain(terminal: pexpect.spawn[bytes]) -> None:
    terminal.expect(pexpect.EOF)
    terminal.close()


def is_idle(home: BackgroundHome, quiet_s: float = 0.3) -> bool:
    """Return whether the engine computes nothing for a while."""
    process = home.engine()
    before = process.cpu_times()
    time.sleep(quiet_s)
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system < 0.5 * quiet_s


def test_ctrl_c_ends_the_answer_and_not_the_engine(home: BackgroundHome, slow: Path) -> None:
    expected, _ = answer(home, slow)
    pid = home.engine().pid
    terminal = endless(home, slow)
    wait_until(lambda: not is_idle(home))
    terminal.sendintr()
    drain(terminal)
    assert terminal.exitstatus == 130
    wait_until(lambda: is_idle(home))
    again, errors = answer(home, slow)
    assert again == expected
    assert f"joined the background engine {pid}" in errors


def test_a_second_ctrl_c_leaves_at_once(home: BackgroundHome, slow: Path) -> None:
    answer(home, slow)
    terminal = endless(home, slow)
    wait_until(lambda: not is_idle(home))
    home.engine().suspend()  # it cannot answer the first Ctrl-C
    terminal.sendintr()
    time.sleep(0.2)
    terminal.sendintr()
    drain(terminal)
    home.engine().resume()
    wait_until(lambda: is_idle(home))


@pytest.mark.parametrize("seconds", [0.0, 0.1, 0.2, 0.3, 0.5])
def test_ctrl_c_while_an_engine_starts_leaves_nothing(seconds: float, home: BackgroundHome, model: Path) -> None:
    terminal = endless(home, model)
    wait_until(home.engines)
    time.sleep(seconds)
    terminal.sendintr()
    drain(terminal)
    if home.engines() and "joined" not in answer(home, model)[1]:
        home.wait_until_gone()
    assert (
        answer(home, model)[0]
        == home.llmrun("generate", "--raw", "-n", "8", "--seed", "3", "-m", str(model), "--no-warm", "Once").stdout
    )
    assert len([file for file in home.files() if file.endswith(".sock")]) <= 2


def test_a_suspended_client_delays_nobody(home: BackgroundHome, slow: Path) -> None:
    expected, _ = answer(home, slow)
    words = ["generate", "--raw", "-n", "150", "--temp", "3", "--seed", "5", "-m", str(slow), "Once"]
    alone = home.llmrun(*words).stdout
    client = subprocess.Popen([*LLMRUN, *words], stdout=subprocess.PIPE, bufsize=0, env={**home.env}, cwd=ROOT)
    assert client.stdout is not None
    first = client.stdout.read(1)
    client.send_signal(signal.SIGSTOP)
    for _ in range(3):
        found, errors = answer(home, slow)
        assert found == expected
        assert "joined the background engine" in errors
    client.send_signal(signal.SIGCONT)
    rest, _ = client.communicate(timeout=PATIENCE_S)
    assert first + rest == alone
    assert client.returncode == 0


def test_a_suspended_starter_delays_nobody_for_long(home: BackgroundHome, model: Path) -> None:
    starter = subprocess.Popen(
        [*LLMRUN, "generate", "--raw", "-n", "8", "--seed", "3", "-m", str(model), "Once"],
        stdout=subprocess.PIPE,
        env={**home.env},
        cwd=ROOT,
    )
    wait_until(lambda: list(home.folder.glob("*.lock")))
    while not home.files() & {file for file in home.files() if file.endswith(".sock")}:
        time.sleep(0.001)
    starter.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert "joined the background engine" in answer(home, model)[1]
    assert time.monotonic() - began < 10
    starter.send_signal(signal.SIGCONT)
    output, _ = starter.communicate(timeout=PATIENCE_S)
    assert output == answer(home, model)[0]


@pytest.mark.parametrize("seconds", [0.0, 0.2, 1.5])
def test_a_closed_terminal_ends_its_answer(seconds: float, home: BackgroundHome, slow: Path) -> None:
    terminal = endless(home, slow)
    wait_until(home.engines)
    time.sleep(seconds)
    terminal.close()  # the terminal's window: SIGHUP
    assert not terminal.isalive()
    expected = home.llmrun("generate", "--raw", "-n", "8", "--seed", "3", "-m", str(slow), "--no-warm", "Once").stdout
    assert answer(home, slow)[0] == expected
    wait_until(lambda: all(process.cpu_percent(0.3) < 50 for process in home.engines()))


def test_two_versions_take_turns(home: BackgroundHome, model: Path, tmp_path: Path) -> None:
    """The version that asks is the version that answers, and only one engine remains."""
    other = tmp_path / "other"
    shutil.copytree(ROOT / "llmrun", other / "llmrun", ignore=shutil.ignore_patterns("__pycache__", "libraries"))
    shutil.copy(ROOT / "models.toml", other)
    init = other / "llmrun" / "__init__.py"
    init.write_text(init.read_text() + '\n__version__ = "9.9.9"\n')
    words = ["generate", "-v", "--raw", "-n", "8", "--seed", "3", "-m", str(model), "Once"]

    def ask(root: Path) -> tuple[bytes, int]:
        done = subprocess.run(
            [sys.executable, "-P", "-m", *LLMRUN[2:], *words],
            capture_output=True,
            check=True,
            env={**home.env, "PYTHONPATH": str(root)},
            cwd=tmp_path,
            timeout=PATIENCE_S,
        )
        (line,) = [line for line in done.stderr.decode().splitlines() if "the background engine" in line]
        return done.stdout, int(line.split()[-1])

    expected, first = ask(ROOT)
    for root in (other, ROOT, other, other):
        found, pid = ask(root)
        assert found == expected
        command = Path(f"/proc/{pid}/cmdline").read_text() if sys.platform == "linux" else str(root)
        assert str(root) in command
    wait_until(lambda: len(home.engines()) == 1)
    assert home.engine().pid == pid != first
    assert {Path(file).suffix for file in home.files()} == {".sock", ".log"}


def test_starts_and_stops_leave_nothing(home: BackgroundHome, model: Path) -> None:
    for _ in range(8):
        answer(home, model)
        home.engine().terminate()
        home.wait_until_gone()
        assert home.files() == set()
    assert list(home.folder.iterdir()) == []
