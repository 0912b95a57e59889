"""The folder of compiled kernels: what is in it, whether it is whole, and whether more can be kept."""

from __future__ import annotations

from collections.abc import Iterator

from llmrun.doctor.disk import can_write, shown_path
from llmrun.doctor.findings import NOTE, OK, Finding, plural, size_words
from llmrun.doctor.machine import Machine

SECTION = "Files"


def look_at_kernels(machine: Machine) -> Iterator[Finding]:
    del machine
    from llmrun.kernels.cache import survey

    found = survey()
    writable = can_write(found.folder)
    facts = {
        "folder": str(found.folder),
        "entries": found.entries,
        "damaged": found.damaged,
        "bytes": found.n_bytes,
        "writable": writable,
    }
    words = f"{plural(found.entries, 'compiled kernel')}, {size_words(found.n_bytes)}, in {shown_path(found.folder)}"
    if not writable:
        words += ", which cannot be written"
        advice = "Every start compiles its kernels, until they can be kept:"
        yield Finding(SECTION, "kernels", NOTE, words, advice, "export LLMRUN_CACHE_DIR=FOLDER", facts)
    elif found.damaged:
        words += f"; {found.damaged} damaged"
        yield Finding(SECTION, "kernels", NOTE, words, "Nothing need be done: they are compiled again.", facts=facts)
    else:
        yield Finding(SECTION, "kernels", OK, words, facts=facts)
