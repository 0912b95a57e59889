"""Tests that any death of llama.cpp's process becomes a one-line error and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

if sys.platform == "win32":
    pytest.skip("needs POSIX signals", allow_module_level=True)

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama import process as llama_process
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.process import LlamaProcess
from llmrun.backends.llama.rpc_servers import RpcServer
from llmrun.base.errors import BackendCrashed, Cancelled, DoesNotFit, ModelFileError
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.fake_llama import HANGS, fake_llama
from tests.support.backends.seam_contract import batch_of, rows
from tests.support.cli.commands import ROOT
from tests.support.models.downloads import smollm2
from tests.support.models.tiny_models import tiny_model

OPTIONS = OpenOptions(context_size=64, threads=1, gpu_layers=0)
WAIT_S = 20.0  # for operations that take milliseconds


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_model(tmp_path, "F32 untied llama3 rope")


class Interrupted(BaseException):
    """An interruption that, like KeyboardInterrupt and SystemExit, is not an Exception."""


@pytest.fixture(autouse=True)
def lost_interruptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore interruptions that arrive inside a garbage collector callback (hypothesis installs one).

    Python does not propagate them, so they do not count as a failure of the interrupted code.
    """
    report = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if not issubclass(unraisable.exc_type, Interrupted | KeyboardInterrupt):
            report(unraisable)

    monkeypatch.setattr(sys, "unraisablehook", hook)


def opened(path: Path, *, process: LlamaProcess | None = None, **options: Any) -> LlamaBackend:
    with open_gguf(path) as file:
        return LlamaBackend(file, replace(OPTIONS, **options), process=process)


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def open_things() -> tuple[int, int]:
    """Return the numbers of open (file descriptors, threads).

    Collects garbage first: a mapping keeps a file descriptor until the error whose traceback refers to it is freed.
    """
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


@pytest.mark.push
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS])
def test_a_process_killed_between_two_passes(path: Path, number: signal.Signals) -> None:
    backend = opened(path)
    pid = backend._process.pid
    backend.forward(batch_of(rows(0, 0, [5, 6, 7])))
    os.kill(pid, number)
    with pytest.raises(BackendCrashed) as caught:
        backend.forward(batch_of(rows(0, 3, [8])))
    assert str(caught.value) == f"llama.cpp died while running {path}: {number.name}"
    assert caught.value.exit_code == 3
    backend.close()
    backend.close()
    assert not Path(f"/proc/{pid}").exists()  # not even as a zombie


