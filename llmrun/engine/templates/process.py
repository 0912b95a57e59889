"""Starts, asks, watches and kills the process that runs chat templates.

A template comes with the model file, so it is an untrusted program. Jinja2's sandbox keeps it away from Python, but
does not limit its time and memory. The process does, with the system's limits and our own. A hole in the sandbox would
not lead far either: the process has an empty environment and no open files.
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
from llmrun.engine.templates.abilities import TemplateAbilities, ThinkingTags
from llmrun.engine.templates.frames import FrameTooLong, decoded, encoded, read_frame, write_frame
from llmrun.errors import LlmrunError, TemplateRefused

if TYPE_CHECKING:
    import psutil

_FIRST_LOOK_S = 0.05  # until then, the system's limits suffice; psutil takes 20 ms to import
_LOOK_S = 0.01
# What a long conversation may need per byte. Python stores a text with one emoji in four bytes per character, and a
# template that splits, trims and joins it makes ten copies.
_MEMORY_PER_BYTE = 40
_OUTPUT_PER_BYTE = 8
_CPU_S_PER_BYTE = 1e-7
_TOO_DEEP = "it is nested too deeply, or calls itself"
_NONSENSE = "its process gives an answer that means nothing"


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """What one template may use; only a long conversation raises this, in proportion.

    cpu_s   seconds of CPU time, so that no template is refused because other programs are busy
    wall_s  seconds until it is given up, whatever it does
    memory  bytes of the whole process, about 30 million of them Python's own
    output  bytes of text: about 4 million tokens
    """

    cpu_s: float = 6.0
    wall_s: float = 30.0
    memory: int = 256_000_000
    output: int = 1 << 24

    def for_request(self, size: int, memory: int) -> RenderLimits:
        """Return the limits for a request of `size` bytes to a process that already has `memory`."""
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
    """Runs the templates of one model. The process starts with `start` or on first use. Not thread-safe."""

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self._limits = limits or RenderLimits()
        self._process: subprocess.Popen[bytes] | None = None
        self._memory = 0  # the limit it runs under, which cannot be raised; 0 if it has done nothing yet

    def start(self) -> None:
        """Start the process without waiting until it is ready, which takes 60 ms. Raises LlmrunError."""
        self._running()

    def render(self, source: str, name: str, variables: Mapping[str, Any]) -> str:
        """Render a template. Errors call it `name`. Raises TemplateRefused."""
        try:
            request = encoded({"source": source, "variables": variables, "now": datetime.now().isoformat()})
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateRefused(f"conversation is not for a chat template: {name}: {_one_line(error)}") from error
        text = self._asked(request, name, "text")
        if not isinstance(text, str):
            raise self._given_up(name, _NONSENSE)
        return text

    def abilities(self, source: str) -> TemplateAbilities:
        """Find out what a template can do by trying it, in 20 to 200 ms. Empty if it cannot be rendered."""
        try:
            found = self._asked(encoded({"probe": source}), "", "abilities")
            tags = found["thinking_tags"]
            return TemplateAbilities(
                {**found["reasoning_on"]}, {**found["reasoning_off"]}, ThinkingTags(**tags) if tags else None
            )
        except (TemplateRefused, KeyError, TypeError):
            return TemplateAbilities()

    def close(self) -> None:
        """End the process. Idempotent; the process starts again when needed."""
        process, self._process = self._process, None
        self._memory = 0
        if process is not None:
            process.kill()
            process.wait()
            for pipe in _pipes(process):
                with contextlib.suppress(OSError):  # half a request may be left in the pipe
                    pipe.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # somebody else has ended it
        if self._process is None:
            try:
                self._process = _started()
            except OSError as error:
                reason = error.strerror
                raise LlmrunError(f"cannot start a process for templates: {sys.executable}: {reason}") from error
        return self._process

    def _asked(self, request: bytes, name: str, wanted: str) -> Any:
        """Send a request and return the answer's value. Raises TemplateRefused unless its kind is `wanted`."""
        limits = self._limits.for_request(len(request), self._memory)
        if 0 < self._memory < limits.memory:
            self.close()
        process = self._running()
        if self._memory == 0:  # no template has run yet: nothing to watch until the process is ready
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
        raise self._given_up(name, {"memory": limits.out_of_memory, "depth": _TOO_DEEP}.get(str(value), _NONSENSE))

    def _exchange(
        self,
        process: subprocess.Popen[bytes],
        frames: Sequence[bytes],
        limits: RenderLimits,
        name: str,
        unwatched_s: float = _FIRST_LOOK_S,
    ) -> bytes:
        """Send frames and return the next one that comes. Raises TemplateRefused if none comes within the limits."""
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
        words = too_much or exchange.trouble or _death(process.returncode, limits)
        raise TemplateRefused(f"chat template refused: {name}: {words}")

    def _given_up(self, name: str, words: str) -> TemplateRefused:
        """Return the error to raise. The process may be damaged, so the next template gets a new one."""
        self.close()
        return TemplateRefused(f"chat template refused: {name}: {words}")


class _Exchange(threading.Thread):
    """Sends a request and receives the answer. Either may block forever; then the process is killed.

    answer   None until it has come, or if there is none
    trouble  why there is none, unless the process has ended
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
                self.trouble = f"the text it makes has more than {self._longest:,} bytes"


def _started() -> subprocess.Popen[bytes]:
    """Start the process in a session of its own, so that Ctrl-C reaches only its parent, which decides what to do."""
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
    """Wait until the exchange is over. Returns which limit the process has broken, or ""."""
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
    return f"it is not done after {limits.wall_s:g} s" if exchange.is_alive() else ""


def _cpu_s(process: psutil.Process) -> float:
    used = process.cpu_times()
    return used.user + used.system


def _death(status: int, limits: RenderLimits) -> str:
    if status == -getattr(signal, "SIGXCPU", 0):
        return limits.out_of_time
    return f"its process ended: {child_processes.ending(status)}"


def _one_line(words: object) -> str:
    text = " ".join(str(words)[:10_000].split()) or type(words).__name__
    return text if len(text) <= 200 else text[:197] + "..."
