"""Checks values of the command line, and turns them into values for the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.prompt import checked_text
from llmrun.options.sampling_params import SAMPLING, value_text

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.options.sampling_params import SamplingParams


def chat_messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Return the messages for a chat that consists of one question.

    An empty system prompt is included, because it replaces the chat template's default.
    """
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": prompt}]


def described_sampling(sampling: SamplingParams, sent: frozenset[str] | None = None) -> str:
    """Describe the sampling parameters in effect, as in `temperature 0.8, top_k 40, ...`.

    sent  the names of the parameters that are sent to a server; None for local models
    """
    values = {name: getattr(sampling, name) for name in SAMPLING}
    wanted = [
        name
        for name, parameter in SAMPLING.items()
        if (name in sent if sent is not None else not parameter.optional or values[name] != parameter.default)
    ]
    known = ", ".join(f"{name} {value_text(values[name])}" for name in wanted)
    if sent is None:
        return known
    return f"{known}; the server decides the rest" if known else "the server decides"


def parse_stops(texts: Sequence[str]) -> tuple[str, ...]:
    """Check the values of --stop. Raises UsageError if a value is empty or not UTF-8."""
    for text in texts:
        if not checked_text(text, "--stop"):
            raise UsageError("--stop: the text must not be empty")
    return tuple(texts)


def parse_logit_bias(pairs: Sequence[str]) -> dict[int, float]:
    """Parse `["29889=-inf", "7=2.5"]` into `{29889: -inf, 7: 2.5}`. Raises UsageError."""
    biases: dict[int, float] = {}
    for pair in pairs:
        token, _, bias = pair.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise UsageError(f"--logit-bias: {pair!r} is not ID=BIAS, as in 29889=-2.5 or 29889=-inf") from None
        if not biases[int(token)] < math.inf:
            raise UsageError(f"--logit-bias: {pair!r}: the bias must be a number or -inf")
    return biases


def parse_template_variables(text: str | None) -> dict[str, Any]:
    """Parse the JSON object of --chat-template-kwargs, or return {} if it was not given. Raises UsageError."""
    if text is None:
        return {}
    try:
        variables = json.loads(checked_text(text, "--chat-template-kwargs"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--chat-template-kwargs: not JSON: {error}") from None
    if not isinstance(variables, dict):
        raise UsageError('--chat-template-kwargs: not a JSON object, as in {"enable_thinking": false}')
    return variables


def check_gguf_name(output: Path) -> None:
    """Raise UsageError unless the name of a file to write ends in .gguf."""
    if output.suffix != ".gguf":
        better = output / "model.gguf" if output.is_dir() else output.with_suffix(".gguf")
        raise UsageError(f"OUT: {output}: the name must end in .gguf", hint=f"try {better}")
