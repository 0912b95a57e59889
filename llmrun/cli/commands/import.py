"""Give a model file a name.

The file stays where it is, and llmrun links to it; --copy and --move put it into llmrun's folder of models instead.
Afterwards, all commands accept the name. For a split model, give the first file. The vision projector (mmproj) next to
the model is imported, too. Models of Ollama, LM Studio and the Hugging Face cache need no import: `llmrun list` shows
their names.

Examples:
    llmrun import ./model-Q4_K_M.gguf mine
    llmrun import ~/Downloads/model-Q4_K_M.gguf mine:7b --move
    llmrun import ./big-00001-of-00003.gguf
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmrun.base.amounts import format_bytes
from llmrun.base.errors import UsageError
from llmrun.base.machine import shell
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings, asked_projector
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import visible_line

if TYPE_CHECKING:
    from llmrun.hub.upkeep.importing import Import

LISTING = {
    "heading": "Find and fit models",
    "place": 23,
    "extra": "import takes one file; for a split model, name only its first file",
}


def command(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The .gguf file.", autocompletion=options.files, show_default=False)
    ],
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of the model.  [default: the file's name]")
    ] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the file.")] = False,
    move: Annotated[bool, typer.Option("--move", help="Move the file.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a model of this name.")] = False,
    mmproj: Annotated[
        str | None,
        typer.Option(
            "--mmproj",
            metavar="FILE",
            help="Vision projector of the model.  [default: the one next to it]",
            autocompletion=options.files,
        ),
    ] = None,
    no_mmproj: Annotated[
        bool, typer.Option("--no-mmproj", help="Import the model without its vision projector.")
    ] = False,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    apply_settings({"quiet": quiet})
    if copy and move:
        raise UsageError("--copy: cannot be combined with --move")
    asked = asked_projector(mmproj, no_mmproj=no_mmproj)
    if name is not None and os.path.exists(name):  # noqa: PTH110  (Path.exists raises for names that are too long)
        raise UsageError(f"import: {name!r}: a second file", hint=str(LISTING["extra"]))
    path = _path(file)

    from llmrun.cli.console.progress import HubReporter
    from llmrun.hub.upkeep import importing

    how = importing.COPY if copy else importing.MOVE if move else importing.LINK
    planned = importing.plan_import(path, name, how, force=force, mmproj=asked)
    importing.carry_out(planned, how, HubReporter())
    if planned.note:
        out.note(planned.note)
    if json_output:
        body = {"name": planned.name, "how": how, "imported": not planned.is_done}
        files = {"from": [str(each) for each in planned.files], "files": [str(each) for each in planned.finals]}
        out.json(body | files)
        return 0
    verb = {importing.COPY: "copied from", importing.MOVE: "moved from", importing.LINK: "a link to"}[how]
    origin = f"already the name of {planned.files[0]}" if planned.is_done else f"{verb} {planned.files[0]}"
    size, quantization, use = _facts(planned)
    out.lines([visible_line(f"{planned.name}: {size}, {quantization}, {origin}")])
    out.note(f"to try it: {shell.words(['llmrun', *use])}")
    return 0


def _path(file: str) -> Path:
    """Return the file to import. Raises UsageError for a model that is not a file, and ModelNotFound."""
    path = os.path.expanduser(file)  # noqa: PTH111  (Path.expanduser raises if there is no home folder)
    if os.path.exists(path):  # noqa: PTH110
        return Path(path)
    from llmrun.hub.names import HeldSource
    from llmrun.hub.resolve.model_file import LocalPath, understand

    meant = understand(file)
    if isinstance(meant, LocalPath):
        return meant.path
    if isinstance(meant.sources[0], HeldSource):
        raise UsageError(f"import: {file!r}: already has a name", hint=f"llmrun chat {file}")
    raise UsageError(f"import: {file!r}: not a file but a model to download", hint=f"llmrun pull {file}")


def _facts(planned: Import) -> tuple[str, str, list[str]]:
    """Return the model's size, its quantization, and the arguments of a command that uses the model."""
    from llmrun.base.types import Pooling, named_pooling
    from llmrun.formats.gguf.reader import open_gguf
    from llmrun.model.archs.parts.encoders import is_encoder
    from llmrun.model.archs.parts.tensors import quantization

    with open_gguf(planned.finals[0]) as opened:
        use = ["chat", planned.name]
        if "tokenizer.chat_template" not in opened.metadata:
            use = ["generate", "--raw", "-m", planned.name, "TEXT"]
        if is_encoder(opened):
            pooling = named_pooling(opened.metadata, opened.string("general.architecture"))
            command, *texts = ["rerank", "QUERY", "FILE"] if pooling is Pooling.RANK else ["embed", "TEXT"]
            use = [command, "-m", planned.name, *texts]
        return format_bytes(opened.file_bytes), quantization(opened), use
