"""Models that any web server has: how large they are, and where they are kept."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote, urlsplit

from llmrun.errors import IntegrityError
from llmrun.hub.names.file_names import shards_of
from llmrun.hub.names.model_sources import Artifact, Expected, RemoteFile, UrlSource
from llmrun.hub.remote.http_ranges import Remote


def pin(source: UrlSource, expected: tuple[Expected, ...], *, name: str) -> Artifact:
    """What is at the address now: its size by the server's word, its sha256 only where `expected` has one.

    Raises NetworkError, ModelNotFound, and IntegrityError for a size that is not the one expected.
    """
    known = expected or tuple(Expected(shard) for shard in shards_of(file_name(source)))
    files = []
    for wanted in known:
        unmeasured = RemoteFile(wanted.file, 0, wanted.sha256)
        size = remote_file(source, unmeasured).measure()
        if wanted.size not in (None, size):
            raise IntegrityError(f"{wanted.file}: {size:,} bytes are there, {wanted.size:,} expected")
        files.append(RemoteFile(wanted.file, size, wanted.sha256))
    return Artifact(name, source, tuple(files))


def file_name(source: UrlSource) -> str:
    """The last part of the address, as a file is called."""
    return unquote(urlsplit(source.url).path.rpartition("/")[2])


def remote_file(source: UrlSource, file: RemoteFile) -> Remote:
    """A file beside the one of the address, or that one itself: the shards of a model lie together."""

    def address() -> tuple[str, Mapping[str, str]]:
        split = urlsplit(source.url)
        folder = split.path.rpartition("/")[0]
        path = split.path if file.path == file_name(source) else f"{folder}/{quote(file.path)}"
        return split._replace(path=path).geturl(), {}

    return Remote(file, address)
