"""Implements the input, progress and output of `llmrun embed` and `llmrun rerank`.

The texts come from arguments, lines, JSON lines or whole files. The output is vectors or rankings.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from llmrun.backends.base import AUTO
from llmrun.backends.registry import open_backend
from llmrun.base.amounts import counted
from llmrun.base.errors import Cancelled, UsageError, kernel_warnings_told
from llmrun.base.types import Pooling, named_pooling
from llmrun.cli.answers.answering import cancelling, model_files, smaller_ones_named, tell_of_too_many_threads
from llmrun.cli.arguments.prompts import STDIN, checked_text, read_stdin, read_text
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import visible_json
from llmrun.engine.constraint.strict_json import parse
from llmrun.jobs.batching.journal import MORE_ROOM, new_file, remove_leftovers, resolved
from llmrun.options.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.base.types import ModelInfo
    from llmrun.engine.embedding import Embedder, EmbeddingJob, InputReader
    from llmrun.formats.gguf.reader import GGUFFile

_JSON_LINES: Final = (".jsonl", ".ndjson")
# The text of a JSON line is in llmrun's field, in OpenAI's field, or in a field that is common in data sets.
_FIELDS: Final = ("text", "input", "content", "document")


class Input(NamedTuple):
    """A text to embed or to rank.

    place  the place of the text in error messages
    name   the text's name in the output, such as a file name, or ""
    """

    text: str
    place: str
    name: str = ""


def read_texts(words: Sequence[str], file: Path | None) -> list[Input]:
    """Return the texts in arguments or, without arguments, the lines of a file or of standard input (`-`).

    Raises UsageError if there are both arguments and a file, if there is no text, or if a file cannot be read.
    """
    if words and file is not None:
        raise UsageError("the texts were given twice: as arguments and with --file")
    given = () if list(words) == [STDIN] else words
    found = [Input(checked_text(word, "text"), f"text {number}") for number, word in enumerate(given, 1)]
    found = found or _lines(STDIN if file is None else str(file))
    if not found:
        raise UsageError(
            "no texts given", hint='give them as in llmrun embed -m MODEL "a text", or one per line on standard input'
        )
    return found


def read_documents(names: Sequence[str]) -> list[Input]:
    """Return the documents in files. JSON Lines files and standard input (`-`) contain one document per line.

    Raises UsageError if there is no document, if a document is empty, or if a file cannot be read.
    """
    found: list[Input] = []
    for name in names or [STDIN]:
        if name == STDIN or name.endswith(_JSON_LINES):
            found += [each._replace(name=each.name or each.place) for each in _lines(name)]
        else:
            found.append(Input(read_text(Path(name), "document"), name, name))
    if not found:
        hint = 'name their files, as in llmrun rerank -m MODEL "a query" docs/*.txt'
        raise UsageError("no documents given", hint=hint)
    for each in found:
        if not each.text.strip():
            raise UsageError(f"{each.place}: the document is empty", hint="leave out this document")
    return found


def _lines(name: str) -> list[Input]:
    """Return the text of each non-empty line, and print how many empty lines were skipped."""
    whole = read_stdin("texts, one per line,") if name == STDIN else read_text(Path(name), "--file")
    is_json = name.endswith(_JSON_LINES) or (name == STDIN and whole.lstrip().startswith("{"))
    file = "stdin" if name == STDIN else name
    # Texts may contain other characters at which `splitlines` splits, such as U+2028.
    lines = whole.split("\n")
    texts = {f"{file}:{number}": line for number, line in enumerate(lines, 1) if line.strip()}
    if texts and (empty := len(lines) - len(texts)):
        out.note(f"{file}: {counted(empty, 'empty line')} left out, so texts are numbered without them")
    return [
        _of_json(line, place) if is_json else Input(line.removesuffix("\r"), place) for place, line in texts.items()
    ]


def _of_json(line: str, place: str) -> Input:
    """Return the text of a JSON line, which is a string or an object. Raises UsageError."""
    try:
        found = parse(line)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UsageError(f"{place}: a string has an unpaired surrogate") from None
    except RecursionError:
        raise UsageError(f"{place}: the JSON is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{place}: not valid JSON: {error}") from None
    if isinstance(found, str):
        return Input(found, place)
    text = next((found[name] for name in _FIELDS if name in found), None) if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise UsageError(
            f"{place}: no text: must be a string, or an object with {', '.join(_FIELDS[:-1])} or {_FIELDS[-1]}"
        )
    id_ = found.get("id", found.get("custom_id", ""))
    return Input(text, place, id_ if isinstance(id_, str) else json.dumps(id_, ensure_ascii=False))


_ARRAY, _LINES = ".npy", ".jsonl"


def check_output(path: Path, source: Path | None) -> None:
    """Check the path of the output file before vectors are computed. An existing file will be replaced.

    source  the file with the texts, or None

    Raises UsageError if the name does not specify the format, if the path is a folder or a pipe, if the folder is
    missing or cannot be written, or if the path is the source.
    """
    if path.suffix not in (_ARRAY, _LINES):
        raise UsageError(f"--output: {path}: the name must end in {_ARRAY} or {_LINES}")
    folder = resolved(path).parent
    if not folder.is_dir():
        raise UsageError(f"--output: {path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--output: {path}: the folder {folder} cannot be written")
    if path.exists() and not path.is_file():
        raise UsageError(f"--output: {path}: not a file")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise UsageError(f"--output: {path}: the output must not be the input")


def write_vectors(vectors: Sequence[NDArray[np.float32]], inputs: Sequence[Input], path: Path | None) -> None:
    """Write vectors as float32[texts, dimensions] to a .npy file, or as JSON lines to a file or stdout.

    A file is renamed to its final name when it is complete. Raises DoesNotFit and LlmrunError.
    """
    if path is None:
        out.lines(_lines_of(vectors, inputs))
        return
    lines = (f"{line}\n".encode() for line in _lines_of(vectors, inputs))
    target = resolved(path)
    remove_leftovers(target)
    with new_file(target, hint=MORE_ROOM) as file, open(file.fileno(), "wb", closefd=False) as stream:
        stream.writelines(_array_of(vectors) if path.suffix == _ARRAY else lines)


def _array_of(vectors: Sequence[NDArray[np.float32]]) -> Iterator[bytes]:
    """Yield the parts of a .npy file. `numpy.save` is not used because it does not report why a write fails."""
    from numpy.lib import format as npy

    header = io.BytesIO()
    shape = (len(vectors), len(vectors[0]))
    npy.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    yield header.getvalue()
    for vector in vectors:
        yield vector.astype("<f4").tobytes()


def _lines_of(vectors: Sequence[NDArray[np.float32]], inputs: Sequence[Input]) -> Iterator[str]:
    for index, (vector, each) in enumerate(zip(vectors, inputs, strict=True)):
        name = {"id": each.name} if each.name else {}
        start = visible_json(json.dumps({"index": index, **name}, ensure_ascii=False))
        # Each feature is written with the fewest digits that yield the same float32.
        features = ", ".join(str(feature) for feature in vector)
        yield f'{start[:-1]}, "embedding": [{features}]}}'


def write_ranking(scores: Sequence[float], documents: Sequence[Input], top: int | None, *, as_json: bool) -> None:
    """Print the documents with their scores, the best first. Documents with equal scores keep their order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top]
    if as_json:
        results = [
            {"index": index, "document": documents[index].name, "relevance_score": scores[index]} for index in order
        ]
        out.json({"results": results})
        return
    out.lines(f"{scores[index]:10.4f}  {documents[index].name}" for index in order)


