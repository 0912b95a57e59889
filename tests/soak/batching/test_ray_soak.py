"""A small soak of batches on Ray, with the scripted backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.batching.ray_runs import RaySoak

pytestmark = pytest.mark.night


def test_a_small_soak_compares_the_bytes(tmp_path: Path) -> None:
    soak = RaySoak(tmp_path, ["-m", "x", "--backend", "scripted"], lines=20, seed=1, say=lambda _: None)
    soak.same(1)
    assert soak.problems == []
    (tmp_path / "same.jsonl").unlink()
    (tmp_path / "expected.jsonl").write_bytes(b"other bytes")
    soak.same(1)
    assert len(soak.problems) == 1
    assert soak.problems[0].startswith("nothing killed: other bytes than one process")
