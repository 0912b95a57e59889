"""Tests of background engines as processes, with tiny models and the `generate` command."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

if sys.platform == "win32":
    pytest.skip("Python has no Unix sockets on Windows", allow_module_level=True)

from llmrun.base.processes.frames import framed, read_frame
from llmrun.engine.child.messages import TO_CHILD, Ask, Close
from llmrun.engine.requests import Request, TextPrompt
from llmrun.options.sampling_params import SamplingParams
from llmrun.serving.background.eligibility import Standing
from llmrun.serving.background.handshake import BUSY, HELLO, INFO, LEAVING, STOP, STOPPING, WELCOME, build_id, greeting
from llmrun.serving.background.handshake import read_greeting as read
from tests.support.background import BackgroundHome, background_home
from tests.support.cli.commands import LLMRUN, ROOT
from tests.support.models.tiny_models import tiny_model

pytestmark = pytest.mark.push

PATIENCE_S = 30.0
ASKED = ("generate", "-v", "--raw", "-n", "8", "--seed", "3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [tiny_model(folder, name) for name in ("F32", "Q4_0 untied")]


@pytest.fixture
def model(models: list[Path], tmp_path: Path) -> Path:
    """A copy of a model, which a test may replace."""
    return Path(shutil.copy(models[0], tmp_path / "model.gguf"))


@pytest.fixture
def home(tmp_path: Path) -> Iterator[BackgroundHome]:
    with background_home(tmp_path / "home") as made:
        yield made


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, models: list[Path]) -> Iterator[BackgroundHome]:
    """A home with an engine, which tests may use but not end."""
    with background_home(tmp_path_factory.mktemp("home") / "home") as made:
        ask(made, models[0])
        yield made


def ask(home: BackgroundHome, model: Path, *more: str, code: int = 0) -> tuple[str, str]:
    """Ask a model. Returns the answer and stderr."""
    done = home.llmrun(*ASKED, "-m", str(model), *more, "Once")
    output, errors = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == code, output + errors
    return output, errors


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Raw:
    """A client that sends whatever a test prescribes."""

    def __init__(self, home: BackgroundHome) -> None:
        self.socket = home.connect()
        self.socket.settimeout(60)
        self._stream = self.socket.makefile("rb")

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.close()
        self.socket.close()

    def say(self, data: bytes) -> None:
        self.socket.sendall(framed(data))

    def heard(self) -> bytes | None:
        with contextlib.suppress(ConnectionError):
            return read_frame(self._stream, 1 << 30)
        return None

    def asks(self, kind: str, **values: Any) -> tuple[str, dict[str, Any]]:
        self.say(greeting(kind, **values))
        answer, found = read(self.heard())
        return answer, dict(found)

    def hello(self, **changes: Any) -> tuple[str, dict[str, Any]]:
        mine = {"build": build_id(), "standing": Standing.of_this_process().as_json(), "keep_alive_s": None}
        found = self.asks(HELLO, **{**mine, **changes})
        if found[0] == WELCOME:
            self.heard()  # the facts
        return found


LONG = Request(TextPrompt("Once"), max_tokens=100_000, sampling=SamplingParams(temperature=5.0))


def test_the_second_run_joins_the_engine_of_the_first(home: BackgroundHome, model: Path) -> None:
    first, started = ask(home, model)
    pid = home.engine().pid
    second, joined = ask(home, model)
    assert f"started the background engine {pid}" in started
    assert f"joined the background engine {pid}" in joined
    assert first == second == ask(home, model, "--no-warm")[0] != ""
    assert home.engine().pid == pid


def test_an_engine_belongs_to_nobody(shared: BackgroundHome) -> None:
    process = shared.engine()
    assert process.cwd() == "/"
    assert os.getsid(process.pid) == process.pid
    assert process.terminal() is None
    assert set(process.environ()) & {"PATH", "HF_TOKEN", "PYTHONPATH", "LLMRUN_WARM"} == set()
    if sys.platform == "linux":
        assert process.rlimit(psutil.RLIMIT_CORE) == (0, 0)
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert "Umask:\t0077" in status


def test_an_idle_engine_leaves_and_leaves_nothing(home: BackgroundHome, model: Path) -> None:
    ask(home, model, "--keep-alive", "1s")
    children = home.engine().children(recursive=True)
    home.wait_until_gone()
    psutil.wait_procs(children, PATIENCE_S)
    assert home.files() == set()
    assert not any(child.is_running() for child in children)


@pytest.mark.night
def test_keep_alive_zero_ends_a_running_engine_after_the_answer(home: BackgroundHome, model: Path) -> None:
    ask(home, model)
    _, errors = ask(home, model, "--keep-alive", "0")
    assert "joined the background engine" in errors
    home.wait_until_gone()
    assert home.files() == set()


@pytest.mark.night
def test_sigterm_ends_an_engine_without_leftovers(home: BackgroundHome, model: Path) -> None:
    ask(home, model)
    home.engine().terminate()
    home.wait_until_gone()
    assert home.files() == set()


def test_ctrl_c_and_a_hangup_do_not_reach_an_engine(shared: BackgroundHome, models: list[Path]) -> None:
    pid = shared.engine().pid
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        os.kill(pid, number)
    assert f"joined the background engine {pid}" in ask(shared, models[0])[1]


def test_after_kill_9_the_next_run_starts_another_engine(home: BackgroundHome, model: Path) -> None:
    answer, _ = ask(home, model)
    process = home.engine()
    children = process.children(recursive=True)
    process.kill()
    psutil.wait_procs([process, *children], PATIENCE_S)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    again, errors = ask(home, model)
    assert "started the background engine" in errors
    assert again == answer
    assert len([file for file in home.files() if file.endswith(".sock")]) == 1


def test_a_replaced_model_answers(home: BackgroundHome, model: Path, models: list[Path], tmp_path: Path) -> None:
    ask(home, model)
    before = home.engine()
    Path(shutil.copy(models[1], tmp_path / "other")).replace(model)
    answer, errors = ask(home, model)
    assert "started the background engine" in errors
    assert answer == ask(home, model, "--no-warm")[0]
    psutil.wait_procs([before], PATIENCE_S)
    assert home.engine().pid != before.pid


@pytest.mark.night
def test_a_removed_model_is_the_same_error_as_without_an_engine(home: BackgroundHome, model: Path) -> None:
    ask(home, model)
    model.unlink()
    without = home.llmrun("generate", "-m", str(model), "--no-warm", "Once")
    with_engine = home.llmrun("generate", "-m", str(model), "Once")
    assert (with_engine.returncode, with_engine.stderr) == (without.returncode, without.stderr)
    home.wait_until_gone()


@pytest.mark.night
def test_a_broken_model_is_the_same_error_as_without_an_engine(home: BackgroundHome, model: Path) -> None:
    model.write_bytes(model.read_bytes()[:5000])
    without = home.llmrun("generate", "-m", str(model), "--no-warm", "Once")
    with_engine = home.llmrun("generate", "-m", str(model), "Once")
    assert (with_engine.returncode, with_engine.stderr) == (without.returncode, without.stderr)
    assert home.engines() == []
    assert home.files() == set()


def test_a_client_with_another_priority_has_an_engine_of_its_own(home: BackgroundHome, models: list[Path]) -> None:
    usual = home.llmrun(*ASKED, "-m", str(models[0]), "Once")
    command = ["nice", "-n", "3", *LLMRUN, *ASKED, "-m", str(models[0]), "Once"]
    done = subprocess.run(command, capture_output=True, check=True, env={**home.env}, cwd=ROOT, timeout=PATIENCE_S)
    assert "started the background engine" in done.stderr.decode()
    assert done.stdout == usual.stdout
    assert len(home.engines()) == 2


@pytest.mark.night
def test_an_engine_whose_folder_is_removed_leaves(home: BackgroundHome, model: Path) -> None:
    ask(home, model)
    shutil.rmtree(home.folder)
    home.wait_until_gone()


@pytest.mark.night
def test_two_models_have_two_engines(home: BackgroundHome, models: list[Path]) -> None:
    answers = [ask(home, model)[0] for model in (*models, *models)]
    assert len(home.engines()) == 2
    assert answers[:2] == answers[2:]
    assert answers[0] != answers[1]


def test_a_client_of_another_build_ends_the_engine(home: BackgroundHome, model: Path) -> None:
    ask(home, model)
    with Raw(home) as client:
        assert client.hello(build="another")[0] == LEAVING
    home.wait_until_gone()
    assert home.files() == set()


def test_a_busy_engine_stops_only_by_force(home: BackgroundHome, model: Path) -> None:
    ask(home, model)
    with Raw(home) as client, Raw(home) as stopping:
        _, welcome = client.hello()
        client.say(TO_CHILD.encode(Ask(welcome["first_id"], LONG, 0.0)))
        client.heard()  # Taken
        assert stopping.asks(STOP) == (BUSY, {"message": BUSY, "answers": 1})
        assert stopping.asks(STOP, force=True)[0] == STOPPING
        home.wait_until_gone()
        while client.heard() is not None:
            pass
    assert home.files() == set()


@pytest.mark.night
def test_a_leaving_engine_finishes_its_answers(home: BackgroundHome, model: Path) -> None:
    ask(home, model)
    request = Request(TextPrompt("Once"), max_tokens=300, sampling=SamplingParams(temperature=5.0))
    with Raw(home) as client:
        _, welcome = client.hello()
        client.say(TO_CHILD.encode(Ask(welcome["first_id"], request, 0.0)))
        client.heard()
        home.engine().terminate()
        frames = 0
        while client.heard() is not None:
            frames += 1
    assert frames >= 100
    home.wait_until_gone()


def test_the_state_names_the_process_and_the_model(shared: BackgroundHome, models: list[Path]) -> None:
    with Raw(shared) as client:
        kind, state = client.asks(INFO)
        assert client.asks(INFO)[0] == INFO
    assert kind == INFO
    assert (state["pid"], state["path"], state["answers"]) == (shared.engine().pid, str(models[0]), 0)
    assert 0 < state["until"] - time.time() <= 600


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 100,
        framed(b"[]"),
        framed(b"[" * 100_000),
        framed(greeting(HELLO, build=build_id(), standing=[1])),
        framed(greeting(HELLO, build=build_id(), standing={"processors": {}})),
        framed(greeting("unknown")),
        random.Random(1).randbytes(5000),
    ],
    ids=range(8),
)
def test_garbage_does_not_disturb_an_engine(data: bytes, shared: BackgroundHome, models: list[Path]) -> None:
    pid = shared.engine().pid
    with Raw(shared) as client:
        client.socket.sendall(data)
        client.socket.shutdown(1)
        while client.heard() is not None:
            pass
    assert f"joined the background engine {pid}" in ask(shared, models[0])[1]


def test_a_guest_cannot_close_the_engine(shared: BackgroundHome, models: list[Path]) -> None:
    pid = shared.engine().pid
    with Raw(shared) as client:
        client.hello()
        client.say(TO_CHILD.encode(Close()))
        client.heard()
    assert f"joined the background engine {pid}" in ask(shared, models[0])[1]


@pytest.mark.night
def test_connections_leave_no_descriptors_and_threads(shared: BackgroundHome, models: list[Path]) -> None:
    process = shared.engine()
    ask(shared, models[0])
    before = process.num_fds()
    for _ in range(300):
        with Raw(shared) as client:
            client.socket.sendall(b"\0")
    for _ in range(20):
        with Raw(shared) as client:
            client.hello()
    ask(shared, models[0])
    wait_until(lambda: process.num_fds() <= before)
    wait_until(lambda: process.num_threads() < 60)


def test_many_silent_connections_do_not_keep_clients_out(shared: BackgroundHome, models: list[Path]) -> None:
    silent = [Raw(shared) for _ in range(100)]
    try:
        assert "joined the background engine" in ask(shared, models[0])[1]
    finally:
        for each in silent:
            each.__exit__()


def test_a_client_that_is_killed_frees_its_place(shared: BackgroundHome, models: list[Path]) -> None:
    command = [*LLMRUN, "generate", "--raw", "-n", "100000", "--temp", "5", "-m", str(models[0]), "Once"]
    clients = [subprocess.Popen(command, stdout=subprocess.PIPE, env={**shared.env}, cwd=ROOT) for _ in range(3)]
    for client in clients:
        assert client.stdout is not None
        client.stdout.read(1)
    for client in clients:
        client.kill()
        client.communicate()

    def answers() -> int:
        with Raw(shared) as raw:
            return int(raw.asks(INFO)[1]["answers"])

    wait_until(lambda: answers() == 0)


@pytest.mark.night
def test_the_engine_of_a_killed_starter_ends(home: BackgroundHome, model: Path) -> None:
    """The engine notices the end of its starter once the model is open, at the latest."""
    command = [*LLMRUN, *ASKED, "-m", str(model), "Once"]
    starter = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**home.env}, cwd=ROOT
    )
    wait_until(home.engines)
    starter.kill()
    starter.wait()
    home.wait_until_gone()
    assert home.files() <= {file for file in home.files() if file.endswith(".lock")}
    assert "started the background engine" in ask(home, model)[1]
    assert {Path(file).suffix for file in home.files()} == {".sock", ".log"}


def test_many_clients_start_one_engine(home: BackgroundHome, model: Path) -> None:
    command = [*LLMRUN, *ASKED, "-m", str(model), "Once"]
    clients = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**home.env}, cwd=ROOT)
        for _ in range(6)
    ]
    found = [client.communicate(timeout=PATIENCE_S) for client in clients]
    assert len({output for output, _ in found}) == 1
    assert sum(b"started the background engine" in errors for _, errors in found) == 1
    assert sum(b"joined the background engine" in errors for _, errors in found) == 5
    assert len(home.engines()) == 1


@pytest.mark.night
def test_a_thousand_requests_do_not_make_an_engine_grow(home: BackgroundHome, model: Path) -> None:
    ask(home, model, "--keep-alive", "1h")
    process = home.engine()
    number = 0

    def work(connections: int) -> int:
        """Ask through many connections, and return the engine's memory in bytes."""
        nonlocal number
        for _ in range(connections):
            with Raw(home) as client:
                _, welcome = client.hello()
                for place in range(10):
                    number += 1
                    sampling = SamplingParams(temperature=5.0, seed=number)
                    request = Request(TextPrompt(f"Text {number}"), max_tokens=4, sampling=sampling)
                    client.say(TO_CHILD.encode(Ask(welcome["first_id"] + place, request, 0.0)))
                n_finished = 0
                while n_finished < 10:
                    frame = client.heard()
                    assert frame is not None
                    n_finished += frame.count(b"Finished")
        return int(process.memory_info().rss)

    before = work(30)
    assert work(100) - before < 4_000_000
    assert ask(home, model)[1].count("joined the background engine") == 1
