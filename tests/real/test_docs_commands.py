"""Runs the commands in the documentation that need a better model than SmolLM2 (tests/test_docs_commands.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli.documented import PAGES, enter_home, run_commands
from tests.support.models.downloads import CODER as MODEL
from tests.support.models.downloads import assembled
from tests.test_docs_commands import CODER, COMMANDS, reason

pytestmark = pytest.mark.real


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_for_better_models_works(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if lines := [command for command in COMMANDS[page] if reason(command) == CODER]:
        enter_home(tmp_path, page, assembled(MODEL), monkeypatch)
        run_commands(lines)
