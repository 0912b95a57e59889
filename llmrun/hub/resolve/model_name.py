"""Parses model names: paths, catalogue names, Hub repositories, URLs, and models of Ollama and LM Studio.

Parsing never uses the network. Every part of a name that may become part of a path is validated here with
`hub.names.safe_segments`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from llmrun.base.errors import LlmrunError, UsageError
from llmrun.hub.catalog.file import Wanted
from llmrun.hub.catalog.lookup import Catalog, load_catalog
from llmrun.hub.names import (
    Expected,
    HeldSource,
    HubSource,
    hub_source_of,
    quantization_named,
    safe_segments,
    shards_of,
    url_source_of,
)

_LONGEST = 4096  # the maximum number of characters in a name
_MOST_SHORTNAMES = 8  # the maximum length of a chain of short names
_SCHEME = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_PAGE = re.compile(r"(hf\.co|huggingface\.co)/[^/]+/[^/]+/(blob|resolve)/", re.IGNORECASE)
_HUB = re.compile(r"(?:hf|huggingface):(?://)?|(?:www\.)?(?:hf\.co|huggingface\.co)/", re.IGNORECASE)
_HELD = re.compile(r"(?P<holder>ollama|lmstudio):(?://)?(?P<name>.*)", re.IGNORECASE | re.DOTALL)
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_HUB_FORMS = "use hf:owner/name, hf:owner/name:Q4_K_M or hf:owner/name/file.gguf"


@dataclass(frozen=True, slots=True)
class LocalPath:
    """A path that the user gave. The file may not exist."""

    path: Path


def understand(text: str) -> Wanted | LocalPath:
    """Parse a model name, without network access or slow imports.

    Explicit forms are `hf:owner/name`, `hf:owner/name:Q5_K_M` and `hf:owner/name/folder/file.gguf` (each with an
    optional `@revision`), URLs, `ollama:name:tag` and `lmstudio:path`. Any other text is a path if it ends in .gguf or
    contains a path separator. Everything else is a catalogue name or a short name.

    Raises ModelNotFound with a suggestion for unknown names, and UsageError for malformed ones.
    """
    return _understood(text, _MOST_SHORTNAMES)


def on_hub(path: Path) -> str | None:
    """Return the `hf:` name for a missing path that looks like `owner/name[:QUANT][/file.gguf]`, or None.

    Also returns None if the path's first folder exists, because the user has probably misspelled a file name.
    """
    text = f"hf:{path.as_posix()}"
    try:
        if len(path.parts) < 2 or Path(path.parts[0]).exists():
            return None
        _hub(text, path.as_posix())
    except (LlmrunError, OSError, ValueError):
        return None
    return text


def _understood(text: str, left: int) -> Wanted | LocalPath:
    if not text.strip():
        raise UsageError("model: the name is empty", hint="use a name such as smollm2:135m or the path of a .gguf file")
    if len(text) > _LONGEST:
        raise UsageError(f"model: {text[:60]!r}...: {len(text):,} characters, at most {_LONGEST:,} allowed")
    if _PAGE.match(text):  # the user copied a URL from a browser that hides the scheme
        return _url(f"https://{text}", "https")
    if prefix := _HUB.match(text):
        return _hub(text, text[prefix.end() :])
    if held := _HELD.fullmatch(text):
        return _held(text, held["holder"].lower(), held["name"])
    if scheme := _SCHEME.match(text):
        return _url(text, scheme["scheme"].lower())
    if _is_surely_path(text):
        return LocalPath(_expanded(text))
    return _name(text, left)


def _is_surely_path(text: str) -> bool:
    return text.lower().endswith(".gguf") or text.startswith(("/", "./", "../", "~", "\\")) or bool(_DRIVE.match(text))


def _name(text: str, left: int) -> Wanted | LocalPath:
    """Look up a name in the user's short names, then in the catalogue."""
    catalog = load_catalog()
    target = catalog.shortnames.get(text.lower())
    if target is None:
        is_path = any(separator in text for separator in (os.sep, os.altsep) if separator)
        return LocalPath(_expanded(text)) if is_path else catalog.find(text)
    if left == 0:
        raise UsageError(f"model: {text[:300]!r}: short names refer to one another in a loop")
    return _understood(target, left - 1)


