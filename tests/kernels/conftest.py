"""Fixtures that compile all kernels in the background from the start of a run, because compiling takes minutes.

They do so only if a test that needs all kernels runs. Other tests compile what they need, which takes seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_COMMAND = [sys.executable, "-m", "tests.support.kernels.compiled"]
_NEEDS_ALL = "tests/kernels/test_instructions.py"
_compiling = pytest.StashKey[subprocess.Popen[bytes]]()


def _needs_all(session: pytest.Session) -> bool:
    return any(_NEEDS_ALL in item.nodeid for item in session.items)


def pytest_collection_finish(session: pytest.Session) -> None:
    first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"  # the first of the xdist workers
    if first and not session.config.option.collectonly and _needs_all(session):
        session.stash[_compiling] = subprocess.Popen(
            [*_COMMAND, "--beside"], cwd=session.config.rootpath, stdin=subprocess.DEVNULL
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _compiling in session.stash:
        session.stash[_compiling].terminate()
        session.stash[_compiling].wait()


@pytest.fixture(scope="session", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    """Compile the remaining kernels, and wait for those that another worker is compiling."""
    if not _needs_all(request.session):
        return
    if _compiling in request.session.stash:
        assert request.session.stash[_compiling].wait() == 0
    subprocess.run(_COMMAND, cwd=request.config.rootpath, stdin=subprocess.DEVNULL, check=True)
