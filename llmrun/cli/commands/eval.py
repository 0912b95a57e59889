"""Measure how well a model predicts a text or answers questions.

The perplexity is computed as llama-perplexity does. --against compares the model with a base model, such as a larger
quantization: both run side by side, and the KL divergence shows how much their predictions differ. --against-kv-type
and --against-backend compare a model with itself.

Examples:
    llmrun eval qwen3:4b --text wiki.test.raw
    llmrun eval qwen3:4b:Q4_K_M --against qwen3:4b:Q8_0 --text wiki.test.raw
    llmrun eval qwen3:4b --kv-type q8_0 --against-kv-type f16 --text book.txt --chunks 20
    llmrun eval qwen3:4b --choices questions.jsonl
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.flags import takes_flags
from llmrun.cli.arguments.options import models
from llmrun.cli.arguments.parsing import STDIN, read_stdin, read_text
from llmrun.cli.console.terminal import is_terminal
from llmrun.cli.evaluating import EvalFlags

LISTING = {"place": 55}
_TEXT = "https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip"


@takes_flags(EvalFlags)
def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model, preset or .gguf file.", autocompletion=models)],
    *,
    flags: EvalFlags,
) -> int:
    settings = flags.settings(model)
    base = flags.base_settings(settings)
    text = _text(flags)

    # No heavy imports above this line, so that usage errors appear immediately.
    from llmrun.cli.evaluating import Task, evaluate
    from llmrun.jobs.evaluation.choices import read_questions
    from llmrun.jobs.evaluation.measuring import DEFAULT_CONTEXT

    questions = () if flags.choices is None else tuple(read_questions(flags.choices))
    task = Task(text, flags.context or DEFAULT_CONTEXT, flags.chunks, questions)
    return evaluate(settings, base, task, as_json=flags.json_output)


def _text(flags: EvalFlags) -> str | None:
    """Return the text to predict, or None if only questions are to be answered. Raises UsageError."""
    if flags.text is not None:
        return read_stdin("the text") if str(flags.text) == STDIN else read_text(flags.text, "--text")
    if flags.choices is not None:
        return None
    if is_terminal(sys.stdin):
        raise UsageError("--text: missing", hint=f"most published numbers are for wiki.test.raw in {_TEXT}")
    return read_stdin("the text")
