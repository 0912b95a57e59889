"""Settings for the commands that can do their work without most of them, such as `list` and `rm`."""

from __future__ import annotations

from collections.abc import Mapping

from llmrun.cli.console.output import out
from llmrun.settings import Settings, load_sound_settings


def apply_settings(flags: Mapping[str, object]) -> Settings:
    """Load the settings of this run and let `out` obey them. A wrong setting is ignored, with a note.

    flags  as `load_settings` takes them; a value of None or False was not given
    Raises UsageError for a flag.
    """
    given = {name: value for name, value in flags.items() if value not in (None, False)}
    settings, wrong = load_sound_settings(given)
    out.quiet, out.color = settings.quiet, settings.color
    for error in wrong:
        out.note(f"{error}; ignored" + (f" ({error.hint})" if error.hint else ""))
    return settings
