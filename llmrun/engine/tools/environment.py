"""The environment of tools: the variables listed here and those that the user declares, but no other keys or tokens."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

# The MCP SDK's list, plus the variables for language, time zone and temporary files.
_POSIX = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "TMPDIR")
_WINDOWS = (
    *("APPDATA", "HOMEDRIVE", "HOMEPATH", "LOCALAPPDATA", "PATH", "PATHEXT", "PROCESSOR_ARCHITECTURE", "SYSTEMDRIVE"),
    *("SYSTEMROOT", "TEMP", "TMP", "USERNAME", "USERPROFILE"),
)
_LANGUAGE = (
    *("LANG", "LANGUAGE", "LC_ALL", "LC_COLLATE", "LC_CTYPE", "LC_MESSAGES", "LC_MONETARY", "LC_NUMERIC", "LC_TIME"),
    "TZ",
)


def environment(declared: Mapping[str, str]) -> dict[str, str]:
    """Return the listed variables of this process, and `declared`, which takes precedence."""
    listed = (*(_WINDOWS if sys.platform == "win32" else _POSIX), *_LANGUAGE)
    return {name: os.environ[name] for name in listed if name in os.environ} | dict(declared)
