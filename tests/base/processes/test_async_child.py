"""Tests of how AsyncChild ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading

import psutil
import pytest

from llmrun.base.processes.child import AsyncChild

LONGEST = 1 << 20


def test_a_process_that_ended_before_it_was_killed_keeps_its_exit_status(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wait, killed = os.waitpid, threading.Event()

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        killed.wait(1)
        return wait(pid, options)

    async def run() -> str:
        child = await AsyncChild.start([sys.executable, "-c", "raise SystemExit(7)"])
        assert await child.receive(LONGEST) is None
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
        child = await AsyncChild.start([sys.executable, "-c", "input()"])
        child.kill()
        assert await child.receive(LONGEST) is None
        return await child.end(30.0)

    assert asyncio.run(run()) == ("SIGKILL" if sys.platform != "win32" else "exit status 1")


def test_a_process_can_end_while_its_next_message_is_awaited() -> None:
    """A command may be interrupted while it opens a model."""

    async def run() -> str:
        child = await AsyncChild.start([sys.executable, "-c", "input()"])
        receiving = asyncio.create_task(child.receive(LONGEST))
        await asyncio.sleep(0)
        ended = await child.end()
        assert await receiving is None
        return ended

    assert asyncio.run(run()) == ("SIGKILL" if sys.platform != "win32" else "exit status 1")


@pytest.mark.night
@pytest.mark.parametrize("finally_", ["", "; input()"], ids=["ends by itself", "is killed"])
def test_processes_end_although_nobody_reads_their_messages(finally_: str) -> None:
    """A model may be unloaded while it sends embeddings."""
    code = f"import sys; sys.stdout.write('x' * (16 << 20)); sys.stdout.flush(){finally_}"

    async def run() -> str:
        child = await AsyncChild.start([sys.executable, "-c", code])
        await asyncio.sleep(1.0)  # until the buffers are full
        async with asyncio.timeout(60.0):
            return await child.end(0.5 if finally_ else 30.0)

    killed = "SIGKILL" if sys.platform != "win32" else "exit status 1"
    assert asyncio.run(run()) == (killed if finally_ else "exit status 0")
