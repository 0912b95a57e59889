"""Tests of loading in a separate process: its memory use, and Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu import backend
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.formats.gguf.reader import open_gguf
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.push

MEGABYTE = 1_000_000

MEASURED = """
import pathlib, sys
import numpy as np
from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.formats.gguf.reader import open_gguf
from llmrun.base.types import Batch
with open_gguf(sys.argv[1]) as file:
    backend = CpuBackend(file, OpenOptions(context_size=2048, threads=2))
n = 64
rows = np.arange(n, dtype=np.int32)
backend.forward(Batch(rows + 5, np.zeros(n, np.int32), rows, rows == n - 1))
backend.close()
status = pathlib.Path("/proc/self/status").read_text()
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""

SLOW = """
import sys, time
from llmrun.formats.gguf.reader import GGUFFile
from llmrun.cli.app import main
read_into = GGUFFile.read_into
def slow(self, *arguments):
    print("reading", file=sys.__stdout__, flush=True)
    time.sleep(0.2)
    read_into(self, *arguments)
GGUFFile.read_into = slow
sys.exit(main(["generate", "-m", sys.argv[1], "-p", "Hello", "--raw", "-n", "1", "--backend", "cpu"]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells")
def test_peak_memory_is_the_packed_weights_and_little_more() -> None:
    """Packed weights of SmolLM2 take at most 2 % more than in the file, and 64 cache positions take 1.5 MB."""
    path = smollm2()
    run = subprocess.run(
        [sys.executable, "-c", MEASURED, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    in_use = 1.02 * path.stat().st_size + 1.5 * MEGABYTE
    assert int(run.stdout) * 1024 <= 1.1 * in_use + 200 * MEGABYTE


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_ctrl_c_while_weights_are_read_ends_in_silence_with_130(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    with subprocess.Popen(
        [sys.executable, "-c", SLOW, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, "")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_beside_the_packing_leaves_no_thread(tmp_path: Path, error: type[BaseException]) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    before = threading.active_count()
    with open_gguf(path) as file, mock.patch.object(backend, "load_tokenizer", side_effect=error), pytest.raises(error):
        CpuBackend(file, OpenOptions(context_size=32))
    assert threading.active_count() == before


def test_phases_of_the_load_add_up(tmp_path: Path) -> None:
    """All threads that pack are counted, and kernels, tokenizer and packing are parts of the backend's time."""
    began = time.perf_counter()
    with open_gguf(tiny_llama(tmp_path / "tiny.gguf")) as file:
        opened = CpuBackend(file, OpenOptions(context_size=32))
    opened.close()
    elapsed, times = time.perf_counter() - began, opened.info.load_times
    assert times is not None
    assert min(times.header_s, times.kernels_s, times.tokenizer_s, times.packing_s) > 0
    assert times.tokenizer_s <= times.packing_s
    assert times.kernels_s + times.packing_s <= times.backend_s
    assert times.header_s + times.backend_s <= elapsed
    assert times.packed_bytes >= opened.info.weight_bytes * 0.9
    if sys.platform == "linux":
        assert times.page_faults
        assert times.system_s is not None
