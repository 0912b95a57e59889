"""Remove outdated revisions, abandoned downloads and old saved states.

Pruning affects the cache shared with other Hugging Face tools. The command removes revisions of GGUF models that a
newer local revision has replaced, data that belongs to no model, unfinished downloads that have not been resumed for a
week, and week-old files of unfinished imports. Repositories without a GGUF model are left alone. Saved states of chats
and servers, which are mostly KV caches, are removed if they have not been used for 30 days or their conversation no
longer exists.

Examples:
    llmrun prune --dry-run
    llmrun prune
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from llmrun.base.amounts import format_bytes
from llmrun.base.errors import LlmrunError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import apply_settings
from llmrun.cli.console.output import out

if TYPE_CHECKING:
    from llmrun.engine.saved_state.budget import StoredState

LISTING = {
    "heading": "Manage files",
    "place": 113,
    "extra": "`hf cache prune` removes old revisions of every repository",
}

_STATES = "saved states"


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
    states = _remove_states(dry_run=dry_run)
    if states:
        freed = sum(each.n_bytes for each in states)
        total += freed
        told.append({"name": _STATES, "freed_bytes": freed, "files": [str(each.path) for each in states]})
        if not json_output:
            out.lines([f"{_STATES}: {format_bytes(freed)}"])
    if json_output:
        out.json({"dry_run": dry_run, "pruned": told, "freed_bytes": total})
    elif not told and not exit_code:
        out.lines(["Nothing to prune."])
    else:
        out.lines([f"{format_bytes(total)} {'would be freed' if dry_run else 'freed'}"])
    return exit_code


def _remove_states(*, dry_run: bool) -> list[StoredState]:
    """Remove abandoned saved states, and return the list of states. With `dry_run`, nothing is removed."""
    from llmrun.base.folders import conversations_folder, prefixes_folder
    from llmrun.engine.saved_state.budget import abandoned

    removed = []
    for state in abandoned(conversations_folder(), prefixes_folder(), time.time()):
        try:
            if not dry_run:
                state.path.unlink(missing_ok=True)
        except OSError as error:
            out.error(f"{state.path}: cannot be removed: {error.strerror}")
            continue
        removed.append(state)
    return removed
