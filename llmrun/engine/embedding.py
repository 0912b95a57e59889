"""Computes the vectors and scores of texts on a backend, a few rows at a time.

Each text, or pair of a query and a document, becomes one sequence of tokens, whose hidden states are turned into a
vector or a score.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from llmrun.base.errors import ContextExceeded, KVFull, LlmrunError, ModelFileError, UsageError
from llmrun.base.types import HIDDEN, Batch, Pooling, named_pooling
from llmrun.engine.adapters import AdaptedTokens, adapted_tokens, scales_of_rows
from llmrun.engine.costs import MOST_ROWS
from llmrun.engine.slots import Neighbours

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import Backend
    from llmrun.base.types import ModelInfo
    from llmrun.engine.slots import SequenceSlots, Slot
    from llmrun.model.tokenizers.text_tokenizer import Tokenizer

_TEMPLATE: Final = "tokenizer.chat_template.rerank"
_PAIR_KEYS: Final = ("model", "pre", "add_eos_token", "add_sep_token", "seperator_token_id")  # GGUF's spelling
# BPE vocabularies whose pairs have a separator although their files do not declare one.
_SEPARATED: Final = ("jina-v1-en", "jina-v2-code", "roberta-bpe")
MOST_TOKENS: Final = 1 << 20  # tokens in a call; without a limit, a small request could require gigabytes and days


def limited_inputs(texts: Iterable[list[int]]) -> list[Sequence[int]]:
    """Return the texts of a call as arrays with 4 bytes per token, to save memory while hundreds of calls wait.

    Raises UsageError if the texts contain more than MOST_TOKENS tokens in total.
    """
    found, total = list[Sequence[int]](), 0
    for tokens in texts:
        total += len(tokens)
        if total > MOST_TOKENS:
            raise too_many_tokens(total)
        found.append(array("i", tokens))
    return found


def too_many_tokens(total: int) -> UsageError:
    """Return the error for a call whose inputs contain at least `total` tokens."""
    words = f"too many tokens: the inputs have {total:,} or more, the limit for a call is {MOST_TOKENS:,}"
    return UsageError(words, hint="send fewer inputs in a call")


class InputReader:
    """Reads the inputs of one model. `place` names an input in error messages, such as "input 3".

    truncated  how many inputs were truncated so far
    """

    def __init__(self, info: ModelInfo, tokenizer: Tokenizer, allow: str) -> None:
        """Create a reader. `allow` explains in error messages how to allow truncation, such as "use --truncate"."""
        self.truncated = 0
        self._allow = allow
        self._most, self._vocabulary_size = info.context_size, info.vocabulary_size
        self._tokenizer = tokenizer
        self._template = str(info.metadata.get(_TEMPLATE, ""))
        # The tokens that the tokenizer puts around a text, such as [CLS] and [SEP].
        frame = tokenizer.encode("", add_special=True, parse_special=False).tolist()
        n_before = int(frame[:1] == [tokenizer.bos_id])
        self._before, self._after = frame[:n_before], frame[n_before:]
        self._between, self._end = _around_documents(info, tokenizer.eos_id, self._after)

    def tokens_of(self, text: str | Sequence[int], place: str, *, truncate: bool) -> list[int]:
        """Return the tokens of a text with the tokenizer's special tokens, or return given tokens unchanged.

        If a text is too long, `truncate` cuts off its end; without `truncate`, the text raises ContextExceeded. Raises
        UsageError if the text contains no tokens or if a token is not in the vocabulary.
        """
        if isinstance(text, str):
            plain = self._plain(text)
            return self._fitted(lambda tokens: [*self._before, *tokens, *self._after], plain, place, truncate=truncate)
        for token in text:
            if not 0 <= token < self._vocabulary_size:
                most = self._vocabulary_size
                raise UsageError(f"no such token: {place}: {token}, the vocabulary has {most:,} tokens")
        return self._fitted(lambda tokens: tokens, list(text), place, truncate=truncate)

    def pair_of(self, query: str, document: str, place: str, *, truncate: bool) -> list[int]:
        """Return the tokens of a query and a document, in the same form as in llama-server.

        `truncate` cuts off the end of the document if the pair is too long. Raises the errors of `tokens_of`.
        """
        if self._template:
            return self._fitted(
                lambda tokens: self._rendered(query, tokens), self._plain(document), place, truncate=truncate
            )
        beginning = [*self._before, *self._plain(query), *self._between]
        return self._fitted(
            lambda tokens: [*beginning, *tokens, *self._end], self._plain(document), place, truncate=truncate
        )

    def _rendered(self, query: str, document: Sequence[int]) -> list[int]:
        """Return the tokens of the rendered template. Control strings in the query and the document remain text."""
        protect, tokenizer = self._tokenizer.protect, self._tokenizer
        text = tokenizer.decode(document).decode(errors="ignore")
        parts = [part.replace("{query}", protect(query)) for part in self._template.split("{document}")]
        tokens: list[int] = tokenizer.encode_rendered(protect(text).join(parts)).tolist()
        return tokens

    def _plain(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special=False, parse_special=False).tolist()
        return tokens

    def _fitted(
        self, framed: Callable[[list[int]], list[int]], plain: list[int], place: str, *, truncate: bool
    ) -> list[int]:
        """Return framed(plain), with fewer plain tokens if the result is too long and may be truncated."""
        found = framed(plain)
        if not found:
            raise UsageError(f"{place} is empty: it has no tokens")
        if len(found) <= self._most:
            return found
        kept = len(plain) - (len(found) - self._most)
        if not truncate or kept <= 0:
            raise ContextExceeded(
                f"{place} does not fit in the context: {len(found):,} tokens exceed the limit of {self._most:,}",
                hint=f"divide it into parts, or {self._allow} to leave out its end",
            )
        self.truncated += 1
        return framed(plain[:kept])[: self._most]


def _around_documents(info: ModelInfo, eos: int | None, after: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the tokens before and after the document of a pair, as in llama-server.

    eos    the vocabulary's EOS token, or None
    after  the tokens after a single text
    """
    keys = {key: info.metadata.get(f"tokenizer.ggml.{key}") for key in _PAIR_KEYS}
    model, pre, add_eos, add_sep, sep = keys.values()
    if add_eos is None:
        add_eos = model == "t5"
    if add_sep is None:
        add_sep = model == "bert" or pre in _SEPARATED
    sep = sep if sep is not None else next(iter(after), None)
    end = [eos if eos is not None else sep] if add_eos else []
    between = [*end, *([sep] if add_sep else [])]
    return [token for token in between if token is not None], [token for token in end if token is not None]


