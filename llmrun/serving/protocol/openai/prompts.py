"""Reads the prompts of a completion."""

from __future__ import annotations

from typing import Any, Final

from llmrun.base.errors import ContextExceeded
from llmrun.engine.facts import ModelFacts
from llmrun.engine.requests import FillPrompt, TextPrompt, TokenPrompt
from llmrun.serving.protocol.errors import InvalidField, unsupported
from llmrun.serving.protocol.fields import Fields, missing, seen

_WANTED: Final = "a string, a list of strings, a list of token IDs, or a list of such lists"


def read_prompts(fields: Fields, facts: ModelFacts) -> tuple[TextPrompt | TokenPrompt | FillPrompt, ...]:
    """Return the prompts in `prompt`, of which there is at least one. Raises InvalidField and ContextExceeded.

    If there is a `suffix`, the answer fills the gap between each prompt and the suffix.

    A list of tokens that cannot fit is refused here, because sending millions of numbers to the engine's process would
    hold up all other requests.
    """
    prompts = text_prompts(fields, "prompt", facts)
    longest = max((len(prompt.tokens) for prompt in prompts if isinstance(prompt, TokenPrompt)), default=0)
    if longest >= facts.info.context_size:
        raise ContextExceeded.by_prompt(longest, facts.info.context_size, hint="shorten the prompt")
    suffix = fields.text("suffix")
    return tuple(_filled(prompt, suffix, facts) for prompt in prompts) if suffix else prompts


def require_filling(facts: ModelFacts, param: str) -> None:
    """Raise InvalidField for a field that asks to fill in the middle if the model cannot do so."""
    if not facts.fills:
        raise unsupported(param, "this model cannot fill in the middle", hint="its vocabulary has no tokens for it")


def _filled(prompt: TextPrompt | TokenPrompt, suffix: str, facts: ModelFacts) -> FillPrompt:
    require_filling(facts, "suffix")
    if isinstance(prompt, TokenPrompt):
        raise unsupported("suffix", "supported only for prompts that are text")
    return FillPrompt(prompt.text, suffix)


def text_prompts(fields: Fields, name: str, facts: ModelFacts) -> tuple[TextPrompt | TokenPrompt, ...]:
    """Return the texts and lists of tokens in a required field. Raises InvalidField."""
    value = fields.value(name)
    if value is None:
        raise missing(name)
    if type(value) is str:
        return (TextPrompt(value),)
    if type(value) is not list or not value:
        raise fields.wrong(name, _WANTED)
    if type(value[0]) is int:
        return (_tokens(value, name, facts),)
    return tuple(_prompt(item, f"{name}[{number}]", facts) for number, item in enumerate(value))


def read_tokens(fields: Fields, name: str, facts: ModelFacts) -> tuple[int, ...]:
    """Return a required list of token IDs. Raises InvalidField."""
    value = fields.items(name)
    if value is None:
        raise missing(fields.path(name))
    return tuple(_tokens(value, fields.path(name), facts).tokens)


def _prompt(item: Any, place: str, facts: ModelFacts) -> TextPrompt | TokenPrompt:
    if type(item) is str:
        return TextPrompt(item)
    if type(item) is list and item:
        return _tokens(item, place, facts)
    raise InvalidField(place, f"expected a string or a list of token IDs, got {seen(item)}", code="invalid_type")


def _tokens(ids: list[Any], place: str, facts: ModelFacts) -> TokenPrompt:
    for number, token in enumerate(ids):
        if type(token) is not int:
            raise InvalidField(f"{place}[{number}]", f"expected a token ID, got {seen(token)}", code="invalid_type")
        if not 0 <= token < facts.info.vocabulary_size:
            last = facts.info.vocabulary_size - 1
            raise InvalidField(f"{place}[{number}]", f"expected a token ID from 0 to {last}, got {seen(token)}")
    return TokenPrompt(tuple(ids))
