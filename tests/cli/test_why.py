"""Tests of `llmrun why` and of the records that it reads."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from llmrun.base.folders import cache_folder
from llmrun.cli.prefix_advice import clients_of, kind_of, sentences_of
from llmrun.engine.requests import PrefixCause, PrefixReport
from llmrun.serving import prefix_log
from llmrun.serving.prefix_log import PrefixLog, Record, read_records, reused_words, unused_records
from tests.support.cli.commands import run

SYSTEM = "system prompt"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path))
    return cache_folder("why")


def record(report: PrefixReport, *, agent: str = "opencode/1.2 ai-sdk", seconds: float = 0.0) -> Record:
    return Record(time.time(), "qwen3:4b", agent, seconds, report)


def differing(old: str, new: str, where: str = SYSTEM) -> PrefixReport:
    return PrefixReport(18_900, 12, 18_500, PrefixCause.DIFFERS, where, old=old, new=new)


def write(folder: Path, records: Sequence[Record], more: bytes = b"") -> None:
    folder.mkdir(parents=True)
    (folder / "prefixes.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in records) + more)


def test_an_empty_log_gives_one_clear_line(folder: Path) -> None:
    assert run("why") == ("No requests recorded yet. `llmrun serve` records the requests that it answers.\n", "")
    assert not folder.exists()


def test_why_names_what_the_client_changes_and_what_it_costs(folder: Path) -> None:
    reused = record(PrefixReport(18_889, 18_872))
    first = record(PrefixReport(18_889, 0, cause=PrefixCause.FIRST))
    late = record(differing("Today is Nov 30, 16:05", "Today is Nov 30, 16:07"), seconds=190.0)
    write(folder, [first, *[reused] * 17, late, late])
    text, _ = run("why")
    head, rest, problem = text.splitlines()
    assert head == "opencode, qwen3:4b: 17 of 20 requests reused their prefix. 1 request had nothing to reuse yet."
    assert rest == "2 did not:"
    assert problem == (
        "  the client puts the time into its system prompt ('Today is Nov 30, 16:05' became 'Today is Nov 30, 16:07') "
        "(2 times): 37,000 tokens computed again, about 6 min 12 s"
    )
    [found] = json.loads(run("why", "-n", "2", "--json")[0])["clients"]
    assert (found["requests"], found["problems"][0]["kind"]) == (2, "the time")


def test_hostile_records_never_crash_why(folder: Path) -> None:
    hostile = PrefixReport(1, 0, 5, PrefixCause.TOOLS, "tool 1\n", name="\x1b]52;c;\a", detail="added")
    huge = record(PrefixReport(1, 0, 10**18, PrefixCause.EVICTED)), record(differing("a" * 9999, "b"))
    endless = record(PrefixReport(1, 0, 1, PrefixCause.EVICTED, ago_s=1e300), seconds=1e300)
    broken = (b"\xff\xfe", b"[" * 100_000, b"{}", b'{"time": "x"}', b'"\\ud800"', b"0" * 5000)
    junk = [*map(msgspec.json.encode, (*huge, endless)), *broken]
    write(folder, [record(hostile, agent="\x1b[31mred")], b"\n".join(junk))
    text, notes = run("why")
    assert "\x1b" not in text + notes
    assert f"skipped 9 unreadable lines in {folder}" in notes
    assert run("why", "--json")[0].count("\x1b") == 0


def test_why_does_not_wait_for_a_pipe(folder: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs named pipes")
    folder.mkdir()
    os.mkfifo(folder / "prefixes.jsonl")
    assert run("why")[0].startswith("No requests recorded")


def test_records_stay_within_a_megabyte(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_log, "MOST_BYTES", 4096)
    log = PrefixLog(folder)
    for number in range(100):
        log._append(msgspec.json.encode(record(PrefixReport(number, 0))) + b"\n")
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == ["prefixes.1.jsonl", "prefixes.jsonl"]
    assert sum(path.stat().st_size for path in files) < 2 * 4096 + 200
    assert read_records(folder).found[-1].report.total == 99


def test_threads_that_write_records_lose_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    log, line = PrefixLog(folder, notes.append), msgspec.json.encode(record(PrefixReport(5, 5))) + b"\n"
    for _ in range(9):
        log._append(line)
    monkeypatch.setattr(prefix_log, "MOST_BYTES", 10 * len(line) - 1)
    write, both = os.write, threading.Barrier(2, timeout=0.1)

    def slow_write(descriptor: int, data: bytes) -> int:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", slow_write)
    with ThreadPoolExecutor(2) as threads:
        [*_] = threads.map(log._append, [line] * 2)
    assert (len(read_records(folder).found), notes) == (11, [])


def test_a_full_disk_is_noted_once(folder: Path) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file in the way")
    notes: list[str] = []
    log = PrefixLog(folder, notes.append)
    log._append(b"{}\n")
    log._append(b"{}\n")
    assert len(notes) == 1


def test_records_unused_for_30_days_can_be_pruned(folder: Path) -> None:
    write(folder, [record(PrefixReport(5, 5))])
    assert unused_records(time.time()) == []
    [(path, _)] = unused_records(time.time() + 31 * 86_400)
    assert path.name == "prefixes.jsonl"


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("Today is Nov 30, 16:05", "Today is Nov 30, 16:07", "the time"),
        ("Current time: 2026-11-30T16:05:11Z", "Current time: 2026-11-30T16:07:40Z", "the time"),
        ("now=1796054711", "now=1796054822", "the time"),
        ("Today's date: Sun Nov 29 2026", "Today's date: Mon Nov 30 2026", "the date"),
        ("<date>2026-11-29</date>", "<date>2026-11-30</date>", "the date"),
        ("session: 5f0c1d52-8f3a-4c1b", "session: 0d9a7b11-22c3-4e5f", "a random ID"),
        ("call_9fK2mQ81xz", "call_b7Tz03LmQa", "a random ID"),
        ("Chunk ID: 441f93", "Chunk ID: 62ae44", "a random ID"),
        ("Working directory: /home/me/alpha", "Working directory: /home/me/beta", "a path"),
        ("gitStatus: branch main", "gitStatus: branch parser", "the state of git"),
        ("Turn 12", "Turn 13", "a number"),
        ("Be brief.", "Be thorough.", ""),
        ("", "", ""),
    ],
)  # fmt: skip
def test_typical_texts_are_recognized(old: str, new: str, kind: str) -> None:
    assert kind_of(old, new) == kind


@pytest.mark.parametrize("cause", [cause for cause in PrefixCause if cause not in ("", "waited", "first prompt")])
def test_every_cause_has_a_sentence(cause: PrefixCause) -> None:
    report = PrefixReport(900, 12, 800, cause, "tool 3", name="read_file", detail="removed", old="a", new="b", ago_s=65)
    [client] = clients_of([record(report)])
    _, heading, line = sentences_of(client)
    assert heading == "None did:"
    assert line.endswith(": 800 tokens computed again")


def test_words_for_the_log_contain_no_text_of_prompts() -> None:
    report = PrefixReport(900, 12, 800, PrefixCause.TOOLS, "tool 3", name="secret", detail="added", old="mine", new="x")
    assert reused_words(report) == "reused 12 of 900: tools changed, tool 3, added"
    evicted = PrefixReport(18_889, 312, 800, PrefixCause.EVICTED, ago_s=725)
    assert reused_words(evicted) == "reused 312 of 18,889: evicted, 12 minutes ago"
