"""Flags of `os.open` that only some systems have. They are 0 elsewhere.

Without O_BINARY, Windows translates line ends in `os.read` and `os.write`.
"""

from __future__ import annotations

import os

O_BINARY: int = getattr(os, "O_BINARY", 0)
O_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
O_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
