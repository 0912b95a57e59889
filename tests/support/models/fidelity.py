"""Measure how far a model's predictions are from the oracle's: KL divergence with its uncertainty, and perplexity.

The measurements take functions that map a sequence's token ids to the logits at every position.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from llmrun.backends.base import OpenOptions
from llmrun.backends.registry import open_backend
from llmrun.base.types import Batch
from llmrun.formats.gguf.reader import open_gguf
from llmrun.jobs.evaluation.measuring import adapted
from llmrun.model.archs.parts.architecture import architecture_of
from llmrun.model.plan import reference
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.ops.embedding import Embed
from llmrun.model.plan.ops.linear import Linear
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.twin import dequantized

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

LogitsOf = Callable[[Sequence[int]], "NDArray[np.float32]"]  # token ids -> float32[tokens, vocabulary]

WINDOW = 512  # tokens in a perplexity window
RESAMPLES = 2000

# The bounds for every weight type.
TWIN_BOUND = 1e-9  # nats; measured 2e-11. Rounding the KV cache to float16 once costs 5e-7
ENGINE_RATIO = 1.1  # times llama.cpp's own divergence on the same file
ENGINE_FLOOR = 1e-5  # nats; anything smaller is imperceptible
PERPLEXITY_BOUND = 0.005  # relative difference


class LlmrunModel:
    """A model on the CPU engine with one thread, for the logits of whole sequences."""

    def __init__(self, path: Path, kv_type: str = "f16", adapters: Sequence[str] = ()) -> None:
        """Open a model with LoRA adapters, in the notation of --lora."""
        options = OpenOptions(backend="cpu", context_size=WINDOW, threads=1, kv_type=kv_type, adapters=adapters)
        self._backend = open_backend(path, options)
        self._one_at_a_time = threading.Lock()

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Return next-token logits at each position of the sequence, float32[tokens, vocabulary]. Starts from an empty
        cache."""
        n = len(tokens)
        positions = np.arange(n, dtype=np.int32)
        batch = Batch(np.array(tokens, np.int32), np.zeros(n, np.int32), positions, np.ones(n, np.uint8))
        with self._one_at_a_time:
            self._backend.kv.free(0)
            return self._backend.forward(adapted(self._backend, batch)).logits

    def close(self) -> None:
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def plan_of(path: Path) -> Plan:
    """Return the plan of a model file. The file stays open as long as its weights are referenced."""
    file = open_gguf(path)
    architecture = architecture_of(file)
    return architecture.plan(file, architecture.read_config(file))


def head_plan_of(path: Path) -> Plan | None:
    """Return the plan of a model file's draft head, if it has one. The file stays open like that of `plan_of`."""
    file = open_gguf(path)
    architecture = architecture_of(file)
    return architecture.draft_plan(file, architecture.read_config(file))


def dequantized_once(plan: Plan) -> Plan:
    """Return the plan with float32 weights, so that the NumPy twin need not dequantize them for every sequence."""
    done: dict[str, Matrix] = {}

    def once(matrix: Matrix) -> Matrix:
        if matrix.name not in done:
            raw = dequantized(matrix).view(np.uint8).reshape(-1)
            done[matrix.name] = Matrix.of_bytes(matrix.name, "f32", matrix.rows, matrix.columns, raw)
        return done[matrix.name]

    def changed(op: Op) -> Op:
        match op:
            case Embed():
                return replace(op, table=once(op.table))
            case Linear():
                return replace(op, weight=once(op.weight))
            case _:
                return op

    return replace(plan, ops=[changed(op) for op in plan.ops])


def exact_twin(plan: Plan) -> LogitsOf:
    """Return a function that computes logits with the NumPy twin without any rounding."""
    prepared = dequantized_once(plan)
    return lambda tokens: reference.exact(prepared, np.array(tokens, np.int32))


@dataclass(frozen=True)
class Divergence:
    """KL(oracle || model) in nats.

    sums    float64[prompts], summed over the positions of each prompt
    counts  int64[prompts], positions in each prompt
    """

    sums: NDArray[np.float64]
    counts: NDArray[np.int64]

    @property
    def mean(self) -> float:
        """The mean over all positions of all prompts."""
        return float(self.sums.sum() / self.counts.sum())

    def interval(self) -> tuple[float, float]:
        """Return the 95 % bootstrap interval of the mean.

        It resamples whole prompts, because errors within a prompt are correlated.
        """
        draws = _draws(len(self.sums))
        return _middle(self.sums[draws].sum(-1) / self.counts[draws].sum(-1))

    def ratio_interval(self, other: Divergence) -> tuple[float, float]:
        """Return the 95 % bootstrap interval of this mean divided by another's on the same prompts, resampled in
        pairs."""
        draws = _draws(len(self.sums))
        return _middle(self.sums[draws].sum(-1) / other.sums[draws].sum(-1))


