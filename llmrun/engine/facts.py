"""The facts about a model that a server tells its clients and needs to read their requests."""

from __future__ import annotations

from dataclasses import dataclass

from llmrun.base.types import ModelInfo
from llmrun.options.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about an open model.

    name             the name that clients use
    info             `info.metadata` is empty, because it can be megabytes
    kv_tokens        the number of tokens that the KV cache holds for all requests together
    takes_chats      whether the model has a chat template
    takes_tools      whether the model can call tools
    fills            whether the model can fill in the middle of a text
    thinks           whether the model's thinking can be switched on
    end_tokens       the tokens that end an answer, which `ignore_eos` bans
    default_sampling the sampling of requests that do not set their own, with seed 0
    fingerprint      identifies everything that can change the bytes of an answer: the file, llmrun's version and,
                     if results depend on them, the backend and the machine
    memory_bytes     the main memory that the model may take at most, including its process
    """

    name: str
    info: ModelInfo
    kv_tokens: int
    takes_chats: bool
    takes_tools: bool
    fills: bool
    thinks: bool
    end_tokens: tuple[int, ...]
    default_sampling: SamplingParams
    fingerprint: str
    memory_bytes: int = 0
