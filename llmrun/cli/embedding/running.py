"""Opens a model and computes the vectors or scores of texts, with their progress in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from llmrun.backends.base import AUTO
from llmrun.backends.select import open_backend
from llmrun.base.amounts import counted
from llmrun.base.errors import Cancelled
from llmrun.base.kernel_warnings import kernel_warnings_told
from llmrun.base.types import named_pooling
from llmrun.cli.answers.answering import cancelling
from llmrun.cli.answers.open_model import local_options, model_files, smaller_ones_named, tell_of_too_many_threads
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import show_loading
from llmrun.engine.embedding.embedder import Embedder
from llmrun.engine.embedding.inputs import InputReader
from llmrun.engine.embedding.jobs import EmbeddingJob
from llmrun.engine.slots import SequenceSlots

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.base.types import ModelInfo, Pooling
    from llmrun.cli.embedding.inputs import Input
    from llmrun.options.settings import Settings

_TEXTS_AT_A_TIME: Final = 32  # the most texts in a pass


class OpenEmbedder:
    """An open model, which computes vectors and scores."""

    def __init__(self, embedder: Embedder, reader: InputReader, info: ModelInfo) -> None:
        self._embedder, self._reader, self.info = embedder, reader, info

    def vectors(
        self, texts: Sequence[Input], *, dimensions: int | None, normalize: bool, truncate: bool
    ) -> list[NDArray[np.float32]]:
        """Return the vector of each text. Raises UsageError, ContextExceeded and, after Ctrl-C, SystemExit."""

        def read(number: int) -> list[int]:
            return self._reader.tokens_of(texts[number].text, texts[number].place, truncate=truncate)

        job = EmbeddingJob((), lambda job: None, dimensions, normalize)
        return self._results(job, len(texts), read, scores=False)

    def scores(self, query: str, documents: Sequence[Input], *, truncate: bool) -> list[float]:
        """Return the score of each document. Raises the errors of `vectors`."""

        def read(number: int) -> list[int]:
            document = documents[number]
            return self._reader.pair_of(query, document.text, document.place, truncate=truncate)

        job = EmbeddingJob((), lambda job: None)
        return [float(score[0]) for score in self._results(job, len(documents), read, scores=True)]

    def _results(
        self, job: EmbeddingJob, n: int, read: Callable[[int], list[int]], *, scores: bool
    ) -> list[NDArray[np.float32]]:
        self._embedder.check(job, scores=scores)
        job.texts = [read(number) for number in range(n)]
        if cut := self._reader.truncated:
            out.note(f"{cut:,} of {counted(n, 'text')} truncated to {self.info.context_size:,} tokens")
        self._embedder.add(job)
        try:
            with cancelling(self._embedder.cancel) as signals:
                while not self._embedder.idle:
                    self._embedder.step()
                    out.progress(f"{len(job.results):,} of {counted(n, 'text')}")
        except Cancelled:
            raise SystemExit(128 + signals[0]) from None
        finally:
            out.clear_progress()
        if job.error is not None:
            raise job.error
        return job.results


@contextmanager
def open_embedder(settings: Settings, pooling: Pooling | None = None) -> Iterator[OpenEmbedder]:
    """Find the model's file, download it if necessary, and open it.

    May raise any LlmrunError from the hub or a backend.

    pooling  replaces the model's own
    """
    with model_files(settings) as files:
        tell_of_too_many_threads(settings)
        options = replace(
            local_options(settings),
            max_sequences=_TEXTS_AT_A_TIME,
            kv_tokens=AUTO,
            progress=show_loading,
            explain=lambda words: out.detail(f"backend    {words}"),
        )
        with kernel_warnings_told(out.note), smaller_ones_named(files.found.entry):
            backend = open_backend(files.found.path, options)
        try:
            out.clear_progress()
            info = backend.info
            embedder = Embedder(backend, SequenceSlots(backend.kv, info.max_sequences), pooling)
            if pooling is None and info.has_logits and not named_pooling(info.metadata, info.architecture):
                out.note(
                    "this model was probably not trained for embeddings, because its file names no pooling; "
                    "using the last token"
                )
            out.detail(f"model      {files.found.name}: {info.path}")
            out.detail(f"pooling    {embedder.pooling.name.lower()}, {info.context_size:,} tokens of context")
            yield OpenEmbedder(embedder, InputReader(info, backend.tokenizer, "use --truncate"), info)
        finally:
            backend.close()
