"""The parent's side of the process that runs llama.cpp: starting it, asking it, and telling how it died."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

from llmrun import child_processes
from llmrun.backends.llama.messages import read_answer, request_line
from llmrun.backends.llama.shared_layout import FLAG_BYTES
from llmrun.backends.llama.shared_memory import SharedMemory
from llmrun.errors import BackendCrashed, LlmrunError
from llmrun.gguf.problems import shown

_KEPT_BYTES = 64 << 10  # of what it writes to standard error: the reason of a crash is at its end
_PATIENCE_S = 5.0  # for a process that was told to end
_REST_S = 20.0  # for one that was told to stop what it does: a GPU may be in the middle of a long prefill
_PIECE_BYTES = 1 << 20  # of one write
# Where llama.cpp and the C++ library say why they give up.
_REASON = re.compile(
    r"GGML_ASSERT\(.*|[\w-]+\.(?:cpp|c|cu|m):\d+: (?!GGML_ASSERT).*|.*what\(\):.*|.*CUDA error.*|.*: error: .*"
)


class LlamaProcess:
    """A process that runs one model after another. Not thread-safe, but for `stop`."""

    def __init__(self) -> None:
        """Raises LlmrunError where no process can be started."""
        self.memory = SharedMemory.create()
        self._flag = self.memory.map(FLAG_BYTES)
        try:
            self._process = _started(self.memory)
        except OSError as error:
            self.memory.close()
            raise LlmrunError(f"cannot start a process for llama.cpp: {sys.executable}: {error.strerror}") from error
        self._requests = 0
        self._at_rest = True
        self._unread = b""
        self._last_words = b""
        self._listener = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        self._listener.start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(
        self, operation: str, doing: str, *, progress: Callable[[float], None] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Have something done and return the answer. `doing` says in an error what it was: "loading m.gguf".

        Raises BackendCrashed. Whatever else ends the waiting (Ctrl-C) stops the work first, and waits for its end.
        """
        try:
            self._at_rest = False
            answer = self.answer(self.tell(operation, **fields), doing, progress)
            self._at_rest = True
            return answer
        except LlmrunError:
            raise
        except BaseException:
            self._come_to_rest(doing)
            raise

    def settle(self, doing: str) -> None:
        """Have nothing under way any more: a request may be, when the wait for it and the wait for its end were both
        interrupted. Never raises BackendCrashed: the next request is told."""
        if not self._at_rest:
            self._come_to_rest(doing)

    def tell(self, operation: str, **fields: Any) -> int:
        """Send a request; returns its number, by which `answer` knows the answer.

        An exception may come between any two instructions, so a request may be cut off: the next one begins with a
        new line, and what is before that is not understood and left out. So are answers that nobody waits for.
        """
        self._requests += 1
        number = self._requests
        line = b"\n" + request_line(operation, number, fields)
        descriptor = _pipe(self._process.stdin).fileno()
        with contextlib.suppress(BrokenPipeError):  # it is dead: said when its answer is missing
            written = 0
            while written < len(line):
                written += os.write(descriptor, line[written : written + _PIECE_BYTES])
        return number

    def answer(self, number: int, doing: str, progress: Callable[[float], None] | None = None) -> dict[str, Any]:
        """The answer to the request of that number. Raises BackendCrashed."""
        while True:
            answer = self._next_answer(doing)
            if answer.get("number") != number:
                continue
            if "broken" in answer:
                raise LlmrunError(
                    f"llama-cpp-python does not work here: {shown(answer['broken'], 300)}",
                    hint=f"{sys.executable} -m pip install --force-reinstall llama-cpp-python",
                )
            if "progress" not in answer:
                return answer
            if progress is not None:
                progress(answer["progress"])

    def stop(self) -> None:
        """Stop the forward pass that runs, or the next one. From a signal handler or another thread too."""
        self._flag[0] = 1

    @property
    def stopping(self) -> bool:
        return self._flag[0] != 0

    def clear_stop(self) -> None:
        self._flag[0] = 0

    def kill(self) -> None:
        """End it now, from any thread; whoever waits for an answer is told that it died."""
        self._process.kill()

    def close(self) -> None:
        """End the process. Idempotent."""
        try:
            if self._process.returncode is None:
                self.stop()
                if self._process.stdin is not None:
                    self._process.stdin.close()
                self._end()
        finally:
            self._process.kill()  # nothing, but when the wait for its end was interrupted
            self._process.wait()
            self._listener.join(_PATIENCE_S)
            for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()
            self.memory.close()

    def _come_to_rest(self, doing: str) -> None:
        """Stop what runs, and wait for its end; for one that never comes, only so long. When that is interrupted too,
        the flag stays: the pass ends without us."""
        self.stop()
        impatience = threading.Timer(_REST_S, self.kill)
        impatience.daemon = True
        impatience.start()
        try:
            with contextlib.suppress(BackendCrashed):  # the next request is told
                self.answer(self.tell("rest"), doing)
            self.clear_stop()
            self._at_rest = True
        finally:
            impatience.cancel()

    def _end(self) -> int:
        """Wait for its end, or bring it about; returns its status."""
        try:
            return self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _next_answer(self, doing: str) -> dict[str, Any]:
        descriptor = _pipe(self._process.stdout).fileno()
        while b"\n" not in self._unread:
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise self._crashed(doing)
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return read_answer(line)

    def _crashed(self, doing: str) -> BackendCrashed:
        status = self._end()
        self._listener.join(_PATIENCE_S)
        reasons = _REASON.findall(self._last_words.decode(errors="replace"))
        why = f": {shown(reasons[-1].strip(), 200)}" if reasons else ""
        return BackendCrashed(
            f"llama.cpp died while {doing}: {child_processes.ending(status)}{why}",
            hint="the CPU engine may run this model: --backend cpu",
        )

    def _listen(self, pipe: IO[bytes]) -> None:
        while data := os.read(pipe.fileno(), 1 << 16):
            self._last_words = (self._last_words + data)[-_KEPT_BYTES:]


def _started(memory: SharedMemory) -> subprocess.Popen[bytes]:
    """The process, in a group of its own: Ctrl-C goes to all of a terminal's group, one that is just
    starting included."""
    return subprocess.Popen(
        child_processes.command("backends.llama.worker", memory.handle),
        bufsize=0,  # nothing that closing would have to write first, to one that does not read
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=memory.inherited,
        process_group=0 if os.name == "posix" else None,
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        # GGML_NO_BACKTRACE: or a dying llama.cpp starts a debugger on itself.
        env={**child_processes.environment(), "GGML_NO_BACKTRACE": "1"},
    )


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None or pipe.closed:
        raise LlmrunError("the process that runs llama.cpp has been closed")
    return pipe
