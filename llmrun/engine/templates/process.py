"""The child process that renders chat templates: starts it, sends it requests and enforces its limits.

A template comes with the model file, so it is an untrusted program. Jinja2's sandbox restricts its access to Python,
but not its time and memory. The child process limits both, through the operating system and a watchdog in the parent.
Even a template that escapes the sandbox finds an empty environment and no open files.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any, cast

from llmrun import child_processes
from llmrun.engine.templates.abilities import TemplateAbilities, ThinkingTags, ToolAbilities
from llmrun.engine.templates.frames import FrameTooLong, decoded, encoded, read_frame, write_frame
from llmrun.errors import LlmrunError, TemplateRefused

if TYPE_CHECKING:
    import psutil

_FIRST_LOOK_S = 0.05  # seconds before the first check; most requests end sooner, which saves 20 ms for importing psutil
_LOOK_S = 0.01
# Additional limits per byte of a long conversation. Python stores text that contains an emoji in four bytes per
# character, and a template that splits, trims and joins text may hold ten copies of it.
_MEMORY_PER_BYTE = 40
_OUTPUT_PER_BYTE = 8
_CPU_S_PER_BYTE = 1e-7
_TOO_DEEP = "it is nested too deeply, or calls itself"
_INVALID_ANSWER = "its process sent an invalid answer"


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """The resource limits for rendering one template. All except `wall_s` grow with the size of the conversation.

    cpu_s   seconds of CPU time, which does not depend on how busy the machine is
    wall_s  seconds of wall-clock time
    memory  bytes of memory for the whole process, including about 30 MB for Python itself
    output  bytes of rendered text; the default is about 4 million tokens
    """

    cpu_s: float = 6.0
    wall_s: float = 30.0
    memory: int = 256_000_000
    output: int = 1 << 24

    def for_request(self, size: int, memory: int) -> RenderLimits:
        """Return the limits for a request of `size` bytes to a process whose memory limit is already `memory` bytes."""
        return replace(
            self,
            cpu_s=self.cpu_s + size * _CPU_S_PER_BYTE,
            memory=max(self.memory, memory, size * _MEMORY_PER_BYTE),
            output=self.output + size * _OUTPUT_PER_BYTE,
        )

    @property
    def out_of_time(self) -> str:
        return f"it takes longer than {self.cpu_s:.1f} s"

    @property
    def out_of_memory(self) -> str:
        return f"it needs more than {self.memory / 1e6:.0f} MB of memory"


class TemplateProcess:
    """The process that renders one model's templates. It starts with `start` or on first use. Not thread-safe."""

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self._limits = limits or RenderLimits()
        self._process: subprocess.Popen[bytes] | None = None
        self._abilities: dict[str, TemplateAbilities] = {}
        self._memory = 0  # the process's memory limit, which cannot be raised; 0 before the first request

    def start(self) -> None:
        """Start the process without waiting until it is ready, which takes 60 ms. Raises LlmrunError."""
        self._running()

    def render(self, source: str, name: str, variables: Mapping[str, Any]) -> str:
        """Render a template. `name` identifies it in error messages. Raises TemplateRefused."""
        try:
            request = encoded({"source": source, "variables": variables, "now": datetime.now().isoformat()})
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateRefused(
                f"conversation cannot be passed to a chat template: {name}: {_one_line(error)}"
            ) from error
        text = self._request(request, name, "text")
        if not isinstance(text, str):
            raise self._rejection(name, _INVALID_ANSWER)
        return text

    def abilities(self, source: str) -> TemplateAbilities:
        """Probe a template, which takes 20 to 200 ms, only once. Returns empty abilities if it cannot be rendered."""
        if source not in self._abilities:
            self._abilities[source] = self._probe(source)
        return self._abilities[source]

    def _probe(self, source: str) -> TemplateAbilities:
        try:
            found = self._request(encoded({"probe": source}), "", "abilities")
            tags = found["thinking_tags"]
            return TemplateAbilities(
                {**found["reasoning_on"]},
                {**found["reasoning_off"]},
                ThinkingTags(**tags) if tags else None,
                ToolAbilities.from_json(found["tools"]),
            )
        except (TemplateRefused, KeyError, TypeError):
            return TemplateAbilities()

    def close(self) -> None:
        """Kill the process. It starts again on the next use. Idempotent."""
        process, self._process = self._process, None
        self._memory = 0
        if process is not None:
            process.kill()
            process.wait()
            for pipe in _pipes(process):
                with contextlib.suppress(OSError):  # part of a request may be left in the buffer
                    pipe.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # something else has killed the process
        if self._process is None:
            try:
                self._process = _start_process()
            except OSError as error:
                reason = error.strerror
                raise LlmrunError(f"cannot start the process for chat templates: {sys.executable}: {reason}") from error
        return self._process

    def _request(self, request: bytes, name: str, wanted: str) -> Any:
        """Send a request and return the answer's value. Raises TemplateRefused unless the answer's kind is `wanted`."""
        limits = self._limits.for_request(len(request), self._memory)
        if 0 < self._memory < limits.memory:
            self.close()
        process = self._running()
        if self._memory == 0:  # wait for a new process; no template is running yet, so there are no limits to enforce
            self._exchange(process, (), limits, name, unwatched_s=limits.wall_s)
        self._memory = limits.memory
        head = encoded({"cpu_s": limits.cpu_s, "memory": limits.memory})
        answer = self._exchange(process, (head, request), limits, name)
        try:
            kind, value = decoded(answer)
        except (ValueError, TypeError, RecursionError):
            kind = value = None
        if kind == wanted:
            return value
        if kind == "refuses":
            raise TemplateRefused(f"chat template refuses this conversation: {name}: {_one_line(value)}")
        if kind == "failed":
            raise TemplateRefused(f"chat template failed: {name}: {_one_line(value)}")
        raise self._rejection(
            name, {"memory": limits.out_of_memory, "depth": _TOO_DEEP}.get(str(value), _INVALID_ANSWER)
        )

    def _exchange(
        self,
        process: subprocess.Popen[bytes],
        frames: Sequence[bytes],
        limits: RenderLimits,
        name: str,
        unwatched_s: float = _FIRST_LOOK_S,
    ) -> bytes:
        """Send frames and return the next frame received. Raises TemplateRefused if none arrives within the limits."""
        exchange = _Exchange(process, frames, limits.output)
        try:
            exchange.start()
            too_much = _watch(exchange, process.pid, limits, unwatched_s)
        except BaseException:  # Ctrl-C
            self.close()
            raise
        if exchange.answer is not None:
            return exchange.answer
        self.close()
        words = too_much or exchange.trouble or _exit_reason(process.returncode, limits)
        raise TemplateRefused(f"chat template refused: {name}: {words}")

    def _rejection(self, name: str, words: str) -> TemplateRefused:
        """Close the process, which may be in a bad state, and return the error to raise."""
        self.close()
        return TemplateRefused(f"chat template refused: {name}: {words}")


