"""Tests of importance matrix files: both forms are read, and damaged files are refused in one line."""

from __future__ import annotations

import struct
from io import BytesIO
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.llama.imatrix_file import Entry, Imatrix, read_imatrix, write_imatrix
from llmrun.base.errors import LlmrunError, ModelFileError, ModelNotFound
from tests.support.gguf.gguf_files import write_gguf
from tests.support.models.tiny_models import tiny_model


def entry(sums: list[float], counts: list[float]) -> Entry:
    return Entry(np.array(sums, np.float32), np.array(counts, np.float32))


DENSE, EXPERTS = entry([1, 2, 3, 4], [2]), entry([1, 2, 3, 4, 5, 6], [2, 0, 4])
MEASURED = Imatrix({"blk.0.b.weight": DENSE, "blk.0.a.weight": EXPERTS}, ("book.txt",), 3, 512)


def written(measured: Imatrix) -> bytes:
    file = BytesIO()
    write_imatrix(file, measured)
    return file.getvalue()


def older_form(measured: Imatrix) -> bytes:
    """Return the older form, as described in the module."""
    data = struct.pack("<i", len(measured.entries))
    for name, one in measured.entries.items():
        means = (one.means() * measured.chunks).astype("<f4")
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", measured.chunks, means.size)
        data += means.tobytes()
    dataset = measured.datasets[0].encode()
    return data + struct.pack("<ii", measured.chunks, len(dataset)) + dataset


def read(folder: Path, data: bytes) -> Imatrix:
    path = folder / "made.imatrix"
    path.write_bytes(data)
    return read_imatrix(path)


@pytest.mark.push
@given(
    widths=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=4),
    datasets=st.lists(st.text(st.characters(codec="utf-8"), max_size=9), max_size=3),
    chunks=st.integers(0, 2**32 - 1),
)
def test_written_files_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, widths: list[tuple[int, int]], datasets: list[str], chunks: int
) -> None:
    random = np.random.default_rng(0)
    entries = {
        f"blk.{number}.x.weight": Entry(random.random(width * matrices, np.float32), np.arange(matrices, dtype="<f4"))
        for number, (width, matrices) in enumerate(widths)
    }
    found = read(tmp_path_factory.mktemp("f"), written(Imatrix(entries, tuple(datasets), chunks, 512)))
    assert (found.datasets, found.chunks, found.chunk_size) == (tuple(datasets), chunks, 512)
    assert found.entries.keys() == entries.keys()
    for name, one in found.entries.items():
        assert (one.sums == entries[name].sums).all()
        assert (one.counts == entries[name].counts).all()


def test_gguf_py_reads_the_layout_of_llama_imatrix(tmp_path: Path) -> None:
    (tmp_path / "i.gguf").write_bytes(written(MEASURED))
    found = gguf.GGUFReader(tmp_path / "i.gguf")
    assert {key: found.fields[key].contents() for key in found.fields if not key.startswith("GGUF.")} == {
        "general.type": "imatrix",
        "imatrix.datasets": ["book.txt"],
        "imatrix.chunk_count": 3,
        "imatrix.chunk_size": 512,
    }
    assert [(tensor.name, tensor.shape.tolist()) for tensor in found.tensors] == [
        ("blk.0.a.weight.in_sum2", [2, 3]),
        ("blk.0.a.weight.counts", [1, 3]),
        ("blk.0.b.weight.in_sum2", [4]),
        ("blk.0.b.weight.counts", [1]),
    ]


def test_unused_experts_have_means_of_one() -> None:
    assert EXPERTS.means().tolist() == [0.5, 1, 1, 1, 1.25, 1.5]
    assert DENSE.means().tolist() == [0.5, 1, 1.5, 2]


def test_the_older_form_has_the_same_means(tmp_path: Path) -> None:
    found = read(tmp_path, older_form(MEASURED))
    assert (found.datasets, found.chunks) == (("book.txt",), 3)
    for name, means in found.means().items():
        np.testing.assert_allclose(means, MEASURED.entries[name].means(), rtol=1e-6)


@pytest.mark.push
@pytest.mark.parametrize("form", [written(MEASURED), older_form(MEASURED)], ids=["GGUF", "older"])
def test_files_cut_off_anywhere_are_refused(tmp_path: Path, form: bytes) -> None:
    """The padding at the end of the GGUF form may be missing, and the last part of the older form is optional."""
    needed = len(written(MEASURED)) - 28 if form == written(MEASURED) else len(form)
    optional = len(form) - struct.calcsize("<ii") - len("book.txt")
    for size in range(needed):
        if needed < len(form) or size != optional:
            with pytest.raises(ModelFileError):
                read(tmp_path, form[:size])


@pytest.mark.parametrize("form", [written(MEASURED), older_form(MEASURED)], ids=["GGUF", "older"])
@given(data=st.data())
def test_damaged_files_never_crash(tmp_path_factory: pytest.TempPathFactory, form: bytes, data: st.DataObject) -> None:
    damaged = bytearray(form)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(form) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = read(tmp_path_factory.mktemp("f"), bytes(damaged))
    except LlmrunError:
        return
    assert all(np.isfinite(means).all() for means in found.means().values())


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"not an importance matrix: .*: this is a model"):
        read_imatrix(tiny_model(tmp_path, "F32"))
    adapter = write_gguf(tmp_path / "adapter.gguf", {"general.type": "adapter"}, {})
    with pytest.raises(ModelFileError, match=r"general\.type is 'adapter'"):
        read_imatrix(adapter)
    keys = {"general.type": "imatrix", "imatrix.datasets": ["a"], "imatrix.chunk_count": 1, "imatrix.chunk_size": 1}
    half = ("F16", np.zeros((1, 2), np.float32))
    halves = write_gguf(tmp_path / "half.gguf", keys, {"a.in_sum2": half, "a.counts": half})
    with pytest.raises(ModelFileError, match=r"a\.in_sum2: must be F32, not F16"):
        read_imatrix(halves)
    with pytest.raises(ModelNotFound):
        read_imatrix(tmp_path / "missing.gguf")


@pytest.mark.parametrize(("sums", "count"), [([1, np.inf], 1), ([1, -1], 1), ([1, 1], np.nan), ([1, 1], -1)])
def test_impossible_numbers_are_refused(sums: list[float], count: float, tmp_path: Path) -> None:
    measured = Imatrix({"blk.0.a.weight": entry(sums, [count])}, (), 1, 8)
    with pytest.raises(ModelFileError, match=r"blk\.0\.a\.weight: it has numbers that are negative or not finite"):
        read(tmp_path, written(measured))
