"""Tests of what a repository offers, from any listing that a server sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.hub.names import safe_segments
from llmrun.hub.remote.repository import Listing, offered

SHA = "ab" * 32


def listed(*files: object) -> Listing:
    return offered("o/n", "0" * 40, [(file, 10, SHA) for file in files])


def test_shards_are_one_model_and_what_is_no_model_is_left_out_in_silence() -> None:
    found = offered(
        "o/n",
        "0" * 40,
        [
            ("README.md", 10, None),
            ("m-Q8_0-00002-of-00002.gguf", 7, SHA),
            ("m-Q8_0-00001-of-00002.gguf", 5, SHA),
            ("mmproj-F16.gguf", 3, SHA),
            ("imatrix_unsloth.gguf", 3, SHA),
            ("m-imatrix-Q4_K_M.gguf", 3, SHA),
            ("vision/mmproj-model-f16.gguf", 3, SHA),
        ],
    )
    assert [(model.file, model.quantization, model.size, len(model.files)) for model in found.models] == [
        ("m-Q8_0-00001-of-00002.gguf", "Q8_0", 12, 2),
        ("m-imatrix-Q4_K_M.gguf", "Q4_K_M", 3, 1),
    ]
    assert found.left_out == ()


def test_the_folder_names_the_quantization_where_the_file_does_not() -> None:
    found = listed("Q4_K_M/m-00001-of-00001.gguf", "UD-Q2_K_XL/m-UD-Q2_K_XL.gguf", "plain/m.gguf")
    assert {model.file: model.quantization for model in found.models} == {
        "Q4_K_M/m-00001-of-00001.gguf": "Q4_K_M",
        "UD-Q2_K_XL/m-UD-Q2_K_XL.gguf": "UD-Q2_K_XL",
        "plain/m.gguf": "",
    }


@pytest.mark.parametrize(
    "files",
    [
        ("m-00001-of-00003.gguf", "m-00002-of-00003.gguf"),
        ("m-00002-of-00002.gguf",),
        ("m-00001-of-99999.gguf",),
        ("m-00000-of-00001.gguf",),
    ],
)
def test_a_model_without_all_of_its_shards_is_told_and_left_out(files: tuple[str, ...]) -> None:
    found = listed(*files, "m-Q4_0.gguf")
    assert [model.file for model in found.models] == ["m-Q4_0.gguf"]
    assert found.left_out == ("'m.gguf': some of its shards are missing",)


@pytest.mark.parametrize(
    "name", ["../x.gguf", "/x.gguf", "a//x.gguf", "a\x1b[2J.gguf", "a" * 300 + ".gguf", "CON.gguf"]
)
def test_a_name_that_is_no_name_is_told_without_what_a_terminal_obeys(name: str) -> None:
    found = listed(name)
    assert found.models == ()
    (line,) = found.left_out
    assert line.endswith("unsafe file name")
    assert line.isprintable()
    assert len(line) < 300


@pytest.mark.parametrize("size", [0, -1, True, None, "10", 10.0, 2**60, 10**5000], ids=lambda size: type(size).__name__)
def test_a_size_that_cannot_be_is_told(size: object) -> None:
    found = offered("o/n", "0" * 40, [("m.gguf", size, SHA)])
    assert found.models == ()
    assert "invalid size:" in found.left_out[0]
    assert len(found.left_out[0]) < 100


@pytest.mark.parametrize("sha256", [None, "", "AB" * 32, "ab" * 31, 5, "../" + "a" * 61])
def test_a_file_without_a_sha256_is_not_offered(sha256: object) -> None:
    found = offered("o/n", "0" * 40, [("m.gguf", 10, sha256)])
    assert found.models == ()
    assert found.left_out == ("'m.gguf': the Hub reports no sha256",)


anything = st.none() | st.booleans() | st.integers() | st.text(max_size=70) | st.floats() | st.lists(st.integers())
names = st.text(max_size=12).map(lambda text: text + ".gguf") | st.from_regex(
    r"(\.\./|[a-z]/)?m-0000[0-3]-of-0000[1-3]\.gguf"
)


@given(st.lists(st.tuples(names | anything, st.integers(-5, 9) | anything, st.just(SHA) | anything), max_size=8))
def test_whatever_a_server_says_only_what_can_be_written_and_checked_is_offered(
    files: list[tuple[object, ...]],
) -> None:
    found = offered("o/n", "0" * 40, [(one[0], one[1], one[2]) for one in files])
    for file in (file for model in found.models for file in model.files):
        safe_segments(file.path)
        assert 0 < file.size <= 2**50
        assert file.sha256 == SHA
    assert all(line.isprintable() for line in found.left_out)


def test_the_check_of_names_is_the_one_that_paths_are_built_by() -> None:
    with pytest.raises(UsageError):
        safe_segments("../x.gguf")
