"""Kernels are compiled from the start of a run on, beside the tests that come before: it takes minutes."""

from __future__ import annotations

import subprocess
import sys

import pytest

_compiling = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly and any("tests/kernels/" in item.nodeid for item in session.items):
        command = [sys.executable, "-m", "tests.support.compiled"]
        root = session.config.rootpath
        session.stash[_compiling] = subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _compiling in session.stash:
        session.stash[_compiling].terminate()
        session.stash[_compiling].wait()


@pytest.fixture(scope="session", autouse=True)
def _compiled(request: pytest.FixtureRequest) -> None:
    assert request.session.stash[_compiling].wait() == 0
