"""Check that models are complete and unchanged.

The command reads every byte and checks that the sha256 is the expected value, that the header is valid, and that no
scale of a weight block is NaN or infinite. With --engines, the CPU engine and llama.cpp encode a test picture, and the
embeddings must agree.

Examples:
    llmrun verify
    llmrun verify ./file.gguf
    llmrun verify gemma3:4b --engines
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
    from llmrun.jobs.comparing_encoders import RowsCompared

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
    engines: Annotated[
        bool, typer.Option("--engines", help="Also compare both engines' embeddings of a picture.")
    ] = False,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    apply_settings({"quiet": quiet})
    if engines:
        from llmrun.backends.llama.kind import KIND

        if (probe := KIND.probe()).missing:
            raise UsageError(f"--engines: {probe.missing}", hint=probe.hint)

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
    verdicts: list[VerificationResult] = []
    compared: dict[str, RowsCompared | None] = {}
    for model in chosen.values():
        verdicts.append(_told(model, quietly=json_output))
        if engines and verdicts[-1].is_whole:
            try:
                compared[model.name] = _compared(model, is_named=bool(names), quietly=json_output)
            except LlmrunError as error:
                exit_code = exit_code or error.exit_code
                out.error(f"{model.name}: {error}", error.hint)
    damaged = sum(bool(verdict.problems) for verdict in verdicts)
    if not all(rows is None or rows.agrees or rows.known for rows in compared.values()):
        exit_code = exit_code or LlmrunError.exit_code
    if json_output:
        told = [_as_json(verdict) | _rows_as_json(compared, verdict.name, asked=engines) for verdict in verdicts]
        out.json({"models": told, "damaged": damaged})
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


def _compared(model: Model, *, is_named: bool, quietly: bool) -> RowsCompared | None:
    """Compare the rows of both engines for a test picture, and print the result. Returns None without a projector.

    Raises UsageError if the user named a model that has no projector, and the errors of `compare_encoders`.
    """
    from llmrun.base.machine.cpu_count import default_threads
    from llmrun.hub.local.projectors import projector_for
    from llmrun.jobs.comparing_encoders import compare_encoders
    from llmrun.model.vision.projector import read_projector

    path = projector_for(model.path)
    if path is None:
        missing = "--engines: no vision projector, so there are no embeddings to compare"
        text = f"to compare texts: llmrun eval {model.name} --backend cpu --against-backend llama --text FILE"
        if is_named:
            raise UsageError(missing, hint=text)
        out.detail(f"{model.name}: {missing}")
        return None
    out.progress(f"{model.name}: encoding a test picture with both engines")
    rows = compare_encoders(model.path, read_projector(path), default_threads())
    out.clear_progress()
    seen = f"{counted(rows.rows, 'embedding')} of a test picture: "
    seen += f"smallest cosine {rows.cosine:.5f}, largest relative difference {rows.difference:.2%}"
    if rows.agrees and not quietly:
        out.lines([f"{model.name}: OK: both engines agree on {seen}"])
    elif not rows.agrees and rows.known:
        out.note(f"{model.name}: the engines differ, as expected, on {seen}: {rows.known}")
    elif not rows.agrees:
        hint = f"a cosine below {rows.tolerance} is a fault of an engine or of the projector; please report it"
        out.error(f"{model.name}: the engines differ on {seen}", hint)
    return rows


def _rows_as_json(compared: dict[str, RowsCompared | None], name: str, *, asked: bool) -> dict[str, Any]:
    if not asked:
        return {}
    rows = compared.get(name)
    if rows is None:
        return {"engines": None}
    fields = rows._asdict() | {"projector": str(rows.projector), "agrees": rows.agrees}
    return {"engines": fields}


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
