"""Lenient loading of settings, for commands such as `list` and `rm` that work without most of them."""

from __future__ import annotations

from collections.abc import Mapping

from llmrun.cli.console.output import out
from llmrun.settings import Settings, load_sound_settings


def apply_settings(flags: Mapping[str, object]) -> Settings:
    """Load the settings of this run and apply them to `out`. An invalid setting is ignored with a note.

    flags  settings given as flags, as for `load_settings`; None or False means not given
    Raises UsageError for an invalid flag.
    """
    given = {name: value for name, value in flags.items() if value not in (None, False)}
    settings, wrong = load_sound_settings(given)
    out.quiet, out.color = settings.quiet, settings.color
    for error in wrong:
        out.note(f"{error}; ignored" + (f" ({error.hint})" if error.hint else ""))
    return settings
