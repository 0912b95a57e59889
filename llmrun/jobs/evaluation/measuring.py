"""Evaluates a model on chunks of a text, alone or side by side with a base model, and compares two engines.

A text is split into chunks as in llama.cpp's llama-perplexity, so the perplexities are comparable. Each chunk has
`context` tokens and is evaluated separately. Only the tokens of a chunk's second half are scored, because the model has
little context to predict the first tokens. The rest of the text, which does not fill a chunk, is not used.

Scores are the surprise of the following tokens, the KL divergence of two models, and the agreement of their top tokens.
All arithmetic is in float64. Rows are processed one at a time in reused arrays, which stay in the CPU cache. For 49,152
logits, comparing two rows takes 0.2 ms.

Two engines that run the same model are compared position by position on a text, and token by token in an answer.
Engines round differently, so their logits are never equal. If two tokens are almost equally likely, the engines may
choose different tokens. The difference between correct engines is smaller than the effect of a quantization.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llmrun.backends.registry import open_backend
from llmrun.base.errors import DoesNotFit, LlmrunError, UsageError
from llmrun.base.types import LOGITS, Batch
from llmrun.engine.adapters import adapted_tokens
from llmrun.engine.drafting.model import difference_in_words
from llmrun.jobs.bench.intervals import Interval, mean_of_series, proportion
from llmrun.model.archs.parts.encoders import is_encoder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import Backend, OpenOptions
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer

DEFAULT_CONTEXT: Final = 512  # tokens, the default of llama-perplexity
LEAST_CONTEXT: Final = 8


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens to evaluate, and the position where scoring begins.

    inputs  int32[n], the input tokens of the model
    first   the first position whose prediction is scored
    following  int32[n - first], the tokens that follow the scored positions
    """

    inputs: NDArray[np.int32]
    first: int
    following: NDArray[np.int32]

    @property
    def scored(self) -> int:
        """The number of scored predictions."""
        return len(self.following)


def chunks_of(text: str, tokenizer: Tokenizer, context: int, most: int | None = None) -> list[Chunk]:
    """Tokenize a text, split the text into chunks of `context` tokens, and return the first `most` chunks.

    If the vocabulary requires a BOS token, BOS replaces the first token of each chunk. Raises UsageError if the text
    does not fill a chunk.
    """
    first = context // 2
    contexts = contexts_of(text, tokenizer, context, most)
    return [Chunk(tokens[:-1].copy(), first, tokens[first + 1 :]) for tokens in contexts]


