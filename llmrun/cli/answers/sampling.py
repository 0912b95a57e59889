"""Which sampling parameters an answer gets, and which of them a server is sent."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.engine.base import Answering
    from llmrun.settings import Settings

_RANDOM_SEEDS = 1_000_000  # short enough to read out and type again, many enough for a thousand samples


def sent_sampling(engine: Answering, settings: Settings) -> frozenset[str] | None:
    """Return the names of the sampling parameters that the model's server is sent; None for models that run here.

    Only what the user has set is sent, by a flag, in the environment, in config.toml or in a conversation. Everything
    else the server decides: it may know what suits its model, and some models of OpenAI's refuse any temperature.
    """
    if not is_remote(engine):
        return None
    return frozenset(settings.sampling) | ({"seed"} if settings.seed is not None else set())


def next_seed(engine: Answering, settings: Settings) -> int | None:
    """Return the user's seed, or else a random one; None where a server chooses it."""
    if settings.seed is not None or is_remote(engine):
        return settings.seed
    return secrets.randbelow(_RANDOM_SEEDS)


def is_remote(engine: Answering) -> bool:
    """Return whether the model is behind a server."""
    return engine.info.backend == "remote"
