"""Remove outdated revisions, abandoned downloads and unused caches.

Pruning affects the cache shared with other Hugging Face tools. The command removes revisions of GGUF models that a
newer local revision has replaced, data that belongs to no model, unfinished downloads that have not been resumed for a
week, and week-old files of unfinished imports. Repositories without a GGUF model are left alone. Saved states of chats
and servers, which are mostly KV caches, are removed if they have not been used for 30 days or their conversation no
longer exists. Compiled kernels that have not been used for 30 days, such as those of earlier versions, are removed too,
and so are prefix logs (see `llmrun why`) that have not changed for 30 days, and files of background engines that have
ended unexpectedly.

Examples:
    llmrun prune --dry-run
    llmrun prune
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llmrun.base.amounts import counted, format_bytes
from llmrun.base.errors import LlmrunError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LISTING = {
    "heading": "Manage files",
    "place": 113,
    "extra": "`hf cache prune` removes old revisions of every repository",
}


def command(
    dry_run: options.DryRun = False,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> int:
    apply_settings({"quiet": quiet})

    from llmrun.hub.upkeep import removal

    told: list[dict[str, Any]] = []
    exit_code, total = 0, 0
    for planned in removal.prunings():
        try:
            if isinstance(planned, LlmrunError):
                raise planned
            freed = planned.freed if dry_run else removal.remove(planned)
        except LlmrunError as error:
            exit_code = exit_code or error.exit_code
            out.error(str(error), error.hint)
            continue
        total += freed
        files = [str(path) for path in (*planned.links, *planned.blobs)]
        told.append({"name": planned.name, "freed_bytes": freed, "files": files})
        if not json_output:
            out.lines([f"{planned.name}: {format_bytes(freed)}"])
    for name, find, remove in (
        ("saved states", _abandoned_states, _unlink),
        ("compiled kernels", _unused_kernels, _unlink),
        ("prefix logs", _unused_records, _unlink),
        ("leftovers of background engines", _leftovers, _remove_leftover),
    ):
        freed, paths, complete = _remove_unused(find, remove, dry_run=dry_run)
        exit_code = exit_code or int(not complete)
        total += freed
        if paths:
            told.append({"name": name, "freed_bytes": freed, "files": [str(path) for path in paths]})
            if not json_output:
                out.lines([f"{name}: {format_bytes(freed)}"])
    if json_output:
        out.json({"dry_run": dry_run, "pruned": told, "freed_bytes": total})
    elif not told and not exit_code:
        out.lines(["Nothing to prune."])
    else:
        out.lines([f"{format_bytes(total)} {'would be freed' if dry_run else 'freed'}"])
    return exit_code


def _abandoned_states() -> list[tuple[Path, int]]:
    from llmrun.base.folders import conversations_folder, prefixes_folder
    from llmrun.engine.saved_state.budget import abandoned

    return [(each.path, each.n_bytes) for each in abandoned(conversations_folder(), prefixes_folder(), time.time())]


def _unused_kernels() -> list[tuple[Path, int]]:
    from llmrun.base.compiled.cache import unused_files

    return unused_files(time.time())


def _unused_records() -> list[tuple[Path, int]]:
    from llmrun.serving.prefix_log import unused_records

    return unused_records(time.time())


def _leftovers() -> list[tuple[Path, int]]:
    from llmrun.serving.background.control import leftovers

    found: list[tuple[Path, int]] = []
    for each in leftovers():
        with suppress(FileNotFoundError):  # an engine has just ended, or started again
            found.append((each.path, each.path.lstat().st_size))
    return found


def _remove_leftover(path: Path) -> None:
    from llmrun.serving.background.control import remove

    remove(path)


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def _remove_unused(
    find: Callable[[], list[tuple[Path, int]]], remove: Callable[[Path], None], *, dry_run: bool
) -> tuple[int, list[Path], bool]:
    """Call `remove` for each file whose path and size `find` returns. With `dry_run`, nothing is removed.

    Returns the number of bytes freed, the removed files, and whether all files could be removed.
    """
    freed, removed, errors = 0, [], list[str]()
    try:
        for path, n_bytes in find():
            try:
                if not dry_run:
                    remove(path)
            except OSError as error:
                errors.append(f"{error.filename}: cannot be removed: {error.strerror}")
            except LlmrunError as error:
                errors.append(str(error))
            else:
                freed += n_bytes
                removed.append(path)
    except OSError as error:
        out.error(f"{error.filename}: cannot be read: {error.strerror}")
        return 0, [], False
    except LlmrunError as error:
        out.error(str(error), error.hint)
        return 0, [], False
    if errors:
        others = f", and neither can {counted(len(errors) - 1, 'other file')}" if len(errors) > 1 else ""
        out.error(f"{errors[0]}{others}")
    return freed, removed, not errors
