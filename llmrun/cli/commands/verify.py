"""Check that models are complete and unchanged.

The command reads every byte and checks that the sha256 is the expected value, that the header is valid, and that no
scale of a weight block is NaN or infinite.

Examples:
    llmrun verify
    llmrun verify ./file.gguf
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmrun.base.amounts import counted
from llmrun.base.errors import IntegrityError, LlmrunError, ModelNotFound, UsageError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings
from llmrun.cli.console.output import out
from llmrun.options.settings import model_named

if TYPE_CHECKING:
    from llmrun.hub.names import Expected
    from llmrun.hub.upkeep.inventory import Model
    from llmrun.hub.upkeep.verification import VerificationResult

LISTING = {"heading": "Manage files", "place": 112}


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Names as shown by llmrun list, or .gguf files.  [default: all]",
            autocompletion=options.models_here_or_files,
        ),
    ] = None,
    same: options.SameAsModelsHere = None,
    engines: Annotated[bool, typer.Option("--engines", hidden=True)] = False,  # removed
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    apply_settings({"quiet": quiet})
    if engines:
        hint = "llmrun eval NAME --backend cpu --against-backend llama --text FILE"
        raise UsageError("--engines: no longer exists", hint=hint)

    names = list(options.all_models(names, same))
    from llmrun.hub.upkeep.inventory import models

    found = models()
    exit_code = 0
    chosen: dict[str, Model] = {}
    for name in map(model_named, names) if names else [model.name for model in found]:
        try:
            model = _model(name, found)
            chosen.setdefault(model.name, model)
        except LlmrunError as error:
            exit_code = exit_code or error.exit_code
            out.error(str(error), error.hint)
    verdicts = [_told(model, quietly=json_output) for model in chosen.values()]
    damaged = sum(bool(verdict.problems) for verdict in verdicts)
    if json_output:
        out.json({"models": [_as_json(verdict) for verdict in verdicts], "damaged": damaged})
    elif len(verdicts) > 1 or not names:
        unread = sum(not (verdict.is_whole or verdict.problems) for verdict in verdicts)
        out.lines(
            [f"{counted(len(verdicts), 'model')}, {damaged} damaged" + (f", {unread} not read" if unread else "")]
        )
    return max((_exit_code(verdict) for verdict in verdicts), default=0) or exit_code


def _model(name: str, found: list[Model]) -> Model:
    """Return the model with this name, or the model in this file. Raises ModelNotFound and UsageError."""
    from llmrun.hub.resolve.model_file import LocalPath, existing, understand
    from llmrun.hub.upkeep.inventory import of_path, select

    try:
        return select(name, found)
    except ModelNotFound:
        meant = understand(name)
        if not isinstance(meant, LocalPath):
            raise
    return of_path(existing(meant))


def _exit_code(verdict: VerificationResult) -> int:
    """Return the exit code for a model. The exit code for damage is the highest."""
    if verdict.problems:
        return IntegrityError.exit_code
    if verdict.missing:
        return ModelNotFound.exit_code
    return LlmrunError.exit_code if verdict.unread else 0


def _told(model: Model, *, quietly: bool) -> VerificationResult:
    from llmrun.cli.console.progress import HubReporter
    from llmrun.hub.upkeep import verification
    from llmrun.hub.upkeep.inventory import USERS

    verdict = verification.verify(model, _promised(model), HubReporter())
    for problem in verdict.problems:
        out.error(f"{model.name}: {problem}")
    if verdict.problems:
        out.error(f"{model.name}: damaged", _advice(model, verdict))
    for path in verdict.missing:
        beside = "put all files of the model in the same folder"
        out.error(f"{model.name}: a file is missing: {path}", beside if model.holder == USERS else _again(model))
    for line in verdict.unread:
        out.error(f"{model.name}: {line}", "the file could not be checked; look at its permissions and the disk")
    if verdict.is_whole and not quietly:
        known = "sha256 matches" if all(verdict.expected) else "no known sha256 to compare with"
        out.lines([f"{model.name}: OK: {known}, no NaN in {counted(verdict.tensors, 'tensor')}"])
    return verdict


def _promised(model: Model) -> tuple[Expected, ...]:
    """Return a model's checksums and sizes from the catalogue, or () if the model is not in the catalogue."""
    from llmrun.hub.resolve.model_file import LocalPath, understand
    from llmrun.hub.upkeep.inventory import OWN, SHARED

    if model.holder not in (OWN, SHARED):
        return ()
    try:
        meant = understand(model.name)
    except LlmrunError:
        return ()
    return () if isinstance(meant, LocalPath) else meant.expected


def _advice(model: Model, verdict: VerificationResult) -> str:
    from llmrun.hub.upkeep.inventory import OWN, USERS

    downloaded = model.record is not None and model.record.source.startswith(("pypi:", "http"))
    if model.holder == USERS or (model.holder == OWN and not downloaded):
        return "download or copy the file again; if that does not help, the original is damaged, so use another file"
    if not verdict.has_other_bytes:
        return "the published file itself is damaged; try another quantization or another publisher"
    return _again(model)


def _again(model: Model) -> str:
    """Return the command that downloads a model again."""
    holder, _, name = model.name.partition(":")
    if holder == "ollama":
        return f"ollama rm {name} && ollama pull {name}"
    return f"llmrun rm {model.name} && llmrun pull {model.name}"


def _as_json(verdict: VerificationResult) -> dict[str, Any]:
    return {
        "name": verdict.name,
        "whole": verdict.is_whole,
        "readable": not verdict.missing and not verdict.unread,
        "sha256": verdict.digests,
        "expected": verdict.expected,
        "tensors": verdict.tensors,
        "problems": [*verdict.problems, *(f"{path}: missing" for path in verdict.missing), *verdict.unread],
    }
