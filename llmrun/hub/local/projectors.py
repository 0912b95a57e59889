"""Finds the vision projector (mmproj) of a model on this machine.

Projectors are looked for in the model's repository in the Hugging Face cache, in Ollama's manifests, or else in the
model's folder. If that folder has only a link to the model, the folder of the model's file comes next.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from llmrun.base.errors import LlmrunError, ModelNotFound, UsageError, shown
from llmrun.hub.local import other_programs
from llmrun.hub.local.paths import entries, folders_in, hub_cache, is_file
from llmrun.hub.local.stored_models import gguf_files
from llmrun.hub.names import COMMIT, is_projector
from llmrun.hub.projector_names import choices, only_of
from llmrun.options.settings import MMPROJ_OFF


def projector_for(model: Path, asked: str | None = None) -> Path | None:
    """Return the projector of the model whose first file is `model`, or None if there is none.

    asked  the setting `mmproj`: None to search, MMPROJ_OFF for none, or else the path of a file, or the name of a
           projector next to the model

    Raises ModelNotFound if the given file does not exist, and UsageError if several projectors match the model. The
    header of the file must still be checked, because only `check_projector` knows whether projector and model match.
    """
    if asked == MMPROJ_OFF:
        return None
    return _found(model) if asked is None else _named(model, asked)


def projectors_of(model: Path) -> tuple[Path, ...]:
    """Return all files in the model's own folder or repository that are certainly projectors of the model, by name."""
    found, is_clear = _choices(model)
    return tuple(path for same in found for path in same) if is_clear else ()


def only_projectors_of(model: Path) -> tuple[Path, ...]:
    """Return the projectors in the folder of a model that no other model in this folder uses, by name."""
    first, files = _neighbours(model)
    # A link whose target is missing is a model on a disk that is not connected, so it keeps its projectors.
    names = {*files, *(entry.name for entry in entries(model.parent) if entry.is_symlink())}
    return tuple(files[name] for name in only_of(first, names) if name in files)


def snapshot_of(model: Path) -> Path | None:
    """Return the folder of the snapshot in the Hugging Face cache that has the file, or None."""
    with contextlib.suppress(ValueError):  # the file is not in the cache
        parts = model.absolute().relative_to(hub_cache()).parts
        if len(parts) > 3 and parts[1] == "snapshots" and COMMIT.fullmatch(parts[2]):
            return hub_cache().joinpath(*parts[:3])
    return None


def _found(model: Path) -> Path | None:
    found, is_clear = _choices(model)
    if not found and model.is_symlink() and snapshot_of(model) is None:
        model = Path(os.path.realpath(model))
        found, is_clear = _choices(model)
    if found and not is_clear:
        found = [same for same in found if _fits(same[0], model)]
    if len(found) > 1:
        names = [same[0].name for same in found]
        raise UsageError(
            f"{shown(model.name, 200)}: several projectors match: {shown(', '.join(names), 300)}",
            hint=f"choose one with --mmproj, such as --mmproj {shown(names[0], 200)}; --no-mmproj uses none",
        )
    return found[0][0] if found else None


def _choices(model: Path) -> tuple[list[Sequence[Path]], bool]:
    """Return the projectors that match by name, each in one or more precisions, and whether the choice is clear.

    The match is not clear if several projectors match, or if the name of the projector does not tell to which of the
    folder's models it belongs.
    """
    if snapshot_of(model) is None and (held := other_programs.ollama_projectors(model)):
        return [[path] for path in held], len(held) == 1
    first, files = _neighbours(model)
    matching = choices(first, files)
    is_clear = len(matching) == 1 and matching[0].is_certain
    return [[files[name] for name in one.files] for one in matching], is_clear


def _neighbours(model: Path) -> tuple[str, dict[str, Path]]:
    """Return the model's name among the GGUF files of its repository or folder, and these files by name.

    In a repository, files of the model's own snapshot take precedence over those of other snapshots.
    """
    snapshot = snapshot_of(model)
    if snapshot is not None:
        folders = [*folders_in(snapshot.parent), snapshot]
        files = {name: path for folder in folders for name, path in gguf_files(folder)}
        return model.absolute().relative_to(snapshot).as_posix(), files
    return model.name, {entry.name: Path(entry.path) for entry in entries(model.parent) if is_file(entry)}


def check_pair(projector: Path, model: Path) -> None:
    """Check the headers of both files. Raises the errors of `read_projector` and `check_projector`, and ModelFileError.

    A projector for another model has another width, or needs tokens that the model lacks.
    """
    from llmrun.formats.gguf.reader import open_gguf
    from llmrun.model.vision.projector import check_projector, read_projector

    with open_gguf(model) as file:
        check_projector(read_projector(projector), file)


def _fits(projector: Path, model: Path) -> bool:
    try:
        check_pair(projector, model)
    except LlmrunError:
        return False
    return True


def _named(model: Path, asked: str) -> Path:
    path = Path(os.path.expanduser(asked))  # noqa: PTH111  (Path.expanduser may raise)
    with contextlib.suppress(ValueError):  # the text contains a NUL byte
        if path.is_file():
            return path
    beside = [other for name, other in _neighbours(model)[1].items() if is_projector(name)]
    for other in beside:
        if other.name.lower() == asked.lower():
            return other
    names = ", ".join(other.name for other in beside)
    raise ModelNotFound(
        f"--mmproj: {shown(asked, 300)}: no such file",
        hint=f"next to the model: {shown(names, 300)}" if names else "check the path of the projector (mmproj)",
    )
