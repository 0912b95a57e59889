"""Gives a model file a name, with a link, a copy or a move into llmrun's own folder.

The name of a model in our own folder is the name of its file (see hub/local/own_models.py), so an import adds files and
nothing else. Copies are written to a work folder and renamed when they are complete, so a failed or interrupted import
leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llmrun.base.errors import LlmrunError, ModelFileError, ModelNotFound, UsageError, shown
from llmrun.formats.gguf.quantization import quantization_of
from llmrun.hub.local import paths
from llmrun.hub.local.model_records import forget
from llmrun.hub.local.own_models import ENDING, OwnModel, find_own, stem_of
from llmrun.hub.local.projectors import check_pair, only_projectors_of, projector_for
from llmrun.hub.local.safe_writes import CHUNK, make_folder, put_in_place, require_space, sync_folder, writing
from llmrun.hub.names import models_among, shards_of
from llmrun.hub.progress_reporter import Reporter
from llmrun.hub.resolve.model_file import LocalPath, existing, is_bare
from llmrun.hub.transfer.pypi import lock_held
from llmrun.hub.upkeep import inventory
from llmrun.hub.upkeep.inventory import OWN

LINK: Final = "link"
COPY: Final = "copy"
MOVE: Final = "move"

_NAME = re.compile(r"\w[\w.+: -]*")
_ODD = re.compile(r"-*[^\w.+-]+-*")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Import:
    """A planned import.

    name      the name that the model will have
    files     the model's files and its projector, with absolute paths
    finals    the path of each file in our own folder
    replaced  the files that have the name now
    is_done   whether the name already belongs to these files
    kept      the files that are copied instead of moved, because another model uses them
    note      why a projector next to the model is not imported or not moved, or ""
    """

    name: str
    files: tuple[Path, ...]
    finals: tuple[Path, ...]
    replaced: tuple[Path, ...] = ()
    is_done: bool = False
    kept: tuple[Path, ...] = ()
    note: str = ""


def plan_import(file: Path, name: str | None, how: str, *, force: bool, mmproj: str | None = None) -> Import:
    """Check a model and its new name. By default, the name is that of the file, without its ending.

    mmproj  the projector to import with the model, as in `projector_for`

    Raises ModelNotFound and ModelFileError for a file that is not a complete model, UnsupportedModel for a model that
    no backend supports, and UsageError for a name that cannot be used or, without `force`, is in use.
    """
    from llmrun.backends.registry import check_supported
    from llmrun.formats.gguf.metadata import check_is_model
    from llmrun.formats.gguf.reader import open_gguf

    first = existing(LocalPath(file)).absolute()
    try:
        files = tuple(first.with_name(shard) for shard in shards_of(first.name))
    except ValueError as error:
        raise ModelFileError(f"{error}") from error
    with open_gguf(first) as opened:
        check_is_model(opened)
        check_supported(opened)
    chosen = _checked(name) if name else _name_of(first)
    projector, note = _projector(first, mmproj)
    kept: tuple[Path, ...] = ()
    if how == MOVE:
        kept = tuple(path for path in projector if path not in only_projectors_of(first))
        _check_movable((*files, *(path for path in projector if path not in kept)))
        note = (
            "; ".join(f"{shown(path.name, 200)} is copied, not moved: other models may use it" for path in kept) or note
        )
    own = find_own(chosen)
    is_same = own is not None and _is_same(own, files)
    has_projector = all(_is_imported(path, chosen) for path in projector)
    if own is not None and is_same and (has_projector if how == LINK else not own.files[0].is_symlink()):
        return Import(own.name, files, own.files, is_done=True, note=note)
    has_only_links = own is not None and all(path.is_symlink() for path in own.files)
    if not (own is not None and has_only_links and (own.missing or is_same)):
        _check_free(chosen, own, force=force)
    replaced = (*own.files, *_imported_projectors(own)) if own else ()
    ends = [f"-{number:05}-of-{len(files):05}" for number in range(1, len(files) + 1)] if len(files) > 1 else [""]
    ends += [_projector_end(path) for path in projector]
    finals = tuple(paths.models_folder() / f"{chosen}{end}{ENDING}" for end in ends)
    for final in finals:
        if os.path.lexists(final) and final not in replaced and not force:
            raise UsageError(f"import: {final}: already exists", hint="choose another name, or add --force")
    return Import(chosen, (*files, *projector), finals, replaced, kept=kept, note=note)


def _projector(first: Path, asked: str | None) -> tuple[tuple[Path, ...], str]:
    """Return the projector to import with a model, or (), and a note that says why a projector was left out.

    Raises the errors of `projector_for`, and of `check_pair` for a projector that the user named.
    """
    found = projector_for(first, asked)
    if found is None:
        return (), ""
    try:
        check_pair(found, first)
    except LlmrunError as error:
        if asked is not None:
            raise
        return (), f"{shown(found.name, 200)} is not imported: {error}"
    return (found.absolute(),), ""


def _is_imported(projector: Path, name: str) -> bool:
    """Return whether the model with this name has this projector already."""
    final = paths.models_folder() / f"{name}{_projector_end(projector)}{ENDING}"
    return projector.parent == paths.models_folder() or (final.exists() and final.samefile(projector))


def _projector_end(projector: Path) -> str:
    """Return what follows the model's name in the name of its projector, before the ending."""
    quantization = quantization_of(projector.name)
    return f".mmproj-{quantization}" if quantization else ".mmproj"


