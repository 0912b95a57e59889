"""The child's side: how a child process takes over its pipes, ends with its parent and answers requests.

`serve` is for trusted data, and `serve_limited` is for untrusted data. A child process that reads requests and works in
the same thread calls one of these two functions.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable
from time import process_time
from typing import Any

from llmrun.base.processes.frames import decoded, encoded, read_frame, write_frame

_LONGEST = 1 << 40  # bytes; the parent is trusted, but a bug could corrupt the stream


def private_streams() -> tuple[int, int]:
    """Move standard input and output to new descriptors, so that output from libraries cannot mix with messages.

    Afterwards, standard input is empty, and standard output is redirected to stderr. Processes that this process starts
    do not inherit the new descriptors. Returns the new descriptors of standard input and output.
    """
    requests, answers = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.close(nowhere)
    os.dup2(2, 1)
    return requests, answers


def end_with_parent(requests: int) -> None:
    """Exit as soon as the other end of the pipe for requests is closed, even in the middle of work.

    Linux can send a signal when the parent dies (PR_SET_PDEATHSIG), but it sends the signal as soon as the thread that
    started this process ends, even if the parent is still alive.
    """
    if sys.platform == "win32":
        return  # the process detects the closed pipe when it reads the next request
    import select
    import threading

    hung_up = select.poll()
    hung_up.register(requests, 0)

    def wait() -> None:
        hung_up.poll()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def take_over_streams() -> tuple[int, int]:
    """Prepare this process: private streams, no core files, no Ctrl-C, and exit as soon as the parent ends.

    Returns the descriptors of the pipes for requests and answers.
    """
    requests, answers = private_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end_with_parent(requests)
    return requests, answers


def serve(answer: Callable[[bytes], bytes]) -> None:
    """Answer each frame from the parent with a frame, until the parent closes the pipe."""
    requests, answers = take_over_streams()
    # The pipes stay open, because `end_with_parent` would mistake a closed pipe for the parent's end, and exit with 0.
    source, sink = os.fdopen(requests, "rb", closefd=False), os.fdopen(answers, "wb", closefd=False)
    while (request := read_frame(source, _LONGEST)) is not None:
        write_frame(sink, answer(request))


def serve_limited(
    answer: Callable[[Any], tuple[str, Any]],
    decode: Callable[[bytes], Any] = decoded,
    encode: Callable[[tuple[str, Any]], bytes] = encoded,
) -> None:
    """Answer the requests of an `IsolatedProcess` (limits.py) until stdin closes.

    When the process is ready, it sends an empty frame. A request consists of two frames: the limits in JSON,
    {"cpu_s", "memory"}, and then the request itself. The answer to every request is one frame, [kind, value]. If
    `answer` runs out of memory or recurses too deeply, the kind is "over", and the value is "memory" or "depth".
    The process starts no thread, because the thread's stack would count towards the memory limit.

    decode, encode  the codec of requests and answers; by default, JSON
    """
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    out_of_memory, too_deep = encode(("over", "memory")), encode(("over", "depth"))
    write_frame(answers, b"")
    while (limits := read_frame(requests, _LONGEST)) is not None:
        _limit(**decoded(limits))
        if (request := read_frame(requests, _LONGEST)) is not None:
            try:
                reply = encode(answer(decode(request)))
            except MemoryError:
                reply = out_of_memory
            except RecursionError:
                reply = too_deep
            write_frame(answers, reply)


def _limit(cpu_s: float, memory: int) -> None:
    """Set operating-system limits, where available, because the parent checks only at intervals."""
    if sys.platform == "win32":
        return  # the parent's watchdog is the only limit
    import resource

    # The extra second lets the parent act first, because the parent's error message is better.
    enough = math.ceil(process_time() + cpu_s) + 1
    for what, soft, hard in (
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_CPU, enough, resource.getrlimit(resource.RLIMIT_CPU)[1]),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        with contextlib.suppress(OSError, ValueError):  # unsupported on macOS, or the limit is already lower
            resource.setrlimit(what, (soft, hard))
