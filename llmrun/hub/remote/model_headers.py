"""Reads GGUF headers of remote models with HTTP range requests, which transfer only a few hundred kilobytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.base.errors import LlmrunError, ModelNotFound, NetworkError, UnsupportedModel
from llmrun.formats.gguf.remote_header import read_remote_header, read_sibling_header
from llmrun.formats.gguf.source import RangeSource
from llmrun.hub.names import Artifact, HubSource, RemoteFile, UrlSource
from llmrun.hub.remote import http_ranges, huggingface
from llmrun.hub.remote.http_ranges import Patience, RangeResponse, Remote, TryAgain

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.formats.gguf.source import Source
    from llmrun.hub.progress_reporter import Reporter

_MOST_SKIPPED = 16 << 20  # the maximum bytes to discard if a server ignores the range and sends the file from its start
_AT_ONCE = 6  # parallel header requests; most of their time is latency
_LABEL = "reading headers"


def read_header(artifact: Artifact, known: GGUFFile | None = None) -> GGUFFile:
    """Read a remote model's header.

    The result has no tensor data, and lacks metadata that does not affect the memory footprint (see remote_header.py).
    Raises NetworkError, ModelNotFound, ModelFileError, or UnsupportedModel if the source has no range support.

    known  the header of another quantization of the same model; it reduces the transfer to a few kilobytes
    """
    first, *others = artifact.files
    shards = {Path(file.path).name: file for file in others}

    def open_shard(name: str) -> Source:
        if name not in shards:
            raise ModelNotFound(f"{artifact.name}: {name} is not one of its {len(artifact.files)} files")
        return _ranges(artifact, shards[name])

    source = _ranges(artifact, first)
    if known is None:
        return read_remote_header(source, open_shard)
    return read_sibling_header(source, known, open_shard)


def _ranges(artifact: Artifact, file: RemoteFile) -> RangeSource:
    remote = _remote(artifact, file)

    def fetch(start: int, end: int) -> bytes:
        patience = Patience(remote.file.path, remote.file.size, 0)
        while True:
            try:
                with remote.open(start, end, "") as answer:
                    return _bytes_of(answer, start, end)
            except TryAgain as trouble:
                time.sleep(patience.wait_after(trouble, 0))

    return RangeSource(fetch, remote.file.size, Path(remote.file.path))


def _remote(artifact: Artifact, file: RemoteFile) -> Remote:
    source = artifact.source
    if isinstance(source, HubSource):
        return huggingface.remote_file(source, artifact.commit, file)
    if isinstance(source, UrlSource):
        return http_ranges.remote_file(source, file)
    raise UnsupportedModel("headers cannot be read from a wheel before it is downloaded")


def _bytes_of(answer: RangeResponse, start: int, end: int) -> bytes:
    begin = start if answer.whole else 0
    if begin > _MOST_SKIPPED:
        raise NetworkError(
            "the server does not support range requests", hint="download the model first with `llmrun pull`"
        )
    data = bytearray()
    for piece in answer.pieces:
        data += piece
        if len(data) >= begin + end - start:
            return bytes(data[begin : begin + end - start])
    raise TryAgain(f"the connection closed after {len(data):,} of {begin + end - start:,} bytes")


def read_headers(
    artifacts: Sequence[Artifact], reporter: Reporter, known: GGUFFile | None = None
) -> list[GGUFFile | LlmrunError]:
    """Read the headers of several quantizations of a model. Returns one header or error per quantization, in order.

    The first header that can be read, or `known`, determines which ranges of the other files to request. After the
    first header, the other headers are read in parallel.
    """
    found: dict[int, GGUFFile | LlmrunError] = {}
    for number, artifact in enumerate(artifacts if known is None else ()):
        reporter.progress(_LABEL, number, len(artifacts))
        found[number] = answer = _read_or_error(artifact, None)
        if not isinstance(answer, LlmrunError):
            known = answer
            break
    rest = range(len(found), len(artifacts))
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        waiting = {pool.submit(_read_or_error, artifacts[number], known): number for number in rest}
        for done in as_completed(waiting):
            found[waiting[done]] = done.result()
            reporter.progress(_LABEL, len(found), len(artifacts))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C must not wait for pending requests
    reporter.progress(_LABEL, len(artifacts), len(artifacts))
    return [found[number] for number in range(len(artifacts))]


def _read_or_error(artifact: Artifact, known: GGUFFile | None) -> GGUFFile | LlmrunError:
    try:
        return read_header(artifact, known)
    except LlmrunError as error:
        return error
