"""Loads the settings of a command from its flags, the environment and config.toml.

Commands such as `list` and `rm` do not need most settings, so for them an invalid setting only causes a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from llmrun.cli.console.output import out
from llmrun.options.settings import RULES, Settings, load_settings, load_sound_settings

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


def apply_settings(flags: Mapping[str, object]) -> Settings:
    """Load the settings for this run and configure `out` with them. Ignore an invalid setting and print a note.

    Raises UsageError for an invalid flag.

    flags  settings given as flags, as for `load_settings`; None or False means that the flag was not given
    """
    given = {name: value for name, value in flags.items() if value not in (None, False)}
    settings, wrong = load_sound_settings(given)
    out.quiet, out.color = settings.quiet, settings.color
    for error in wrong:
        out.note(f"{error}; ignored" + (f" ({error.hint})" if error.hint else ""))
    return settings
