"""A short version of scripts/soak_store. A damaged or unwritable kernel cache costs one note, never a wrong answer."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.soak.store_soak import Soak, Tally


@pytest.fixture(scope="module")
def soak() -> Iterator[Soak]:
    with TemporaryDirectory() as folder:
        yield Soak(Path(folder))


def test_flipped_bits_are_compiled_again(soak: Soak) -> None:
    for case in range(40):
        soak.flip_in_process(1, case)
    soak.flip_with_process(1, 0)
    assert soak.tally.findings == []
    assert sum(soak.tally.done.values()) == 41


@pytest.mark.parametrize("case", [5, 6])
def test_an_entry_of_another_processor_or_a_folder_is_not_taken(soak: Soak, case: int) -> None:
    soak.other_damage(1, case)
    assert soak.tally.findings == []


def test_a_full_disk_costs_one_note(soak: Soak) -> None:
    soak.cannot_write_one_more()
    assert soak.tally.findings == []


def test_processes_that_start_at_once_give_the_same_answer(soak: Soak) -> None:
    soak.start_at_once(0, processes=3)
    assert soak.tally.findings == []


def test_a_wrong_answer_and_litter_are_findings(soak: Soak) -> None:
    """Check that the soak detects what it looks for."""
    seen = copy(soak)
    seen.tally = Tally()
    seen._right = "another"
    seen.other_damage(1, 1)
    seen._right = soak._right
    seen._entries = dict.fromkeys(soak._entries, b"another")
    seen.other_damage(1, 1)
    assert len(seen.tally.findings) == 2
    assert "another answer" in seen.tally.findings[0]
    assert "the cache differs in" in seen.tally.findings[1]
