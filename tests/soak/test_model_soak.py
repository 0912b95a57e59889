"""Run broken models from opening to the answer. The exit code must be 0 or 3, and no process may crash."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak import model_runs
from tests.soak.model_mutations import bases
from tests.soak.model_soak import Soak, Tally

ROOT = Path(__file__).resolve().parent.parent.parent
CORPUS = Path(__file__).parent / "corpus"
SOAK = [sys.executable, str(ROOT / "scripts" / "soak_models"), "--worker"]
SEED = 2
CASES = 1000
BACKENDS = ("cpu", "llama")


def soak(backend: str, count: int, folder: Path, *, in_processes: bool = False) -> Tally:
    return Soak(
        backend=backend,
        seed=SEED,
        first=0,
        count=count,
        jobs=2,
        findings=folder,
        command=SOAK,
        in_processes=in_processes,
    ).run(lambda line: None)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thousand_mutants_end_in_an_answer_or_in_words(backend: str, tmp_path: Path) -> None:
    tally = soak(backend, CASES, tmp_path)
    assert tally.findings == []
    assert sum(tally.outcomes.values()) == CASES
    # Mutations would test nothing if they broke every file at its first byte, or no file at all.
    assert tally.outcomes["0 answered"] > CASES // 4
    assert tally.outcomes["3 BadGGUF"] > CASES // 10
    assert tally.outcomes["3 ModelFileError"] > CASES // 50


def test_real_processes_end_so_too_with_one_line(tmp_path: Path) -> None:
    tally = soak("cpu", 20, tmp_path, in_processes=True)
    assert tally.findings == []
    assert tally.outcomes["0 answered"] > 2
    assert sum(tally.outcomes.values()) == 20


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_models_that_are_broken_work(backend: str, tmp_path: Path) -> None:
    for case, (draft, _) in enumerate(bases()):
        path = model_runs.write(tmp_path, draft.build())
        assert model_runs.generate(path, backend, case) == (0, "answered")
    model_runs.close_llama_process()


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_model_that_once_ended_otherwise_ends_well(backend: str, tmp_path: Path) -> None:
    paths = sorted(CORPUS.glob("*.gguf"))
    assert paths
    for case, path in enumerate(paths):
        copy = model_runs.write(tmp_path, path.read_bytes())
        code, outcome = model_runs.generate(copy, backend, case)
        assert code in model_runs.ALLOWED, f"{path.name}: {outcome}"
    model_runs.close_llama_process()


def test_a_case_is_the_same_bytes_in_every_process() -> None:
    program = "import hashlib; from tests.soak.model_mutations import mutant; "
    program += "print(hashlib.sha256(b''.join(mutant(5, case) for case in range(200))).hexdigest())"
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert digests != {hashlib.sha256().hexdigest()}


# The driver, with fake workers

FAKE_WORKER = """
import json, os, signal, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    for case in range(asked["first"], asked["last"]):
        if case == 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        if case == 5:
            print("x.cpp:12: GGML_ASSERT(a == b) failed\\nand more", file=sys.stderr, flush=True)
            os.abort()
        if case == 7:
            time.sleep(3600)
        print(json.dumps([1, "OSError: odd"] if case == 9 else [0, "answered"]), flush=True)
"""


def fake_soak(folder: Path, program: str, log: Path | None) -> Tally:
    return Soak(
        backend="cpu",
        seed=SEED,
        first=0,
        count=600,
        jobs=2,
        findings=folder / "findings",
        command=[sys.executable, "-c", program],
        log=log,
        hang_seconds=1.0,
    ).run(lambda line: None)


def test_the_driver_outlives_its_workers_and_tells_how_each_ended(tmp_path: Path) -> None:
    tally = fake_soak(tmp_path, FAKE_WORKER, None)
    assert tally.outcomes == {
        "0 answered": 596,
        "DEATH by SIGSEGV": 1,
        "DEATH by SIGABRT x.cpp:N: GGML_ASSERT(a == b) failed": 1,
        "HANG of more than 1 s": 1,
        "1 OSError: odd": 1,
    }
    assert len(tally.findings) == 4
    assert tally.findings[0] == f"case 3 of seed {SEED} on cpu: DEATH by SIGSEGV"
    assert len(list((tmp_path / "findings").glob("cpu-*.gguf"))) == 4


def test_a_log_is_gone_on_from(tmp_path: Path) -> None:
    log = tmp_path / "soak.jsonl"
    tally = fake_soak(tmp_path, FAKE_WORKER, log)
    with log.open("a") as file:
        file.write('{"backend": "cpu", "seed"')  # an incomplete line, as left by a power failure
    assert fake_soak(tmp_path, "raise SystemExit('nothing is left to do')", log).outcomes == tally.outcomes
