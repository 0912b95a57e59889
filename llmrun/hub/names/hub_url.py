"""Parses URLs. A URL of the Hub becomes a HubSource, and a URL of any other .gguf file becomes a UrlSource."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from llmrun.base.errors import UsageError
from llmrun.hub.names.file_names import safe_segments
from llmrun.hub.names.model_sources import HubSource, UrlSource

if TYPE_CHECKING:
    from urllib.parse import SplitResult

_HUB_HOSTS = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})
LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")
_NOT_MODELS = frozenset({"datasets", "spaces", "docs", "models", "collections", "papers", "api"})


def hub_source_of(url: str) -> HubSource | None:
    """Parse the URL of a model or file on the Hub or on HF_ENDPOINT's host. Returns None for other hosts.

    The path is `/owner/name`, `/owner/name/tree/main` or `/owner/name/blob/main/file.gguf`. Instead of `blob`, it may
    contain `resolve` or `raw`. Raises UsageError for all other pages of the Hub.
    """
    from urllib.parse import unquote

    split = _split(url)
    path = _path_on_hub(split)
    if path is None:
        return None
    parts = [unquote(part) for part in path.strip("/").split("/")]
    if len(parts) >= 4 and parts[2] in ("blob", "resolve", "raw"):
        repository, revision, file = parts[:2], parts[3], parts[4:]
    elif len(parts) == 4 and parts[2] == "tree":
        repository, revision, file = parts[:2], parts[3], []
    else:
        repository, revision, file = parts, "main", []
    wrong = UsageError(
        f"model: {url[:300]!r}: not the URL of a model or a model file", hint="use hf:owner/name/file.gguf"
    )
    if len(repository) != 2 or repository[0] in _NOT_MODELS:
        raise wrong
    try:
        for part in (*repository, revision):
            safe_segments(part)
        if any("/" in part for part in (*repository, *file)):
            raise wrong
        if file:
            safe_segments("/".join(file))
    except UsageError:
        raise wrong from None
    return HubSource("/".join(repository), "/".join(file) or None, None, revision)


def url_source_of(url: str) -> tuple[UrlSource, str]:
    """Parse the URL of a .gguf file on any web server. Returns (source, file name).

    Raises UsageError if the URL does not name a .gguf file, or if it is an http:// URL of another machine, because a
    server cannot be authenticated without TLS.
    """
    from urllib.parse import unquote

    split = _split(url)
    if split.scheme != "https" and not LOOPBACK.fullmatch(split.hostname or ""):
        raise UsageError(f"model: {url[:300]!r}: http:// is only allowed for this machine", hint="use https://")
    file = unquote(split.path.rpartition("/")[2])
    if not file.lower().endswith(".gguf"):
        raise UsageError(f"model: {url[:300]!r}: not the URL of a .gguf file")
    try:
        safe_segments(file)
    except UsageError:
        raise UsageError(f"model: {url[:300]!r}: {file[:300]!r} is not a safe file name") from None
    return UrlSource(split._replace(fragment="").geturl()), file


def _split(url: str) -> SplitResult:
    from urllib.parse import urlsplit

    try:
        if not url.isascii() or not url.isprintable() or any(letter in url for letter in ' \\"<>^`{|}'):
            raise ValueError("it contains a character that must be written as %XX")
        split = urlsplit(url)
        if split.username is not None or split.password is not None:
            raise ValueError("it must not contain a user name or password")
        if not split.hostname or split.port == 0:
            raise ValueError("it has no host name")
    except ValueError as error:
        raise UsageError(f"model: {_without_password(url)[:300]!r}: not a valid URL: {error}") from error
    return split


def _without_password(url: str) -> str:
    return re.sub(r"//[^/]*@", "//...@", url)


def _path_on_hub(split: SplitResult) -> str | None:
    if split.hostname in _HUB_HOSTS and split.port in (None, 443):
        return split.path
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/")
    start = f"{split.scheme}://{split.netloc}{split.path}"
    if endpoint and start.lower().startswith(endpoint.lower() + "/"):
        return start[len(endpoint) :]
    return None
