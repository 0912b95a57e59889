"""Loads settings leniently, for commands such as `list` and `rm` that do not need most of them."""

from __future__ import annotations

from collections.abc import Mapping

from llmrun.cli.console.output import out
from llmrun.options.settings import Settings, load_sound_settings


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
