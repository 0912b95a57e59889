"""Metadata and downloads of models at plain URLs on any web server."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote, urlsplit

from llmrun.base.errors import IntegrityError
from llmrun.hub.names.file_names import shards_of
from llmrun.hub.names.model_sources import Artifact, Expected, RemoteFile, UrlSource
from llmrun.hub.remote.http_ranges import Remote


def pin(source: UrlSource, expected: tuple[Expected, ...], *, name: str) -> Artifact:
    """Return the files that are available at the URL now, with the sizes that the server reports.

    Web servers do not publish digests, so a sha256 is known only if `expected` contains it. Raises NetworkError,
    ModelNotFound, or IntegrityError for unexpected sizes.
    """
    known = expected or tuple(Expected(shard) for shard in shards_of(file_name(source)))
    files = []
    for wanted in known:
        unmeasured = RemoteFile(wanted.file, 0, wanted.sha256)
        size = remote_file(source, unmeasured).measure()
        if wanted.size not in (None, size):
            raise IntegrityError(f"{wanted.file}: the server's file is {size:,} bytes, expected {wanted.size:,}")
        files.append(RemoteFile(wanted.file, size, wanted.sha256))
    return Artifact(name, source, tuple(files))


def file_name(source: UrlSource) -> str:
    """Return the file name at the end of the URL, percent-decoded."""
    return unquote(urlsplit(source.url).path.rpartition("/")[2])


def remote_file(source: UrlSource, file: RemoteFile) -> Remote:
    """Return a remote for the file at the URL or for another shard in the same folder."""

    def address() -> tuple[str, Mapping[str, str]]:
        split = urlsplit(source.url)
        folder = split.path.rpartition("/")[0]
        path = split.path if file.path == file_name(source) else f"{folder}/{quote(file.path)}"
        return split._replace(path=path).geturl(), {}

    return Remote(file, address)
