"""Tests that answers are the same in containers and sandboxes, and with limits, as without."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

if sys.platform != "linux":
    pytest.skip("needs Linux", allow_module_level=True)

from tests.support.cli.commands import LLMRUN, ROOT, TIMEOUT_S, llmrun
from tests.support.cli.restricted import CALLS
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.push

RESTRICTED = (sys.executable, "-m", "tests.support.cli.restricted")
QUESTION = ("generate", "-q", "--temp", "0", "-n", "8", "Say hello in French.")


@pytest.fixture(scope="module")
def answer() -> bytes:
    """Return the answer on this machine as it is. This also compiles the kernels."""
    done = llmrun(*QUESTION, "-m", str(smollm2()))
    assert (done.returncode, done.stderr) == (0, b"")
    return done.stdout


def run(*prefix: str, question: tuple[str, ...] = QUESTION) -> subprocess.CompletedProcess[bytes]:
    """Run the question after a command that takes another command as its arguments."""
    return subprocess.run(
        [*prefix, *LLMRUN, *question, "-m", str(smollm2())],
        input=b"",
        capture_output=True,
        check=False,
        cwd=ROOT,
        timeout=TIMEOUT_S,
    )


def in_own_mounts(script: str) -> tuple[str, ...]:
    """Return a command that runs another one after `script`, whose mounts only these processes see."""
    return ("unshare", "--mount", "sh", "-ec", f'{script}\nexec "$@"', "sh")


def can_mount() -> bool:
    return os.geteuid() == 0 and subprocess.call(["unshare", "--mount", "true"]) == 0


needs_mounts = pytest.mark.skipif(not can_mount(), reason="this process cannot mount file systems")
needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of system calls are those of x86-64")


@pytest.mark.night
@needs_x86
@pytest.mark.parametrize("error", [1, 38], ids=["forbidden", "unknown"])
def test_system_calls_that_fail_change_no_answer(answer: bytes, error: int) -> None:
    done = run(*RESTRICTED, "--errno", str(error), "--calls", *CALLS, "--")
    assert (done.stdout, done.stderr, done.returncode) == (answer, b"", 0)


@pytest.mark.night
@needs_x86
def test_llama_cpp_shares_memory_without_memfd() -> None:
    question = (*QUESTION, "--backend", "llama", "-n", "2")
    done = run(*RESTRICTED, "--calls", "memfd_create", "--", question=question)
    assert (done.stderr, done.returncode) == (b"", 0)
    assert done.stdout == run("env", question=question).stdout != b""


@pytest.mark.night
@pytest.mark.parametrize(
    "prefix",
    [
        (*RESTRICTED, "--no-huge-pages", "--"),
        ("env", "--unset=HOME"),
        ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))),
        ("sh", "-c", 'ulimit -v 3000000 && exec "$@"', "sh"),
        ("sh", "-c", 'ulimit -l 0; ulimit -n 64; exec "$@"', "sh"),
    ],
    ids=["no huge pages", "no HOME", "one processor", "little address space", "few open files"],
)
def test_limits_of_the_process_change_no_answer(answer: bytes, prefix: tuple[str, ...]) -> None:
    done = run(*prefix)
    assert (done.stdout, done.stderr, done.returncode) == (answer, b"", 0)


@pytest.mark.night
@needs_mounts
@pytest.mark.parametrize(
    "script",
    [
        "mount -o remount,bind,ro /",
        "mount -t tmpfs none /proc; mount -t tmpfs none /sys",
        "mount -t tmpfs -o size=64k none /dev/shm",
        'mount -t tmpfs -o noexec none /mnt; export TMPDIR=/mnt HOME=/mnt/home; mkdir "$HOME"',
    ],
    ids=["read-only", "no /proc and no /sys", "tiny /dev/shm", "no programs in TMPDIR"],
)
def test_containers_change_no_answer(answer: bytes, script: str) -> None:
    done = run(*in_own_mounts(script))
    assert (done.stdout, done.stderr, done.returncode) == (answer, b"", 0)


@pytest.mark.night
@needs_mounts
def test_kernels_work_on_noexec_file_systems(answer: bytes) -> None:
    """Machine code is in anonymous memory, so it does not matter that its cache cannot be mapped as executable."""
    script = "mount -t tmpfs -o noexec,nosuid none /mnt; export LLMRUN_CACHE_DIR=/mnt/cache TMPDIR=/mnt HOME=/mnt"
    done = run(*in_own_mounts(script))
    assert (done.stdout, done.returncode) == (answer, 0)