def _imported_projectors(own: OwnModel) -> Iterator[Path]:
    """Yield the projectors that were imported with a model."""
    beginning = f"{stem_of(own.files[0].name)}.mmproj".lower()
    for path in only_projectors_of(own.files[0]):
        if path.name.lower().startswith(beginning):
            yield path


def carry_out(planned: Import, how: str, reporter: Reporter) -> None:
    """Link, copy or move the files. Raises DoesNotFit if the disk is too full, and LlmrunError if a write fails."""
    if planned.is_done:
        return
    key = f"import {planned.name}"
    folder, work = paths.models_folder(), paths.work_folder(key)

    def waiting() -> None:
        reporter.note(f"{planned.name}: waiting for another process's import")

    with lock_held(paths.lock_file(key), folder, waiting):
        shutil.rmtree(work, ignore_errors=True)  # a killed import may have left files here
        make_folder(work, folder)
        try:
            if how == LINK:
                _each(planned, work, _link)
            elif how == COPY or not _moved(planned, work, reporter):
                require_space(folder, sum(file.stat().st_size for file in planned.files), planned.name)
                _each(planned, work, lambda file, new: _copy(file, new, reporter))
                if how == MOVE:
                    for file in planned.files:
                        if file not in planned.kept:
                            with writing(file):
                                file.unlink()
        finally:
            shutil.rmtree(work, ignore_errors=True)
            with contextlib.suppress(OSError):  # another process is using the folder
                work.parent.rmdir()
        for old in planned.replaced:
            if not any(_is_one_file(old, final) for final in planned.finals):
                with writing(old):
                    old.unlink(missing_ok=True)


def _is_one_file(old: Path, new: Path) -> bool:
    """Return whether two paths name one file or link, as two spellings do on systems that ignore case."""
    return os.path.lexists(old) and os.path.samestat(old.lstat(), new.lstat())


def _each(planned: Import, work: Path, make: Callable[[Path, Path], None]) -> None:
    """Make each new file in the work folder, then give all files their final names."""
    made = [work / final.name for final in planned.finals]
    for file, new in zip(planned.files, made, strict=True):
        make(file, new)
    _forget(planned)
    for new, final in zip(made, planned.finals, strict=True):
        put_in_place(new, final)


def _forget(planned: Import) -> None:
    """Remove the records of files that are about to be replaced. A link's record belongs to its target."""
    for old in planned.replaced:
        if not old.is_symlink():
            forget(old)


def _link(file: Path, new: Path) -> None:
    try:
        new.symlink_to(file)
    except OSError as error:
        if sys.platform == "win32" or error.errno in _NO_LINKS:
            raise LlmrunError(
                f"import: links cannot be created in {paths.models_folder()}: {error.strerror}",
                hint="add --copy or --move",
            ) from error
        with writing(new):
            raise