def contexts_of(text: str, tokenizer: Tokenizer, context: int, most: int | None = None) -> NDArray[np.int32]:
    """Tokenize a text and return the first `most` chunks as int32[chunks, context], with BOS as in `chunks_of`.

    Raises UsageError if the text does not fill a chunk.
    """
    tokens = tokens_of(text, tokenizer)
    if len(tokens) < context:
        hint = f"use a longer text, or --context {len(tokens)}" if len(tokens) >= LEAST_CONTEXT else "use a longer text"
        raise UsageError(f"--text: {len(tokens):,} tokens do not fill a chunk of {context:,}", hint=hint)
    chunks = tokens[: len(tokens) // context * context].reshape(-1, context)[:most].copy()
    if (bos := added_bos(tokenizer)) is not None:
        chunks[:, 0] = bos
    return chunks


def tokens_of(text: str, tokenizer: Tokenizer) -> NDArray[np.int32]:
    """Tokenize a text as the beginning of a document, with BOS if the vocabulary requires BOS, but without EOS."""
    tokens = tokenizer.encode(text, add_special=True, parse_special=False)
    return tokens[:-1] if len(tokens) and tokens[-1] == tokenizer.eos_id != tokenizer.bos_id else tokens


def added_bos(tokenizer: Tokenizer) -> int | None:
    """Return the BOS token if the vocabulary requires BOS at the beginning of a text, or else None."""
    begun = tokenizer.encode("a", add_special=True, parse_special=False)
    return tokenizer.bos_id if len(begun) and begun[0] == tokenizer.bos_id else None


# The memory for the logits of one forward pass, which allows 110 rows with a vocabulary of 151,936 tokens.
_LOGITS_BYTES: Final = 64 << 20
_LEAST_ROWS: Final = 16


def rows_at_a_time(vocabulary_size: int) -> int:
    """Return the maximum number of rows of logits that a forward pass should return."""
    return max(_LEAST_ROWS, _LOGITS_BYTES // (4 * vocabulary_size))


def batch_of(tokens: NDArray[np.int32], seq: int, start: int, first: int) -> Batch:
    """Return a batch of one sequence that begins at position `start` and requests logits from position `first` on."""
    positions = np.arange(start, start + len(tokens), dtype=np.int32)
    want = (positions >= first) * np.uint8(LOGITS)
    return Batch(np.ascontiguousarray(tokens), np.full(len(tokens), seq, np.int32), positions, want)


def joined(batches: list[Batch]) -> Batch:
    """Return a batch that contains the rows of several batches, one after another."""
    return Batch(
        np.concatenate([batch.tokens for batch in batches]),
        np.concatenate([batch.seq for batch in batches]),
        np.concatenate([batch.pos for batch in batches]),
        np.concatenate([batch.want for batch in batches]),
    )


def adapted(backend: Backend, batch: Batch) -> Batch:
    """Return a copy of a batch that uses the model's LoRA adapters, with the scales of the opened model.

    Adapters with invocation tokens do not apply, because texts contain no invocation tokens.
    """
    adapters = adapted_tokens(None, backend.info.adapters, ())
    return batch if adapters is None else replace(batch, scales=adapters.rows(0, len(batch.tokens)))


def logits_in_slices(backend: Backend, batch: Batch, most: int) -> Iterator[NDArray[np.float32]]:
    """Run a batch and yield the requested logits, float32[up to `most`, vocabulary], in order.

    Raises the errors of `Backend.forward`.
    """
    wanted = np.flatnonzero(batch.want)
    ends = [*(wanted[most - 1 :: most] + 1).tolist(), len(batch.want)]
    start = 0
    for end in ends:
        if end == start:
            continue
        rows = slice(start, end)
        part = Batch(batch.tokens[rows], batch.seq[rows], batch.pos[rows], batch.want[rows])
        logits = backend.forward(adapted(backend, part)).logits
        if len(logits):
            yield logits
        start = end


class Scores(NamedTuple):
    """The scores of consecutive positions for one model, or for a model and its base.

    surprise    float64[positions], the negative log probability of the following token in nats
    base        float64[positions], the surprise for the base; empty without a base
    divergence  float64[positions], KL(base || model) in nats; empty without a base
    agrees      bool[positions], True if both models have the same most likely token; empty without a base
    """

    surprise: NDArray[np.float64]
    base: NDArray[np.float64]
    divergence: NDArray[np.float64]
    agrees: NDArray[np.bool_]

    @classmethod
    def joined(cls, parts: list[Scores]) -> Scores:
        """Return the scores of all positions, in order."""
        return cls(*(np.concatenate([part[field] for part in parts]) for field in range(4)))


def scores_of(logits: NDArray[np.float32], following: NDArray[np.int32]) -> Scores:
    """Score one model. `logits` is float32[positions, vocabulary], and `following` is int32[positions]."""
    surprise = np.empty(len(logits))
    values, chances = np.empty((2, logits.shape[1]))
    for position, row in enumerate(logits):
        values[:] = row
        surprise[position] = _log_sum(values, chances) - values[following[position]]
    nothing = np.empty(0)
    return Scores(surprise, nothing, nothing, np.empty(0, np.bool_))


def scores_of_two(logits: NDArray[np.float32], base: NDArray[np.float32], following: NDArray[np.int32]) -> Scores:
    """Score a model and its base. `logits` and `base` are float32[positions, vocabulary].

    For the base P and the model Q, KL(P || Q) = E_P[log P - log Q]. Of several equal top logits, the lowest ID counts.
    """
    surprise, of_base, divergence = np.empty((3, len(logits)))
    agrees = np.empty(len(logits), np.bool_)
    q, p, chances = np.empty((3, logits.shape[1]))
    for position, (row, base_row) in enumerate(zip(logits, base, strict=True)):
        token = following[position]
        q[:], p[:] = row, base_row
        log_q = _log_sum(q, chances)
        log_p = _log_sum(p, chances)
        surprise[position] = log_q - q[token]
        of_base[position] = log_p - p[token]
        p -= q
        p *= chances  # A dot product is slower: BLAS takes 2.8 ms to start its threads, and this line takes 0.03 ms.
        divergence[position] = max(float(p.sum()) / float(chances.sum()) + log_q - log_p, 0.0)  # max() propagates NaN
        agrees[position] = row.argmax() == base_row.argmax()
    return Scores(surprise, of_base, divergence, agrees)


def _log_sum(logits: NDArray[np.float64], chances: NDArray[np.float64]) -> float:
    """Return the logarithm of the sum of the exponentials, and set `chances` to a multiple of the probabilities."""
    most = logits.max()
    np.subtract(logits, most, out=chances)
    np.exp(chances, out=chances)
    return float(most + np.log(chances.sum()))


def check_same_vocabulary(model: Backend, base: Backend) -> None:
    """Raise UsageError unless both models have the same tokens, because the divergence is a sum over all tokens."""
    sizes = model.info.vocabulary_size, base.info.vocabulary_size
    words = difference_in_words(model, base)
    if not words and sizes[0] != sizes[1]:
        words = f"{model.info.path}: {sizes[0]:,} tokens, but {sizes[1]:,} in {base.info.path}"
    if words:
        raise UsageError(f"different vocabularies: {words}", hint="compare quantizations of the same model")


def scores_of_chunks(model: Backend, base: Backend | None, chunks: Sequence[Chunk]) -> Iterator[Scores]:
    """Yield the scores of each chunk. The models alternate after every 64 MB of logits.

    Raises the errors of `Backend.forward`, and LlmrunError if a model computes numbers that are not finite.
    """
    most = rows_at_a_time(model.info.vocabulary_size)
    backends = [model] if base is None else [model, base]
    for number, chunk in enumerate(chunks, 1):
        batch = batch_of(chunk.inputs, 0, 0, chunk.first)
        for backend in backends:
            backend.kv.free(0)
        parts, done = [], 0
        for logits, *others in zip(*(logits_in_slices(backend, batch, most) for backend in backends), strict=True):
            following = chunk.following[done : done + len(logits)]
            parts.append(scores_of_two(logits, others[0], following) if others else scores_of(logits, following))
            done += len(following)
        scores = Scores.joined(parts)
        check_finite(model, scores.surprise, f"chunk {number}")
        if base is not None:
            check_finite(base, scores.base, f"chunk {number}")
        yield scores


def check_finite(backend: Backend, surprise: NDArray[np.float64], where: str) -> None:
    """Raise LlmrunError if the surprises of a model's tokens are not finite. `where` names the part of the text."""
    if not np.isfinite(surprise).all():
        path = backend.info.path
        raise LlmrunError(
            f"{path}: {where}: the model computed logits that are not finite numbers",
            hint=f"check the file: llmrun verify {path}",
        )


PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Perplexity:
    """The perplexity of a model.

    value        e to the power of the mean surprise, with its interval of 95 %
    token_error  the standard error that llama-perplexity prints after "+/-". It assumes that the surprises of
                 neighbouring tokens are independent, and covers the true value in 68 % of cases if they are
    """

    value: Interval
    token_error: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing a model with its base.

    divergence   the mean of KL(base || model) in nats
    percentiles  the percentiles of the divergence, for each of PERCENTILES
    maximum      the largest divergence
    same_top     the proportion of positions where both models have the same most likely token
    ratio        the perplexity of the model divided by the perplexity of the base, computed from the same tokens
    """

    divergence: Interval
    percentiles: tuple[float, ...]
    maximum: float
    same_top: Interval
    ratio: Interval


@dataclass(frozen=True, slots=True)
class TextResult:
    """The result for a text. `base` and `comparison` are None if the model was not compared with another model."""

    chunks: int
    scored: int
    model: Perplexity
    base: Perplexity | None
    comparison: Comparison | None


def summarized(chunks: Sequence[Scores]) -> TextResult:
    """Summarize the scores of at least one chunk. All chunks must have the same number of scored tokens.

    The intervals are computed from the chunks' means, because errors within a chunk are correlated. With fewer
    than ENOUGH_PARTS chunks, the intervals are infinite.
    """
    surprise = np.array([chunk.surprise for chunk in chunks])
    model = _perplexity(surprise)
    if not chunks[0].base.size:
        return TextResult(len(chunks), surprise.size, model, None, None)
    base = np.array([chunk.base for chunk in chunks])
    divergence = np.array([chunk.divergence for chunk in chunks])
    agrees = np.array([chunk.agrees for chunk in chunks])
    mean = mean_of_series(divergence.mean(axis=1))
    comparison = Comparison(
        divergence=mean._replace(low=max(mean.low, 0.0)),  # divergences are never negative
        percentiles=tuple(np.percentile(divergence, PERCENTILES).tolist()),
        maximum=float(divergence.max()),
        same_top=proportion(agrees.sum(axis=1).tolist(), agrees.shape[1]),
        ratio=mean_of_series((surprise - base).mean(axis=1)).exponential(),
    )
    return TextResult(len(chunks), surprise.size, model, _perplexity(base), comparison)


def _perplexity(surprise: NDArray[np.float64]) -> Perplexity:
    """Return the perplexity from the surprise of each scored token, float64[chunks, scored]."""
    value = mean_of_series(surprise.mean(axis=1)).exponential()
    error = float(surprise.std() / math.sqrt(max(1, surprise.size - 1)))
    return Perplexity(value, value.estimate * error)


class Source(NamedTuple):
    """A model file and the options for opening it."""

    path: Path
    options: OpenOptions


def _check_predicts(file: GGUFFile) -> None:
    """Raise UsageError if a file contains an encoder, which has no logits."""
    if is_encoder(file):
        raise UsageError(f"{file.path.stem} computes embeddings and predicts no text", hint="name another model")


@contextmanager
def opened(model: Source, base: Source | None) -> Iterator[list[Backend]]:
    """Open a model and its optional base, yield a list with both in this order, and close them at the end.

    Raises the errors of `open_backend`, such as DoesNotFit if the base does not fit beside the model. Raises UsageError
    if the models have different vocabularies, or, before the weights are read, if a model has no logits.
    """
    with ExitStack() as held:
        backend = open_backend(model.path, replace(model.options, on_header=_check_predicts))
        held.callback(backend.close)
        if base is None:
            yield [backend]
            return
        # Our own cache uses memory only when it is filled. llama.cpp has already filled its cache with zeros.
        reserved = backend.info.kv_bytes if backend.info.backend == "cpu" else 0
        try:
            other = open_backend(base.path, replace(base.options, reserved_memory=reserved, on_header=_check_predicts))
        except DoesNotFit as error:
            raise DoesNotFit(
                f"both models must fit in memory at the same time: {error}",
                hint="close other programs, or compare smaller models",
            ) from error
        held.callback(other.close)
        check_same_vocabulary(backend, other)
        yield [backend, other]
