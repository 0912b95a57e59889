"""Fixtures that compile the kernels in the background from the start of a run, because compiling takes minutes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_COMMAND = [sys.executable, "-m", "tests.support.kernels.compiled"]
_compiling = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    first = os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0"  # the first of the xdist workers
    if (
        first
        and not session.config.option.collectonly
        and any("tests/kernels/" in item.nodeid for item in session.items)
    ):
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
    if _compiling in request.session.stash:
        assert request.session.stash[_compiling].wait() == 0
    subprocess.run(_COMMAND, cwd=request.config.rootpath, stdin=subprocess.DEVNULL, check=True)
