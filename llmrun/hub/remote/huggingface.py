"""Queries the Hugging Face Hub: lists files with sizes and digests, searches repositories, and checks reachability.

huggingface_hub handles URLs, tokens and proxy settings, and reports each file's sha256. However, huggingface_hub never
compares that sha256 with the downloaded bytes, and version 2.4 even serves truncated and corrupt files from its cache.
Therefore, huggingface_hub is used only for metadata, and `hub/transfer` downloads the files and verifies them.

The reachability check neither sends nor shows the user's token.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from llmrun.base.errors import IntegrityError, LlmrunError, ModelNotFound, NetworkError, UsageError
from llmrun.hub.names import COMMIT, Artifact, Expected, HubSource, RemoteFile, safe_segments, shards_of, without_shard
from llmrun.hub.remote import network_errors
from llmrun.hub.remote.http_ranges import Remote
from llmrun.hub.remote.network_errors import (
    CHECK_ENDPOINT,
    NOT_A_HUB,
    NoFile,
    NoRepository,
    Unreachable,
    answer_within,
    plain,
    translated,
    without_secrets,
)
from llmrun.hub.remote.repository import Listing, OfferedModel, choose, is_sha256, is_size, nearest_files, offered

if TYPE_CHECKING:
    from huggingface_hub.file_download import HfFileMetadata
    from huggingface_hub.hf_api import ModelInfo


def pin(source: HubSource, expected: tuple[Expected, ...], *, name: str) -> Artifact:
    """Return the exact files to which `source` currently refers, which must match the known values in `expected`.

    A separate request for the first file's metadata checks that this user may download from the repository. Raises
    IntegrityError if a file differs from `expected`, UsageError for malformed names, ModelNotFound and NetworkError.
    """
    if source.file is not None and _parts(source.file) == (source.file,):
        safe_segments(source.file)
        commit, first = _first_file(source, source.file, _known(expected, source.file))
        files: tuple[RemoteFile, ...] = (first,)
    else:
        found = listing(source)
        files = _meant(source, found).files
        commit, first = _first_file(replace(source, revision=found.commit), files[0].path, files[0])
        if commit != found.commit or first != files[0]:
            raise NetworkError(
                "the Hub's responses are inconsistent",
                hint="try again; the repository may have changed in the meantime",
            )
    _check(files, expected)
    return Artifact(name, replace(source, file=files[0].path), files, commit)


def listing(source: HubSource) -> Listing:
    """List all models in the source's repository at its revision, ignoring the source's file and quantization.

    Raises ModelNotFound if the repository or revision does not exist, and NetworkError if the request fails.
    """
    import_client()
    try:
        info = answer_within(2 * network_errors.ANSWER_SECONDS, lambda: _information(source))
    except NoRepository as error:
        raise _with_nearest_repository(error, source.repository) from error
    files = [
        (sibling.rfilename, sibling.size, sibling.lfs.sha256 if sibling.lfs else None)
        for sibling in info.siblings or ()
    ]
    return offered(source.repository, _commit(info.sha), files)


def remote_file(source: HubSource, commit: str, file: RemoteFile) -> Remote:
    """Return a remote for range requests to a file at the given commit, without sending a request."""
    return Remote(file, lambda: request(source.repository, commit, file.path))


def request(repository: str, commit: str, file: str) -> tuple[str, dict[str, str]]:
    """Return (URL, headers) for downloading a file.

    The headers may contain the user's token, so they must not be sent to other hosts after a redirect. Raises
    NetworkError for invalid network settings.
    """
    import_client()
    with translated(repository):
        from huggingface_hub.file_download import hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented but not exported

        headers = build_hf_headers(library_name="llmrun") | {"accept-encoding": "identity"}
        return hf_hub_url(repository, file, revision=commit), headers


def import_client() -> None:
    """Import huggingface_hub. Raises NetworkError if HF_ENDPOINT prevents the import."""
    # Import the modules directly because the package's lazy attributes print failed imports to stdout.
    try:
        import huggingface_hub.hf_api  # noqa: F401
        from huggingface_hub import constants
    except ValueError as error:  # huggingface_hub parses HF_ENDPOINT during import
        raise NetworkError(f"network settings: {plain(error)}", hint="check HF_ENDPOINT") from error
    # With telemetry enabled, the first request also fetches a list of agents from the Hub, which takes up to 3 s.
    constants.HF_HUB_DISABLE_TELEMETRY = True


def _information(source: HubSource) -> ModelInfo:
    from huggingface_hub import errors
    from huggingface_hub.hf_api import HfApi
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # documented but not exported

    with translated(source.repository):
        get_session()  # fail early on invalid proxy or certificate settings, so they are not mistaken for bad responses
        try:
            return HfApi(library_name="llmrun").model_info(
                source.repository, revision=source.revision, files_metadata=True, timeout=network_errors.ANSWER_SECONDS
            )
        except (errors.HfHubHTTPError, errors.HFValidationError, UnicodeEncodeError):
            raise  # UnicodeEncodeError means that the token is not ASCII
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise NetworkError(NOT_A_HUB, hint=CHECK_ENDPOINT) from error


def _first_file(source: HubSource, file: str, known: RemoteFile | None) -> tuple[str, RemoteFile]:
    """Return (commit, file metadata) for a file at the source's revision."""
    import_client()
    try:
        metadata = answer_within(network_errors.ANSWER_SECONDS, lambda: _metadata(source, file))
    except NoRepository as error:
        raise _with_nearest_repository(error, source.repository) from error
    except NoFile as error:
        raise _with_nearest_file(error, source, file) from error
    commit = _commit(metadata.commit_hash)
    size = metadata.size if metadata.size is not None or known is None else known.size
    if size is None or not is_size(size) or not is_sha256(metadata.etag):
        raise NetworkError(f"{file}: the Hub reports no size or no sha256 for this file")
    return commit, RemoteFile(file, size, metadata.etag)


