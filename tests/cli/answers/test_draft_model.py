"""Tests of resolving the draft model that --speculate names."""

from __future__ import annotations

import pytest

from llmrun.base.errors import ModelNotFound, UsageError
from llmrun.cli.answers.answering import resolved_draft


def test_a_draft_model_is_resolved_like_any_model() -> None:
    assert resolved_draft("a.gguf", lambda name: f"/models/{name}") == "/models/a.gguf"


def test_a_draft_model_cannot_be_on_a_server() -> None:
    with pytest.raises(UsageError, match=r"^--speculate: http://host/v1: a draft model must run on this machine"):
        resolved_draft("http://host/v1", lambda name: name)


def test_an_unknown_draft_model_is_blamed_on_its_flag() -> None:
    def unknown(name: str) -> str:
        raise ModelNotFound(f"model: {name!r}: not here", hint="look elsewhere")

    with pytest.raises(ModelNotFound, match=r"^--speculate: 'on': not here$") as caught:
        resolved_draft("on", unknown)
    assert caught.value.hint == "look elsewhere"
