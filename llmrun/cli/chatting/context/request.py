"""Builds the requests of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llmrun.cli.chatting.preferences import STOP, Value, chosen_format
from llmrun.engine.requests import ChatPrompt, Request

if TYPE_CHECKING:
    from llmrun.cli.answers.thinking import Wish
    from llmrun.options.sampling_params import SamplingParams
    from llmrun.options.settings import Settings


def chat_request(
    prompt: ChatPrompt,
    settings: Settings,
    preferences: Mapping[str, Value],
    sampling: SamplingParams,
    wish: Wish,
    sent_sampling: frozenset[str] | None,
) -> Request:
    """Return the request for the next answer.

    settings     the settings with the conversation's preferences applied
    preferences  the conversation's preferences
    wish         whether the model should think, and how long
    """
    stops = preferences.get(STOP, [])
    return Request(
        prompt=prompt,
        max_tokens=settings.token_limit,
        stop=tuple(stops) if isinstance(stops, list) else (),
        sampling=sampling,
        think=wish.think,
        think_budget=wish.think_budget,
        response_format=chosen_format(preferences),
        sent_sampling=sent_sampling,
    )
