"""The facts about the served model that the wire formats need."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ServedFacts:
    """Facts about the served model.

    name             the name that clients use
    context_size     the maximum number of tokens of a prompt and its answer
    takes_chats      whether the model has a chat template
    takes_tools      whether the model can call tools
    default_sampling the sampling of requests that do not set their own
    fingerprint      identifies everything that decides about the bytes of an answer
    thinks           whether the model's thinking can be switched on
    end_tokens       the tokens that end an answer, which `ignore_eos` bans; () if they are unknown
    """

    name: str
    vocabulary_size: int
    context_size: int
    takes_chats: bool
    takes_tools: bool
    default_sampling: SamplingParams
    fingerprint: str
    thinks: bool = False
    end_tokens: tuple[int, ...] = ()
