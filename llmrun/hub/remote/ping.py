"""Whether the Hugging Face Hub answers, and what decides how it is asked. No token is sent, and none is told."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from llmrun.errors import LlmrunError, NetworkError
from llmrun.hub.remote.network_errors import answer_within, plain, translated, without_secrets

PATIENCE_S = 4.0  # a Hub that can be reached answers in less than one
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy")


@dataclass(frozen=True, slots=True)
class Ping:
    """What was found.

    endpoint  the Hub's address, or HF_ENDPOINT's, without a name or password
    seconds   until it answered; None: it did not
    trouble   why it did not, or was not asked
    offline   it was not asked
    token     one is configured
    proxies   the names of the variables that set one
    """

    endpoint: str
    seconds: float | None
    trouble: str
    offline: bool
    token: bool
    proxies: tuple[str, ...]


def ping_hub(*, offline: bool, patience: float = PATIENCE_S) -> Ping:
    """Ask the Hub's front page for its headers. Never raises for what the network does."""
    proxies = tuple(name for name in _PROXIES if os.environ.get(name))
    try:
        from huggingface_hub import constants
    except (ImportError, ValueError) as error:  # it takes HF_ENDPOINT apart while it is imported
        return Ping("", None, f"huggingface_hub does not work: {plain(error)}", False, False, proxies)
    endpoint = without_secrets(constants.ENDPOINT)
    token = bool(hub_token())
    if offline or constants.HF_HUB_OFFLINE:
        return Ping(endpoint, None, "not asked: offline mode", True, token, proxies)
    seconds, trouble = _asked(constants.ENDPOINT, patience)
    return Ping(endpoint, seconds, trouble, False, token, proxies)


def hub_token() -> str | None:
    """The token that would be sent, for who must see that it is shown nowhere. None also where it cannot be read."""
    try:
        from huggingface_hub import get_token

        return get_token()
    except (ImportError, ValueError, OSError):
        return None


def _asked(endpoint: str, patience: float) -> tuple[float | None, str]:
    """(seconds, trouble)"""
    try:
        return answer_within(patience, lambda: _ask(endpoint, patience)), ""
    except LlmrunError as error:
        return None, str(error)


def _ask(endpoint: str, patience: float) -> float:
    """Seconds until it answered. Raises NetworkError."""
    started = time.perf_counter()
    with translated():
        from huggingface_hub import get_session

        response = get_session().head(endpoint, timeout=patience, follow_redirects=False)
    if response.status_code >= 500:
        raise NetworkError(f"the server has trouble (HTTP {response.status_code})")
    return time.perf_counter() - started
