"""The doctor's check of the kernel cache: its size, its damaged entries, and whether it is writable."""

from __future__ import annotations

from collections.abc import Iterator

from llmrun.base.amounts import counted, format_bytes
from llmrun.base.machine.shell import another_folder, remove
from llmrun.jobs.doctor.disk import can_write, shown_path
from llmrun.jobs.doctor.findings import NOTE, OK, Finding
from llmrun.jobs.doctor.machine import Machine

SECTION = "Files"
_ELSEWHERE = "Without this cache, every run compiles its kernels again. To use another folder:"


def look_at_kernels(machine: Machine) -> Iterator[Finding]:
    del machine
    from llmrun.base.compiled.cache import survey

    try:
        found = survey()
    except OSError as error:
        words = f"compiled kernels cannot be read: {error.filename}: {error.strerror}"
        yield Finding(SECTION, "kernels", NOTE, words, _ELSEWHERE, another_folder("LLMRUN_CACHE_DIR"))
        return
    writable = can_write(found.folder)
    facts = {
        "folder": str(found.folder),
        "entries": found.entries,
        "damaged": found.damaged,
        "bytes": found.n_bytes,
        "writable": writable,
    }
    what = f"{counted(found.entries, 'compiled kernel')}, {format_bytes(found.n_bytes)},"
    words = f"{what if found.entries else 'no compiled kernels'} in {shown_path(found.folder)}"
    if not writable:
        words += ", which is not writable"
        yield Finding(SECTION, "kernels", NOTE, words, _ELSEWHERE, another_folder("LLMRUN_CACHE_DIR"), facts)
    elif found.damaged:
        words += f"; {found.damaged} damaged"
        advice = "Damaged kernels are not used; llmrun compiles them again. To clear the cache:"
        yield Finding(SECTION, "kernels", NOTE, words, advice, remove(found.folder), facts)
    else:
        yield Finding(SECTION, "kernels", OK, words, facts=facts)
