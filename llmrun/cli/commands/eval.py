"""Measure how well a model predicts a text or answers questions.

The perplexity is computed as in llama-perplexity. --against compares the model with a base model, such as a larger
quantization. The two models run side by side, and the KL divergence shows how much their predictions differ.
--against-kv-type and --against-backend compare a model with itself.

Examples:
    llmrun eval qwen3:4b --text wiki.test.raw
    llmrun eval qwen3:4b:Q4_K_M --against qwen3:4b:Q8_0 --text wiki.test.raw
    llmrun eval qwen3:4b --kv-type q8_0 --against-kv-type f16 --text book.txt --chunks 20
    llmrun eval qwen3:4b --choices questions.jsonl
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from llmrun.backends.registry import CHOICES
from llmrun.base.errors import UsageError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import models, one_of, required_model, settings_of, takes_flags
from llmrun.cli.arguments.prompts import read_long_text
from llmrun.engine.remote.request import is_endpoint
from llmrun.formats.layouts.kv import KV_CHOICES
from llmrun.options.settings import RULES, SPECULATE_OFF, Settings, model_named, with_model, with_values

LISTING = {"heading": "Measure", "place": 121}
_TEXT = "https://huggingface.co/datasets/ggml-org/ci/resolve/main/wikitext-2-raw-v1.zip"


@dataclass(frozen=True, slots=True)
class EvalFlags:
    """The values of the flags, in the order of --help. None or False means that the flag was not given."""

    model: options.SameAsModel = None
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="Text to predict.  [default: standard input]"),
    ] = None
    choices: Annotated[
        Path | None,
        typer.Option("--choices", metavar="FILE", help="Multiple-choice questions, one JSON object per line."),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="NAME",
            help="Compare with this base model.  [default: none]",
            autocompletion=models,
        ),
    ] = None
    against_kv_type: Annotated[
        str | None,
        options.speed_option(
            "--against-kv-type",
            metavar="TYPE",
            help="KV cache precision of the base.  [default: --kv-type]",
            autocompletion=one_of(*KV_CHOICES),
        ),
    ] = None
    against_backend: Annotated[
        str | None,
        options.device_option(
            "--against-backend",
            metavar="NAME",
            help="Backend of the base.  [default: --backend]",
            autocompletion=one_of(*CHOICES),
        ),
    ] = None
    context: Annotated[
        int | None,
        options.speed_option(
            "-c",
            "--context",
            "--ctx-size",
            metavar="N",
            min=8,
            help="Tokens per chunk of the text.  [default: 512]",
        ),
    ] = None
    chunks: Annotated[
        int | None,
        typer.Option("--chunks", metavar="N", min=1, help="Evaluate only the first N chunks.  [default: all]"),
    ] = None
    kv_type: options.KVType = None
    lora: options.Lora = None
    threads: options.Threads = None
    backend: options.Backend = None
    gpu_layers: options.GpuLayers = None
    tensor_split: options.TensorSplit = None
    split_mode: options.SplitMode = None
    main_gpu: options.MainGpu = None
    rpc: options.Rpc = None
    rpc_anyway: options.RpcAnyway = None
    json_output: options.Json = False
    offline: options.Offline = False
    quiet: options.Quiet = False
    verbose: options.Verbose = False

    def settings(self, model: str) -> Settings:
        """Load the settings for this run and configure `out` with them. Raises UsageError."""
        settings = settings_of(self, model, verbose=self.verbose)
        for name in (settings.model, *([] if self.against is None else [model_named(self.against)])):
            if is_endpoint(name):
                raise UsageError(f"{name}: a server does not return all logits", hint="name a model on this machine")
        return replace(settings, ctx_size=None, speculate=SPECULATE_OFF, loras=tuple(self.lora or ()), preset=None)

    def base_settings(self, settings: Settings) -> Settings | None:
        """Return the settings of the base model, or None if there is none. Raises UsageError."""
        own = {"kv_type": self.against_kv_type, "backend": self.against_backend}
        changes = {name: _checked(name, value) for name, value in own.items() if value is not None}
        if self.against is None and not changes:
            return None
        base = settings if self.against is None else with_model(settings, self.against)
        return replace(with_values(base, changes), loras=(), preset=None)


def _checked(name: str, value: str) -> object:
    """Return the value of an --against flag. Raises UsageError like `load_settings`."""
    rule = RULES[name]
    try:
        return rule.check(value)
    except ValueError:
        flag = f"--against-{name.replace('_', '-')}"
        raise UsageError(f"flag: {flag}: {value!r} is not {rule.words}", hint=rule.advice(value)) from None


@takes_flags(EvalFlags)
def command(
    name: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Model, preset or .gguf file.", autocompletion=models)
    ] = None,
    *,
    flags: EvalFlags,
) -> int:
    settings = flags.settings(required_model(name, flags.model, "llmrun eval qwen3:4b --text wiki.test.raw"))
    base = flags.base_settings(settings)
    text = _text(flags)

    # Heavy imports must stay below this line, so that usage errors appear immediately.
    from llmrun.cli.answers.answering import announce_loading

    announce_loading(settings)
    from llmrun.cli.evaluating import Task, evaluate
    from llmrun.jobs.evaluation.choices import read_questions
    from llmrun.jobs.evaluation.measuring import DEFAULT_CONTEXT

    questions = () if flags.choices is None else tuple(read_questions(flags.choices))
    task = Task(text, flags.context or DEFAULT_CONTEXT, flags.chunks, questions)
    return evaluate(settings, base, task, as_json=flags.json_output)


def _text(flags: EvalFlags) -> str | None:
    """Return the text to predict, or None if only questions are to be answered. Raises UsageError."""
    if flags.text is None and flags.choices is not None:
        return None
    return read_long_text(flags.text, hint=f"most published numbers are for wiki.test.raw in {_TEXT}")
