"""The doctor's check of background engines: those that are running, and the files that crashed engines have left."""

from __future__ import annotations

from collections.abc import Iterator

from llmrun.base.amounts import counted
from llmrun.base.errors import LlmrunError
from llmrun.jobs.doctor.examine import NOTE, OK, Finding, Machine, advice_of
from llmrun.jobs.doctor.folders import shown_path

SECTION = "Engines"


def look_at_engines(machine: Machine) -> Iterator[Finding]:
    del machine
    from llmrun.serving.background.control import leftovers, running

    try:
        engines, left = running(), leftovers()
    except LlmrunError as error:  # models run without background engines, too
        yield Finding(SECTION, "engines", NOTE, str(error), advice_of(error))
        return
    facts = {
        "models": [engine.title for engine in engines],
        "states": [engine.activity for engine in engines],
        "pids": [engine.pid or 0 for engine in engines],
    }
    hung = [engine for engine in engines if engine.state is None]
    words = ", ".join(f"{engine.title}: {engine.activity}" for engine in engines) or "no background engine is running"
    if hung:
        advice = "An engine does not answer, perhaps because its process is suspended. To end it:"
        yield Finding(SECTION, "engines", NOTE, words, advice, "llmrun stop --all --force", facts)
    else:
        yield Finding(SECTION, "engines", OK, words, facts=facts)
    if left:
        problems = [f"{shown_path(each.path)}: {each.problem}" for each in left if each.problem]
        leftover = f"{counted(len(left), 'file')} of background engines that have ended unexpectedly"
        words = "; ".join([leftover, *problems])
        found = {"files": [str(each.path) for each in left], "problems": [each.problem for each in left]}
        advice = "The files are harmless. The next engine for the same model replaces them. To remove them:"
        yield Finding(SECTION, "engine_leftovers", NOTE, words, advice, "llmrun prune", found)