def _hub(text: str, rest: str) -> Wanted:
    """Parse `owner/name`, followed by an optional `/file.gguf` or `:QUANTIZATION` and an optional `@revision`."""
    rest, _, revision = rest.partition("@")
    path, _, quant = rest.partition(":")
    parts = path.split("/")
    if len(parts) < 2:
        from llmrun.hub.names import hint_for_repository

        near = hint_for_repository(path, load_catalog().repositories())
        raise UsageError(f"model: {text[:300]!r}: not of the form owner/name", hint=near or _HUB_FORMS)
    try:
        for part in (path, *([revision] if "@" in text else [])):
            safe_segments(part)
    except UsageError as error:
        raise UsageError(f"model: {text[:300]!r}: not a valid repository, file or revision", hint=_HUB_FORMS) from error
    repository, file = "/".join(parts[:2]), "/".join(parts[2:])
    if ":" in rest and file:
        raise UsageError(f"model: {text[:300]!r}: names both a file and a quantization", hint=_HUB_FORMS)
    if ":" in rest and quant.lower() != "latest" and not quantization_named(quant):
        raise UsageError(
            f"model: {text[:300]!r}: {quant[:100]!r} is not a quantization", hint="use one such as :Q4_K_M or :Q8_0"
        )
    source = HubSource(repository, file or None, quantization_named(quant) or None, revision or "main")
    return _from_hub(text, source)


def _from_hub(text: str, source: HubSource) -> Wanted:
    if source.file is not None:
        _check_file(text, source.file)
    catalog: Catalog = load_catalog()
    # Keep the catalogue entry but not its sha256, because the user asks for the repository's current file.
    return Wanted(str(source), (source,), entry=catalog.entry_of(source.repository))


def _check_file(text: str, file: str) -> None:
    if not file.lower().endswith(".gguf"):
        raise UsageError(f"model: {text[:300]!r}: {file[:300]!r} does not end in .gguf", hint=_HUB_FORMS)
    try:
        shards_of(file)
    except ValueError as error:
        raise UsageError(f"model: {text[:300]!r}: {error}") from error


def _url(text: str, scheme: str) -> Wanted | LocalPath:
    if scheme == "file":
        return LocalPath(_expanded(text[len("file://") :]))
    if scheme not in ("https", "http"):
        raise UsageError(
            f"model: {text[:300]!r}: models cannot be downloaded from {scheme}:// URLs",
            hint="use hf:owner/name, https://.../file.gguf, ollama:name or lmstudio:path",
        )
    on_hub = hub_source_of(text)
    if on_hub is not None:
        return _from_hub(text, on_hub)
    source, file = url_source_of(text)
    _check_file(text, file)
    return Wanted(source.url.partition("?")[0], (source,), tuple(Expected(shard) for shard in shards_of(file)))


def _held(text: str, holder: str, name: str) -> Wanted:
    """Parse the name of a model that belongs to Ollama (`name:tag`) or LM Studio (a path in its models folder)."""
    path, colon, tag = name.partition(":") if holder == "ollama" else (name, "", "")
    try:
        safe_segments(path)
        if colon:
            safe_segments(tag)
    except UsageError as error:
        forms = {"ollama": "ollama:NAME or ollama:NAME:TAG", "lmstudio": "lmstudio:OWNER/NAME/FILE.gguf"}
        raise UsageError(f"model: {text[:300]!r}: not a valid model name", hint=forms[holder]) from error
    source = HeldSource(holder, name)
    return Wanted(str(source), (source,))


def _expanded(text: str) -> Path:
    try:
        return Path(os.path.expanduser(text))  # noqa: PTH111 (Path.expanduser raises if there is no home folder)
    except ValueError:  # the user name after "~" is invalid; keep the text, and report that the file does not exist
        return Path(text)
