"""Tests of the answer log: whole lines with many writers, private files, and no secrets."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import sys
from pathlib import Path

import pytest

from llmrun.base.types import FinishReason, ModelInfo, Timings
from llmrun.cli.answers.answer_log import AnswerLog, entry_of
from llmrun.cli.answers.report import AnsweredRequest
from llmrun.engine.requests import ChatPrompt, Finished, Request
from llmrun.options.sampling_params import SamplingParams

INFO = ModelInfo("p", "n", "a", "t", 0, 0, 0, 64, 64, 1, "scripted", "none", 1, "f16")
TIMINGS = Timings(0.0, 4, 0, 2, 0.1, 0.1, 0.1, 0.2)


def entry(prompt: str = "p", answer: str = "a", **others: object) -> dict[str, object]:
    return {"time": "t", "model": "m", "prompt": prompt, "answer": answer, "finish_reason": "stop", **others}


def log_in(folder: Path) -> AnswerLog:
    return AnswerLog(folder / "data" / "logs" / "answers.jsonl")


def answered(text: str, sent: frozenset[str] | None = None) -> AnsweredRequest:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    request = Request(ChatPrompt(messages), sampling=SamplingParams(top_k=3, seed=5), sent_sampling=sent)
    return AnsweredRequest("m", INFO, request, text, (), Finished(0, FinishReason.CANCELLED, None, 6, TIMINGS))


def test_an_entry_has_everything_that_made_the_answer() -> None:
    found = entry_of(answered("hi"), "pirate", {})
    assert (found["system"], found["prompt"], found["answer"], found["model"]) == ("Be brief.", "hi", "hi", "m")
    assert found["preset"] == "pirate"
    assert (found["seed"], found["finish_reason"]) == (5, "cancelled")
    assert found["sampling"]["top_k"] == 3
    assert found["usage"]["completion_tokens"] == 2
    assert found["timings"]["total_s"] == 0.2


def test_sampling_that_a_server_decided_is_not_claimed() -> None:
    found = entry_of(answered("hi", frozenset({"top_k"})), None, {})
    assert (found["sampling"], found["seed"]) == ({"top_k": 3}, None)


def test_secrets_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_API_KEY", "sk-very-secret")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    found = json.dumps(entry_of(answered("sk-very-secret and hf_abcdefgh at https://me:pass@host"), None, {}))
    assert "sk-very" not in found
    assert "hf_abc" not in found
    assert "pass@" not in found


def test_the_last_entries_with_all_words_are_found(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    assert log.last(3) == log.last(3, ["x"])
    for number in range(5):
        log.append(entry(f"Question {number}", "ÄRGER" if number % 2 else "calm"))
    assert [one["prompt"] for one in log.last(2).entries] == ["Question 3", "Question 4"]
    assert [one["prompt"] for one in log.last(None, ["question", "ärger"]).entries] == ["Question 1", "Question 3"]
    assert len(log.last(None).entries) == 5


@pytest.mark.skipif(sys.platform == "win32", reason="needs file modes")
def test_folder_and_file_are_private(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    before = os.umask(0)
    try:
        log.append(entry())
    finally:
        os.umask(before)
    assert stat.S_IMODE(log.path.parent.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in log.path.parent.iterdir()} == {0o600}


def test_damaged_lines_are_counted_and_a_torn_one_spoils_no_other(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.append(entry("first"))
    with log.path.open("ab") as file:
        file.write(b"[1]\n{}\n\xff\n" + b"[" * 100_000 + b'\n{"time": "to')
    log.append(entry("second"))
    found = log.last(None)
    assert [one["prompt"] for one in found.entries] == ["first", "second"]
    assert found.damaged == 5


def test_an_entry_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_in(tmp_path)
    log.append(entry("first"))
    before = log.path.read_bytes()
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 10:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:-5])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        log.append(entry("second"))
    assert log.path.read_bytes() == before


def test_what_is_no_file_is_neither_written_nor_read(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.path.mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        log.append(entry())
    with pytest.raises(OSError, match="not a file"):
        log.last(None)


def test_clearing_says_how_much_there_was(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    assert log.clear() == 0
    for _ in range(3):
        log.append(entry())
    assert log.clear() == 3
    assert not log.path.exists()


def _write_many(path: Path, name: str, count: int) -> None:
    log = AnswerLog(path)
    for number in range(count):
        log.append(entry(f"{name} {number}", "x" * 20_000))


@pytest.mark.push
def test_processes_that_log_at_once_never_mix_their_lines(tmp_path: Path) -> None:
    path = log_in(tmp_path).path
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(path, name, 20)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    found = AnswerLog(path).last(None)
    assert found.damaged == 0
    for name in "abc":
        own = [one["prompt"] for one in found.entries if one["prompt"].startswith(name)]
        assert own == [f"{name} {number}" for number in range(20)]
