"""How far a model's predictions are from the oracle's: divergence with its uncertainty, and perplexity.

A measurement takes functions from the token ids of a sequence to the logits of every position, whoever computes them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from llmrun.archs.registry import architecture_of
from llmrun.backends.base import OpenOptions
from llmrun.backends.select import open_backend
from llmrun.gguf.reader import open_gguf
from llmrun.plan import reference
from llmrun.plan.matrix import Matrix
from llmrun.plan.ops.base import Op
from llmrun.plan.ops.embedding import Embed
from llmrun.plan.ops.linear import Linear
from llmrun.plan.plan import Plan
from llmrun.plan.twin import dequantized
from llmrun.types import Batch

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

LogitsOf = Callable[[Sequence[int]], "NDArray[np.float32]"]  # token ids -> float32[tokens, vocabulary]

WINDOW = 512  # tokens of a perplexity window
RESAMPLES = 2000

# What every weight type is held to.
TWIN_BOUND = 1e-9  # nats; 2e-11 was measured, and one rounding of the KV cache to float16 is 5e-7
ENGINE_RATIO = 1.1  # times llama.cpp's own divergence on the same file
ENGINE_FLOOR = 1e-5  # nats: below this nobody can tell
PERPLEXITY_BOUND = 0.005  # relative


class LlmrunModel:
    """A model on the CPU engine, on one thread, asked for the logits of whole sequences."""

    def __init__(self, path: Path, kv_type: str = "f16") -> None:
        self._backend = open_backend(path, OpenOptions(backend="cpu", context_size=WINDOW, threads=1, kv_type=kv_type))
        self._one_at_a_time = threading.Lock()

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """float32[tokens, vocabulary]: what follows each position of this sequence, and of nothing before it."""
        n = len(tokens)
        positions = np.arange(n, dtype=np.int32)
        batch = Batch(np.array(tokens, np.int32), np.zeros(n, np.int32), positions, np.ones(n, np.bool_))
        with self._one_at_a_time:
            self._backend.kv.free(0)
            return self._backend.forward(batch)

    def close(self) -> None:
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def plan_of(path: Path) -> Plan:
    """The plan of a model file, which stays open for as long as somebody may read its weights."""
    file = open_gguf(path)
    architecture = architecture_of(file)
    return architecture.plan(file, architecture.read_config(file))


def dequantized_once(plan: Plan) -> Plan:
    """The same plan over float32 weights, so that the NumPy twin need not dequantize for every sequence."""
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
    """The logits of the NumPy twin that rounds nothing."""
    prepared = dequantized_once(plan)
    return lambda tokens: reference.exact(prepared, np.array(tokens, np.int32))


@dataclass(frozen=True)
class Divergence:
    """KL(oracle || model) in nats. sums float64[prompts] over the positions of each prompt, counts int64[prompts]."""

    sums: NDArray[np.float64]
    counts: NDArray[np.int64]

    @property
    def mean(self) -> float:
        """Over all positions of all prompts."""
        return float(self.sums.sum() / self.counts.sum())

    def interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the mean. Whole prompts are drawn: positions of one prompt err together."""
        draws = _draws(len(self.sums))
        return _middle(self.sums[draws].sum(-1) / self.counts[draws].sum(-1))

    def ratio_interval(self, other: Divergence) -> tuple[float, float]:
        """95 % bootstrap interval of this mean over another's on the same prompts, drawn in pairs."""
        draws = _draws(len(self.sums))
        return _middle(self.sums[draws].sum(-1) / other.sums[draws].sum(-1))


def _draws(prompts: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, prompts, (RESAMPLES, prompts))


def _middle(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


def kl_divergence(oracle: NDArray[np.float32], models: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    """float64[models, positions] in nats, from logits float32[positions, vocabulary].

    With d = oracle - model, KL = log E exp(E d - d), the means under the oracle's distribution: no difference of two
    large logarithms, so 1e-9 is as exact as 1. A row at a time stays in the cache, four times as fast as all at once.
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
    """The divergence of each model from the oracle on every position of every prompt."""
    sums, counts = [], []
    for prompt, (expected, *found) in _all_logits([oracle, *models.values()], prompts):
        sums.append(kl_divergence(expected, found).sum(-1))
        counts.append(len(prompt))
    by_model = np.array(sums).T
    return {name: Divergence(by_model[index], np.array(counts)) for index, name in enumerate(models)}


def divergences_of_positions(
    oracle: LogitsOf, models: Mapping[str, LogitsOf], prompts: Iterable[Sequence[int]]
) -> dict[str, NDArray[np.float64]]:
    """float64[positions of all prompts] of each model, in nats."""
    parts = [
        kl_divergence(expected, found) for _, (expected, *found) in _all_logits([oracle, *models.values()], prompts)
    ]
    return dict(zip(models, np.concatenate(parts, axis=1), strict=True))


@dataclass(frozen=True)
class Perplexity:
    value: float
    predicted: int  # tokens


def perplexities(models: Mapping[str, LogitsOf], tokens: Sequence[int]) -> dict[str, Perplexity]:
    """Over consecutive windows, of which each model is given the first token and predicts the others."""
    windows = [tokens[start : start + WINDOW] for start in range(0, len(tokens) - 1, WINDOW)]
    surprise = np.zeros(len(models))  # nats
    for window, found in _all_logits(list(models.values()), windows):
        surprise += [_surprise(logits[:-1], np.array(window[1:])) for logits in found]
    predicted = len(tokens) - len(windows)
    return {
        name: Perplexity(float(np.exp(total / predicted)), predicted)
        for name, total in zip(models, surprise, strict=True)
    }


def _surprise(logits: NDArray[np.float32], following: NDArray[np.int64]) -> float:
    """Minus the log-probability of all the tokens that follow, in nats."""
    total = 0.0
    for row, token in zip(logits, following, strict=True):
        shifted = row.astype(np.float64) - row.max()
        total += float(np.log(np.exp(shifted).sum()) - shifted[token])
    return total


def _all_logits(
    models: Sequence[LogitsOf], sequences: Iterable[Sequence[int]]
) -> Iterator[tuple[Sequence[int], list[NDArray[np.float32]]]]:
    """Each sequence with the logits of every model. Two run at a time, and the next sequence is begun early."""
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
