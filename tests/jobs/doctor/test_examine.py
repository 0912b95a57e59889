"""Tests that every check runs, and that a failing check becomes a line of the report."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from llmrun.base.errors import UsageError
from llmrun.jobs.doctor import examine as examining
from llmrun.jobs.doctor.examine import NOTE, OK, PROBLEM, Finding, Machine, Report, examine


@pytest.fixture(autouse=True)
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examining, "_CHECKS", ())


def good(machine: Machine) -> Iterator[Finding]:
    yield Finding("S", "good", OK, f"offline: {machine.offline}")


def ill(machine: Machine) -> Iterator[Finding]:
    yield Finding("S", "before", OK, "said before")
    raise RuntimeError("no such luck")


def mistaken(machine: Machine) -> Iterator[Finding]:
    del machine
    raise UsageError("environment: LLMRUN_CACHE_DIR: '~nobody' names no home", hint="unset it")


def nothing(words: str) -> None:
    del words


def test_findings_come_in_order() -> None:
    report = examine(Machine(offline=True), nothing, [("A", good), ("B", good)])
    assert [finding.words for finding in report.findings] == ["offline: True"] * 2
    assert report.works


def test_a_check_that_fails_is_a_note_and_the_next_one_runs() -> None:
    report = examine(Machine(), nothing, [("A", ill), ("B", good)])
    before, failed, after = report.findings
    assert (before.name, after.name) == ("before", "good")
    assert (failed.section, failed.name, failed.status) == ("A", "failed_ill", NOTE)
    assert failed.words == "this check failed: RuntimeError: no such luck"
    (trace,) = report.traces
    assert 'raise RuntimeError("no such luck")' in trace
    assert report.works


def test_an_error_of_ours_is_a_problem_in_its_own_words() -> None:
    report = examine(Machine(), nothing, [("A", mistaken)])
    (found,) = report.findings
    assert (found.status, found.name, found.advice) == (PROBLEM, "failed_mistaken", "Unset it.")
    assert found.words == "environment: LLMRUN_CACHE_DIR: '~nobody' names no home"
    assert not report.works
    assert report.traces == []


def test_a_check_whose_import_fails_is_a_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(examining, "_CHECKS", (("A", "a thing", "no_such_module", "look"),))
    (found,) = examine(Machine(), told.append).findings
    assert "ModuleNotFoundError" in found.words
    assert told == ["checking a thing"]


def test_no_secret_is_in_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")

    def tattling(machine: Machine) -> Iterator[Finding]:
        yield Finding("S", "n", OK, "the token is hf_secretsecret", facts={"token": ["hf_secretsecret"]})
        raise RuntimeError("refused: hf_secretsecret")

    report = examine(Machine(), nothing, [("A", tattling)])
    assert "hf_secret" not in repr(report)
    assert repr(report).count("[hidden]") >= 4


def test_a_report_counts_by_status() -> None:
    report = Report([Finding("S", "a", OK, ""), Finding("S", "b", NOTE, ""), Finding("S", "c", NOTE, "")])
    assert (report.count(NOTE), report.count(PROBLEM), report.works) == (2, 0, True)
