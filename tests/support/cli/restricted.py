"""Runs a command on a Linux system that lacks something, as in containers and sandboxes, or on old kernels.

    python -m tests.support.cli.restricted [--no-huge-pages] [--errno N --calls NAME...] -- COMMAND...

System calls in `--calls` fail with an error, for example ENOSYS (38) as on old kernels, or EPERM (1) as in sandboxes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import struct
import sys
from collections.abc import Sequence

# Numbers of system calls on x86-64.
CALLS = {
    "madvise": 28,
    "flock": 73,
    "sched_setaffinity": 203,
    "sched_getaffinity": 204,
    "fallocate": 285,
    "perf_event_open": 298,
    "memfd_create": 319,
    "membarrier": 324,
    "copy_file_range": 326,
    "rseq": 334,
    "io_uring_setup": 425,
    "pidfd_open": 434,
    "close_range": 436,
}

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _PR_SET_THP_DISABLE = 22, 38, 41
_SECCOMP_MODE_FILTER = 2
_LOAD_NUMBER, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # instructions of classic BPF
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("n", ctypes.c_ushort), ("code", ctypes.c_void_p))


def _prctl(*arguments: object) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl{arguments}")


def _forbid(numbers: Sequence[int], error: int) -> None:
    """Install a seccomp filter, which child processes inherit."""
    count = len(numbers)
    tests = [(_JUMP_IF_EQUAL, count - index, 0, number) for index, number in enumerate(numbers)]
    steps = [(_LOAD_NUMBER, 0, 0, 0), *tests, (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(_Program(len(steps), ctypes.addressof(code))), 0, 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--no-huge-pages", action="store_true")
    parser.add_argument("--errno", type=int, default=38)
    parser.add_argument("--calls", nargs="*", choices=CALLS, default=[])
    split = sys.argv.index("--")
    asked, command = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    if asked.no_huge_pages:
        _prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    if asked.calls:
        _forbid([CALLS[name] for name in asked.calls], asked.errno)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
