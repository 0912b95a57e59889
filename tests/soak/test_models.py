"""Tests of broken models: those that revealed faults in the past, and the worker that opens them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.soak import models
from tests.soak.model_mutations import mutant
from tests.soak.models import ALLOWED, BACKENDS, CORPUS, Worker
from tests.support.cli.commands import ROOT

pytestmark = pytest.mark.push


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_model_that_once_ended_otherwise_ends_well(backend: str, tmp_path: Path) -> None:
    worker, paths = Worker(tmp_path), sorted(CORPUS.glob("*.gguf"))
    try:
        outcomes = {path.name: worker.run(path, backend, case) for case, path in enumerate(paths)}
    finally:
        worker.end()
    assert outcomes
    assert {name: outcome for name, outcome in outcomes.items() if outcome[0] not in ALLOWED} == {}


@pytest.mark.night
def test_a_case_is_the_same_bytes_in_every_process() -> None:
    program = "import hashlib; from tests.soak.model_mutations import mutant; "
    program += "print(hashlib.sha256(b''.join(mutant(5, case) for case in range(200))).hexdigest())"
    digests = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        digests.add(subprocess.check_output([sys.executable, "-c", program], env=environment))
    assert digests == {hashlib.sha256(b"".join(mutant(5, case) for case in range(200))).hexdigest().encode() + b"\n"}


class Deadly:
    """An object that calls a function when a worker unpickles it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.night
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_the_worker_tells_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_HANG_S", 1.0)
    for deadly, end in (
        (Deadly(os.abort), "the worker died: SIGABRT"),
        (Deadly(os._exit, 7), "the worker died: exit 7"),
        (Deadly(time.sleep, 60), "still running after 1 s"),
    ):
        worker = Worker(tmp_path)
        try:
            assert worker.run(deadly, "cpu", 0) == (None, end)  # type: ignore[arg-type]
        finally:
            worker.end()
