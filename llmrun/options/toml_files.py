"""Reads the TOML files that users write: config.toml and models.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmrun.base.errors import UsageError


def read_toml(path: Path, role: str) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises FileNotFoundError or NotADirectoryError if there is no such file, and UsageError if it cannot be read or is
    invalid.

    role  what the file is, for error messages: "config" or "catalogue"
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise UsageError(f"{role}: {path}: cannot be read: {error.strerror}") from error
    import tomllib  # importing this takes 5 ms, and most runs do not need it

    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{role}: {path}: not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from error
    except (ValueError, RecursionError) as error:  # ValueError means invalid TOML or too many digits
        raise UsageError(f"{role}: {path}: not valid TOML: {error}") from error
