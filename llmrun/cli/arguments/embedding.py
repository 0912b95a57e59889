"""The flags that `llmrun embed` and `llmrun rerank` share, and the settings derived from these flags.

Both commands take texts as positional arguments, so the model is always an option.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from llmrun.base.errors import UsageError
from llmrun.base.types import Pooling
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import models, names_a_model, one_of, settings_of, with_model_option
from llmrun.engine.remote.request import is_endpoint
from llmrun.options.settings import Settings

_POOLINGS = {"mean": Pooling.MEAN, "cls": Pooling.CLS, "last": Pooling.LAST}


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """The values of the model flags, in the order of --help. None or False means "not given"."""

    model: Annotated[
        str | None,
        typer.Option("-m", "--model", metavar="NAME", help="Model, preset or .gguf file.", autocompletion=models),
    ] = None
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Leave out the end of texts that are too long.  [default: fail]")
    ] = False
    ctx_size: options.ContextSize = None
    threads: options.Threads = None
    backend: options.Backend = None
    offline: options.Offline = False
    quiet: options.Quiet = False
    verbose: options.Verbose = False

    def settings(self, first: str | None, example: str) -> Settings:
        """Load the settings for this run and configure `out` with them. Raises UsageError.

        first    the first positional argument, which was the model in earlier versions
        example  a complete command, for the hint if the model is missing
        """
        if self.model is None:
            named = first is not None and names_a_model(first)
            raise UsageError("-m: the model is missing", hint=with_model_option(first or "") if named else example)
        settings = settings_of(self, self.model, verbose=self.verbose)
        if is_endpoint(settings.model):
            raise UsageError(
                f"{settings.model}: this command runs a model on this machine",
                hint="send requests to the server's /v1/embeddings or /v1/rerank",
            )
        return replace(settings, preset=None)


@dataclass(frozen=True, slots=True)
class EmbedFlags(ModelFlags):
    """The flags of `llmrun embed`."""

    file: Annotated[
        Path | None, typer.Option("-f", "--file", metavar="FILE", help="Embed each line of this file; - reads stdin.")
    ] = None
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to this .npy or .jsonl file.")
    ] = None
    dimensions: Annotated[
        int | None,
        typer.Option("--dimensions", metavar="N", min=1, help="Keep only the first N dimensions.  [default: all]"),
    ] = None
    raw: Annotated[bool, typer.Option("--no-normalize", help="Do not scale the vectors to length 1.")] = False
    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling",
            metavar="NAME",
            help="Pooling: mean, cls or last.  [default: the model's own]",
            autocompletion=one_of(*_POOLINGS),
        ),
    ] = None

    @property
    def chosen_pooling(self) -> Pooling | None:
        """The value of --pooling, or None for the model's own pooling. Raises UsageError."""
        if self.pooling is not None and self.pooling not in _POOLINGS:
            raise UsageError(f"--pooling: {self.pooling!r} is not one of {', '.join(_POOLINGS)}")
        return _POOLINGS[self.pooling] if self.pooling else None


@dataclass(frozen=True, slots=True)
class RerankFlags(ModelFlags):
    """The flags of `llmrun rerank`."""

    top: Annotated[
        int | None, typer.Option("--top", metavar="N", min=1, help="Show only the best N documents.  [default: all]")
    ] = None
    json_output: options.Json = False
