"""Tests that safetensors files are read strictly: hostile ones end in an error of one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.base.errors import ModelFileError
from llmrun.jobs.converting.checkpoint import DTYPES, SafetensorsFile
from tests.support.converting.checkpoints import save_safetensors, write_safetensors
from tests.support.converting.packing import Tensors
from tests.support.tiers import examples

F16 = {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}


@settings(deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=6),
    types=st.lists(st.sampled_from(sorted(DTYPES)), min_size=6, max_size=6),
)
def test_what_was_written_is_read(
    shapes: list[list[int]], types: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    random = np.random.default_rng(0)
    tensors = {
        f"tensor {index}": (type_, np.frombuffer(random.bytes(8 * int(np.prod(shape, dtype=int))), DTYPES[type_]))
        for index, (shape, type_) in enumerate(zip(shapes, types, strict=False))
    }
    tensors = {
        name: (type_, values[: int(np.prod(shape, dtype=int))].reshape(shape))
        for (name, (type_, values)), shape in zip(tensors.items(), shapes, strict=True)
    }
    file = SafetensorsFile(save_safetensors(tmp_path_factory.mktemp("st") / "a.safetensors", tensors))
    assert set(file.tensors) == set(tensors)
    for name, (type_, values) in tensors.items():
        tensor = file.tensors[name]
        assert (tensor.dtype, tensor.shape) == (type_, values.shape)
        assert tensor.read().tobytes() == values.tobytes()
    file.close()


def test_rows_are_read_on_their_own(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    tensors: Tensors = {"before": ("F16", np.zeros(5, np.float16)), "rows": ("F32", values)}
    file = SafetensorsFile(save_safetensors(tmp_path / "a.safetensors", tensors))
    assert (file.tensors["rows"].read_rows(1, 3) == values[1:3]).all()
    file.close()


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": F16}, b"x" * 11, "has 84 bytes, but its tensors end at byte 85; it may be incomplete"),
        ({"a": F16}, b"x" * 13, "has 86 bytes, but its tensors end at byte 85"),
        (
            {"a": F16 | {"data_offsets": [1, 13]}},
            b"x" * 13,
            "a begins at byte 74, but the data before it ends at byte 73",
        ),
        ({"a": F16, "b": F16}, b"x" * 12, "b begins at byte"),
        ({"a": F16 | {"data_offsets": [0, 10]}}, b"x" * 10, "a needs 12 bytes, but has 10"),
        ({"a": F16 | {"data_offsets": [12, 0]}}, b"x" * 12, "a needs 12 bytes, but has -12"),
        ({"a": F16 | {"data_offsets": [0]}}, b"", "a has invalid data_offsets"),
        ({"a": F16 | {"data_offsets": [-12, 0]}}, b"", "a has invalid data_offsets"),
        ({"a": F16 | {"shape": [2, -3]}}, b"x" * 12, "a has an invalid shape"),
        ({"a": F16 | {"shape": [2, True]}}, b"x" * 12, "a has an invalid shape"),
        ({"a": F16 | {"shape": [1 << 40, 1 << 40]}}, b"", "a has an invalid shape"),
        ({"a": F16 | {"shape": [1] * 65}}, b"xx", "a has an invalid shape"),
        ({"a": F16 | {"dtype": "F12"}}, b"x" * 12, "a has the unknown type 'F12'"),
        ({"a": F16 | {"dtype": ["F16"]}}, b"x" * 12, "a has the unknown type"),
        ({"a": 5}, b"", "a must be an object, not '5'"),
        ([], b"", "must contain an object, not an array"),
        ({"\x1b[31m": {}}, b"", "\\x1b[31m has the unknown type"),
    ],
)
def test_hostile_headers_are_refused(header: Any, data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError) as caught:
        SafetensorsFile(write_safetensors(tmp_path / "a.safetensors", json.dumps(header), data))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes, too few"),
        (b"\xff" * 8, "the header must have at most 0 bytes"),
        (b"\x08" + bytes(7) + b"{", "the header must have at most 1 bytes, not 8"),
        (b"\x02" + bytes(7) + b"\xff\xfe", "is not a safetensors file"),
        (b"\x02" + bytes(7) + b"{{", "invalid JSON"),
        (b"\x0d" + bytes(7) + b'{"a":1,"a":2}', 'the key "a" occurs twice'),
        ((200_000).to_bytes(8, "little") + b'{"a":' + b"[" * 199_995, "nested too deeply"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        SafetensorsFile(path)
    assert message in str(caught.value)


@pytest.mark.push
@settings(deadline=None, max_examples=examples(300))
@given(data=st.data())
def test_mutants_end_in_an_error_or_a_file(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    tensors: Tensors = {"a": ("F16", np.zeros((2, 3), np.float16)), "b": ("I32", np.zeros(4, np.int32))}
    path = save_safetensors(tmp_path_factory.mktemp("st") / "a.safetensors", tensors)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content)
    try:
        file = SafetensorsFile(path)
    except ModelFileError:
        return
    for tensor in file.tensors.values():
        assert tensor.read().nbytes == tensor.nbytes
    file.close()
