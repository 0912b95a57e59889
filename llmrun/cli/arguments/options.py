"""The flags that several commands share. None means that a flag was not given; settings and the model then decide."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llmrun.backends.base import KV_TYPES
from llmrun.backends.registry import CHOICES, choices_in_words
from llmrun.cli.arguments.values import models, one_of

Model = Annotated[
    str | None,
    typer.Option(
        "-m",
        "--model",
        metavar="NAME",
        help="A name of the catalogue, a .gguf file, or a server's URL#MODEL.",
        autocompletion=models,
    ),
]
System = Annotated[str | None, typer.Option("-s", "--system", metavar="TEXT", help="The system prompt.")]
MaxTokens = Annotated[
    int | None,
    typer.Option("-n", "--max-tokens", metavar="N", help="End the answer after N tokens; -1: no limit.  [default: -1]"),
]
ContextSize = Annotated[
    int | None,
    typer.Option("-c", "--ctx-size", metavar="N", help="Tokens of context.  [default: what fits, up to 32768]"),
]
KVType = Annotated[
    str | None,
    typer.Option(
        "--kv-type",
        metavar="TYPE",
        help="Of the KV cache: f16, or q8_0 of half the size.  [default: f16]",
        autocompletion=one_of(*KV_TYPES),
    ),
]
Threads = Annotated[
    int | None, typer.Option("-t", "--threads", metavar="N", help="CPU threads.  [default: one a core]")
]
LogitBias = Annotated[
    list[str] | None,
    typer.Option("--logit-bias", metavar="ID=BIAS", help="Add BIAS to a token's logit; -inf bans it. Repeatable."),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="The same seed gives the same text.  [default: random]"),
]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="End the answer before TEXT. Repeatable.")
]
Think = Annotated[
    bool | None,
    typer.Option("--think/--no-think", help="Let the model think first, or not.  [default: as its template has it]"),
]
ThinkBudget = Annotated[
    int | None, typer.Option("--think-budget", metavar="N", help="End its thinking after N tokens; 0: none at all.")
]
HideThinking = Annotated[bool, typer.Option("--hide-thinking", help="Do not show what it thinks.")]
Stream = Annotated[
    bool | None,
    typer.Option("--stream/--no-stream", help="Show the answer while it is written.  [default: --stream]"),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Nothing on stderr but errors.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Say more on stderr.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
PromptTemplate = Annotated[
    str | None,
    typer.Option("-T", "--template", metavar="NAME", help="A prompt template, by name or path: see llmrun templates."),
]
Params = Annotated[
    list[str] | None,
    typer.Option("-P", "--param", metavar="NAME=VALUE", help="Set a variable of the prompt template. Repeatable."),
]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend",
        metavar="NAME",
        help=f"{choices_in_words()}.  [default: auto]",
        autocompletion=one_of(*CHOICES),
    ),
]
GpuLayers = Annotated[
    str | None,
    typer.Option(
        "--gpu-layers",
        "-ngl",
        metavar="N",
        help="Layers that a GPU runs: auto, all, or a number.  [default: auto]",
        autocompletion=one_of("auto", "all"),
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option("--chat-template", metavar="FILE", help="Jinja2 in place of the model's own template."),
]
ChatTemplateKwargs = Annotated[
    str | None,
    typer.Option("--chat-template-kwargs", metavar="JSON", help="More variables for the chat template."),
]
Offline = Annotated[bool, typer.Option("--offline", help="Use only what is on this machine.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")]
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Say what would be removed, and remove nothing.")]
