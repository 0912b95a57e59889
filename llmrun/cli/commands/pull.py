"""Download models. The paths are printed to stdout, everything else to stderr.

Interrupted downloads resume, and files already present are not downloaded again. If the repository has a vision
projector (mmproj) for the model, the projector is downloaded, too. Without arguments, the command downloads exactly the
files listed in llmrun.lock in the current folder.

Examples:
    llmrun pull qwen3:4b hf:org/repo:Q5_K_M
    llmrun pull --dry-run qwen3:4b
    llmrun pull --lock qwen3:4b
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from msgspec.structs import replace

from llmrun.base.amounts import format_bytes, format_seconds
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.cli.arguments import options
from llmrun.cli.arguments.options import all_models, apply_settings
from llmrun.cli.console.output import out
from llmrun.cli.console.progress import HubReporter
from llmrun.cli.messages import message_for
from llmrun.options.settings import MMPROJ_OFF, model_named

if TYPE_CHECKING:
    from llmrun.hub.names import Artifact, RemoteFile
    from llmrun.hub.resolve.model_file import Pull

LISTING = {"heading": "Find and fit models", "place": 22}
Given = TypeVar("Given")
Found = TypeVar("Found")


def command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Model names, hf:OWNER/NAME[:QUANT] or URLs.  [default: all in llmrun.lock]",
            autocompletion=options.models,
        ),
    ] = None,
    same: options.SameAsModels = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be downloaded without downloading it.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="REV", help="Branch, tag or commit of the repository.")
    ] = None,
    lock: Annotated[bool, typer.Option("--lock", help="Record the exact files in llmrun.lock.")] = False,
    locked: Annotated[
        bool, typer.Option("--locked", help="Download exactly the files in llmrun.lock, or fail.")
    ] = False,
    no_mmproj: Annotated[bool, typer.Option("--no-mmproj", help="Do not download vision projectors.")] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Download models even if they do not fit in memory.")
    ] = False,
    offline: options.Offline = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per model instead of paths.")
    ] = False,
) -> int:
    settings = apply_settings({"offline": offline, "quiet": quiet})
    out.verbose, models = verbose, list(all_models(models, same))
    if locked and (lock or revision is not None):
        raise UsageError("--locked: cannot be combined with --lock or --revision")
    if revision is not None and not models:
        raise UsageError("--revision: no model given")
    from llmrun.hub.resolve.lockfile import LOCK

    pulling = _Pulling(
        names=tuple(dict.fromkeys(map(model_named, models))),
        revision=revision,
        lock=lock,
        locked=locked,
        dry_run=dry_run,
        projectors=not no_mmproj and settings.mmproj != MMPROJ_OFF,
        anyway=anyway,
        offline=settings.offline,
        as_json=json_output,
        lock_path=Path(LOCK),
    )
    return pulling.run()


@dataclass(slots=True)
class _Pulling:
    """One run of the command, with its arguments and flags.

    The run plans all downloads, checks the disk space, and then downloads the models one by one. If one model fails,
    the others are still downloaded.
    """

    names: tuple[str, ...]
    revision: str | None
    lock: bool
    locked: bool
    dry_run: bool
    projectors: bool
    anyway: bool
    offline: bool
    as_json: bool
    lock_path: Path
    reporter: HubReporter = field(default_factory=HubReporter)
    failures: list[int] = field(default_factory=list)  # exit codes
    locked_now: dict[str, Artifact] = field(default_factory=dict)
    follows_lock: bool = False  # whether exactly the files in the lock file are downloaded

    def run(self) -> int:
        from llmrun.hub.resolve.model_file import require_room

        names, plan = self._names_and_plan()
        found = [planned for name in names if (planned := self._trying(name, plan, name))]
        by_name = {planned.name: planned for planned in found}  # qwen3 and qwen3:4b may refer to the same model
        pulls = list(map(self._with_projector, by_name.values()))
        for planned in pulls:
            self._tell_plan(planned)
        fetching = [planned for planned in pulls if planned.here is None]
        if len(fetching) > 1:
            total = sum(each.size for planned in fetching for each in (planned.pinned, planned.projector) if each)
            out.fields([f"total {format_bytes(total)} in {len(fetching)} models"])
        refused = [
            planned
            for planned in fetching
            if not self.anyway and not self._trying(planned.name, _memory_checked, planned)
        ]
        pulls = [planned for planned in pulls if planned not in refused]
        require_room(pulls)
        if self.dry_run:
            return self._code()
        for planned in pulls:
            self._trying(planned.name, self._pull, planned)
        if self.locked_now:
            self._write_lock()
        if self.failures and len(names) > 1:
            rest = "" if len(self.failures) == len(names) else "; the others are on this machine"
            out.note(f"{len(self.failures)} of {len(names)} models failed{rest}")
        return self._code()

    def _names_and_plan(self) -> tuple[Sequence[str], Callable[[str], Pull]]:
        from llmrun.hub.resolve.lockfile import read_lock
        from llmrun.hub.resolve.model_file import plan, plan_current, plan_locked

        names = self.names
        if not self.locked and names:
            lock = None
        elif not self.locked and not self.lock_path.exists():
            raise UsageError("no model given, and there is no llmrun.lock here", hint="llmrun pull smollm2:135m")
        else:
            lock = read_lock(self.lock_path)
            names = names or tuple(lock)
        if self.lock and self.lock_path.exists():
            read_lock(self.lock_path)  # report a broken lock before downloading gigabytes
        if self.lock or self.revision is not None:
            return names, lambda name: plan_current(name, self.revision, self.reporter, offline=self.offline)
        if lock is not None:
            self.follows_lock = True
            return names, lambda name: plan_locked(name, lock, self.reporter, offline=self.offline)
        return names, lambda name: plan(name, self.reporter, offline=self.offline)

    def _with_projector(self, planned: Pull) -> Pull:
        from llmrun.hub.resolve.projectors import with_projector

        if not self.projectors:
            return replace(planned, projector=None)
        return planned if self.follows_lock else with_projector(planned, self.reporter, offline=self.offline)

    def _trying(self, name: str, step: Callable[[Given], Found], given: Given) -> Found | None:
        """Return the result of `step`. On failure, report the error and return None.

        If only one model was requested and the output is not JSON, raise the error instead.
        """
        try:
            return step(given)
        except LlmrunError as error:
            if len(self.names) == 1 and not self.as_json:
                raise
            message = message_for(error)
            self.failures.append(message.exit_code)
            out.error(message.sentence if name in message.sentence else f"{name}: {message.sentence}", message.hint)
            if self.as_json:
                said = {"message": message.sentence, "hint": message.hint, "exit_code": message.exit_code}
                out.json({"name": name, "status": "failed", "error": said})
            return None

    def _code(self) -> int:
        return self.failures[0] if self.failures else 0

    # The following methods process one model.

    def _tell_plan(self, planned: Pull) -> None:
        if self.dry_run and self.as_json:
            out.json(_described(planned, "present" if planned.here else "planned", planned.here))
        elif self.dry_run:
            out.answer("  ".join(_plan_fields(planned)) + "\n")
        else:
            out.fields(_plan_fields(planned))
        for artifact in (planned.pinned, planned.projector):
            for file in artifact.files if artifact is not None else ():
                out.detail(f"  {file.path}  {file.size:,} bytes  sha256 {file.sha256 or 'unknown'}")

    def _pull(self, planned: Pull) -> None:
        path, told = self._fetch(planned.name, planned.pinned, lambda: planned.fetch(self.reporter))
        if planned.sources is not None and planned.sources.offer() != planned.pinned:  # another source had to be used
            planned = self._with_projector(replace(planned, pinned=planned.sources.offer()))
        body = _described(planned, "fetched" if told and planned.here is None else "present", path)
        if (projector := planned.projector) is not None:
            from llmrun.hub.transfer.download import download

            place, _ = self._fetch(projector.name, projector, lambda: download(projector, self.reporter))
            body["projector"] = {**body["projector"], "path": str(place)}
        if self.lock:
            self.locked_now[planned.name] = planned.lockable(path)
        if self.as_json:
            out.json(body | told if planned.here is None else body)
        else:
            out.answer(f"{path}\n")

    def _fetch(self, name: str, artifact: Artifact | None, fetch: Callable[[], Path]) -> tuple[Path, dict[str, float]]:
        """Download the artifact if necessary, and print its speed.

        Returns the path of the first file, and the duration for --json, which is empty if nothing was downloaded.
        """
        from llmrun.hub.transfer.download import bytes_here

        held = bytes_here(artifact) if artifact is not None else 0
        started = time.monotonic()
        try:
            path = fetch()
        except KeyboardInterrupt:
            out.note("stopped; run the command again to resume the download")
            raise
        seconds = time.monotonic() - started
        if artifact is None or held == artifact.size:
            return path, {}
        speed = f"{format_bytes((artifact.size - held) / seconds)}/s"
        out.fields([name, f"{format_bytes(artifact.size)} in {format_seconds(seconds)}", speed])
        return path, {"seconds": round(seconds, 3)}

    def _write_lock(self) -> None:
        from llmrun.hub.resolve.lockfile import read_lock, write_lock

        kept = read_lock(self.lock_path) if self.lock_path.exists() else {}
        write_lock(self.lock_path, kept | self.locked_now)
        out.fields([f"{self.lock_path}: {', '.join(self.locked_now)}"])


def _memory_checked(planned: Pull) -> Pull:
    """Raise DoesNotFit if the model cannot run on this machine. Otherwise, return the pull unchanged."""
    from llmrun.hub.resolve.memory_check import require_memory

    if planned.pinned is not None and planned.wanted is not None:
        require_memory(planned.pinned, planned.wanted, HubReporter())
    return planned


def _plan_fields(planned: Pull) -> list[str]:
    """Return fields such as `qwen3:4b  2.50 GB  hf:Qwen/Qwen3-4B-GGUF/Qwen3-4B-Q4_K_M.gguf  Apache-2.0`."""
    from llmrun.hub.local.other_programs import FOLDER_NAMES, holder_of
    from llmrun.hub.transfer.download import bytes_here

    artifact, projector = planned.pinned, planned.projector
    more = []
    if projector is not None and bytes_here(projector) < projector.size:
        more = [f"{format_bytes(projector.size)} more for images: {projector.files[0].path}"]
    if planned.here is not None or artifact is None:
        holder = holder_of(planned.here) if planned.here else ""
        return [planned.name, f"already here, in {FOLDER_NAMES[holder]}" if holder else "already here", *more]
    fields = [planned.name, format_bytes(artifact.size)]
    if len(artifact.files) > 1:
        fields += [f"{len(artifact.files)} files"]
    if held := bytes_here(artifact):
        fields += [f"{format_bytes(held)} already downloaded"]
    fields += [str(artifact.source), *more]
    entry = planned.wanted.entry if planned.wanted is not None else None
    return [*fields, entry.license] if entry is not None else fields


def _described(planned: Pull, status: str, path: Path | None) -> dict[str, Any]:
    """Return a model's JSON object for --json. If no server was contacted, the keys about the source are left out."""
    body: dict[str, Any] = {"name": planned.name, "status": status, "path": str(path) if path else None}
    if planned.pinned is not None:
        body |= {
            "source": str(planned.pinned.source),
            "commit": planned.pinned.commit,
            "size": planned.pinned.size,
            "files": [_file_described(one) for one in planned.pinned.files],
        }
    if planned.projector is not None:
        body["projector"] = _file_described(planned.projector.files[0])
    return body


def _file_described(file: RemoteFile) -> dict[str, Any]:
    return {"file": file.path, "size": file.size, "sha256": file.sha256}
