"""Tests that the suggested model grows with the memory and comes only from the catalogue."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.hub.resolve.memory_check import suggested_model

GB = 10**9


@pytest.mark.parametrize(
    ("memory", "name"),
    [
        (0.3 * GB, None),
        (2 * GB, "gemma3:1b"),
        (4 * GB, "qwen2.5:1.5b"),
        (6 * GB, "qwen3:4b-instruct"),
        (16 * GB, "qwen3:4b-instruct"),
        (64 * GB, "qwen3:30b-instruct"),
    ],
)
def test_more_memory_suits_a_larger_model(memory: float, name: str | None) -> None:
    found = suggested_model(int(memory))
    assert (found and found.name) == name


def test_what_the_user_has_replaced_is_not_suggested_by_our_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models.toml").write_text(
        '[models."qwen3:4b-instruct"]\ndescription = "mine"\nlicense = "MIT"\nrepository = "o/n"\n'
        'quants.Q4_K_M = { file = "m-Q4_K_M.gguf" }\nseen = "here"\n'
    )
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").touch()
    found = suggested_model(16 * GB)
    assert found is not None
    assert found.name == "llama3.2:3b"