class _Exchange(threading.Thread):
    """A thread that sends a request and receives the answer. It may block until the child process is killed.

    answer   the received frame, or None
    trouble  why the answer was rejected; empty if the process ended without an answer
    """

    def __init__(self, process: subprocess.Popen[bytes], frames: Sequence[bytes], longest: int) -> None:
        super().__init__(daemon=True)
        self._frames = frames
        self._to, self._from = _pipes(process)
        self._longest = longest
        self.answer: bytes | None = None
        self.trouble = ""

    def run(self) -> None:
        with contextlib.suppress(OSError):  # the process has ended
            try:
                for frame in self._frames:
                    write_frame(self._to, frame)
                self.answer = read_frame(self._from, self._longest)
            except FrameTooLong:
                self.trouble = f"its output exceeds {self._longest:,} bytes"


def _start_process() -> subprocess.Popen[bytes]:
    """Start the process in its own session, so that Ctrl-C reaches only the parent."""
    return subprocess.Popen(
        child_processes.isolated_command("engine.templates.worker"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=os.name == "posix",
        creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        env=child_processes.isolated_environment(),
    )


def _pipes(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes]]:
    return cast("tuple[IO[bytes], IO[bytes]]", (process.stdin, process.stdout))


def _watch(exchange: threading.Thread, pid: int, limits: RenderLimits, unwatched_s: float) -> str:
    """Wait until the exchange ends or exceeds a limit. Returns a description of that limit, or ""."""
    deadline = time.monotonic() + limits.wall_s
    exchange.join(unwatched_s)
    if not exchange.is_alive():
        return ""
    import psutil

    most_cpu_s = limits.cpu_s
    with contextlib.suppress(psutil.Error):  # the process has ended
        watched = psutil.Process(pid)
        most_cpu_s += _cpu_s(watched)
        while exchange.is_alive() and time.monotonic() < deadline:
            if watched.memory_info().rss > limits.memory:
                return limits.out_of_memory
            if _cpu_s(watched) > most_cpu_s:
                return limits.out_of_time
            exchange.join(_LOOK_S)
    exchange.join(max(0.0, deadline - time.monotonic()))
    return f"it did not finish within {limits.wall_s:g} s" if exchange.is_alive() else ""


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system


def _exit_reason(status: int, limits: RenderLimits) -> str:
    if status == -getattr(signal, "SIGXCPU", 0):
        return limits.out_of_time
    return f"its process ended: {child_processes.ending(status)}"


def _one_line(words: object) -> str:
    text = " ".join(str(words)[:10_000].split()) or type(words).__name__
    return text if len(text) <= 200 else text[:197] + "..."
