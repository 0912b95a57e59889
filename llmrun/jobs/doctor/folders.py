"""The doctor's checks of the model folders and the settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llmrun.base.amounts import counted, format_bytes
from llmrun.base.errors import UsageError
from llmrun.base.folders import config_file, own_models_file
from llmrun.base.machine.shell import another_folder
from llmrun.hub.catalog.file import read_file
from llmrun.hub.catalog.lookup import read_whole
from llmrun.hub.local.paths import hub_cache, models_folder
from llmrun.jobs.doctor.disk import can_write, shown_path, use_of
from llmrun.jobs.doctor.findings import NOTE, OK, PROBLEM, Finding, advice_of
from llmrun.jobs.doctor.machine import Machine
from llmrun.options.settings import load_presets, load_sound_settings

SECTION = "Files"
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
        advice = "Models cannot be downloaded to this folder. To use another one for this session:"
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
    """Check the user's models.toml, if there is one. If it is invalid, no model can be found by name."""
    del machine
    path = own_models_file()
    if not path.is_file():
        return
    facts: dict[str, Any] = {"file": str(path), "models": [], "presets": [], "error": None}
    try:
        facts["models"] = [*read_whole(read_file(path))]
        facts["presets"] = [preset.name for preset in load_presets().values()]
    except UsageError as error:
        yield _invalid("own_models", path, error, facts)
        return
    words = f"{counted(len(facts['models']), 'model')} and {counted(len(facts['presets']), 'preset')}"
    yield Finding(SETTINGS, "own_models", OK, f"{words} in {shown_path(path)}", facts=facts)


def _invalid(name: str, path: Path, error: UsageError, facts: Mapping[str, object]) -> Finding:
    advice = advice_of(error) or f"Fix {shown_path(path)}."
    return Finding(SETTINGS, name, PROBLEM, f"invalid: {error}", advice, facts={**facts, "error": str(error)})
