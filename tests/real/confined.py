"""Runs one untrusted program: `python -I -S confined.py CPU_S`, with the program on stdin and an empty folder as cwd.

This file imports only the standard library, because it runs without site-packages. Before the program starts, the
process moves to a network namespace without interfaces, and limits its own CPU time, memory, size of files and number
of processes. An audit hook also refuses sockets, new processes, ctypes, signals to other processes, and changes of
files outside the folder. The hook cannot stop a program that looks for gaps, but it stops mistakes in a model's code.
On systems that do not allow network namespaces, only the hook blocks the network, and a warning on stderr says so.

The process prints FINISHED as its last line only if the program ran to its end, so `sys.exit` does not pass a test.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from pathlib import Path
from typing import Any

FINISHED = "confined: the program ran to its end"
NO_NAMESPACE = "confined: warning: this system permits no network namespace; only an audit hook blocks the network"
_MEMORY = 1 << 30  # bytes of address space
_FILE = 1 << 20  # bytes of each file that the program writes
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # CLONE_NEWUSER, CLONE_NEWNET
# The program never needs audit events that begin with one of these, nor changes outside the folder.
_REFUSED = (
    *("socket.", "subprocess.", "ctypes.", "pty.", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system"),
    *("os.kill", "os.chmod", "os.chown", "os.mount", "signal.pthread_kill", "sys.addaudithook"),
)
_CHANGES = (
    *("os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate", "os.utime"),
    "shutil.rmtree",
)


def leave_network() -> bool:
    """Move to a network namespace without interfaces. Returns False if the system does not permit namespaces."""
    unshare = ctypes.CDLL(None, use_errno=True).unshare
    return any(unshare(flags) == 0 for flags in (_NEW_NETWORK, _NEW_USER | _NEW_NETWORK))


def limit(cpu_s: int) -> None:
    if sys.platform == "win32":
        raise OSError("limits of processes need a Unix system")
    for what, most in (
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, _FILE),
        (resource.RLIMIT_NPROC, 0),  # has no effect for root, so the hook also refuses new processes
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))


def guard(folder: Path) -> None:
    """Install the audit hook, which allows changes of files only in `folder`."""

    def is_inside(path: object) -> bool:
        return (
            isinstance(path, str | bytes | os.PathLike) and folder in Path(os.path.realpath(os.fsdecode(path))).parents
        )

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(_REFUSED):
            raise PermissionError(f"confined: {event} is refused")
        writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        changed = arguments[:2] if event in ("os.rename", "os.link", "os.symlink") else arguments[:1]
        if (writes or event in _CHANGES) and not all(map(is_inside, changed)):
            raise PermissionError(f"confined: {event} of {arguments[0]!r} is refused")

    sys.addaudithook(hook)


def main() -> None:
    program = sys.stdin.read()
    if not leave_network():
        sys.stderr.write(NO_NAMESPACE + "\n")
    limit(int(sys.argv[1]))
    code = compile(program, "<program>", "exec")
    guard(Path.cwd().resolve())
    with contextlib.redirect_stdout(sys.stderr):
        exec(code, {"__name__": "__main__"})
    sys.stdout.write(FINISHED + "\n")


if __name__ == "__main__":
    main()