def _metadata(source: HubSource, file: str) -> HfFileMetadata:
    from huggingface_hub.file_download import get_hf_file_metadata, hf_hub_url

    with translated(source.repository):
        url = hf_hub_url(source.repository, file, revision=source.revision)
        return get_hf_file_metadata(url, timeout=network_errors.ANSWER_SECONDS, library_name="llmrun")


def _with_nearest_file(error: NoFile, source: HubSource, file: str) -> ModelNotFound:
    try:
        return NoFile(str(error), hint=nearest_files(listing(source).models, file, source.repository))
    except LlmrunError:  # the listing only improves the hint, so a failure is ignored
        return error


def _with_nearest_repository(error: NoRepository, repository: str) -> ModelNotFound:
    from llmrun.hub.catalog import load_catalog
    from llmrun.hub.names import hint_for_repository

    near = hint_for_repository(repository, load_catalog().repositories())
    return NoRepository(str(error), hint=f"{near} {error.hint}") if near else error


def _meant(source: HubSource, found: Listing) -> OfferedModel:
    try:
        if source.file is None:
            return choose(found.models, source.quantization, source.repository)
        for model in found.models:
            if model.file == source.file:
                return model
    except ModelNotFound as error:
        if not found.models and found.left_out:
            raise ModelNotFound(str(error), hint="; ".join(found.left_out[:3])) from error
        raise
    name = without_shard(source.file)
    broken = [line for line in found.left_out if name in line]
    if broken:
        raise ModelNotFound(broken[0], hint="choose another quantization or another repository")
    raise ModelNotFound(
        f"no such file: {source.file}", hint=nearest_files(found.models, source.file, source.repository)
    )


def _parts(file: str) -> tuple[str, ...]:
    try:
        return shards_of(file)
    except ValueError as error:
        raise ModelNotFound(str(error), hint="name the first shard (-00001-of-) or only the quantization") from error


def _commit(told: object) -> str:
    if not isinstance(told, str) or not COMMIT.fullmatch(told):
        raise NetworkError(NOT_A_HUB, hint=CHECK_ENDPOINT)
    return told


def _known(expected: tuple[Expected, ...], file: str) -> RemoteFile | None:
    if len(expected) == 1 and expected[0].size is not None:
        return RemoteFile(file, expected[0].size, expected[0].sha256)
    return None


def _check(files: tuple[RemoteFile, ...], expected: tuple[Expected, ...]) -> None:
    if expected and len(expected) != len(files):
        raise IntegrityError(f"the model on the Hub has changed: {len(files)} files, expected {len(expected)}")
    for file, known in zip(files, expected, strict=False):
        if known.sha256 not in (None, file.sha256) or known.size not in (None, file.size):
            raise IntegrityError(
                f"the file on the Hub has changed: sha256 {file.sha256} ({file.size} bytes), "
                f"expected {known.sha256} ({known.size} bytes)",
                hint="accept the current file with `llmrun pull --revision`, or update llmrun",
            )


_NO_NETWORK = "check the connection, or search the local catalogue without --hub"
_LICENCE = "license:"  # the prefix of the tag that states a repository's licence


class HubModel(Struct, frozen=True):
    """A search result. `downloads` counts the downloads of the last 30 days. `license` is "" if unknown."""

    repository: str  # "owner/name"
    downloads: int
    likes: int
    license: str
    gated: bool

    @property
    def name(self) -> str:
        """The name that llmrun commands accept for this repository."""
        return f"hf:{self.repository}"


