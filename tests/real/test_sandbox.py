"""Tests of the sandbox for untrusted programs: limits, no network, no changes outside an empty folder."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from tests.real.sandbox import run_untrusted

pytestmark = [pytest.mark.push, pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")]


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 + 1 == 2",
        "import math, collections, re, itertools, heapq, hashlib, random, string, typing, functools, bisect, datetime",
        "import os\nassert os.listdir() == []\nopen('a', 'w').write('b')\nos.remove('a')",
        "print('words', end='')",
    ],
)
def test_harmless_programs_pass(program: str) -> None:
    verdict = run_untrusted(program)
    assert verdict.passed, verdict.words


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("assert 1 + 1 == 3", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "exit status 0"),
        ("import os; os._exit(0)", "exit status 0"),
        ("import numpy", "ModuleNotFoundError"),  # answers must not depend on what is installed
        ("input()", "EOFError"),
        ("while True: pass", "exit status -"),
        ("x = bytearray(2 << 30)", "MemoryError"),
        ("open('large', 'wb').write(bytes(2 << 20))", "File too large"),
        ("import os; os.fork()", "refused"),
        ("import subprocess; subprocess.run(['true'])", "refused"),
        ("import os; os.system('true')", "refused"),
        ("import os; os.kill(os.getppid(), 0)", "refused"),
        ("import socket; socket.socket()", "refused"),
        ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:9/')", "refused"),
        ("import ctypes; ctypes.CDLL(None)", "refused"),
        ("open('/tmp/llmrun-untrusted', 'w')", "refused"),
        ("import os; os.rename('a', '/tmp/llmrun-untrusted')", "refused"),
        ("import shutil; shutil.rmtree('/tmp/llmrun-untrusted')", "Error"),
    ],
)
def test_programs_that_fail_or_do_harm_do_not_pass(program: str, words: str) -> None:
    verdict = run_untrusted(program)
    assert not verdict.passed
    assert words in verdict.words


def test_programs_change_no_other_files(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("kept")
    for attempt in (f"os.remove({str(kept)!r})", f"shutil.rmtree({str(tmp_path)!r})", f"open({str(kept)!r}, 'a')"):
        assert not run_untrusted(f"import os, shutil\n{attempt}").passed
    assert kept.read_text() == "kept"


def test_the_namespace_alone_blocks_the_network() -> None:
    """Even without the audit hook, a child cannot reach a server of this machine."""
    import subprocess

    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
import socket, sys
from tests.real.confined import leave_network
assert leave_network()
socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=5)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if "assert leave_network()" in done.stderr:
        pytest.skip("this system permits no network namespace")
    assert "Network is unreachable" in done.stderr
