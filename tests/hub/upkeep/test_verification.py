"""Tests that a model is reported intact only if its hash matches and its scales are finite."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from llmrun.hub.catalog import Wanted
from llmrun.hub.local.model_records import ModelRecord, file_record, known_digest, write_record
from llmrun.hub.local.stored_models import find
from llmrun.hub.names import Expected, HubSource
from llmrun.hub.progress_reporter import Silent
from llmrun.hub.upkeep import verification
from llmrun.hub.upkeep.inventory import models
from llmrun.hub.upkeep.verification import VerificationResult, verify
from tests.support.gguf.gguf_bytes import RawGGUF, RawTensor, string
from tests.support.hub.model_stores import Stores, gguf, sha256
from tests.support.models.downloads import SMOLLM2_SHA256, smollm2

pytestmark = pytest.mark.push

ONE, TWO = gguf(salt=1), gguf(salt=2)


def verdict(*promised: Expected) -> VerificationResult:
    (model,) = models()
    return verify(model, promised, Silent())


def test_a_whole_model_is_remembered_as_one(stores: Stores) -> None:
    (link,) = stores.shared("org/name", {"m.gguf": ONE})
    found = verdict()
    assert found == VerificationResult("hf:org/name/m.gguf", (sha256(ONE),), (sha256(ONE),), 1, ())
    assert not found.has_other_bytes
    assert known_digest(link) == sha256(ONE)


def test_the_real_model_is_whole(stores: Stores) -> None:
    path = stores.own("m.gguf", b"")
    shutil.copy(smollm2(), path)
    found = verdict(Expected("m.gguf", None, SMOLLM2_SHA256))
    assert found.problems == ()
    assert found.tensors == 272
    assert found.expected == (SMOLLM2_SHA256,)


def test_a_flipped_bit_is_found_though_time_and_size_are_the_same_and_the_model_is_not_used_any_more(
    stores: Stores,
) -> None:
    (link,) = stores.shared("org/name", {"m.gguf": ONE})
    verdict()
    before = link.stat()
    data = bytearray(ONE)
    data[-1] ^= 1
    link.resolve().write_bytes(data)
    os.utime(link, ns=(before.st_atime_ns, before.st_mtime_ns))
    asked = Wanted("it", (HubSource("org/name", "m.gguf"),))
    assert find(asked, Silent()) == link  # the link was not checked
    found = verdict()
    assert found.has_other_bytes
    assert found.problems == (f"{link}: sha256 is {sha256(bytes(data))}, expected {sha256(ONE)}",)
    assert find(asked, Silent()) is None


def test_where_nobody_says_what_the_bytes_must_be_the_record_does(stores: Stores) -> None:
    path = stores.own("m.gguf", ONE)
    assert verdict() == VerificationResult("m", (sha256(ONE),), ("",), 1, ())
    assert verdict().expected == (sha256(ONE),)
    path.write_bytes(TWO)
    for _ in range(2):  # still reported the second time
        found = verdict()
        assert found.has_other_bytes
        assert found.digests == (sha256(TWO),)
        assert found.expected == (sha256(ONE),)


def test_the_catalogues_word_comes_before_the_records(stores: Stores) -> None:
    path = stores.own("m.gguf", ONE)
    write_record(ModelRecord("m", "pypi:m==1", "", (file_record(path, sha256(ONE)),), 1.0, 0.0))
    assert verdict(Expected("m.gguf", None, sha256(TWO))).has_other_bytes
    assert verdict(Expected("a.gguf"), Expected("b.gguf")).expected == (sha256(ONE),)


def with_weights(data: bytes, type_id: int, shape: tuple[int, ...]) -> bytes:
    raw = RawGGUF({"general.architecture": string("llama")}, [RawTensor("a\x1b[31m.weight", type_id, shape, len(data))])
    header = raw.header()
    return header.ljust(-(-len(header) // 32) * 32, b"\0") + data.ljust(-(-len(data) // 32) * 32, b"\0")


def test_weights_that_are_no_numbers_are_counted(stores: Stores) -> None:
    weights = np.ones(64, "<f4")
    weights[[5, 9]] = np.nan, np.inf
    stores.shared("org/name", {"m.gguf": with_weights(weights.tobytes(), 0, (64,))})
    found = verdict()
    assert not found.has_other_bytes
    assert found.problems == (r"a\x1b[31m.weight: 2 of 64 weights contain NaN or infinity, first at 5",)


def test_blocks_are_counted_over_the_parts_that_are_read(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = bytearray(bytes(18) * 64)
    for index in (33, 60):
        blocks[18 * index : 18 * index + 2] = struct.pack("<H", 0x7C00)
    stores.shared("org/name", {"m.gguf": with_weights(bytes(blocks), 2, (32, 64))})
    line = r"a\x1b[31m.weight: 2 of 64 blocks of Q4_0 contain NaN or infinity, first at 33"
    assert verdict().problems == (line,)
    for size in (1, 18, 100, 18 * 34):
        monkeypatch.setattr(verification, "_CHUNK", size)
        assert verdict().problems == (line,)


def test_a_model_full_of_nans_does_not_fill_the_screen(stores: Stores) -> None:
    tensors = [RawTensor(f"t{number}", 0, (8,), 32) for number in range(40)]
    raw = RawGGUF({"general.architecture": string("llama")}, tensors)
    header = raw.header()
    data = header.ljust(-(-len(header) // 32) * 32, b"\0") + b"\xff" * 32 * 40
    stores.shared("org/name", {"m.gguf": data})
    assert len(verdict().problems) == 20


def test_a_header_that_breaks_a_rule_is_a_problem(stores: Stores) -> None:
    stores.shared("org/name", {"m.gguf": b"GGUF nonsense"})
    found = verdict()
    assert found.tensors == 0
    assert not found.has_other_bytes
    assert "not a valid GGUF file" in found.problems[0]


def test_a_file_that_cannot_be_read_is_no_damage(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    (link,) = stores.shared("org/name", {"m.gguf": ONE})
    verdict()

    def refuse(path: Path, *_: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(verification, "digest", refuse)
    found = verdict()
    assert found.unread == (f"{link}: cannot be read: Permission denied",)
    assert (found.problems, found.missing, found.is_whole) == ((), (), False)
    assert known_digest(link) == sha256(ONE)


def test_progress_ends_at_its_total(stores: Stores) -> None:
    stores.shared("org/name", {"m.gguf": ONE})
    seen: dict[str, tuple[int, int]] = {}

    class Watching(Silent):
        def progress(self, label: str, done: int, total: int) -> None:
            seen[label] = (done, total)

    verify(models()[0], (), Watching())
    size = len(ONE)
    assert seen == {
        "hashing hf:org/name/m.gguf": (size, size),
        "checking the tensors of hf:org/name/m.gguf": (128, 128),
    }


def test_the_projector_is_verified_with_its_model(stores: Stores) -> None:
    projector_bytes = gguf(salt=9)
    _, projector = stores.shared("org/name", {"m.gguf": ONE, "mmproj-F16.gguf": projector_bytes})
    digests = sha256(ONE), sha256(projector_bytes)
    assert verdict() == VerificationResult("hf:org/name/m.gguf", digests, digests, 2, ())
    assert known_digest(projector) == sha256(projector_bytes)
    projector.resolve().write_bytes(projector_bytes[:-1] + b"?")
    damaged = verdict()
    assert damaged.problems[0].startswith(f"{projector}: sha256 is ")
    assert damaged.has_other_bytes
