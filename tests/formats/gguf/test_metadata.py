"""Tests that files that belong to a model are not taken for one."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.base.errors import ModelFileError
from llmrun.formats.gguf.metadata import check_is_model, purpose_of
from llmrun.formats.gguf.reader import open_gguf
from tests.support.gguf.gguf_files import write_gguf


@pytest.mark.parametrize(
    ("kind", "purpose", "hint"),
    [
        ("adapter", "a LoRA adapter", "--lora"),
        ("imatrix", "an importance matrix", "--imatrix"),
        ("mmproj", "a vision projector", ""),
    ],
)
def test_other_files_say_what_they_are_for(tmp_path: Path, kind: str, purpose: str, hint: str) -> None:
    with open_gguf(write_gguf(tmp_path / "file.gguf", {"general.type": kind}, {})) as file:
        assert purpose_of(file) == purpose
        with pytest.raises(ModelFileError, match=f"is {purpose}$") as refused:
            check_is_model(file)
        assert hint in refused.value.hint


@pytest.mark.parametrize("kind", ["model", "a new kind", 5])
def test_models_and_unknown_kinds_are_accepted(tmp_path: Path, kind: str | int) -> None:
    with open_gguf(write_gguf(tmp_path / "file.gguf", {"general.type": kind}, {})) as file:
        assert purpose_of(file) == ""
        check_is_model(file)
