"""Prepares the process that runs llama.cpp: its streams, its signals, and its end."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from llmrun.backends.llama.messages import read_request, read_soon


def requests_from(descriptor: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    unread = bytearray()
    while data := read_soon(descriptor):
        unread += data
        if b"\n" not in data:
            continue
        *lines, rest = bytes(unread).split(b"\n")
        unread = bytearray(rest)
        for line in lines:
            request = read_request(line)
            if request is not None:
                yield request


def ignore_ctrl_c() -> None:
    """Ignore Ctrl-C, because the parent handles it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave_no_core_file() -> None:
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def end_with_the_parent(requests: int) -> None:
    """Exit as soon as the other end of the request pipe is closed, even in the middle of a forward pass.

    Linux can send a signal when the parent dies (PR_SET_PDEATHSIG), but it sends the signal as soon as the thread that
    started this process ends, even if the parent is still alive.
    """
    if sys.platform == "win32":
        return  # The worker notices when it reads the next request.
    hung_up = select.poll()
    hung_up.register(requests, 0)

    def wait() -> None:
        hung_up.poll()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
