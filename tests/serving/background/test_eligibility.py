"""Tests of who may join or start a background engine."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

if sys.platform == "win32":
    pytest.skip("Python has no Unix sockets on Windows", allow_module_level=True)

from llmrun.serving.background.eligibility import (
    Standing,
    reason_not_to_join,
    reason_not_to_start_unasked,
    stricter,
)


@pytest.fixture(autouse=True)
def plain_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "SUDO_UID", "SUDO_USER", "DOAS_USER", "PKEXEC_UID", "container", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    for name in ("getuid", "geteuid", "getgid", "getegid"):
        monkeypatch.setattr(os, name, lambda: 1000)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_a_plain_user_may_join_and_start(tmp_path: Path) -> None:
    assert reason_not_to_join() == ""
    assert reason_not_to_start_unasked(tmp_path) == ""


@pytest.mark.parametrize("name", ["geteuid", "getegid"])
def test_setuid_programs_do_not_join(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, name, lambda: 7)
    assert "rights of another" in reason_not_to_join()


def test_own_standing_equals_itself() -> None:
    own = Standing.of_this_process()
    assert stricter(own, Standing.from_json(json.loads(json.dumps(own.as_json())))) == ""