@pytest.mark.push
def test_a_process_killed_while_loading(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = LlamaProcess()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(BackendCrashed, match=f"llama.cpp died while loading {path}: SIGKILL"):
        opened(path, process=process)
    process.close()


def test_the_last_words_of_an_assertion_are_told() -> None:
    process = LlamaProcess()
    process._child._stderr.tail = b"noise\nsrc/llama-vocab.cpp:12: GGML_ASSERT(id_to_token.size() == 3) failed\x1b[2J\n"
    os.kill(process.pid, signal.SIGABRT)
    with pytest.raises(BackendCrashed) as caught:
        process.ask("devices", "looking")
    assert str(caught.value) == (
        r"llama.cpp died while looking: SIGABRT: GGML_ASSERT(id_to_token.size() == 3) failed\x1b[2J"
    )
    process.close()


@pytest.mark.push
def test_a_file_cut_off_under_the_mapping_is_told_even_when_it_killed(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Skips the check before the first pass, so that llama.cpp reads past the end and dies of SIGBUS."""
    checks = [lambda: None]
    backend = opened(path)
    check = backend._mapped.check_unchanged
    monkeypatch.setattr(backend._mapped, "check_unchanged", lambda: checks.pop()() if checks else check())
    pid = backend._process.pid
    size = path.stat().st_size
    os.truncate(path, 0)
    with pytest.raises(ModelFileError) as caught:
        backend.forward(batch_of(rows(0, 0, list(range(5, 60)))))
    assert str(caught.value) == f"the model file changed while it was being read: {path}: was {size} bytes, is 0"
    assert eventually(lambda: not is_running(pid))
    backend.close()


@pytest.mark.push
def test_a_file_cut_off_while_it_is_loaded_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = LlamaProcess.answer

    def cut_off(process: LlamaProcess, number: int, doing: str, progress: object = None) -> dict[str, object]:
        os.truncate(path, 4096)
        os.kill(process.pid, signal.SIGBUS)
        return answer(process, number, doing)

    monkeypatch.setattr(LlamaProcess, "answer", cut_off)
    with pytest.raises(ModelFileError, match=r"the model file changed while it was being read: .* is 4096"):
        opened(path)


@pytest.mark.push
def test_a_file_written_to_in_place_is_noticed_before_it_is_believed(path: Path) -> None:
    backend = opened(path)
    with path.open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"changed!")
    os.utime(path, ns=(1, 1))
    with pytest.raises(ModelFileError, match="the model file changed while it was being read"):
        backend.forward(batch_of(rows(0, 0, [5])))
    backend.close()


@pytest.mark.push
def test_a_file_replaced_by_another_is_still_the_old_one(tmp_path: Path, path: Path) -> None:
    backend = opened(path)
    other = tmp_path / "other"
    shutil.copy(path, other)
    other.replace(path)
    assert backend.forward(batch_of(rows(0, 0, [5]))).logits.shape == (1, backend.info.vocabulary_size)
    backend.close()


@pytest.mark.push
@pytest.mark.parametrize("content", [b"", b"GGUF no model", None])
def test_a_file_replaced_after_it_was_checked_is_not_the_one_that_was_checked(
    tmp_path: Path, path: Path, content: bytes | None
) -> None:
    """Covers replacements that llama.cpp can load (None stands for a whole model) and ones that it cannot."""
    other = tiny_model(tmp_path, "F32 odd")
    if content is not None:
        other.write_bytes(content)
    with open_gguf(path) as file:
        other.replace(path)
        with pytest.raises(ModelFileError, match=f"{path}: it was replaced by another file$"):
            LlamaBackend(file, OpenOptions(context_size=64, threads=1, gpu_layers=0))


@pytest.mark.push
def test_nothing_is_left_open(path: Path) -> None:
    counts = []
    for _ in range(3):
        opened(path).close()
        process = LlamaProcess()
        process.kill()
        with pytest.raises(BackendCrashed):
            opened(path, process=process)
        process.close()
        counts.append(open_things())
    assert counts == counts[:1] * 3


def interrupt_after(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    return timer


@pytest.mark.push
def test_ctrl_c_while_running_leaves_the_answers_in_step(path: Path) -> None:
    """The interruptions are spread over a pass and the moments before and after it."""
    backend = opened(path, context_size=2048)
    long = np.random.default_rng(0).integers(5, 200, 2000).tolist()
    expected = backend.forward(batch_of(rows(0, 0, [5, 6, 7]))).logits
    interrupted = 0
    for moment in range(30):
        finished = False
        backend.kv.free(0)
        try:
            timer = interrupt_after(0.0015 * moment)
            backend.forward(batch_of(rows(0, 0, long)))
            finished = True
            timer.join()
            time.sleep(WAIT_S)
        except KeyboardInterrupt:
            interrupted += not finished
        backend.kv.free(0)
        np.testing.assert_array_equal(backend.forward(batch_of(rows(0, 0, [5, 6, 7]))).logits, expected)
    assert interrupted
    backend.close()


@pytest.mark.push
def test_ctrl_c_while_loading_ends_the_process(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[LlamaProcess] = []

    def interrupted(process: LlamaProcess, number: int, doing: str, progress: object = None) -> dict[str, object]:
        processes.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(LlamaProcess, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened(path)
    assert not is_running(processes[0].pid)


@pytest.fixture
def interruptions() -> Iterator[Callable[[float, float], None]]:
    """Yield interruptions(first, interval), which raises Interrupted after `first` seconds and then every `interval`
    seconds.

    It only raises while the backend is at work. `interruptions(0, 0)` stops it.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(str(ROOT / "llmrun")):
            frame = frame.f_back
        if frame is not None:
            raise Interrupted

    before = signal.signal(signal.SIGALRM, handle)
    yield lambda first, interval: (signal.setitimer(signal.ITIMER_REAL, first, interval), None)[1]
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.push
def test_any_request_interrupted_at_any_moment_leaves_the_truth(
    path: Path, interruptions: Callable[[float, float], None]
) -> None:
    """Interrupts once or twice in a row, so that the cleanup after the first interruption is interrupted too."""
    backend = opened(path, context_size=512, max_sequences=2)
    random = np.random.default_rng(3)
    known: list[list[int]] = [[], []]
    interrupted = 0
    for _ in range(150):
        new = random.integers(5, 200, int(random.integers(1, 60))).tolist()
        seq, operation = int(random.integers(2)), int(random.integers(4))
        at = backend.kv.lengths[seq]
        assert at <= len(known[seq])
        known[seq] = known[seq][:at] + new
        interruptions(0.0001 + 0.002 * float(random.random()), 0.0005 if random.random() < 0.3 else 0)
        try:
            if operation == 0:
                backend.kv.truncate(seq, at // 2)
            elif operation == 1:
                backend.tokenizer.encode("some text " * 50, add_special=True, parse_special=True)
            elif at + len(new) <= 512:
                backend.forward(batch_of(rows(seq, at, new)))
            else:
                backend.kv.free(seq)
        except Interrupted:
            interrupted += 1
        except RuntimeError as error:  # the standard library was interrupted while it released a lock
            if not isinstance(error.__context__, Interrupted) or "lock" not in str(error):
                raise
            interrupted += 1
        except Cancelled:  # an interrupted wait sets the flag too
            assert interrupted
        interruptions(0, 0)
    assert interrupted > 20
    backend._process.clear_stop()
    for seq in range(2):
        held = known[seq][: backend.kv.lengths[seq]][:500]
        kept = backend.kv.truncate(seq, len(held))
        assert kept == len(held)
        went_on = backend.forward(batch_of(rows(seq, kept, [8]))).logits
        backend.kv.free(seq)
        fresh = backend.forward(batch_of(rows(seq, 0, [*held, 8]))).logits[-1:]
        np.testing.assert_allclose(went_on, fresh, rtol=0, atol=0.005 * float(np.ptp(fresh)))
    backend.close()


@pytest.mark.push
def test_one_that_never_answers_is_ended_by_close(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_process, "_EXIT_S", 0.1)
    backend = opened(path)
    pid = backend._process.pid
    os.kill(pid, signal.SIGSTOP)
    backend.close()
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.push
def test_ctrl_c_while_it_never_answers(
    path: Path, monkeypatch: pytest.MonkeyPatch, interruptions: Callable[[float, float], None]
) -> None:
    """The process does not even read its input, so the write blocks when the pipe is full."""
    monkeypatch.setattr(llama_process, "_STOP_S", 0.1)
    backend = opened(path)
    os.kill(backend._process.pid, signal.SIGSTOP)
    interruptions(0.1, 0)
    with pytest.raises(Interrupted):
        backend._process.ask("tokenize", "splitting", text="a" * 1_000_000, add_special=False, parse_special=False)
    with pytest.raises(BackendCrashed, match="SIGKILL"):
        backend.forward(batch_of(rows(0, 0, [5])))
    backend.close()


@pytest.mark.push
def test_it_outlives_the_thread_that_started_it(path: Path) -> None:
    backends: list[LlamaBackend] = []
    thread = threading.Thread(target=lambda: backends.append(opened(path)))
    thread.start()
    thread.join()
    time.sleep(0.1)
    [backend] = backends
    backend.forward(batch_of(rows(0, 0, [5])))
    backend.close()


@pytest.mark.push
def test_it_ends_in_the_middle_of_a_pass_when_the_process_that_started_it_is_killed() -> None:
    """The pass would take at least 20 seconds."""
    code = (
        "import os, signal, threading, time\nimport numpy as np\nfrom pathlib import Path\n"
        "from llmrun.backends.llama.backend import LlamaBackend\nfrom llmrun.formats.gguf.reader import open_gguf\n"
        "from llmrun.backends.base import OpenOptions\nfrom llmrun.base.types import Batch\n"
        f"with open_gguf(Path({str(smollm2())!r})) as file:\n"
        "    backend = LlamaBackend(file, OpenOptions(context_size=8192, threads=1, gpu_layers=0))\n"
        "ids = np.arange(8000, dtype=np.int32)\n"
        "batch = Batch(ids + 5, 0 * ids, ids, ids < 0)\n"
        "threading.Thread(target=backend.forward, args=[batch], daemon=True).start()\n"
        "time.sleep(0.2)\nprint(backend._process.pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60)
    killed = time.monotonic()
    assert eventually(lambda: not is_running(int(ran.stdout)))
    assert time.monotonic() - killed < WAIT_S / 2
    assert ran.stderr == b""


def test_it_leaves_no_core_file() -> None:
    process = LlamaProcess()
    process.ask("rest", "waiting")
    limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
    [core] = [line.split() for line in limits if line.startswith("Max core file size")]
    assert core[4:6] == ["0", "0"]
    process.close()


def test_ctrl_c_of_the_terminal_does_not_reach_it_even_while_it_starts() -> None:
    process = LlamaProcess()
    assert os.getpgid(process.pid) != os.getpgrp()
    process.close()


def test_it_dies_with_the_process_that_started_it(path: Path) -> None:
    code = (
        "import os, signal\nfrom llmrun.backends.llama.process import LlamaProcess\n"
        "process = LlamaProcess()\nprocess.ask('devices', 'looking')\nprint(process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT, timeout=60)
    pid = int(ran.stdout)
    assert eventually(lambda: not is_running(pid))
    assert ran.stderr == b""


@pytest.mark.push
def test_it_does_not_hear_ctrl_c(path: Path) -> None:
    backend = opened(path)
    os.kill(backend._process.pid, signal.SIGINT)
    backend.forward(batch_of(rows(0, 0, [5])))
    backend.close()


@pytest.mark.push
def test_its_noise_reaches_no_stream_of_ours(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    backend = opened(path, context_size=256, kv_tokens=256)
    backend.forward(batch_of(rows(0, 0, [5])))
    backend.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.push
def test_it_needs_nothing_of_the_environment(path: Path, tmp_path: Path) -> None:
    """It also ignores files in the working directory, which must not be imported as modules."""
    (tmp_path / "json.py").write_text("raise SystemExit('wrong json')")
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\nfrom llmrun.backends.base import OpenOptions\n"
        "from llmrun.backends.registry import open_backend\n"
        f"backend = open_backend(Path({str(path)!r}), OpenOptions('llama'))\n"
        "print(backend.info.backend)\nbackend.close()"
    )
    environment = {"LLMRUN_CACHE_DIR": os.environ["LLMRUN_CACHE_DIR"]}  # compiling kernels would take seconds
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, cwd=tmp_path, env=environment, timeout=60
    )
    assert (ran.stdout, ran.stderr) == (b"llama\n", b"")


def test_a_cache_that_no_machine_holds_does_not_fit(path: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"a KV cache of 1,099,511,627,776 tokens \(268,435,456 MiB\) need ") as caught:
        opened(path, context_size=1 << 40)
    assert caught.value.exit_code == 7


@pytest.mark.push
def test_a_stuck_rpc_server_is_given_up_after_a_stop(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While llama.cpp waits for a server, it does not look at the stop flag."""
    monkeypatch.syspath_prepend(fake_llama(tmp_path / "fake", when_decoding=HANGS))
    monkeypatch.setattr(llama_process, "_STOP_S", 0.3)
    monkeypatch.setattr(llama_process, "_LOOK_MS", 50)
    backend = opened(path)
    backend._process.rpc_servers = [RpcServer("box:1", "127.0.0.1:1")]
    timer = threading.Timer(0.3, backend.cancel)
    timer.start()
    for _ in range(2):
        with pytest.raises(BackendCrashed) as caught:
            backend.forward(batch_of(rows(0, 0, [5])))
        assert str(caught.value) == f"gave up waiting for the RPC server box:1 while running {path}"
    timer.join()
    backend.close()


@pytest.mark.push
def test_a_busy_rpc_server_is_waited_for(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a stop, there is no time limit: a server may compute for minutes."""
    monkeypatch.syspath_prepend(fake_llama(tmp_path / "fake", when_decoding="import time\ntime.sleep(1)"))
    monkeypatch.setattr(llama_process, "_STOP_S", 0.1)
    monkeypatch.setattr(llama_process, "_LOOK_MS", 50)
    backend = opened(path)
    backend._process.rpc_servers = [RpcServer("box:1", "127.0.0.1:1")]
    backend.forward(replace(batch_of(rows(0, 0, [5])), want=np.zeros(1, np.uint8)))
    backend.close()