def _copy(file: Path, new: Path, reporter: Reporter) -> None:
    done, total = 0, file.stat().st_size
    with file.open("rb") as source, writing(new), new.open("xb") as target:
        while done <= total and (chunk := source.read(CHUNK)):
            target.write(chunk)
            done += len(chunk)
            reporter.progress(f"copying {file.name}", done, max(done, total))
        target.flush()
        os.fsync(target.fileno())
    if done != total:
        raise ModelFileError(
            f"{file}: changed while it was being copied", hint="import the file again when it is complete"
        )


def _moved(planned: Import, work: Path, reporter: Reporter) -> bool:
    """Rename all files or none. Returns False if they are on another disk, so that they must be copied."""
    _forget(planned)
    with contextlib.ExitStack() as undo:
        for file, final in zip(planned.files, planned.finals, strict=True):
            if file in planned.kept:
                _copy(file, work / final.name, reporter)
                file = work / final.name
            with writing(final):
                try:
                    file.replace(final)
                except OSError as error:
                    if error.errno == errno.EXDEV:
                        return False
                    raise
            undo.callback(final.replace, file)
        undo.pop_all()
    sync_folder(paths.models_folder())
    return True


def _check_movable(files: Sequence[Path]) -> None:
    """Raise UsageError if a file is a link or belongs to another program."""
    for file in files:
        if file.is_symlink():
            raise UsageError(
                f"--move: {file} is a link to {os.path.realpath(file)}", hint="use --copy, or move that file"
            )
    for model in inventory.models():
        if model.holder != OWN and any(os.path.samefile(model.path, file) for file in files):  # noqa: PTH121
            raise UsageError(
                f"--move: {files[0]}: another program needs this file: {model.name}",
                hint="leave out --move to use the file in place, or use --copy",
            )


def _name_of(first: Path) -> str:
    """Return a name for a file: its own, with "-" in place of characters that are hard to type."""
    return _checked(_ODD.sub("-", stem_of(first.name)).strip("-."))


def _checked(name: str) -> str:
    """Return a name without ".gguf". Raises UsageError if `list` could not show the model under this name."""
    stem = stem_of(name)
    file = f"{stem}{ENDING}"
    usable = (
        _NAME.fullmatch(stem) and is_bare(stem) and stem[-1] not in ". " and models_among([file]) == {file: (file,)}
    )
    if not usable or len(file.encode()) > 200:
        hint = "use letters, digits and . _ - :, such as mine:7b"
        raise UsageError(f"import: {name[:100]!r} cannot be the name of a model", hint=hint)
    if sys.platform == "win32" and ":" in stem:
        raise UsageError(
            f"import: {name!r}: file names cannot contain : on Windows", hint=f"use {stem.replace(':', '-')}"
        )
    return stem


def _is_same(own: OwnModel, files: Sequence[Path]) -> bool:
    """Return whether a model in our own folder already consists of these files, or of links to them."""
    return own.missing is None and len(own.files) == len(files) and own.files[0].samefile(files[0])


def _check_free(name: str, own: OwnModel | None, *, force: bool) -> None:
    """Raise UsageError if a name is in use. With `force`, only names in the user's models.toml count.

    own  the model in our own folder that has the name
    """
    other = "choose another name: llmrun import FILE NAME"
    catalogue = inventory.sound_catalogue()
    if name.lower() in inventory.hidden_names(catalogue):
        raise UsageError(f"import: {name!r}: already a preset or a short name in models.toml", hint=other)
    if force:
        return
    if own is not None:
        raise UsageError(
            f"import: {name!r}: already the name of {own.files[0]}", hint=f"{other}; or add --force to replace it"
        )
    with contextlib.suppress(ModelNotFound):
        if catalogue is not None and catalogue.find(name):
            raise UsageError(
                f"import: {name!r}: already the name of a model in the catalogue",
                hint=f"{other}; or add --force to use this name for your file",
            )
