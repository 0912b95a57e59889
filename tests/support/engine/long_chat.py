"""A long conversation whose template drops past thinking, to count the prompt tokens that each turn computes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from llmrun.engine.engine import Engine
from llmrun.engine.requests import ChatPrompt, Request
from llmrun.options.sampling_params import SamplingParams
from tests.support.engine.answers import answer_all

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def words(engine: Engine, tokens: int, seed: int) -> str:
    """Return random words of about this many tokens."""
    random, text = np.random.default_rng(seed), ""
    while len(engine.tokenizer.encode(text, add_special=False, parse_special=False)) < tokens:
        text += " " + "".join(random.choice(list(LETTERS), 5))
    return text


def tokens_computed(engine: Engine, turns: int, *, context: int, thinking: int, answer: int) -> list[tuple[int, int]]:
    """Hold a conversation, and return (tokens in the prompt, prompt tokens that were computed) for each turn.

    The prompt of the last turn has about `context` tokens. Each turn thinks for `thinking` tokens, which the next
    prompt does not contain, and its answer in the next prompt has about `answer` tokens.
    """
    question = 100
    system = words(engine, context - turns * (question + answer), seed=0)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    never = SamplingParams(temperature=0, logit_bias=dict.fromkeys(engine.tokenizer.end_of_generation, -math.inf))
    found = []
    for turn in range(turns):
        messages.append({"role": "user", "content": words(engine, question, seed=turn + 1)})
        prompt = ChatPrompt(list(messages), template_kwargs={"enable_thinking": True})
        [gathered] = answer_all(engine, [Request(prompt, thinking + answer, sampling=never)])
        timings = gathered.finished.timings
        found.append((timings.prompt_tokens, timings.prompt_tokens - timings.cached_tokens))
        thought, text = "hm", words(engine, answer, seed=100 + turn)
        messages.append({"role": "assistant", "content": text, "reasoning_content": thought})
    return found
