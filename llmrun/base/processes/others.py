"""Waits for processes that are not children of this one, and kills them."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Final

import psutil

_LOOK_S: Final = 0.01


class OtherProcess:
    """A process, found by its id. A later process with the same id does not count as this one."""

    def __init__(self, pid: int) -> None:
        """Find the process. If it does not exist, it has ended."""
        self._process: psutil.Process | None = None
        with suppress(psutil.Error):
            self._process = psutil.Process(pid)

    def ends_within(self, seconds: float) -> bool:
        """Wait until the process is gone or a zombie, and return whether that happened in time."""
        end = time.monotonic() + seconds
        while self._is_running():
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_S)
        return True

    def kill(self) -> None:
        """End the process at once. Does nothing if it has ended."""
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                self._process.kill()

    def _is_running(self) -> bool:
        if self._process is None or not self._process.is_running():
            return False
        try:
            return self._process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False
