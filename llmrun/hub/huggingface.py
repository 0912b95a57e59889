"""A file from the Hugging Face Hub, into the cache that all Hugging Face tools share.

huggingface_hub knows the address, the token, the proxy settings and the file's sha256. It never compares that sha256
with the bytes (version 2.4 serves a truncated or flipped file from its cache), so the bytes are streamed and checked
here, and then laid down as its cache would have them: other tools find the file.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from llmrun.errors import IntegrityError, NetworkError
from llmrun.hub.catalog import CatalogEntry, HubSource
from llmrun.hub.reporter import Reporter
from llmrun.hub.store import (
    CHUNK,
    blob_path,
    digest,
    hub_cache,
    partial_blob,
    repository_folder,
)
from llmrun.hub.transfer import require_space, save_verified, writing

if TYPE_CHECKING:
    from huggingface_hub.file_download import HfFileMetadata

# For name resolution and connecting together: huggingface_hub's own limit is per address, and a host has several.
ANSWER_SECONDS = 10.0
_COMMIT = re.compile(r"[0-9a-f]{40}")


def fetch(source: HubSource, entry: CatalogEntry, reporter: Reporter) -> Path:
    """Download the file and return its place in the shared cache. The caller holds the model's lock.

    Raises NetworkError, IntegrityError, DoesNotFit, or LlmrunError for a cache that cannot be written.
    """
    commit = _commit_holding(source, entry)
    repository = repository_folder(source)
    pointer = repository / "snapshots" / commit / source.file
    blob = blob_path(source, entry.sha256)
    with writing(repository):
        blob.parent.mkdir(parents=True, exist_ok=True)
        pointer.parent.mkdir(parents=True, exist_ok=True)
    with _lock_of_other_tools(source, entry.sha256):
        if not _is_whole(blob, entry, reporter):
            require_space(blob.parent, entry.size, f"{entry.name} from the Hugging Face Hub")
            chunks = _stream(source, commit)
            save_verified(
                chunks, entry, partial_blob(source, entry.sha256), blob, reporter, f"downloading {entry.name}"
            )
        with writing(pointer):
            _point(pointer, blob)
            _write_reference(repository / "refs" / "main", commit)
    return pointer


def _commit_holding(source: HubSource, entry: CatalogEntry) -> str:
    """The commit at `main`, once it is known that the file there is the one the catalogue means."""
    # From the modules themselves: the package's lazy attributes print a failed import to stdout, where the answer goes.
    try:
        from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_url
    except ValueError as error:  # it takes HF_ENDPOINT apart while it is imported
        raise NetworkError(f"network settings: {_plain(error)}", hint="check HF_ENDPOINT") from error

    def ask() -> HfFileMetadata:
        with _translated():
            url = hf_hub_url(source.repository, source.file)
            return get_hf_file_metadata(url, timeout=ANSWER_SECONDS, library_name="llmrun")

    metadata = _answer_within(ANSWER_SECONDS, ask)
    if metadata.commit_hash is None or not _COMMIT.fullmatch(metadata.commit_hash):
        raise NetworkError("the answer is not a Hugging Face Hub's", hint="check HF_ENDPOINT and the proxy settings")
    if metadata.etag != entry.sha256 or metadata.size not in (None, entry.size):
        raise IntegrityError(
            f"another file is there now: sha256 {_plain(metadata.etag)} ({metadata.size} bytes) seen, "
            f"{entry.sha256} ({entry.size} bytes) expected"
        )
    return metadata.commit_hash


def _answer_within(seconds: float, ask: Callable[[], HfFileMetadata]) -> HfFileMetadata:
    """`ask()`, given up after `seconds`: a resolver or a firewall that drops packets can hold it for minutes."""
    answers: list[HfFileMetadata] = []
    refusals: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # noqa: BLE001 (carried to the thread that waits)
            refusals.append(error)

    thread = threading.Thread(target=run, name="llmrun-hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if refusals:
        raise refusals[0]
    if not answers:
        raise NetworkError(f"no answer within {seconds:g} s")
    return answers[0]


def _stream(source: HubSource, commit: str) -> Iterator[bytes]:
    """The file's bytes. httpx2 drops the token when the Hub redirects to the host that stores the file."""
    from huggingface_hub import constants, get_session, hf_hub_url, hf_raise_for_status
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, not exported

    with _translated():
        request = get_session().stream(
            "GET",
            hf_hub_url(source.repository, source.file, revision=commit),
            headers=build_hf_headers(library_name="llmrun") | {"accept-encoding": "identity"},
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            follow_redirects=True,
        )
        with request as response:
            hf_raise_for_status(response)
            yield from response.iter_raw(CHUNK)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn what huggingface_hub and the network raise into a NetworkError of a few words."""
    import httpx2
    from huggingface_hub import errors

    login = "accept the model's licence on its page at the Hub if it has one, then `hf auth login`"
    try:
        yield
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        words = {401: "not authorised", 403: "no access", 404: "no such file", 429: "too many requests"}
        reason = "the repository is gated" if isinstance(error, errors.GatedRepoError) else words.get(status, "refused")
        raise NetworkError(f"{reason} (HTTP {status})", hint=login if status in (401, 403) else "") from error
    except httpx2.TimeoutException as error:
        raise NetworkError("timed out") from error
    except httpx2.ConnectError as error:
        raise NetworkError(f"unreachable ({_plain(error)})") from error
    except (FileNotFoundError, ImportError, ValueError) as error:  # a certificate file, a proxy, a token, an endpoint
        raise NetworkError(
            f"network settings: {_plain(error)}",
            hint="check HF_ENDPOINT, HF_TOKEN, SSL_CERT_FILE and the proxy variables",
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise NetworkError(_plain(error) or type(error).__name__) from error


def _plain(words: object) -> str:
    """The first line of what a library or another machine said, without what a terminal would obey."""
    lines = re.sub(r"^\[Errno -?\d+\] ", "", str(words).strip()).splitlines()
    return "".join(letter for letter in lines[0] if letter.isprintable())[:160] if lines else ""


@contextlib.contextmanager
def _lock_of_other_tools(source: HubSource, sha256: str) -> Iterator[None]:
    """The lock that huggingface_hub takes for this blob."""
    import filelock

    path = hub_cache() / ".locks" / repository_folder(source).name / f"{sha256}.lock"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path, mode=0o664)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_whole(blob: Path, entry: CatalogEntry, reporter: Reporter) -> bool:
    """True for a blob that only lacks its link, because a download was killed between the two."""
    if not blob.is_file() or blob.stat().st_size != entry.size:
        return False
    return digest(blob, reporter, f"checking {entry.name}") == entry.sha256


def _point(pointer: Path, blob: Path) -> None:
    """Link the snapshot's file to its blob; where links cannot be made, the file itself moves there, as the Hub's
    own tools do it."""
    link = pointer.with_name(pointer.name + f".{os.getpid()}")
    link.unlink(missing_ok=True)
    try:
        link.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        blob.replace(pointer)
    else:
        link.replace(pointer)


def _write_reference(reference: Path, commit: str) -> None:
    reference.parent.mkdir(parents=True, exist_ok=True)
    written = reference.with_name(f"{reference.name}.{os.getpid()}")
    written.write_text(commit, "ascii")
    written.replace(reference)
