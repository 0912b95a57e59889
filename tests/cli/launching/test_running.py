"""Tests of a run of an agent in this process."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from llmrun.cli.launching.running import AgentRun

if sys.platform == "linux":  # other systems lack waitid, at least in some versions of Python

    def test_a_late_signal_keeps_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
        """When a terminal closes, SIGHUP may end the agent just before llmrun handles its own SIGHUP."""
        waits = os.waitpid

        def interrupted(pid: int, options: int) -> tuple[int, int]:
            if options == os.WUNTRACED:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                os.kill(os.getpid(), signal.SIGTERM)
            return waits(pid, options)

        monkeypatch.setattr(os, "waitpid", interrupted)
        with AgentRun() as run:
            assert run.run(["sh", "-c", "exit 7"], {"PATH": os.defpath}) == 7
