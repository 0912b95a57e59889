"""What the README says of the code is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from llmrun.archs.registry import ARCHITECTURES, table

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_table_of_architectures_is_the_registrys() -> None:
    """scripts/architectures_table prints it."""
    assert f"\n\n{table()}\n" in README.read_text(encoding="utf-8")


def test_every_architecture_says_what_its_users_know_it_as() -> None:
    assert all(architecture.models for architecture in ARCHITECTURES.values())


def test_every_page_of_the_docs_is_linked() -> None:
    readme = README.read_text(encoding="utf-8")
    pages = sorted((README.parent / "docs").glob("*.md"))
    assert pages
    assert [page.name for page in pages if f"(docs/{page.name})" not in readme] == []


DOCUMENTS = sorted((README.parent / "docs").glob("*.md"))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_file_a_document_names_exists(document: Path) -> None:
    """Names are from the repository's root, or from the package; capitals stand for a name to be chosen."""
    named = set(re.findall(r"`((?:[a-z_]+/)+[\w.*-]*)`", document.read_text(encoding="utf-8")))
    root = README.parent
    missing = [name for name in named if not re.search(r"[A-Z*]|\.\.\.", name) and not name.startswith("src/")]
    assert [name for name in missing if not (root / name).exists() and not (root / "llmrun" / name).exists()] == []
