"""Tests of the process that runs the engine, without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading

import psutil
import pytest

from llmrun.engine_process.child import ChildProcess


def test_a_process_that_ended_before_it_was_killed_keeps_its_exit_status(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wait, killed = os.waitpid, threading.Event()

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        killed.wait(1)
        return wait(pid, options)

    async def run() -> str:
        child = await ChildProcess.start([sys.executable, "-c", "raise SystemExit(7)"])
        assert await child.receive() is None
        with contextlib.suppress(psutil.NoSuchProcess):  # since Python 3.12, the event loop may be faster
            while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.001)
        child.kill()
        killed.set()
        return await child.end(30.0)

    monkeypatch.setattr(os, "waitpid", waitpid)
    assert asyncio.run(run()) == "exit status 7"
    assert not caplog.records


def test_killed_processes_end() -> None:
    async def run() -> str:
        child = await ChildProcess.start([sys.executable, "-c", "input()"])
        child.kill()
        assert await child.receive() is None
        return await child.end(30.0)

    assert asyncio.run(run()) == "SIGKILL"
