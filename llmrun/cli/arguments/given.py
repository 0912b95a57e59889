"""Loads the settings that the flags of a command give."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from llmrun.cli.console.output import out
from llmrun.options.settings import RULES, Settings, load_settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def given_by(flags: DataclassInstance) -> dict[str, object]:
    """Return the settings among the flags that were given. None or False means that a flag was not."""
    values = {flag.name: getattr(flags, flag.name) for flag in fields(flags) if flag.name in RULES}
    return {name: value for name, value in values.items() if value not in (None, False)}


def settings_of(flags: DataclassInstance, model: str, *, verbose: bool) -> Settings:
    """Load the settings for a run with this model and configure `out` with them. Raises UsageError."""
    settings = load_settings({**given_by(flags), "model": model})
    out.quiet, out.verbose, out.color = settings.quiet, verbose, settings.color
    return settings
