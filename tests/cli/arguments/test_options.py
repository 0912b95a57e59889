"""Tests of the settings that flags give."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.arguments.options import given_by, settings_of
from llmrun.cli.console.output import out


@dataclass(frozen=True)
class Flags:
    threads: int | None = None
    quiet: bool = False
    documents: int = 3  # not a setting


def test_only_settings_that_were_given_count() -> None:
    assert given_by(Flags()) == {}
    assert given_by(Flags(threads=2, quiet=True)) == {"threads": 2, "quiet": True}


def test_the_output_follows_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(out, "quiet", False)
    monkeypatch.setattr(out, "verbose", False)
    assert settings_of(Flags(threads=2, quiet=True), "a-model", verbose=True).threads == 2
    assert (out.quiet, out.verbose) == (True, True)


def test_a_wrong_value_is_refused() -> None:
    with pytest.raises(UsageError, match="threads"):
        settings_of(Flags(threads=-2), "a-model", verbose=False)
