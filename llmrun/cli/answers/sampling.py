"""Chooses the seed of an answer and the sampling parameters that are sent to a server."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmrun.engine.base import Answering
    from llmrun.options.settings import Settings

_RANDOM_SEEDS = 1_000_000  # the seeds are short enough to retype, yet repeats are rare among a thousand samples


def sent_sampling(engine: Answering, settings: Settings) -> frozenset[str] | None:
    """Return the names of the sampling parameters to send to the server, or None for local models.

    Only parameters that the user has set are sent (with a flag, in the environment, in config.toml or in a
    conversation). The server chooses the others, because it may have the best defaults for its model, and because some
    OpenAI models reject every temperature.
    """
    if not is_remote(engine):
        return None
    return frozenset(settings.sampling) | ({"seed"} if settings.seed is not None else set())


def next_seed(engine: Answering, settings: Settings) -> int | None:
    """Return the user's seed, or a random one if it is not set. Return None if the server chooses the seed."""
    if settings.seed is not None or is_remote(engine):
        return settings.seed
    return secrets.randbelow(_RANDOM_SEEDS)


def is_remote(engine: Answering) -> bool:
    """Return whether the model runs on a server."""
    return engine.info.backend == "remote"
