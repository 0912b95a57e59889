"""Tests of the commands that install and rebuild llama.cpp."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import PackageNotFoundError

import pytest

from llmrun.backends.llama.build_command import install_command, llama_requirement


def test_the_requirement_is_that_of_the_installed_package() -> None:
    """It names no distribution of ours, which may not be on the index."""
    assert llama_requirement().startswith("llama-cpp-python")
    assert "llmrun" not in llama_requirement()


def test_in_a_clone_that_was_never_installed_it_is_the_clones_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert install_command().endswith("/llama-cpp-python/whl/cpu '.[llama]'")
