"""Reads JSON from untrusted files. Any problem with a file raises UsageError."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from llmrun.base.errors import UsageError

MOST_BYTES = 256 << 20  # The size limit of a results file. A million samples take 20 MB.


def read_text(path: Path) -> str:
    """Return the text of a results file. Raises UsageError."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise UsageError(f"results: {path}: too large: {size:,} bytes, limit {MOST_BYTES:,}")
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise UsageError(f"results: {path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # The file is not UTF-8, or the path contains a NUL.
        raise UsageError(f"results: {path}: not UTF-8 text: {error}") from error


def parse(text: str, where: str) -> Any:
    """Parse JSON and reject numbers that are not finite. Raises UsageError, whose message begins with `where`."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_refuse)
    except RecursionError:
        raise UsageError(f"{where}: nested too deeply") from None
    except ValueError as error:  # The JSON is invalid, or an integer has too many digits.
        raise UsageError(f"{where}: not valid JSON: {error}") from error


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is not a finite number")
