"""The flags that several commands share, the completions of these flags, and the settings derived from flags.

If a flag is None, the value comes from the settings. Completions run only when a shell requests them (see
`cli/completing`), so each function contains its own imports. Commands such as `list` and `rm` need few settings, so
they ignore invalid settings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.backends.base import SPLIT_MODES
from llmrun.backends.registry import CHOICES, choices_in_words
from llmrun.base.errors import UsageError
from llmrun.cli.console.output import out
from llmrun.formats.layouts.kv import KV_CHOICES
from llmrun.options.settings import RULES, Settings, load_settings, load_sound_settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FILES = "<files>"
_HERE = "on this machine"


def one_of(*choices: str) -> Callable[[], list[str]]:
    """Return a completion function for a fixed list of values."""
    return lambda: list(choices)


def files() -> list[str]:
    """Return FILES, for a file name that Typer treats as text."""
    return [FILES]


def models() -> list[tuple[str, str] | str]:
    """Return the user's presets, the models on this machine and in the catalogue, and FILES."""
    from llmrun.hub.catalog import load_catalog

    names: tuple[str, ...] = ()
    with contextlib.suppress(UsageError):  # the command itself will report a broken catalogue
        names = load_catalog().names()
    found = dict.fromkeys(names, "to download") | dict(models_here()) | described_presets()
    return [*found.items(), FILES]


def described_presets() -> dict[str, str]:
    """Return the names and descriptions of the user's presets, or {} if a preset is invalid."""
    from llmrun.options.settings import load_presets

    with contextlib.suppress(UsageError):  # the command itself will report an invalid preset
        return {preset.name: f"preset of {preset.model}" for preset in load_presets().values()}
    return {}


def drafts() -> list[tuple[str, str] | str]:
    """Return the possible values of --speculate: auto, off and model names."""
    return [("auto", "drafts by lookup"), ("off", "no drafts"), *models()]


def models_here() -> list[tuple[str, str]]:
    """Return the models on this machine."""
    from llmrun.hub.upkeep import inventory

    return [(model.name, _HERE) for model in inventory.models()]


def models_here_or_files() -> list[tuple[str, str] | str]:
    """Return the models on this machine, and FILES."""
    return [*models_here(), FILES]


PromptCache = Annotated[
    Path | None,
    typer.Option("--prompt-cache", metavar="FILE", help="Cache the processed prompt in this file for later runs."),
]


def _model_option(names: str) -> Any:
    shown = f"{names}.  [default: {Settings().model}]"
    return typer.Option("-m", "--model", metavar="NAME", help=shown, autocompletion=models)