def _draws(prompts: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, prompts, (RESAMPLES, prompts))


def _middle(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def kl_divergence(oracle: NDArray[np.float32], models: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return float64[models, positions] in nats, from logits float32[positions, vocabulary].

    With d = oracle - model, KL = log E exp(E d - d), where E is the mean under the oracle's distribution. This avoids
    subtracting two large logarithms, so 1e-9 is as accurate as 1. Processing one row at a time keeps it in the CPU
    cache, which is four times as fast as processing all rows at once.
    """
    result = np.empty((len(models), len(oracle)))
    for position, row in enumerate(oracle):
        row = row.astype(np.float64)
        p = np.exp(row - row.max())
        p /= p.sum()
        for index, model in enumerate(models):
            d = row - model[position]
            result[index, position] = np.log(p @ np.exp(p @ d - d))
    return result


def divergences(
    oracle: LogitsOf, models: Mapping[str, LogitsOf], prompts: Iterable[Sequence[int]]
) -> dict[str, Divergence]:
    """Return the divergence of each model from the oracle over every position of every prompt."""
    sums, counts = [], []
    for prompt, (expected, *found) in _all_logits([oracle, *models.values()], prompts):
        sums.append(kl_divergence(expected, found).sum(-1))
        counts.append(len(prompt))
    by_model = np.array(sums).T
    return {name: Divergence(by_model[index], np.array(counts)) for index, name in enumerate(models)}


def divergences_of_positions(
    oracle: LogitsOf, models: Mapping[str, LogitsOf], prompts: Iterable[Sequence[int]]
) -> dict[str, NDArray[np.float64]]:
    """Return the divergence of each model in nats, float64[positions of all prompts]."""
    parts = [
        kl_divergence(expected, found) for _, (expected, *found) in _all_logits([oracle, *models.values()], prompts)
    ]
    return dict(zip(models, np.concatenate(parts, axis=1), strict=True))


@dataclass(frozen=True)
class Perplexity:
    value: float
    predicted: int  # number of predicted tokens


def perplexities(models: Mapping[str, LogitsOf], tokens: Sequence[int]) -> dict[str, Perplexity]:
    """Return each model's perplexity over consecutive windows, in which all tokens but the first are predicted."""
    windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens) - 1, WINDOW)]
    surprise = np.zeros(len(models))  # in nats
    for window, found in _all_logits(list(models.values()), windows):
        surprise += [_surprise(logits[:-1], np.array(window[1:])) for logits in found]
    predicted = len(tokens) - len(windows)
    return {
        name: Perplexity(float(np.exp(total / predicted)), predicted)
        for name, total in zip(models, surprise, strict=True)
    }


def _surprise(logits: NDArray[np.float32], following: NDArray[np.int64]) -> float:
    """Return the negative log-probability of the following tokens, summed, in nats."""
    total = 0.0
    for row, token in zip(logits, following, strict=True):
        shifted = row.astype(np.float64) - row.max()
        total += float(np.log(np.exp(shifted).sum()) - shifted[token])
    return total


def _all_logits(
    models: Sequence[LogitsOf], sequences: Iterable[Sequence[int]]
) -> Iterator[tuple[Sequence[int], list[NDArray[np.float32]]]]:
    """Yield each sequence with the logits of every model. Runs two models at a time and starts the next sequence
    early."""
    waiting: deque[tuple[Sequence[int], list[Future[NDArray[np.float32]]]]] = deque()
    with ThreadPoolExecutor(2) as pool:
        for sequence in sequences:
            waiting.append((sequence, [pool.submit(logits_of, sequence) for logits_of in models]))
            if len(waiting) == 2:
                yield _collected(waiting)
        while waiting:
            yield _collected(waiting)


def _collected(
    waiting: deque[tuple[Sequence[int], list[Future[NDArray[np.float32]]]]],
) -> tuple[Sequence[int], list[NDArray[np.float32]]]:
    sequence, running = waiting.popleft()
    return sequence, [future.result() for future in running]
