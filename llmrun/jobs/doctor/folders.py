"""The doctor's checks of the kernel cache, the model folders, the settings and the user's own models."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrun.base.amounts import counted, format_bytes
from llmrun.base.errors import LlmrunError, UsageError
from llmrun.base.folders import Place, cache_folder, config_file, own_models_file, places
from llmrun.base.machine.shell import another_folder, remove
from llmrun.hub.catalog import parse_file, read_file
from llmrun.hub.local.paths import hub_cache, models_folder
from llmrun.jobs.doctor.examine import NOTE, OK, PROBLEM, Finding, Machine, advice_of
from llmrun.options.settings import load_presets, load_sound_settings

_MOST_FILES = 200_000  # counting stops at this number, because network file systems list only 10,000 files/s


@dataclass(frozen=True, slots=True)
class Use:
    """Disk usage of a folder.

    files    the number of files in the folder and its subfolders
    n_bytes  the total size of the files
    free     free bytes on the folder's disk; None if unknown
    whole    True if all files were counted
    """

    files: int
    n_bytes: int
    free: int | None
    whole: bool


def use_of(folder: Path) -> Use:
    """Return the disk usage of a folder, or of a single file."""
    files = n_bytes = 0
    if folder.is_file():
        return Use(1, folder.stat().st_size, _free(folder), True)
    for parent, _, names in os.walk(folder):
        for name in names:
            if files >= _MOST_FILES:
                return Use(files, n_bytes, _free(folder), False)
            with contextlib.suppress(OSError):  # the file was deleted after it was listed
                n_bytes += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118 - ten times as fast as pathlib
                files += 1
    return Use(files, n_bytes, _free(folder), True)


def all_places() -> list[Place]:
    """Return all folders and files that llmrun writes by itself, whether or not they exist."""
    hub = Place(hub_cache(), "models from the Hugging Face Hub, for all programs", is_shared=True)
    return [*places(), *_runtime_folder(), hub]


def _runtime_folder() -> Iterator[Place]:
    """Yield the folder of background engines if it is not in the cache folder."""
    from llmrun.serving.background.place import folder_path, supported

    with contextlib.suppress(LlmrunError):  # this user has no folder
        if supported() and (path := folder_path()) != cache_folder("run"):
            yield Place(path, "sockets and locks of background engines")


def can_write(folder: Path) -> bool:
    """Return whether a file can be created in a folder, or in the nearest existing folder above it.

    The check creates and deletes a temporary file, because permissions do not reveal that a disk is full or read-only.
    """
    try:
        with tempfile.TemporaryFile(dir=_nearest(folder), prefix=".llmrun-doctor-"):
            return True
    except OSError:
        return False


def shown_path(path: Path) -> str:
    """Return a path as text, with the home folder shortened to `~`."""
    with contextlib.suppress(RuntimeError, ValueError):  # the home folder does not exist, or does not contain the path
        return str(Path("~") / path.relative_to(Path.home()))
    return str(path)


def _free(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(_nearest(folder)).free
    except OSError:
        return None


def _nearest(folder: Path) -> Path:
    """Return the folder itself, or the nearest existing folder above it."""
    for path in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            if path.exists():
                return path
    return folder


SECTION = "Files"
_ELSEWHERE = "Without this cache, every run compiles its kernels again. To use another folder:"


def look_at_kernels(machine: Machine) -> Iterator[Finding]:
    del machine
    from llmrun.base.compiled.cache import survey

    try:
        found = survey()
    except OSError as error:
        words = f"compiled kernels cannot be read: {error.filename}: {error.strerror}"
        yield Finding(SECTION, "kernels", NOTE, words, _ELSEWHERE, another_folder("LLMRUN_CACHE_DIR"))
        return
    writable = can_write(found.folder)
    facts = {
        "folder": str(found.folder),
        "entries": found.entries,
        "damaged": found.damaged,
        "bytes": found.n_bytes,
        "writable": writable,
    }
    what = f"{counted(found.entries, 'compiled kernel')}, {format_bytes(found.n_bytes)},"
    words = f"{what if found.entries else 'no compiled kernels'} in {shown_path(found.folder)}"
    if not writable:
        words += ", which is not writable"
        yield Finding(SECTION, "kernels", NOTE, words, _ELSEWHERE, another_folder("LLMRUN_CACHE_DIR"), facts)
    elif found.damaged:
        words += f"; {found.damaged} damaged"
        advice = "Damaged kernels are not used; llmrun compiles them again. To clear the cache:"
        yield Finding(SECTION, "kernels", NOTE, words, advice, remove(found.folder), facts)
    else:
        yield Finding(SECTION, "kernels", OK, words, facts=facts)


SETTINGS = "Settings"
_LITTLE = 2_000_000_000  # bytes; with less free space than this, only a few small models fit


def look_at_folders(machine: Machine) -> Iterator[Finding]:
    del machine
    yield _folder("models", "models", models_folder(), "LLMRUN_DATA_DIR")
    yield _folder("hub_cache", "Hub cache", hub_cache(), "HF_HUB_CACHE")


def _folder(name: str, words: str, folder: Path, variable: str) -> Finding:
    use = use_of(folder)
    writable = can_write(folder)
    facts = {
        "folder": str(folder),
        "exists": folder.is_dir(),
        "files": use.files,
        "bytes": use.n_bytes,
        "counted_all": use.whole,
        "disk_free": use.free,
        "writable": writable,
    }
    size = f"{'' if use.whole else 'more than '}{format_bytes(use.n_bytes)}" if use.files else "no files"
    words = f"{words}: {size} in {shown_path(folder)}"
    if use.free is not None:
        words += f", {format_bytes(use.free)} free"
    if not writable:
        advice = "Models cannot be downloaded to this folder. To use another folder for this session:"
        return Finding(SECTION, name, NOTE, f"{words}; not writable", advice, another_folder(variable), facts)
    if use.free is not None and use.free < _LITTLE:
        advice = f"Free up space, or set {variable} to a folder on another disk."
        return Finding(SECTION, name, NOTE, words, advice, facts=facts)
    return Finding(SECTION, name, OK, words, facts=facts)


def look_at_settings(machine: Machine) -> Iterator[Finding]:
    """Check config.toml and the environment. Invalid settings are problems because no model can run with them."""
    del machine
    path = config_file()
    facts = {"file": str(path), "exists": path.is_file(), "error": None}
    _, errors = load_sound_settings()
    if errors:
        yield _invalid("settings", path, errors[0], facts)
        return
    found = (
        f"read from {shown_path(path)}" if path.is_file() else f"all at their defaults; there is no {shown_path(path)}"
    )
    yield Finding(SETTINGS, "settings", OK, found, facts=facts)


def look_at_own_models(machine: Machine) -> Iterator[Finding]:
    """Check the user's models.toml, if the file exists. Invalid TOML prevents finding any model by name."""
    del machine
    path = own_models_file()
    if not path.is_file():
        return
    facts: dict[str, Any] = {"file": str(path), "models": [], "presets": [], "error": None}
    try:
        file, models = parse_file(read_file(path))
        broken = [*file.broken.values()]
        facts["models"] = [*models]
        facts["presets"] = [preset.name for preset in load_presets(broken.append).values()]
    except UsageError as error:
        broken = [error]
    if broken:
        words = "; ".join(str(error).removeprefix(f"catalogue: {path}: ") for error in broken[1:])
        first = str(broken[0]) + (f"; {words}" if words else "")
        yield _invalid("own_models", path, UsageError(first, hint=broken[0].hint), facts)
        return
    words = f"{counted(len(facts['models']), 'model')} and {counted(len(facts['presets']), 'preset')}"
    yield Finding(SETTINGS, "own_models", OK, f"{words} in {shown_path(path)}", facts=facts)


def _invalid(name: str, path: Path, error: UsageError, facts: Mapping[str, object]) -> Finding:
    advice = advice_of(error) or f"Fix {shown_path(path)}."
    return Finding(SETTINGS, name, PROBLEM, f"invalid: {error}", advice, facts={**facts, "error": str(error)})
