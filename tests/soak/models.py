"""Opens broken models and generates answers with them, in a worker process that may crash or hang."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import re
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.process import LlamaProcess
from llmrun.base.errors import BackendCrashed
from llmrun.cli.messages import message_for
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TextPrompt
from llmrun.formats.gguf.reader import open_gguf
from llmrun.options.settings import default_sampling
from tests.soak.driver import Broken, Case, Soak
from tests.soak.model_mutations import bases, mutant

CORPUS = Path(__file__).resolve().parent / "corpus"
BACKENDS = ("cpu", "llama")
_HANG_S = 60.0  # compiling a kernel takes seconds
_MOST_MEMORY = 4 << 30  # address space in bytes, of the worker and of each process that it starts
_START_S = 60.0


def models(soak: Soak) -> Iterator[Case]:
    """Run one mutant per case: even cases on the CPU engine, odd cases on llama.cpp.

    A case ends in an answer or an error with exit code 3, or 8 if the file declares a context of a few tokens. Any
    other exit code, a warning, a signal, a hang and too much memory are findings, and the file is saved in the corpus.
    Commit it together with the fix.
    """
    worker = Worker(soak.folder)
    for number, (draft, _) in enumerate(bases()):
        path = write(soak.folder, draft.build())
        for backend in BACKENDS:
            if (ended := worker.run(path, backend, number)) != (0, "answered"):
                raise Broken(f"a valid model ends with {ended} on {backend}")

    def case(number: int) -> str:
        nonlocal worker
        backend, data = BACKENDS[number % 2], mutant(soak.seed, number)
        path = write(soak.folder, data)
        code, outcome = worker.run(path, backend, number)
        if code not in ALLOWED:
            kind = re.sub(r"[^a-z]+", "-", outcome.lower())[:60].strip("-")
            (CORPUS / f"{backend}-{kind}-seed-{soak.seed}-case-{number}.gguf").write_bytes(data)
            if code is None:
                worker.end()
                worker = Worker(soak.folder)
            raise Broken(f"{backend}: exit code {code}, {outcome}")
        return f"{code} {outcome}"

    try:
        yield case
    finally:
        worker.end()


class Worker:
    """A process that runs thousands of models one after another, like a long session.

    call  runs a case and returns its exit code and outcome, like `generate`
    """

    def __init__(self, folder: Path, call: Callable[[Path, str, int], tuple[int, str]] | None = None) -> None:
        self._errors = folder / "stderr"
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, str(self._errors), call or generate), daemon=False)
        self._process.start()
        theirs.close()
        if not self._ours.poll(_START_S):
            raise RuntimeError("the worker does not start")
        self._ours.recv()

    def run(self, path: Path, backend: str, case: int) -> tuple[int | None, str]:
        """Return the exit code and the outcome of a case, or None and how the worker ended."""
        try:
            self._ours.send((path, backend, case))
            if not self._ours.poll(_HANG_S):
                return None, f"still running after {_HANG_S:.0f} s"
            code, outcome = self._ours.recv()
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode or 0
            how = signal.Signals(-code).name if code < 0 else f"exit {code}"
            return None, f"the worker died: {how} {self._errors.read_text(errors='replace').strip()[-300:]}".strip()
        return code, outcome

    def end(self) -> None:
        """Kill the worker and everything it started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self._process.pid).children(recursive=True):
                process.kill()
        self._process.kill()
        self._process.join()
        self._ours.close()


def _work(requests: Connection, errors: str, call: Callable[[Path, str, int], tuple[int, str]]) -> None:
    """Run the requested cases in the worker. Whatever libraries print goes to a file."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MOST_MEMORY, _MOST_MEMORY))
    log = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    requests.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            requests.send(call(*requests.recv()))


# --- a case, in the worker

# Words, single bytes, control tokens of both vocabularies, and one letter.
PROMPTS = ("Hello world", "\n\t\x01\x7f é 日本 \U0001f600", "the <|im_end|> </s> <s>", "a")
# Exit code 8 is allowed because a file may declare a context of three tokens.
ALLOWED = (0, 3, 8)
CONTEXT = 64
TOKENS = 4


def generate(path: Path, backend: str, case: int) -> tuple[int, str]:
    """Run a case in this process. Returns the exit code, and "answered" or the error.

    Context, prompt, threads and sampling depend on the number of the case.
    """
    return ended(path, partial(_answer, path, backend, case))


def ended(path: Path, run: Callable[[], None]) -> tuple[int, str]:
    """Return the exit code and the outcome of a case: "answered", or the error with FILE in place of the path."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # otherwise NumPy would print warnings on the user's terminal
            run()
    except Exception as error:  # noqa: BLE001 - as the command's own main does
        message = message_for(error)
        told = message.exit_code not in ALLOWED or isinstance(error, BackendCrashed)
        general = re.sub(r"\d+", "N", message.sentence.replace(str(path), "FILE"))
        words = f": {general:.300}" if told else ""
        return message.exit_code, f"{type(error).__name__}{words}"
    return 0, "answered"


def _answer(path: Path, backend: str, case: int) -> None:
    context = CONTEXT if case % 4 else None
    # On a busy machine, two threads of llama.cpp need 50 ms per token, because they spin.
    options = OpenOptions(context_size=context, threads=2 if case % (2 if backend == "cpu" else 50) == 1 else 1)
    with _open(path, backend, options) as engine:
        if not engine.info.has_logits:
            return  # encoders generate no text
        sampling = replace(default_sampling(engine.info.metadata), seed=case)
        if case % 3 == 0:
            sampling = replace(sampling, temperature=0.0)
        prompt, logprobs = TextPrompt(PROMPTS[case % len(PROMPTS)]), 3 if case % 5 == 0 else None
        deque(engine.generate(Request(prompt, TOKENS, sampling=sampling, logprobs=logprobs)), maxlen=0)


def _open(path: Path, backend: str, options: OpenOptions) -> Engine:
    """Open the model. llama.cpp keeps its child process from case to case, because starting one takes 0.1 s."""
    if backend == "cpu":
        return Engine.open(path, replace(options, backend="cpu"))
    with open_gguf(path) as file:
        return Engine(LlamaBackend(file, replace(options, gpu_layers=0), process=llama_process()))


def llama_process() -> LlamaProcess:
    """Return the child process of the previous case, or a new one if that process has ended."""
    if _llama_process()._child.ended():
        _llama_process().close()
        _llama_process.cache_clear()
    return _llama_process()


@functools.cache
def _llama_process() -> LlamaProcess:
    return LlamaProcess()


def write(folder: Path, data: bytes) -> Path:
    """Write the model of a case to a file with a hostile name."""
    path = folder / "mutant\x1b[31m.gguf"
    path.write_bytes(data)
    return path
