"""A terminal for forked runs of `llmrun`, with the interface of `pexpect.spawn`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pexpect
import ptyprocess

from tests.support.cli import forking


class _ForkedTerminal(ptyprocess.PtyProcess):  # type: ignore[misc]  # it has no types
    """The terminal of a forked run. It waits through `ForkedProcess`, because the run is not a child."""

    def __init__(self, process: forking.ForkedProcess, descriptor: int) -> None:
        super().__init__(process.pid, descriptor)
        self._process = process

    def isalive(self) -> bool:
        code = self._process.wait() if self.flag_eof else self._process.poll()
        if code is None:
            return True
        self.terminated = True
        self.status = code
        self.exitstatus = code if code >= 0 else None
        self.signalstatus = -code if code < 0 else None
        return False

    def wait(self) -> int | None:
        self._process.wait()
        self.isalive()
        return self.exitstatus


class ForkedSpawn(pexpect.spawn):  # type: ignore[misc]  # it has no types either
    """`pexpect.spawn` for commands of the form `python -m MODULE ...`, which are forked."""

    def _spawnpty(self, args: list[str | bytes], env: Mapping[str, str], cwd: str, **options: Any) -> _ForkedTerminal:
        if sys.platform == "win32":
            raise NotImplementedError(sys.platform)
        import termios

        ours, theirs = os.openpty()
        termios.tcsetwinsize(ours, options["dimensions"])
        _python, _m, *words = map(os.fsdecode, args)
        process = forking.start_on_terminal(words, env, Path(cwd), theirs)
        return _ForkedTerminal(process, ours)
