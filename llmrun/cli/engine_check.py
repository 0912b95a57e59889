"""Implements `verify --engines`, which compares the predictions of the CPU engine and llama.cpp for a model."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llmrun.backends.base import OpenOptions
from llmrun.backends.registry import BACKENDS
from llmrun.base.amounts import counted
from llmrun.base.errors import UsageError, kernel_warnings_told
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import show_loading
from llmrun.jobs.evaluation.measuring import (
    ANSWER_TOKENS,
    MOST_DIVERGENCE,
    Agreement,
    Source,
    agreement_of,
    one_chunk,
    opened,
    tokens_of,
)

if TYPE_CHECKING:
    from llmrun.backends.base import Backend
    from llmrun.jobs.evaluation.measuring import Difference

_TEXT_TOKENS: Final = 512  # of the text; the rest is not used
_LABEL: Final = 18  # columns


def sample_text() -> str:
    """Return the built-in text, which has prose, code, a calculation and five languages."""
    return files("llmrun.jobs.evaluation").joinpath("sample.txt").read_text(encoding="utf-8").removesuffix("\n")


def check_engines_installed() -> None:
    """Raise UsageError if one of the engines is not installed."""
    for entry in BACKENDS:
        if (probe := entry.kind().probe()).missing:
            raise UsageError(f"--engines: {probe.missing}", hint=probe.hint)


def check_engines(name: str, path: Path, text: str, *, quietly: bool) -> tuple[bool, dict[str, Any]]:
    """Compare the engines on a text, and print the result. Return whether they agree, and the result for JSON.

    May raise any LlmrunError from the backends, for example if one of them does not support the model.
    """
    ours, theirs = (
        Source(path, OpenOptions(entry.name, context_size=_TEXT_TOKENS + ANSWER_TOKENS, progress=show_loading))
        for entry in BACKENDS
    )
    with kernel_warnings_told(out.note), opened(ours, theirs) as (one, other):
        tokens = tokens_of(text, one.tokenizer)[:_TEXT_TOKENS]
        if len(tokens) < 2:
            raise UsageError("--text: the text has fewer than two tokens", hint="use a longer text")
        out.progress(f"{name}: comparing the engines on {len(tokens)} tokens")
        found = agreement_of(one, other, one_chunk(tokens))
        out.clear_progress()
        if not quietly:
            out.lines(_lines(name, found, (one, other)))
        elif not found.agrees:
            out.error(f"{name}: {_verdict(found)}")
        return found.agrees, _body(found, (one, other))


def _verdict(found: Agreement) -> str:
    if found.agrees:
        return "OK: the engines agree"
    return f"the engines disagree: correct engines differ by at most {MOST_DIVERGENCE} nats"


def _lines(name: str, found: Agreement, backends: tuple[Backend, Backend]) -> Iterator[str]:
    names = " and ".join(f"{backend.info.backend} ({backend.info.device})" for backend in backends)
    divergence = found.scores.divergence
    yield f"{name}: {_verdict(found)}"
    yield _line("engines", names)
    yield _line(
        "KL divergence",
        f"{divergence.mean():.6f} nats on average over {counted(len(divergence), 'position')}, median: "
        f"{np.median(divergence):.6f}, maximum: {divergence.max():.6f}",
    )
    yield _line("same top token", f"{100 * found.scores.agrees.mean():.2f} %")
    if found.in_text is not None:
        yield _line("first difference", f"at position {found.in_text.position}: {_words(found.in_text, backends)}")
    answer = f"equal for {counted(len(found.answer), 'token')}"
    if found.in_answer is not None:
        answer += f", then {_words(found.in_answer, backends)}"
    yield _line("greedy answer", answer)


def _line(label: str, text: str) -> str:
    return f"  {label:{_LABEL}}{text}"


def _words(found: Difference, backends: tuple[Backend, Backend]) -> str:
    return ", ".join(
        f"{backend.info.backend} prefers {backend.tokenizer.token_text(token)!r} by {margin:.3g}"
        for backend, token, margin in zip(backends, found.tokens, found.margins, strict=True)
    )


def _body(found: Agreement, backends: tuple[Backend, Backend]) -> dict[str, Any]:
    divergence = found.scores.divergence
    return {
        "agree": found.agrees,
        "names": [backend.info.backend for backend in backends],
        "devices": [backend.info.device for backend in backends],
        "positions": len(divergence),
        "kl_divergence": {
            "mean": float(divergence.mean()),
            "median": float(np.median(divergence)),
            "maximum": float(divergence.max()),
            "limit": MOST_DIVERGENCE,
        },
        "same_top": float(found.scores.agrees.mean()),
        "first_difference": _difference_body(found.in_text, backends),
        "equal_answer_tokens": len(found.answer),
        "answer_difference": _difference_body(found.in_answer, backends),
    }


def _difference_body(found: Difference | None, backends: tuple[Backend, Backend]) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "position": found.position,
        "tokens": list(found.tokens),
        "texts": [backend.tokenizer.token_text(token) for backend, token in zip(backends, found.tokens, strict=True)],
        "margins": list(found.margins),
    }