def pooling_of(info: ModelInfo) -> Pooling:
    """Return the pooling that the model was trained with.

    If the file does not name a pooling, the default is the last token with a causal mask, or the mean without one.
    """
    named = named_pooling(info.metadata, info.architecture)
    return named or (Pooling.LAST if info.has_logits else Pooling.MEAN)


def first_wanted(pooling: Pooling, tokens: int, *, is_causal: bool) -> slice:
    """Return the positions whose hidden states a text of this many tokens needs."""
    match pooling:
        case Pooling.MEAN:
            return slice(0, tokens)
        case Pooling.LAST:
            return slice(tokens - 1, tokens)
        case Pooling.RANK if is_causal:
            return slice(tokens - 1, tokens)
    return slice(0, 1)


def pooled(hidden: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean of a text's hidden states, float32[wanted positions, features]."""
    mean: NDArray[np.float32] = hidden.mean(0, dtype=np.float64).astype(np.float32)
    return mean


def check_finite(vector: NDArray[np.float32], number: int) -> None:
    """Raise ModelFileError if a value of the vector of input `number` is NaN or infinite."""
    if not np.isfinite(vector).all():
        raise ModelFileError(
            f"invalid model output: the vector of input {number} has values that are not finite",
            hint="check the model file with llmrun verify, or try another backend",
        )


def cut_to(vector: NDArray[np.float32], dimensions: int | None) -> NDArray[np.float32]:
    """Return the first `dimensions` features of a vector, or all. Raises UsageError if the vector is shorter.

    Models with Matryoshka training order the features by importance.
    """
    if dimensions is None:
        return vector
    if not 1 <= dimensions <= len(vector):
        raise UsageError(f"dimensions: must be 1 to {len(vector)}, the size of this model's vectors, not {dimensions}")
    return vector[:dimensions]


def normalized(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a vector scaled to length 1. Zero vectors stay zero."""
    length = np.sqrt(np.square(vector, dtype=np.float64).sum())
    unit: NDArray[np.float32] = (vector / length if length else vector).astype(np.float32)
    return unit


def score_of(labels: NDArray[np.float32]) -> float:
    """Return the score of a document, given the model's logits for the labels.

    With one label, the score is a logit. With several labels, the score is the probability of the first one, such as
    "yes".
    """
    if len(labels) == 1:
        return float(labels[0])
    weights = np.exp(labels.astype(np.float64) - labels.max())
    return float(weights[0] / weights.sum())


@dataclass(slots=True, eq=False)
class EmbeddingJob:
    """A job of embedding or scoring: the texts of one call, its options, and the results.

    texts       the tokens of each text
    on_done     called with the job once it has all of its results or an error
    dimensions  the number of features to keep, or None for all
    normalize   whether vectors have length 1
    tenant      the owner of the job
    results     float32[features] for each text, in order; scores are float32[1]
    error       why the job failed, or None
    """

    texts: Sequence[Sequence[int]]
    on_done: Callable[[EmbeddingJob], None]
    dimensions: int | None = None
    normalize: bool = True
    tenant: str = ""
    results: list[NDArray[np.float32]] = field(default_factory=list)
    error: LlmrunError | None = None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


class JobTurns:
    """The unfinished jobs. Tenants are served round-robin, and so are the jobs of a tenant. Thread-safe."""

    def __init__(self) -> None:
        self._tenants: dict[str, deque[EmbeddingJob]] = {}  # tenants with jobs; the first tenant is next
        self._lock = Lock()

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def __contains__(self, job: EmbeddingJob) -> bool:
        return job in self._tenants.get(job.tenant, ())

    def add(self, job: EmbeddingJob) -> None:
        with self._lock:
            self._tenants.setdefault(job.tenant, deque()).append(job)

    def remove(self, job: EmbeddingJob) -> None:
        """Remove a job. Unknown jobs are ignored."""
        with self._lock:
            jobs = self._tenants.get(job.tenant, deque())
            if job in jobs:
                jobs.remove(job)
            if not jobs:
                self._tenants.pop(job.tenant, None)

    def next_texts(self) -> Iterator[tuple[EmbeddingJob, int]]:
        """Yield the jobs and numbers of all texts without results, in the order in which they should run.

        The next call starts with another tenant, and the current tenant will continue with another job.
        """
        with self._lock:
            queues = [deque((job, len(job.results)) for job in jobs) for jobs in self._tenants.values()]
            if queues:
                tenant = next(iter(self._tenants))
                jobs = self._tenants[tenant] = self._tenants.pop(tenant)
                jobs.rotate(-1)
        while queues:
            for queue in queues:
                job, number = queue.popleft()
                yield job, number
                if number + 1 < len(job.texts):
                    queue.append((job, number + 1))
            queues = [queue for queue in queues if queue]


LONGEST_WAIT_S: Final = 5.0  # how long a job may lack room before new requests have to wait


@dataclass(slots=True, eq=False)
class _Text:
    """A text that is being computed.

    number   the index of the text in its job
    slot     the slot that holds the first tokens of the text
    cached   the list of the slot's tokens after the last pass; a request that takes the slot replaces this list
    hidden   the wanted hidden states so far, float32[positions, features] for each pass
    """

    number: int
    tokens: Sequence[int]
    adapters: AdaptedTokens | None
    slot: Slot
    cached: list[int]
    hidden: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def is_lost(self) -> bool:
        return self.slot.busy or self.slot.tokens is not self.cached


class _Part(NamedTuple):
    """The rows of a text in a pass: the text's tokens from `first` to `end`."""

    job: EmbeddingJob
    text: _Text
    first: int
    end: int


def check_purpose(name: str, pooling: Pooling, *, scores: bool) -> None:
    """Raise UsageError if a model with this pooling computes no scores, or computes nothing but scores."""
    ranks = pooling is Pooling.RANK
    if scores and not ranks:
        raise UsageError(
            f"{name} computes embeddings but cannot rank documents",
            hint="use a reranker, such as hf:ggml-org/Qwen3-Reranker-0.6B-Q8_0-GGUF",
        )
    if ranks and not scores:
        raise UsageError(f"{name} ranks documents but does not compute embeddings", hint="use it with `llmrun rerank`")


class Embedder:
    """Computes the results of jobs on the idle sequences of a backend.

    Short texts are in the KV cache only during one call of `step`. With a causal mask, longer texts are divided among
    passes. Between two passes, a request may take over the sequence of a text or of a cached prefix; the text is then
    computed again from its beginning. The bits of a result do not depend on other texts or on how its text is divided.
    """

    def __init__(
        self,
        backend: Backend,
        slots: SequenceSlots,
        pooling: Pooling | None = None,
        neighbours: Neighbours | None = None,
        on_pass: Callable[[int], None] = lambda rows: None,
    ) -> None:
        """Create an embedder.

        pooling  replaces the model's own pooling
        on_pass  called before a pass with the number of its rows
        """
        self._backend, self._slots = backend, slots
        self._neighbours, self._on_pass = neighbours or Neighbours(backend.kv), on_pass
        self.pooling = pooling or pooling_of(backend.info)
        self._divides = backend.info.has_logits  # without a causal mask, rows attend to later rows, too
        self._turns = JobTurns()
        self._begun: dict[EmbeddingJob, _Text] = {}  # texts that are partly in the cache
        self._waiting: dict[EmbeddingJob, float] = {}  # maps jobs that lack room to the start of their wait

    @property
    def idle(self) -> bool:
        return not self._turns

    def check(self, job: EmbeddingJob, *, scores: bool) -> None:
        """Raise UsageError if the model cannot compute the results of a job. Thread-safe."""
        info = self._backend.info
        if not info.hidden_size:
            raise UsageError(f"{info.name} does not compute embeddings on the {info.backend} backend")
        check_purpose(info.name, self.pooling, scores=scores)
        if job.dimensions is not None:
            cut_to(np.empty(info.hidden_size, np.float32), job.dimensions)

    def cancel(self) -> None:
        """Stop the current pass, or the next one, which then raises Cancelled. Signal handlers may call this method."""
        self._backend.cancel()

    def add(self, job: EmbeddingJob) -> None:
        """Add a job. Thread-safe."""
        self._turns.add(job)

    def drop(self, job: EmbeddingJob) -> None:
        """Forget a job, unless the job is done. Thread-safe."""
        self._turns.remove(job)

    def step(self) -> None:
        """Run one pass with texts of the jobs, chosen round-robin, or no pass if there is no room for any text.

        Raises Cancelled and BackendCrashed.
        """
        self._forget_lost()
        if not self.idle:
            parts = self._next_parts(self._neighbours.rows_beside_answers())
            if parts:
                self._run(parts)
        since = min(self._waiting.values(), default=math.inf)
        self._neighbours.hold_up(time.monotonic() - since > LONGEST_WAIT_S)

    def _forget_lost(self) -> None:
        """Forget the texts whose jobs were dropped or whose sequences were taken by requests."""
        self._waiting = {job: since for job, since in self._waiting.items() if job in self._turns}
        for job, text in list(self._begun.items()):
            if text.is_lost:
                del self._begun[job]
                self._note_waiting(job)
            elif job not in self._turns:
                del self._begun[job]
                self._slots.forget(text.slot)

    def _note_waiting(self, job: EmbeddingJob) -> None:
        """Record that a job lacks room because of requests or other texts."""
        self._waiting.setdefault(job, time.monotonic())

    def _next_parts(self, most: int) -> list[_Part]:
        """Choose the rows of the next pass: up to `most` rows, or all rows of one text that cannot be divided."""
        parts: list[_Part] = []
        blocks, left = 0, most  # cache blocks that the pass adds, and rows for which the pass still has room
        used = [text.slot for text in self._begun.values()]
        skipped = set[EmbeddingJob]()  # the other texts of these jobs must wait, because results are returned in order
        for job, number in islice(self._turns.next_texts(), MOST_ROWS):
            text = None if job in skipped else self._text(job, number, left, used, alone=not parts)
            part = None if text is None else _Part(job, text, *self._rows_of(text, left))
            needed = 0 if part is None else self._backend.kv.needed(part.text.slot.index, part.end)
            if part is None or not self._make_room(blocks + needed, used):
                if not parts and not skipped:
                    self._note_waiting(job)
                skipped.add(job)
                continue
            parts.append(part)
            blocks += needed
            left -= part.end - part.first
            if left < 1:
                break
        return parts

    def _rows_of(self, text: _Text, left: int) -> tuple[int, int]:
        """Return the first position of a text that the next pass runs, and the position after the last one."""
        first, n = len(text.cached), len(text.tokens)
        return first, min(first + left, n) if self._divides else n

    def _text(self, job: EmbeddingJob, number: int, left: int, used: list[Slot], *, alone: bool) -> _Text | None:
        """Return a text of a job with a slot, which is added to `used`, or None if the text cannot run now.

        left   rows for which the pass still has room
        alone  True if the text would be the first one of the pass
        """
        text, tokens = self._begun.get(job), job.texts[number]
        if text is not None and text.number == number:
            return text
        if not self._divides and not alone and len(tokens) > left:
            return None
        slot = self._slots.lend(used) if self._fits(tokens, left) else None
        if slot is None:
            return None
        used.append(slot)
        # The adapters of a text have the scales with which they were opened.
        adapters = adapted_tokens(None, self._backend.info.adapters, list(tokens))
        return _Text(number, tokens, adapters, slot, slot.tokens)

    def _fits(self, tokens: Sequence[int], most: int) -> bool:
        """Return whether a text is computed in one pass, or fits in the cache beside requests and begun texts.

        A text that does not fit could compete with a request for the same room forever.
        """
        if len(tokens) <= most or not self._divides:
            return True
        sizes = [len(tokens), *(len(text.tokens) for text in self._begun.values())]
        blocks = sum(-(-size // self._backend.kv.block_size) for size in sizes)
        return blocks <= self._neighbours.spare_blocks()

    def _make_room(self, blocks: int, used: Sequence[Slot]) -> bool:
        """Forget cached prefixes until this many blocks are free. Returns False if there are not enough prefixes."""
        while self._backend.kv.free_blocks < blocks:
            if not self._slots.forget_oldest_idle(used):
                return False
        return True

    def _run(self, parts: Sequence[_Part]) -> None:
        """Run a pass, and add the results of complete texts to their jobs."""
        want = [self._wanted(part) for part in parts]
        rows = [part.end - part.first for part in parts]
        batch = Batch(
            np.concatenate([np.array(part.text.tokens[part.first : part.end], np.int32) for part in parts]),
            np.repeat(np.array([part.text.slot.index for part in parts], np.int32), rows),
            np.concatenate([np.arange(part.first, part.end, dtype=np.int32) for part in parts]),
            np.concatenate(want),
            scales=scales_of_rows([(part.text.adapters, part.first, part.end) for part in parts]),
        )
        self._on_pass(sum(rows))
        try:
            hidden = self._backend.forward(batch).hidden
        except BaseException as error:
            for part in parts:  # the cache may still contain tokens of these texts
                self._begun.pop(part.job, None)
                self._slots.forget(part.text.slot)
            if not isinstance(error, KVFull):
                raise
            for part in parts:
                self._note_waiting(part.job)
            return
        ends = np.cumsum([np.count_nonzero(flags) for flags in want])
        for part, of_part in zip(parts, np.split(hidden, ends[:-1]), strict=True):
            self._take(part, of_part)

    def _wanted(self, part: _Part) -> NDArray[np.uint8]:
        """Return the outputs that a pass needs from the rows of a part (Batch.want)."""
        want = np.zeros(len(part.text.tokens), np.uint8)
        want[first_wanted(self.pooling, len(want), is_causal=self._divides)] = HIDDEN
        return want[part.first : part.end]

    def _take(self, part: _Part, hidden: NDArray[np.float32]) -> None:
        """Keep the hidden states of a part, and add the result to its job if the text is complete."""
        job, text = part.job, part.text
        text.hidden.append(hidden)
        if part.end < len(text.tokens):
            text.cached = self._slots.keep(text.slot, list(text.tokens[: part.end]))
            self._begun[job] = text
            return
        self._begun.pop(job, None)
        self._slots.forget(text.slot)
        self._waiting.pop(job, None)
        if job.error is not None:  # an earlier text of the pass has ended the job
            return
        try:
            job.results.append(self._result(job, text))
        except LlmrunError as error:
            job.error = error
        if job.error is not None or len(job.results) == len(job.texts):
            self.drop(job)
            job.on_done(job)

    def _result(self, job: EmbeddingJob, text: _Text) -> NDArray[np.float32]:
        vector = pooled(np.concatenate(text.hidden))
        check_finite(vector, text.number)
        if self.pooling is Pooling.RANK:
            return np.array([score_of(vector)], np.float32)
        vector = cut_to(vector, job.dimensions)
        return normalized(vector) if job.normalize else vector
