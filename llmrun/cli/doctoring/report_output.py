"""Prints the doctor's report as text or as JSON."""

from __future__ import annotations

import json
from typing import Any

from rich.text import Text

from llmrun import __version__
from llmrun.base.amounts import counted
from llmrun.cli.console.columns import wrapped
from llmrun.cli.console.output import out
from llmrun.cli.console.terminal import columns
from llmrun.jobs.doctor.examine import Report
from llmrun.jobs.doctor.findings import NOTE, OK, PROBLEM, Finding

SCHEMA = 1
_MARKS = {OK: Text("✓", "green"), NOTE: Text("•", "yellow"), PROBLEM: Text("✗", "bold red")}


def show_json(report: Report) -> None:
    """Print the report as a JSON object. Later versions may add keys, but never rename or redefine keys."""
    out.json(
        {
            "schema": SCHEMA,
            "llmrun": __version__,
            "works": report.works,
            "checks": [_as_json(finding) for finding in report.findings],
        }
    )


def _as_json(finding: Finding) -> dict[str, Any]:
    return {
        "section": finding.section,
        "name": finding.name,
        "status": finding.status,
        "words": finding.words,
        "advice": finding.advice,
        "command": finding.command,
        "facts": dict(finding.facts),
    }


def show(report: Report) -> None:
    """Print one line per finding, then the advice, then the verdict. With --verbose, print all data to stderr."""
    for finding in report.findings:
        out.detail(f"{finding.name}: {json.dumps(dict(finding.facts), ensure_ascii=False)}")
    out.picture(_lines(report.findings))
    for finding in sorted(report.findings, key=lambda finding: finding.status != PROBLEM):  # problems first
        if finding.advice:
            _print_advice(finding)
    out.answer("\n")
    out.picture(_verdict(report))


def _lines(findings: list[Finding]) -> Text:
    """Format the findings as lines with a section, a mark and text. Wrap long text with a hanging indent."""
    left = max(len(finding.section) for finding in findings) + 2
    lines, before = [], ""
    for finding in findings:
        section = "" if finding.section == before else finding.section
        first, *more = wrapped(finding.words, columns() - left - 2)
        lines.append(Text.assemble((section.ljust(left), "bold"), _MARKS[finding.status], " ", first))
        lines += [Text(" " * (left + 2) + line) for line in more]
        before = finding.section
    return Text("\n").join(lines)


def _print_advice(finding: Finding) -> None:
    """Print a finding's advice. The command is on a line of its own and is not wrapped, so it can be copied."""
    out.answer("\n")
    words = wrapped(f"{finding.section}: {finding.advice}", columns() - 2)
    out.picture(Text.assemble(_MARKS[finding.status], " ", "\n  ".join(words)))
    if finding.command:
        out.answer(f"  {finding.command}\n")


def _verdict(report: Report) -> Text:
    notes = counted(report.count(NOTE), "note")
    if report.works:
        return Text.assemble(("Everything that llmrun needs works", "green"), f"; {notes}.")
    problems = counted(report.count(PROBLEM), "problem")
    return Text.assemble((f"{problems}", "bold red"), f" to fix, {notes}.")
