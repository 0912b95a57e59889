"""Chat templates rendered in a process of their own, with what each cost: CPU seconds and peak memory.

    with Renderers() as renderers:
        [measured] = renderers.run([source])

A helper process imports the sandbox once and forks for every batch, so that a template that kills its process, eats
its memory or never ends is seen and hurts nobody else.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
MOST_SECONDS = 2.0  # of CPU, for one template
MOST_BYTES = 256_000_000  # of the whole process
CPU_LIMIT = 20  # seconds a batch may take before it is killed: ten times what one template may
MEMORY_LIMIT = 1 << 30  # bytes of address space above what the helper has: four times what one template may
CONVERSATION: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Grüße, what is 7 ** 2?\nThanks."},
        {"role": "assistant", "content": "49 🙂"},
        {"role": "user", "content": [{"type": "text", "text": "And 8 ** 2?"}]},
    ],
    "tools": [
        {"type": "function", "function": {"name": "get", "parameters": {"properties": {"x": {"type": "string"}}}}},
    ],
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
}


@dataclass(frozen=True)
class Measured:
    """How one template ended: outcome is "text", "refused", the name of an exception that got out, or "killed".

    said     the text, or the message
    seconds  of CPU
    peak     bytes of resident memory of the whole process, the largest of its batch; 40 MB without any template
    """

    outcome: str
    said: str
    seconds: float
    peak: int

    @property
    def well(self) -> bool:
        """It ended as every template must: in a text or a refusal, in time, and not for want of memory or stack."""
        wanting = ("MemoryError", "recursion depth", "stack overflow")
        in_time = self.seconds < MOST_SECONDS and self.peak < MOST_BYTES
        return in_time and (
            self.outcome == "text" or (self.outcome == "refused" and not any(word in self.said for word in wanting))
        )


class Renderers:
    """The helper process. `run` measures sources, `batch` of them in one fork."""

    def __enter__(self) -> Renderers:
        self._helper = subprocess.Popen(
            [sys.executable, "-c", "from tests.support.templates.measured_templates import serve; serve()"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._helper.communicate()

    def run(self, sources: Sequence[str], batch: int = 1) -> list[Measured]:
        """Raises AssertionError when the helper itself dies."""
        assert self._helper.stdin
        assert self._helper.stdout
        measured: list[Measured] = []
        for start in range(0, len(sources), batch):
            part = sources[start : start + batch]
            print(json.dumps(part), file=self._helper.stdin, flush=True)
            answer = self._helper.stdout.readline()
            assert answer, "the helper process is gone"
            found = [Measured(*each) for each in json.loads(answer)]
            if len(part) == 1:
                measured += found or [Measured("killed", "", CPU_LIMIT, MEMORY_LIMIT)]
            elif len(found) == len(part) and all(each.well for each in found):
                measured += found
            else:  # which of them it was
                measured += self.run(part)
        return measured


def measure(sources: Sequence[str], batch: int = 1) -> list[Measured]:
    """`Renderers.run` in two processes at once: half of the sources each."""
    half = len(sources) // 2
    with Renderers() as first, Renderers() as second, ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(first.run, sources[:half], batch), pool.submit(second.run, sources[half:], batch)]
        return [each for run in runs for each in run.result()]


def serve() -> None:
    """The helper's loop: a line of sources in, a line of measurements out; fewer of them when the fork was killed."""
    from llmrun.engine import sandbox

    sandbox.render("{{ messages | length }}", "warm", CONVERSATION)
    own = _own_peak()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) if sys.platform == "linux" else 0
    limit = pages * resource.getpagesize() + MEMORY_LIMIT
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            # A fork begins with few pages of its own: what it grows by is what the templates cost.
            began = _peak(resource.getrusage(resource.RUSAGE_SELF))
            if pages:
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            with os.fdopen(writing, "w", encoding="utf-8") as output:
                output.write(f"{began}\n")
                _render_all(json.loads(line), output)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, encoding="utf-8") as answers:
            [began, *measured] = [json.loads(answer) for answer in answers if answer.endswith("\n")]
        _, _, usage = os.wait4(child, 0)
        peak = own + _peak(usage) - began
        sys.stdout.write(json.dumps([[*each, peak] for each in measured]) + "\n")
        sys.stdout.flush()


def _own_peak() -> int:
    """Peak memory of this program. The system's account of a process begins before it was this program, when it was a
    copy of the one that started it: a test suite of 300 MB, say."""
    if sys.platform == "linux":
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return _peak(resource.getrusage(resource.RUSAGE_SELF))


def _peak(usage: resource.struct_rusage) -> int:
    return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _render_all(sources: list[str], output: Any) -> None:
    from llmrun.engine import sandbox
    from llmrun.errors import TemplateRefused

    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    for source in sources:
        used = resource.getrusage(resource.RUSAGE_SELF)
        before = used.ru_utime + used.ru_stime
        resource.setrlimit(resource.RLIMIT_CPU, (int(before) + CPU_LIMIT, resource.RLIM_INFINITY))
        try:
            outcome, said = "text", sandbox.render(source, "hostile.jinja", CONVERSATION)
        except TemplateRefused as refused:
            outcome, said = "refused", str(refused)
        except BaseException as error:  # noqa: BLE001 - whatever gets out is what is looked for
            outcome, said = type(error).__name__, str(error)
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = used.ru_utime + used.ru_stime - before
        print(json.dumps([outcome, said[:400], seconds]), file=output, flush=True)
