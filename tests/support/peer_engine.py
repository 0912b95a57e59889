"""An engine in a process of its own, for scripts/peer_bench.py: `peer_engine NAME MODEL THREADS CONTEXT`.

One line of JSON says that the model is loaded; then each line on stdin ({"do": "prefill", "tokens": 256}, or "decode"
with "depth") is answered with its seconds, and the end of stdin with the most memory this process ever held.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Peer(Protocol):
    """An engine as a benchmark sees it."""

    facts: dict[str, Any]
    vocabulary_size: int

    def clear(self) -> None: ...

    def run(self, tokens: list[int], start: int) -> int:
        """Tokens of one sequence from a position on; returns the likeliest next."""
        ...


class Llmrun:
    def __init__(self, path: Path, threads: int, context_size: int) -> None:
        from llmrun.backends.cpu import CpuBackend
        from llmrun.bench.roofline import needs_of_plan
        from llmrun.gguf.reader import open_gguf

        self._file = open_gguf(path)
        self._backend = CpuBackend(self._file, context_size=context_size, max_sequences=1, threads=threads)
        info = self._backend.info
        needs = needs_of_plan(self._backend.plan)
        self.vocabulary_size = info.vocabulary_size
        self.facts = {
            "device": info.device,
            "bytes_a_token": needs.weight_bytes,
            "products_a_token": needs.products,
        }

    def clear(self) -> None:
        self._backend.kv.free(0)

    def run(self, tokens: list[int], start: int) -> int:
        from llmrun.types import Batch

        n = len(tokens)
        want = np.zeros(n, np.bool_)
        want[-1] = True
        positions = np.arange(start, start + n, dtype=np.int32)
        batch = Batch(np.array(tokens, np.int32), np.zeros(n, np.int32), positions, want)
        return int(self._backend.forward(batch)[-1].argmax())


class LlamaCpp:
    facts: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it

    def __init__(self, path: Path, threads: int, context_size: int) -> None:
        import llama_cpp

        self._library = llama_cpp
        self._silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silent, None)
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = context_size, context_size, 512
        context.n_threads = context.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        self.vocabulary_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def clear(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)

    def run(self, tokens: list[int], start: int) -> int:
        array = (self._library.llama_token * len(tokens))(*tokens)
        if self._library.llama_decode(self._context, self._library.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError("llama_decode failed")
        logits = self._library.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.vocabulary_size,)).argmax())


def prefill(peer: Peer, prompt: list[int]) -> float:
    peer.clear()
    started = time.perf_counter()
    peer.run(prompt, 0)
    return time.perf_counter() - started


def decode(peer: Peer, prompt: list[int], count: int) -> float:
    peer.clear()
    token = peer.run(prompt, 0)
    started = time.perf_counter()
    for position in range(len(prompt), len(prompt) + count):
        token = peer.run([token], position)
    return time.perf_counter() - started


def peak_bytes() -> int:
    """The most memory this process ever held. Linux's getrusage says what its parent held, if that is more."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(1024 * int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def answer(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def main() -> None:
    name, path, threads, context_size = sys.argv[1:]
    started = time.perf_counter()
    kinds: dict[str, Callable[[Path, int, int], Peer]] = {"llmrun": Llmrun, "llama.cpp": LlamaCpp}
    peer = kinds[name](Path(path), int(threads), int(context_size))
    answer({**peer.facts, "load_seconds": time.perf_counter() - started})
    random = np.random.default_rng(0)
    for line in sys.stdin:
        question = json.loads(line)
        if question["do"] == "prefill":
            seconds = prefill(peer, random.integers(10, peer.vocabulary_size - 10, question["tokens"]).tolist())
        else:
            prompt = random.integers(10, peer.vocabulary_size - 10, max(16, question["depth"])).tolist()
            seconds = decode(peer, prompt, question["tokens"])
        answer({"seconds": seconds})
    answer({"peak_bytes": peak_bytes()})


if __name__ == "__main__":
    main()
