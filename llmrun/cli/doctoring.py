"""Prints the doctor's report and llmrun's paths as text or as JSON, and contributes the terminal check.

The check reports the width, colors and encoding that llmrun detects.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict

from rich.text import Text

from llmrun import __version__
from llmrun.base.amounts import counted, format_bytes
from llmrun.cli.completing import installed
from llmrun.cli.console.output import out, wrapped
from llmrun.cli.console.terminal import can_color, columns, is_terminal
from llmrun.jobs.doctor.examine import NOTE, OK, PROBLEM, Finding, Machine, Report

SECTION = "Terminal"
_NARROW = 60
_SIZE = 7  # columns for a size
_LEAST_ROOM = 24  # columns for the description of a path; with fewer columns, the description is on the next line


def look_at_terminal(machine: Machine) -> Iterator[Finding]:
    del machine
    terminal, color, utf8 = is_terminal(sys.stdout), can_color(sys.stdout, out.color), _locale_is_utf8()
    facts = {
        "stdout_is_terminal": terminal,
        "stdin_is_terminal": is_terminal(sys.stdin),
        "color": color,
        "utf8": utf8,
        "columns": columns() if terminal else None,
        "term": os.environ.get("TERM"),
    }
    if not terminal:
        yield Finding(SECTION, "terminal", OK, "the output goes to a file or a pipe, so it is plain text", facts=facts)
        return
    words = f"{columns()} columns, {'colors' if color else 'no colors'}, {'UTF-8' if utf8 else 'not UTF-8'}"
    if not utf8:
        advice = "Text other than ASCII may look wrong. To use a UTF-8 locale:"
        yield Finding(SECTION, "terminal", NOTE, words, advice, "export LC_ALL=C.UTF-8", facts)
    elif columns() < _NARROW:
        yield Finding(SECTION, "terminal", NOTE, f"{words}; tables need at least {_NARROW}", facts=facts)
    else:
        yield Finding(SECTION, "terminal", OK, words, facts=facts)


def _locale_is_utf8() -> bool:
    """Return whether the locale variables indicate UTF-8.

    Python writes UTF-8 regardless of the locale. If no variable is set, UTF-8 is assumed, because current terminals
    support it.
    """
    named = next((os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)), "")
    return named in ("", "C", "POSIX") or "utf8" in named.lower().replace("-", "")


SCHEMA = 1
_MARKS = {OK: Text("✓", "green"), NOTE: Text("•", "yellow"), PROBLEM: Text("✗", "bold red")}


def show_json(report: Report) -> None:
    """Print the report as a JSON object. Later versions may add keys, but never rename or redefine keys."""
    out.json(
        {
            "schema": SCHEMA,
            "llmrun": __version__,
            "works": report.works,
            "checks": [asdict(finding) for finding in report.findings],
        }
    )


def show_report(report: Report) -> None:
    """Print one line per finding, then the advice, then the verdict. With --verbose, print all data to stderr."""
    for finding in report.findings:
        out.detail(f"{finding.name}: {json.dumps(dict(finding.facts), ensure_ascii=False)}")
    out.picture(_lines(report.findings))
    for finding in sorted(report.findings, key=lambda finding: finding.status != PROBLEM):  # problems first
        if finding.advice:
            _print_advice(finding)
    out.answer("\n")
    out.picture(_verdict(report))


def show_paths(*, as_json: bool) -> None:
    """Print all folders and files that llmrun writes, with their sizes, and the files that load completion."""
    from llmrun.jobs.doctor.folders import all_places, shown_path, use_of

    places = [*all_places(), *installed.installed()]
    uses = [use_of(place.path) for place in places]
    if as_json:
        rows = [
            {
                "path": str(place.path),
                "holds": place.holds,
                "shared": place.is_shared,
                "exists": place.path.exists(),
                "files": use.files,
                "bytes": use.n_bytes,
                "counted_all": use.whole,
            }
            for place, use in zip(places, uses, strict=True)
        ]
        out.json({"schema": SCHEMA, "llmrun": __version__, "paths": rows})
        return
    names = [shown_path(place.path) for place in places]
    left = max(map(len, names))
    for name, place, use in zip(names, places, uses, strict=True):
        size = format_bytes(use.n_bytes) if use.files else "-"
        room = columns() - left - _SIZE - 4
        if room >= _LEAST_ROOM:
            first, *more = wrapped(place.holds, room)
            out.lines(
                [f"{size:>{_SIZE}}  {name:{left}}  {first}", *(f"{'':{left + _SIZE + 4}}{line}" for line in more)]
            )
        else:
            more = wrapped(place.holds, columns() - _SIZE - 2)
            out.lines([f"{size:>{_SIZE}}  {name}", *(f"{'':{_SIZE + 2}}{line}" for line in more)])


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
    """Print a finding's advice. The command is printed unwrapped on a line of its own, so that users can copy it."""
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
