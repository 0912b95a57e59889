"""Searches the Hugging Face Hub for repositories with GGUF models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmrun.base.errors import NetworkError, UsageError
from llmrun.hub.names.file_names import safe_segments
from llmrun.hub.remote import network_errors
from llmrun.hub.remote.huggingface import import_client
from llmrun.hub.remote.network_errors import CHECK_ENDPOINT, NOT_A_HUB, Unreachable, answer_within, translated

_NO_NETWORK = "check the connection, or search the local catalogue without --hub"
_LICENCE = "license:"  # the prefix of the tag that states a repository's licence


@dataclass(frozen=True, slots=True)
class HubModel:
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
    """Return up to `limit` repositories that match and contain GGUF files, the most downloaded first.

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
    """Return the Hub's JSON object for each repository. The objects are not validated.

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
    licence = next(_licences(facts.get("tags")), "")
    return HubModel(name, _count(facts.get("downloads")), _count(facts.get("likes")), licence, bool(facts.get("gated")))


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 60 else 0


def _licences(tags: object) -> Iterator[str]:
    for tag in tags if isinstance(tags, list) else ():
        if isinstance(tag, str) and tag.startswith(_LICENCE):
            yield tag.removeprefix(_LICENCE)[:60]