def search_hub(words: str, limit: int) -> list[HubModel]:
    """Return up to `limit` repositories that match the query and contain GGUF files, the most downloaded first.

    Raises Unreachable if the Hub does not respond and NetworkError for other failures.
    """
    import_client()
    try:
        found = answer_within(network_errors.ANSWER_SECONDS, lambda: _ask(words, limit))
    except Unreachable as error:
        sentence = f"search --hub: the Hub does not respond: {error}"
        raise Unreachable(sentence, hint=error.hint or _NO_NETWORK) from error
    except NetworkError as error:
        raise NetworkError(f"search --hub: {error}", hint=error.hint) from error
    return [model for facts in found if (model := _checked(facts))]


def _ask(words: str, limit: int) -> list[Any]:
    """Return the Hub's JSON object for each repository. This function does not validate the objects.

    HfApi.list_models is not used because it retries an unreachable Hub for 20 s and logs each attempt to stderr.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented but not exported
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    query = {"filter": "gguf", "sort": "downloads", "limit": str(limit)} | ({"search": words} if words else {})
    with translated():
        response = get_session().get(
            f"{constants.ENDPOINT}/api/models",
            params=query,
            headers=build_hf_headers(library_name="llmrun"),
            timeout=network_errors.ANSWER_SECONDS,
        )
        hf_raise_for_status(response)
        try:
            found = response.json()
        except (ValueError, RecursionError) as error:
            raise NetworkError(NOT_A_HUB, hint=CHECK_ENDPOINT) from error
    if not isinstance(found, list):
        raise NetworkError(NOT_A_HUB, hint=CHECK_ENDPOINT)
    return found[:limit]


def _checked(facts: Any) -> HubModel | None:
    """Validate the Hub's JSON object for a repository. Returns None if the repository's name is malformed."""
    if not isinstance(facts, dict) or not isinstance(name := facts.get("id"), str) or name.count("/") != 1:
        return None
    try:
        safe_segments(name)
    except UsageError:
        return None
    tags = facts.get("tags")
    tags = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    licence = next((tag.removeprefix(_LICENCE)[:60] for tag in tags if tag.startswith(_LICENCE)), "")
    return HubModel(name, _count(facts.get("downloads")), _count(facts.get("likes")), licence, bool(facts.get("gated")))


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60 else 0


PATIENCE_S = 4.0  # a reachable Hub responds within one second
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")


class Ping(Struct, frozen=True):
    """The result of a reachability check.

    endpoint  the URL of the Hub or of HF_ENDPOINT, without user name and password
    seconds   the response time in seconds; None if there was no response
    trouble   the reason for a missing response or request; "" if the Hub responded
    offline   whether offline mode prevented the request
    token     whether a token is configured
    proxies   the names of the environment variables that configure proxies
    """

    endpoint: str
    seconds: float | None
    trouble: str
    offline: bool
    token: bool
    proxies: tuple[str, ...]


def ping_hub(*, offline: bool, patience: float = PATIENCE_S) -> Ping:
    """Send a HEAD request to the Hub's front page. Network failures are part of the result and are not raised."""
    proxies = tuple(name for name in _PROXIES if os.environ.get(name))
    try:
        from huggingface_hub import constants
    except (ImportError, ValueError) as error:  # huggingface_hub parses HF_ENDPOINT during import
        return Ping("", None, f"huggingface_hub cannot be imported: {plain(error)}", False, False, proxies)
    endpoint = without_secrets(constants.ENDPOINT)
    token = bool(hub_token())
    if offline or constants.HF_HUB_OFFLINE:
        return Ping(endpoint, None, "not checked in offline mode", True, token, proxies)
    try:
        seconds = answer_within(patience, lambda: _response_time(constants.ENDPOINT, patience))
    except LlmrunError as error:
        return Ping(endpoint, None, str(error), False, token, proxies)
    return Ping(endpoint, seconds, "", False, token, proxies)


def hub_token() -> str | None:
    """Return the user's token, for callers that redact it. Returns None if there is no readable token."""
    try:
        from huggingface_hub import get_token

        return get_token()
    except (ImportError, ValueError, OSError):
        return None


def _response_time(endpoint: str, patience: float) -> float:
    """Return the endpoint's response time in seconds. Raises NetworkError."""
    started = time.perf_counter()
    with translated():
        from huggingface_hub import get_session

        response = get_session().head(endpoint, timeout=patience, follow_redirects=False)
    if response.status_code >= 500:
        raise NetworkError(f"server error (HTTP {response.status_code})")
    return time.perf_counter() - started
