"""Limits the duration of network requests and translates library exceptions to llmrun's errors."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from llmrun.base.errors import LlmrunError, ModelNotFound, NetworkError, UsageError

if TYPE_CHECKING:
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

# The limit in seconds for resolving the name and connecting. An HTTP client's timeout would apply to each address
# separately.
ANSWER_SECONDS = 10.0
NOT_A_HUB = "the response does not come from a Hugging Face Hub"
CHECK_ENDPOINT = "check HF_ENDPOINT and the proxy settings"

Result = TypeVar("Result")


class NoRepository(ModelNotFound):
    """The Hub has no repository with this name, or hides the repository from this user."""


class Unreachable(NetworkError):
    """The server did not respond. Name resolution or the connection failed, or the request timed out."""


class NoFile(ModelNotFound):
    """The repository and the revision exist, but the file does not."""


def answer_within(seconds: float, ask: Callable[[], Result]) -> Result:
    """Return the result of `ask()`, or give up after `seconds`.

    Without a time limit, a slow DNS resolver or a firewall that drops packets can block a request for minutes. Raises
    Unreachable if the time runs out, and re-raises any error from `ask`.
    """
    answers: list[Result] = []
    refusals: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(ask())
        except BaseException as error:  # noqa: BLE001 (the waiting thread re-raises it)
            refusals.append(error)

    thread = threading.Thread(target=run, name="llmrun-hub", daemon=True)
    thread.start()
    thread.join(seconds)
    if refusals:
        raise refusals[0]
    if not answers:
        raise Unreachable(f"no answer within {seconds:g} s")
    return answers[0]


@contextlib.contextmanager
def translated(repository: str = "") -> Iterator[None]:
    """Translate exceptions of huggingface_hub, httpx2 and the network to short llmrun errors.

    `repository` is the requested repository, which appears in hints. Raises ModelNotFound if a repository,
    revision or file does not exist, UsageError for an invalid repository name, and NetworkError for all other failures.
    """
    import httpx2
    from huggingface_hub import errors

    try:
        yield
    except errors.HfHubHTTPError as error:
        raise _refusal(error, repository) from error
    except errors.HFValidationError as error:
        raise UsageError(f"repository: {plain(error)}") from error
    except httpx2.TimeoutException as error:
        raise Unreachable("timed out") from error
    except httpx2.ConnectError as error:
        hint = CHECK_ENDPOINT if _is_at_endpoint(error) else ""
        raise Unreachable(f"unreachable ({plain(error)})", hint=hint) from error
    except httpx2.UnsupportedProtocol as error:
        raise NetworkError(f"network settings: {plain(error).rstrip('.')}", hint=CHECK_ENDPOINT) from error
    except (FileNotFoundError, ImportError, ValueError) as error:  # a certificate, proxy, token or endpoint is invalid
        raise NetworkError(
            f"network settings: {plain(error)}",
            hint="check HF_ENDPOINT, HF_TOKEN, SSL_CERT_FILE and the proxy variables",
        ) from error
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        raise NetworkError(plain(error) or type(error).__name__) from error


def _is_at_endpoint(error: httpx2.ConnectError) -> bool:
    """Return whether the request was sent to HF_ENDPOINT's host, not to another URL or the target of a redirect."""
    try:
        return urlsplit(os.environ.get("HF_ENDPOINT", "")).hostname == error.request.url.host
    except (ValueError, RuntimeError):  # HF_ENDPOINT is not a URL, or the error has no request
        return False


def _refusal(error: HfHubHTTPError, repository: str) -> LlmrunError:
    from huggingface_hub import constants, errors

    status = error.response.status_code
    page = plain(f"{without_secrets(constants.ENDPOINT)}/{repository}")
    login = "run `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        return NetworkError(
            f"the repository is gated (HTTP {status})", hint=f"accept its licence at {page}, then {login}"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        if status == 404:
            return NoRepository(
                f"no such repository (HTTP {status})", hint="check the name, which must have the form owner/name"
            )
        # The Hub tells anonymous users that private repositories do not exist.
        if "authorization" not in error.response.request.headers:
            return NoRepository(
                f"no such repository, or a private one (HTTP {status})",
                hint=f"check the name; if the repository is private or gated, {login}",
            )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFound(f"no such revision (HTTP {status})", hint=f"see the branches and tags at {page}")
    if status == 404:
        return NoFile(f"no such file (HTTP {status})", hint=f"see the files at {page}")
    words = {401: "the token was rejected", 403: "access denied", 429: "too many requests"}
    hint = {401: login, 403: f"check your access at {page}, then {login}", 429: f"try again later, or {login}"}
    return NetworkError(f"{words.get(status, 'refused')} (HTTP {status})", hint=hint.get(status, ""))


def without_secrets(url: str) -> str:
    """Return a URL without its user name and password."""
    try:
        parts = urlsplit(url)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    except ValueError:
        return "(not a URL)"


def plain(words: object) -> str:
    """Return the first line of a library's or server's message, without errno prefixes and control characters."""
    lines = re.sub(r"^\[Errno -?\d+\] ", "", str(words).strip()).splitlines()
    return "".join(letter for letter in lines[0] if letter.isprintable())[:160] if lines else ""
