"""The parent's side of the process that runs llama.cpp: starting it, asking it, and telling how it died."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import IO, Any

from llmrun.backends.llama_layout import FLAG_BYTES
from llmrun.backends.shared_memory import SharedMemory
from llmrun.errors import BackendCrashed, LlmrunError
from llmrun.gguf.problems import shown

_KEPT_BYTES = 64 << 10  # of what it writes to standard error: the reason of a crash is at its end
_PATIENCE_S = 5.0  # for a process that was told to end
# Where llama.cpp and the C++ library say why they give up.
_REASON = re.compile(
    r"GGML_ASSERT\(.*|[\w-]+\.(?:cpp|c|cu|m):\d+: (?!GGML_ASSERT).*|.*what\(\):.*|.*CUDA error.*|.*: error: .*"
)


class LlamaProcess:
    """A process that runs one model after another. Not thread-safe, but for `stop`."""

    def __init__(self) -> None:
        self.memory = SharedMemory.create()
        self._flag = self.memory.map(FLAG_BYTES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "llmrun.backends.llama_worker", self.memory.handle],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=self.memory.inherited,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                "GGML_NO_BACKTRACE": "1",  # or a dying llama.cpp starts a debugger on itself
            },
        )
        self._requests = 0
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
            return self.answer(self.tell(operation, **fields), doing, progress)
        except LlmrunError:
            raise
        except BaseException:
            self.stop()
            try:
                self.answer(self.tell("rest"), doing)
            finally:
                self.clear_stop()
            raise

    def tell(self, operation: str, **fields: Any) -> int:
        """Send a request; returns its number, by which `answer` knows the answer.

        An exception may come between any two instructions, so a request may be cut off: the next one begins with a
        new line, and what is before that is not understood and left out. So are answers that nobody waits for.
        """
        self._requests += 1
        number = self._requests
        line = json.dumps({"do": operation, "number": number, **fields}).encode()
        pipe = _pipe(self._process.stdin)
        with contextlib.suppress(BrokenPipeError):  # it is dead: said when its answer is missing
            pipe.write(b"\n" + line + b"\n")
            pipe.flush()
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
        if self._process.returncode is None:
            self.stop()
            with contextlib.suppress(OSError):
                _pipe(self._process.stdin).close()
            try:
                self._process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(OSError):
                    pipe.close()
        self.memory.close()

    def _next_answer(self, doing: str) -> dict[str, Any]:
        descriptor = _pipe(self._process.stdout).fileno()
        while b"\n" not in self._unread:
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise self._crashed(doing)
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:  # the rest of a line whose beginning an exception took away
            return {}
        return answer

    def _crashed(self, doing: str) -> BackendCrashed:
        try:
            status = self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._listener.join(_PATIENCE_S)
        reasons = _REASON.findall(self._last_words.decode(errors="replace"))
        why = f": {shown(reasons[-1].strip(), 200)}" if reasons else ""
        return BackendCrashed(
            f"llama.cpp died while {doing}: {_how(status)}{why}",
            hint="the CPU engine may run this model: --backend cpu",
        )

    def _listen(self, pipe: IO[bytes]) -> None:
        while data := os.read(pipe.fileno(), 1 << 16):
            self._last_words = (self._last_words + data)[-_KEPT_BYTES:]


def _how(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None or pipe.closed:
        raise LlmrunError("the process that runs llama.cpp has been closed")
    return pipe
