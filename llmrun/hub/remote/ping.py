"""Checks whether the Hugging Face Hub is reachable. The user's token is neither sent nor shown."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from llmrun.base.errors import LlmrunError, NetworkError
from llmrun.hub.remote.network_errors import answer_within, plain, translated, without_secrets

PATIENCE_S = 4.0  # a reachable Hub responds within one second
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")


@dataclass(frozen=True, slots=True)
class Ping:
    """The result of a reachability check.

    endpoint  the URL of the Hub or of HF_ENDPOINT, without user name and password
    seconds   the response time in seconds; None if there was no response
    trouble   why there was no response or no request; "" if the Hub responded
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
    seconds, trouble = _asked(constants.ENDPOINT, patience)
    return Ping(endpoint, seconds, trouble, False, token, proxies)


def hub_token() -> str | None:
    """Return the user's token, for callers that redact it. Returns None if there is no readable token."""
    try:
        from huggingface_hub import get_token

        return get_token()
    except (ImportError, ValueError, OSError):
        return None


def _asked(endpoint: str, patience: float) -> tuple[float | None, str]:
    """Return (response time in seconds or None, reason for a failure or "")."""
    try:
        return answer_within(patience, lambda: _ask(endpoint, patience)), ""
    except LlmrunError as error:
        return None, str(error)


def _ask(endpoint: str, patience: float) -> float:
    """Return the response time in seconds. Raises NetworkError."""
    started = time.perf_counter()
    with translated():
        from huggingface_hub import get_session

        response = get_session().head(endpoint, timeout=patience, follow_redirects=False)
    if response.status_code >= 500:
        raise NetworkError(f"server error (HTTP {response.status_code})")
    return time.perf_counter() - started
