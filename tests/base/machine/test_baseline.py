"""Tests that processors on which NumPy would crash are recognized."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.base.machine.processor import missing_instructions
from llmrun.cli import app

V2 = "fpu cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3"


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (f"processor\t: 0\nflags\t\t: {V2} avx2\nbugs:\n", []),
        (f"flags : {V2.replace('sse4_2', '')}\n", ["sse4_2"]),
        ("flags : fpu sse2 cx16 hypervisor\n", ["lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"]),  # QEMU's kvm64
        ("Features : fp asimd\n", []),
        ("flags : fpu " + "x" * 5000 + f" {V2}\n", []),  # longer than what is read
        ("", []),
        (None, []),
    ],
)
def test_missing_instructions_are_named(tmp_path: Path, text: str | None, missing: list[str]) -> None:
    (tmp_path / "proc").mkdir()
    if text is not None:
        (tmp_path / "proc/cpuinfo").write_text(text)
    assert missing_instructions(tmp_path) == missing


def test_this_processor_has_them_all() -> None:
    assert missing_instructions() == []


def test_a_processor_without_them_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "missing_instructions", lambda: ["popcnt", "sse4_2"])
    assert app.main(["--version"]) == 1
    assert capsys.readouterr().err == (
        "error: this processor cannot run NumPy: it lacks popcnt, sse4_2 (x86-64-v2)\n"
        "hint: in a virtual machine, select the CPU type host\n"
    )
