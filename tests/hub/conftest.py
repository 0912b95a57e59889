"""Fixtures that simulate disks for the tests of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub.small_disks import SmallDisk, small_disk


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    """Yield a disk with room for about 1 MiB, until `make_room` is called."""
    with small_disk(tmp_path / "disk", 1 << 20, monkeypatch) as disk:
        yield disk
