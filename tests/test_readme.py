"""What the README says of the code is so."""

from __future__ import annotations

from pathlib import Path

from llmrun.archs.registry import ARCHITECTURES, table

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_table_of_architectures_is_the_registrys() -> None:
    """scripts/architectures_table prints it."""
    assert f"\n\n{table()}\n" in README.read_text(encoding="utf-8")


def test_every_architecture_says_what_its_users_know_it_as() -> None:
    assert all(architecture.models for architecture in ARCHITECTURES.values())
