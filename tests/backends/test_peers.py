"""What scripts/peer_bench.py sets side by side: both engines, on the same file, do the work that is asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmrun.backends.cpu import CpuBackend
from llmrun.bench.roofline import needs_of_plan
from llmrun.gguf.reader import open_gguf
from tests.support.commands import ROOT
from tests.support.gguf_files import tiny_llama
from tests.support.peer_engine import LlamaCpp, Llmrun, decode, prefill


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("peers") / "tiny.gguf", weight_type="F32")


def test_both_find_the_same_next_tokens(model: Path) -> None:
    ours, theirs = Llmrun(model, 1, 64), LlamaCpp(model, 1, 64)
    prompt = [5, 70, 71, 80, 9]
    for peer in (ours, theirs):
        assert prefill(peer, prompt) > 0
        assert decode(peer, prompt, 4) > 0
    said = []
    for peer in (ours, theirs):
        peer.clear()
        token = peer.run(prompt, 0)
        said.append([token, *(token := peer.run([token], 5 + step) for step in range(6))])
    assert said[0] == said[1]


def test_the_cost_of_a_token_is_the_plans(model: Path) -> None:
    with open_gguf(model) as file:
        backend = CpuBackend(file, context_size=64, max_sequences=1, threads=1)
    facts, needs = Llmrun(model, 1, 64).facts, needs_of_plan(backend.plan)
    assert facts["bytes_a_token"] == needs.weight_bytes
    assert facts["products_a_token"] == needs.products
    backend.close()


@pytest.mark.parametrize("name", ["llmrun", "llama.cpp"])
def test_a_process_answers_each_question_and_tells_its_memory_at_the_end(model: Path, name: str) -> None:
    command = [sys.executable, "-m", "tests.support.peer_engine", name, str(model), "1", "64"]
    questions = [{"do": "prefill", "tokens": 20}, {"do": "decode", "tokens": 3, "depth": 20}]
    done = subprocess.run(
        command, input="".join(json.dumps(one) + "\n" for one in questions), capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    facts, *answers, last = (json.loads(line) for line in done.stdout.splitlines())
    assert facts["load_seconds"] > 0
    assert [answer["seconds"] > 0 for answer in answers] == [True, True]
    assert last["peak_bytes"] > 1 << 20
