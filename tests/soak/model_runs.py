"""Run a model file as `llmrun generate --raw -n 4` or `llmrun embed` does, and report how it ends."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections import deque
from dataclasses import replace
from pathlib import Path

from llmrun.backends.base import OpenOptions
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.llama.process import LlamaProcess
from llmrun.cli.messages import message_for
from llmrun.engine.defaults import default_sampling
from llmrun.engine.embedding.inputs import InputReader
from llmrun.engine.embedding.jobs import EmbeddingJob
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, TextPrompt
from llmrun.errors import BackendCrashed
from llmrun.gguf.reader import open_gguf
from llmrun.types import Pooling

# Words, single bytes, control tokens of both vocabularies, and one letter.
PROMPTS = ("Hello world", "\n\t\x01\x7f é 日本 \U0001f600", "the <|im_end|> </s> <s>", "a")
# Exit code 8 is allowed because a file may declare a context of three tokens.
ALLOWED = (0, 3, 8)
CONTEXT = 64
TOKENS = 4

# Context, prompt, threads and sampling differ between cases, but each case is reproducible.


def generate(path: Path, backend: str, case: int) -> tuple[int, str]:
    """Run a case in this process. Returns the exit code and the outcome.

    The outcome is "answered" or the type of the error, with its message if that says more.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # otherwise NumPy would print warnings on the user's terminal
            _answer(path, backend, case)
    except Exception as error:  # noqa: BLE001 - as the command's own main does
        message = message_for(error)
        told = message.exit_code not in ALLOWED or isinstance(error, BackendCrashed)
        words = f": {_general(message.sentence, path)}" if told else ""
        return message.exit_code, f"{type(error).__name__}{words}"
    return 0, "answered"


def _answer(path: Path, backend: str, case: int) -> None:
    open_engine = _engine_on_llama if backend == "llama" else _engine_on_cpu
    with open_engine(path, _context(case), _threads(backend, case)) as engine:
        sampling = replace(default_sampling(engine.info.metadata), seed=case)
        if case % 3 == 0:
            sampling = replace(sampling, temperature=0.0)
        logprobs = 3 if case % 5 == 0 else None
        prompt = PROMPTS[case % len(PROMPTS)]
        if not engine.info.has_logits:
            _embed(engine, prompt)
            return
        request = Request(TextPrompt(prompt), TOKENS, sampling=sampling, logprobs=logprobs)
        deque(engine.generate(request), maxlen=0)


def _embed(engine: Engine, text: str) -> None:
    """Compute the vector of a text, or its score if the model is a reranker. Raises the error of a text that fails."""
    embedder = engine.embedder()
    job = EmbeddingJob(
        [InputReader(engine.info, engine.tokenizer, "truncate it").tokens_of(text, "text", truncate=True)], _end
    )
    embedder.check(job, scores=embedder.pooling is Pooling.RANK)
    embedder.add(job)
    while not embedder.idle:
        embedder.step()
    if job.error is not None:
        raise job.error


def _end(job: EmbeddingJob) -> None:
    """Leave the results in the job."""


def _engine_on_cpu(path: Path, context: int | None, threads: int) -> Engine:
    return Engine.open(path, OpenOptions(backend="cpu", context_size=context, threads=threads))


def _engine_on_llama(path: Path, context: int | None, threads: int) -> Engine:
    """Open the model in the child process of the previous case if it still runs. Starting one takes a tenth of a
    second."""
    with open_gguf(path) as file:
        process = _llama_process()
        backend = LlamaBackend(file, OpenOptions(context_size=context, threads=threads, gpu_layers=0), process=process)
    try:
        return Engine(backend)
    except BaseException:
        backend.close()
        raise


_processes: list[LlamaProcess] = []


def _llama_process() -> LlamaProcess:
    if _processes and not _processes[0].alive:
        _processes.pop().close()
    if not _processes:
        _processes.append(LlamaProcess())
    return _processes[0]


def close_llama_process() -> None:
    while _processes:
        _processes.pop().close()


def generate_in_new_process(path: Path, backend: str, case: int) -> tuple[int, str]:
    """Run a case as a user does and check that stderr has one line and a hint. Returns the exit code and the
    outcome."""
    command = [sys.executable, "-m", "llmrun", "generate", "--raw", "-m", str(path), "--backend", backend]
    command += ["-n", str(TOKENS), "--seed", str(case), "-t", str(_threads(backend, case))]
    context = _context(case)
    if context is not None:
        command += ["-c", str(context)]
    if case % 3 == 0:
        command += ["--temp", "0"]
    done = subprocess.run(
        [*command, "-q", "-p", PROMPTS[case % len(PROMPTS)]], capture_output=True, timeout=60, check=False
    )
    lines = done.stderr.decode().splitlines()
    if done.returncode < 0:
        return -done.returncode, f"signal {-done.returncode}: {_general(' '.join(lines[-1:]), path)}"
    told = [line for line in lines if not line.startswith(("error: ", "hint: "))]
    if told or (done.returncode != 0) != bool(lines):
        return 1, f"on stderr: {_general(' '.join(told or lines), path)}"
    words = _general(lines[0].removeprefix("error: ").split(":")[0], path) if lines else "answered"
    return done.returncode, words


def _threads(backend: str, case: int) -> int:
    """Return the number of threads. On a busy machine, two llama.cpp threads need 50 ms per token, because they
    spin."""
    return 2 if case % (2 if backend == "cpu" else 50) == 1 else 1


def _context(case: int) -> int | None:
    return CONTEXT if case % 4 else None


def _general(words: str, path: Path) -> str:
    """Remove case-specific details, so that equal outcomes are counted together."""
    return re.sub(r"\d+", "N", re.sub(r"\S*/[^:]*\.gguf", "FILE", words.replace(str(path), "FILE")))[:300]


def write(folder: Path, data: bytes) -> Path:
    """Write a case's file. Its name is hostile, too."""
    path = folder / "mutant\x1b[31m.gguf"
    path.write_bytes(data)
    return path
