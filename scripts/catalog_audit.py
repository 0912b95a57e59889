"""Compares the catalogue with the Hub, and finds missing files, changed files, and sizes and digests to fill in."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from llmrun.base.errors import LlmrunError, ModelNotFound, NetworkError
from llmrun.hub.catalog import CatalogEntry, Quant
from llmrun.hub.names import Expected, HubSource, RemoteFile, shards_of

ANSWER_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class CatalogFinding:
    """The result of comparing one quantization of a model with the Hub.

    wrong    a short description of the difference; "" if the Hub and the catalogue agree
    files    the files as the Hub lists them; () if any of them is missing there
    lacking  whether the catalogue lacks a size or a sha256 that the Hub reports
    """

    entry: str
    quant: str
    source: HubSource
    wrong: str
    files: tuple[RemoteFile, ...] = ()
    lacking: bool = False


def check_entry(entry: CatalogEntry, listings: dict[str, Mapping[str, RemoteFile] | str]) -> Iterator[CatalogFinding]:
    """Yield a finding for each Hub source of each quantization. Raises NetworkError if the Hub cannot be reached.

    listings  a cache that this function fills; it maps repositories to their files, or to the reason for a failure
    """
    for quant in entry.quants.values():
        for source in quant.sources:
            if isinstance(source, HubSource):
                if source.repository not in listings:
                    listings[source.repository] = _listing_or_reason(source.repository)
                yield _compare(entry.name, quant, source, listings[source.repository])


def ask_hub(repository: str) -> Mapping[str, RemoteFile]:
    """Return the GGUF files of a repository, keyed by path.

    Raises ModelNotFound if the repository does not exist or access is denied, and NetworkError if the Hub cannot be
    reached or sends an invalid answer.
    """
    try:
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError
        from huggingface_hub.hf_api import HfApi
    except ValueError as error:  # huggingface_hub parses HF_ENDPOINT during import
        raise NetworkError(f"network settings: {error}", hint="check HF_ENDPOINT") from error
    import httpx2

    try:
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, library_name="llmrun")
        info = api.model_info(repository, files_metadata=True, timeout=ANSWER_SECONDS)
    except RepositoryNotFoundError as error:
        raise ModelNotFound("the repository does not exist or is private") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403, 404):
            raise ModelNotFound(f"not accessible (HTTP {status})") from error
        raise NetworkError(f"the Hub refused the request (HTTP {status})") from error
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, KeyError, TypeError) as error:
        words = "".join(letter for letter in str(error).split("\n")[0] if letter.isprintable())
        raise NetworkError(f"cannot reach the Hub: {words[:160] or type(error).__name__}") from error
    return {
        sibling.rfilename: RemoteFile(sibling.rfilename, sibling.size, sibling.lfs.sha256 if sibling.lfs else None)
        for sibling in info.siblings or ()
        if sibling.size is not None and sibling.rfilename.lower().endswith(".gguf")
    }


def _listing_or_reason(repository: str) -> Mapping[str, RemoteFile] | str:
    try:
        return ask_hub(repository)
    except ModelNotFound as error:
        return str(error)


def _compare(entry: str, quant: Quant, source: HubSource, listing: Mapping[str, RemoteFile] | str) -> CatalogFinding:
    if isinstance(listing, str):
        return CatalogFinding(entry, quant.name, source, listing)
    paths = shards_of(source.file or "")
    if missing := [path for path in paths if path not in listing]:
        return CatalogFinding(entry, quant.name, source, f"{missing[0]} is missing on the Hub")
    files = tuple(listing[path] for path in paths)
    pairs = list(zip(quant.files, files, strict=True))
    wrong = "; ".join(filter(None, (_difference(expected, file) for expected, file in pairs)))
    lacking = any(expected.size is None or (expected.sha256 is None and file.sha256) for expected, file in pairs)
    return CatalogFinding(entry, quant.name, source, wrong, files, bool(lacking))


def _difference(expected: Expected, file: RemoteFile) -> str:
    if expected.size is not None and expected.size != file.size:
        return f"{file.size:,} bytes on the Hub, {expected.size:,} in the catalogue"
    if expected.sha256 is not None and file.sha256 is not None and expected.sha256 != file.sha256:
        return f"sha256 {file.sha256[:12]}... on the Hub, {expected.sha256[:12]}... in the catalogue"
    return ""


def with_facts(text: str, finding: CatalogFinding) -> str:
    """Return the text of a models.toml file after filling in the sizes and digests of a finding.

    Raises LlmrunError unless the quantization is written as a single line, `quants.NAME = { ... }`, under its model's
    heading.
    """
    name = re.escape(finding.entry)
    heading = re.search(rf'^\[models\.(?:"{name}"|{name})\]$', text, re.MULTILINE)
    line = re.compile(rf"^quants\.{re.escape(finding.quant)} = \{{ (?P<facts>[^\n]*) \}}$", re.MULTILINE)
    match = line.search(text, heading.end()) if heading else None
    following = text.find("\n[", heading.end()) if heading else -1
    if match is None or (following != -1 and match.start() > following):
        raise LlmrunError(f"catalogue: {finding.entry}: quants.{finding.quant}: not on a line of its own")
    facts = re.sub(r'(?:, )?\b(?:size|sha256|about) = (?:\[[^\]]*\]|"[^"]*"|[0-9_]+)', "", match["facts"])
    facts += ", size = " + _listed([f"{file.size:_}" for file in finding.files])
    if all(file.sha256 for file in finding.files):
        facts += ", sha256 = " + _listed([f'"{file.sha256}"' for file in finding.files])
    return f"{text[: match.start('facts')]}{facts.removeprefix(', ')}{text[match.end('facts') :]}"


def _listed(values: list[str]) -> str:
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"
