"""Tests of the digest that identifies a model without reading all of its bytes."""

from __future__ import annotations

from pathlib import Path

from llmrun.formats.gguf.reader import open_gguf, sampled_digest
from tests.support.models.tiny_architectures import tiny_architecture


def digest_of(path: Path) -> str:
    with open_gguf(path) as file:
        return sampled_digest(file)


def test_a_digest_depends_on_the_header_and_the_weights(tmp_path: Path) -> None:
    path = tiny_architecture(tmp_path, "qwen2")
    data = path.read_bytes()
    digest = digest_of(path)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(data)
    assert digest_of(copy) == digest
    changed = bytearray(data)
    changed[-100] ^= 1
    copy.write_bytes(changed)
    assert digest_of(copy) != digest
    copy.write_bytes(data.replace(b"tiny", b"tidy"))
    assert digest_of(copy) != digest