_TEXTS_AT_A_TIME: Final = 32  # the maximum number of texts in a pass


class OpenEmbedder:
    """An open model that computes vectors and scores."""

    def __init__(self, embedder: Embedder, reader: InputReader, info: ModelInfo) -> None:
        self._embedder, self._reader, self.info = embedder, reader, info

    def vectors(
        self, texts: Sequence[Input], *, dimensions: int | None, normalize: bool, truncate: bool
    ) -> list[NDArray[np.float32]]:
        """Return the vector of each text. Raises UsageError, ContextExceeded and, after Ctrl-C, SystemExit."""

        def read(number: int) -> list[int]:
            return self._reader.tokens_of(texts[number].text, texts[number].place, truncate=truncate)

        from llmrun.engine.embedding import EmbeddingJob

        job = EmbeddingJob((), lambda job: None, dimensions, normalize)
        return self._results(job, len(texts), read, scores=False)

    def scores(self, query: str, documents: Sequence[Input], *, truncate: bool) -> list[float]:
        """Return the score of each document. Raises the errors of `vectors`."""

        def read(number: int) -> list[int]:
            document = documents[number]
            return self._reader.pair_of(query, document.text, document.place, truncate=truncate)

        from llmrun.engine.embedding import EmbeddingJob

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
def open_embedder(
    settings: Settings, pooling: Pooling | None = None, *, scores: bool = False
) -> Iterator[OpenEmbedder]:
    """Find the model's file, download it if necessary, and open it.

    This function may raise any LlmrunError from the hub or a backend. If the model's header shows that the model cannot
    be used, UsageError is raised before the weights are read.

    pooling  the pooling to use instead of the model's own
    scores   whether to rank documents instead of computing vectors
    """
    with model_files(settings) as files:
        from llmrun.engine.embedding import Embedder, InputReader, check_purpose
        from llmrun.engine.slots import SequenceSlots

        def check(file: GGUFFile) -> None:
            named = named_pooling(file.metadata, file.string("general.architecture"))
            check_purpose(files.found.name, pooling or named or Pooling.LAST, scores=scores)

        tell_of_too_many_threads(settings)
        options = replace(
            files.options,
            max_sequences=_TEXTS_AT_A_TIME,
            kv_tokens=AUTO,
            progress=files.loading,
            explain=lambda words: out.detail(f"backend    {words}"),
            on_header=check,
        )
        with kernel_warnings_told(out.note), smaller_ones_named(files.found.entry):
            backend = open_backend(files.found.path, options)
        try:
            files.loading.end()
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
