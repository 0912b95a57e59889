"""Tests of `llmrun eval` as users type it."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from llmrun.backends.base import OpenOptions
from llmrun.base.errors import UsageError
from llmrun.jobs.evaluation.measuring import Source, opened
from tests.support.cli.commands import LLMRUN, ROOT, llmrun, screen_of
from tests.support.models.downloads import smollm2
from tests.support.models.prompts import PASSAGES
from tests.support.models.tiny_encoders import TINY_ENCODERS, tiny_encoder

pytestmark = pytest.mark.push

TEXT = "The harbour of the old town freezes for about six weeks every winter. " * 3
QUESTIONS = [
    {"prompt": "The capital of France is", "choices": ["the moon", "Paris", "seven"], "answer": "Paris"},
    {"prompt": "Bees make", "choices": ["concrete", "honey"], "answer": "B"},
]
SCRIPTED = ("eval", "model", "--backend", "scripted", "-c", "32")


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps(question) for question in QUESTIONS))
    return str(path)


def told(*arguments: str, code: int = 0, **options: Any) -> dict[str, Any]:
    done = llmrun(*arguments, "--json", **options)
    assert done.returncode == code, done.stderr.decode()
    body: dict[str, Any] = json.loads(done.stdout)
    return body


def test_a_text_is_evaluated(text: str) -> None:
    done = llmrun(*SCRIPTED, "--text", text, "-q")
    lines = done.stdout.decode().splitlines()
    assert [line.split("  ")[0].rstrip() for line in lines] == ["model", "text", "perplexity", "time"]
    assert "6 chunks of 32 tokens, 90 tokens scored" in lines[1]
    assert "(95 %: " in lines[2]
    assert (done.returncode, done.stderr) == (0, b"")


def test_the_text_can_come_from_a_pipe(text: str) -> None:
    piped = told(*SCRIPTED, stdin=TEXT.encode())["text"]
    assert (
        piped == told(*SCRIPTED, "--text", text)["text"] == told(*SCRIPTED, "--text", "-", stdin=TEXT.encode())["text"]
    )
    assert told(*SCRIPTED, "--chunks", "2", stdin=TEXT.encode())["text"]["chunks"] == 2


def test_a_model_against_itself_differs_nowhere(text: str, questions: str) -> None:
    body = told(*SCRIPTED, "--text", text, "--choices", questions, "--against", "model")
    assert body["complete"]
    assert body["text"]["perplexity"] == body["text"]["base_perplexity"]
    assert body["text"]["perplexity_ratio"] == {"value": 1, "low": 1, "high": 1}
    assert body["text"]["kl_divergence"]["value"] == body["text"]["kl_divergence"]["maximum"] == 0
    assert body["text"]["same_top"]["value"] == 1
    assert body["choices"]["questions"] == 2
    assert body["choices"]["different"] == body["choices"]["gained"] == body["choices"]["lost"] == 0
    assert [len(one["scores"]) for one in body["choices"]["answers"]] == [3, 2]


def test_other_flags_of_the_base_are_a_base(text: str) -> None:
    body = told(*SCRIPTED, "--text", text, "--against-backend", "scripted")
    assert body["base"]["name"] == body["model"]["name"] == "model"


def test_adapters_are_named_for_the_model_only(text: str, tmp_path: Path) -> None:
    (tmp_path / "pirate.gguf").touch()
    adapter = ("--lora", f"{tmp_path / 'pirate.gguf'}:0.5", "--against", "model")
    body = told(*SCRIPTED, "--text", text, *adapter)
    assert [each["name"] for each in body["model"]["adapters"]] == ["pirate"]
    assert body["base"]["adapters"] == []
    lines = llmrun(*SCRIPTED, "--text", text, *adapter).stdout.decode().splitlines()
    assert lines[0].endswith(", pirate (scale 0.5)")
    assert "pirate" not in lines[1]


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_few_chunks_have_no_intervals(text: str, chunks: int) -> None:
    arguments = (*SCRIPTED, "--text", text, "--chunks", str(chunks), "--against", "model")
    found = told(*arguments)["text"]
    assert found["chunks"] == chunks
    for name in ("perplexity", "base_perplexity", "perplexity_ratio", "kl_divergence", "same_top"):
        assert (found[name]["low"], found[name]["high"]) == (None, None)
        assert found[name]["value"] is not None
    done = llmrun(*arguments).stdout.decode()
    assert "too few for intervals, which need 4 chunks\n" in done
    assert "95 %" not in done


def test_models_with_different_vocabularies_are_refused_in_one_line(text: str, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"vocabulary_size": 300}))
    done = llmrun(*SCRIPTED, "--text", text, "--against", str(other))
    assert done.returncode == 2
    assert done.stderr.decode().splitlines()[0].startswith("error: different vocabularies: model: 260 tokens, but 300")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "missing.txt"], "--text: missing.txt: No such file"),
        (["--choices", "missing.jsonl"], "--choices: missing.jsonl: cannot be read"),
        (["--against-kv-type", "q9"], "--against-kv-type: 'q9' is not"),
        (["--against-backend", "gpu"], "--against-backend: 'gpu' is not"),
        (["--against", "http://localhost:1/v1"], "a server does not return all logits"),
        (["-c", "4"], "-c: 4 is not a whole number of at least 8"),
    ],
)
def test_bad_flags_are_refused(arguments: list[str], words: str) -> None:
    done = llmrun("eval", "model", "--backend", "scripted", *arguments, stdin=TEXT.encode())
    assert done.returncode == 2
    assert words.removeprefix("-c: ") in done.stderr.decode()


def test_an_empty_text_is_found_before_the_model(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    done = llmrun("eval", "-m", "no-such-model", stdin=b"")
    assert done.stderr.decode() == (
        "error: the text is missing: standard input is empty\n"
        "hint: name a file with --text FILE, or pipe its text to this command\n"
    )
    done = llmrun("eval", "-m", "no-such-model", "--text", str(tmp_path / "empty.txt"))
    assert "empty.txt: the file is empty" in done.stderr.decode()
    assert done.returncode == 2


def test_encoders_are_refused_by_their_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(tiny_encoder(tmp_path, TINY_ENCODERS["bert"]), OpenOptions("cpu"))
    monkeypatch.setattr("llmrun.backends.cpu.backend.CpuBackend", None)  # the backend would read the weights
    with pytest.raises(UsageError, match="computes embeddings and predicts no text"), opened(source, None):
        pass


def test_a_user_without_a_text_is_told_where_to_get_one() -> None:
    screen, code = screen_of("eval", "model", "--backend", "scripted", NO_COLOR="1")
    assert code == 2
    assert "--text: missing" in screen
    assert "wikitext-2-raw-v1.zip" in screen


@pytest.mark.night
def test_ctrl_c_prints_what_has_been_measured(tmp_path: Path, text: str) -> None:
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps({"step_seconds": 0.5}))
    command = [*LLMRUN, "eval", str(slow), "--backend", "scripted", "-c", "32", "--text", text, "--json"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(2.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    body = json.loads(out)
    assert not body["complete"]
    assert 1 <= body["text"]["chunks"] < 6
    assert f"stopped after {body['text']['chunks']} of 6 chunks" in err.decode()


# --- the real model ---------------------------------------------------------------------------------------------------


@pytest.mark.night
def test_a_kv_type_is_judged_and_questions_are_answered(questions: str) -> None:
    flags = ("--text", str(PASSAGES), "--chunks", "2", "--choices", questions)
    body = told("eval", str(smollm2()), *flags, "--backend", "cpu", "--kv-type", "q8_0", "--against-kv-type", "f16")
    assert (body["model"]["kv_type"], body["base"]["kv_type"]) == ("q8_0", "f16")
    assert 1e-4 < body["text"]["kl_divergence"]["value"] < 0.02
    assert body["text"]["same_top"]["value"] > 0.9
    assert 0.97 < body["text"]["perplexity_ratio"]["value"] < 1.03
    assert body["choices"]["acc"]["value"] == body["choices"]["base"]["acc"]["value"] == 1