Model = Annotated[str | None, _model_option("Model, preset, .gguf file, or server URL#MODEL")]
LocalModel = Annotated[str | None, _model_option("Model, preset or .gguf file")]
System = Annotated[str | None, typer.Option("-s", "--system", metavar="TEXT", help="System prompt.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--max-tokens",
        metavar="N",
        help="Maximum tokens to generate; -1 for no limit.  [default: until the model stops]",
    ),
]
ContextSize = Annotated[
    int | None,
    typer.Option("-c", "--ctx-size", metavar="N", help="Context size in tokens.  [default: what fits, up to 32768]"),
]
KVType = Annotated[
    str | None,
    typer.Option(
        "--kv-type",
        metavar="TYPE",
        help="KV cache precision: f16, q8_0, q4_0 or KEYS:VALUES.  [default: f16]",
        autocompletion=one_of(*KV_CHOICES),
    ),
]
Lora = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="[NAME=]FILE[:SCALE]",
        help="Apply a LoRA adapter in GGUF format. Repeatable.",
        autocompletion=files,
    ),
]
Threads = Annotated[
    int | None, typer.Option("-t", "--threads", metavar="N", help="Number of CPU threads.  [default: one per core]")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=BIAS", help="Add BIAS to a token's logit; -inf bans it. Repeatable."),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Random seed; the same seed gives the same text.  [default: random]"),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop just before generating TEXT. Repeatable.")
]
Think = Annotated[
    bool | None,
    typer.Option("--think/--no-think", help="Turn thinking on or off.  [default: set by the chat template]"),
]
ThinkBudget = Annotated[
    int | None, typer.Option("--think-budget", metavar="N", help="Stop thinking after N tokens; 0 turns it off.")
]
HideThinking = Annotated[bool, typer.Option("--hide-thinking", help="Do not show the model's thinking.")]
Stream = Annotated[
    bool | None,
    typer.Option("--stream/--no-stream", help="Show the answer while it is generated.  [default: stream]"),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print only errors on stderr.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print more details on stderr.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Params = Annotated[
    list[str] | None,
    typer.Option("-P", "--param", metavar="NAME=VALUE", help="Set a variable of the preset's prompt. Repeatable."),
]
PromptTemplate = Annotated[str | None, typer.Option("-T", "--template", hidden=True)]  # no longer exists
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help=f"Backend: {choices_in_words()}.  [default: auto]",
        autocompletion=one_of(*CHOICES),
    ),
]
GpuLayers = Annotated[
    str | None,
    typer.Option(
        "--gpu-layers",
        "-ngl",
        metavar="N",
        help="Layers to run on the GPU: auto, all, or a number.  [default: auto]",
        autocompletion=one_of("auto", "all"),
    ),
]
TensorSplit = Annotated[
    str | None,
    typer.Option(
        "--tensor-split", metavar="N,N,...", help="Proportion of layers for each GPU.  [default: by free memory]"
    ),
]
SplitMode = Annotated[
    str | None,
    typer.Option(
        "--split-mode",
        metavar="MODE",
        help="How to divide layers among GPUs: layer, row, or none.  [default: layer]",
        autocompletion=one_of(*SPLIT_MODES),
    ),
]
MainGpu = Annotated[
    int | None,
    typer.Option("--main-gpu", metavar="N", help="Number of the GPU to use with --split-mode none.  [default: 0]"),
]
Rpc = Annotated[
    str | None,
    typer.Option("--rpc", metavar="HOST:PORT,...", help="Offload layers to llama.cpp RPC servers, or off for none."),
]
RpcAnyway = Annotated[
    bool | None, typer.Option("--rpc-anyway", help="Allow RPC servers at addresses that are not private.")
]
Speculate = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="WHAT",
        help="Speculation: auto, off, or a draft model.  [default: auto on the CPU engine]",
        autocompletion=drafts,
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option("--chat-template", metavar="FILE", help="Jinja2 file to use instead of the model's chat template."),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option("--chat-template-kwargs", metavar="JSON", help="Extra chat template variables, as a JSON object."),
]
JsonSchema = Annotated[
    str | None,
    typer.Option("--json-schema", metavar="FILE|JSON", help="Answer in JSON that matches this JSON Schema."),
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")]
Regex = Annotated[
    str | None, typer.Option("--regex", metavar="REGEX", help="Answer with text that matches this regular expression.")
]
Grammar = Annotated[
    str | None,
    typer.Option("--grammar", metavar="FILE", help="Answer with text that matches a GBNF or Lark grammar."),
]
Choice = Annotated[
    str | None, typer.Option("--choice", metavar="A,B,C", help="Answer with one of these texts, separated by commas.")
]
Offline = Annotated[bool, typer.Option("--offline", help="Use only local files; do not access the network.")]
DEBUG_HELP = "Show a traceback if the command fails."
Debug = Annotated[bool, typer.Option("--debug", help=DEBUG_HELP)]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Show what would be removed without removing it.")]


def given_by(flags: DataclassInstance) -> dict[str, object]:
    """Return the settings whose flags were given. A flag counts as given if its value differs from the default."""
    values = [(flag, getattr(flags, flag.name)) for flag in fields(flags) if flag.name in RULES]
    return {flag.name: value for flag, value in values if value is not flag.default}


def settings_of(flags: DataclassInstance, model: str, *, verbose: bool) -> Settings:
    """Load the settings for a run with this model and configure `out` with them. Raises UsageError."""
    settings = load_settings({**given_by(flags), "model": model})
    out.quiet, out.verbose, out.color = settings.quiet, verbose, settings.color
    return settings


def apply_settings(flags: Mapping[str, object]) -> Settings:
    """Load the settings for this run and configure `out` with them. Invalid settings are ignored with a note.

    Raises UsageError for an invalid flag.

    flags  settings given as flags, as for `load_settings`; None or False means that the flag was not given
    """
    given = {name: value for name, value in flags.items() if value not in (None, False)}
    settings, wrong = load_sound_settings(given)
    out.quiet, out.color = settings.quiet, settings.color
    for error in wrong:
        out.note(f"{error}; ignored" + (f" ({error.hint})" if error.hint else ""))
    return settings
