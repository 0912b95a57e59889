"""Tests of which file of a repository is chosen when the name leaves that open."""

from __future__ import annotations

import pytest

from llmrun.base.errors import ModelNotFound
from llmrun.formats.gguf.quantization import quantization_of
from llmrun.hub.names import RemoteFile, shards_of
from llmrun.hub.remote.repository import PREFERRED, OfferedModel, choose, nearest_files, offered, quantizations


def models(*files: str) -> tuple[OfferedModel, ...]:
    """Return a listing of the models with these first files, in increasing order of size."""
    parts = [(part, 10 + number, f"{number:064x}") for number, file in enumerate(files) for part in shards_of(file)]
    return offered("o/n", "0" * 40, parts).models


def chosen(quantization: str | None, *files: str) -> str:
    return choose(models(*files), quantization).file


@pytest.mark.parametrize(
    ("files", "best"),
    [
        (("m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-F16.gguf"), "m-Q4_K_M.gguf"),
        (("m-Q8_0.gguf", "m-UD-Q4_K_XL.gguf", "m-Q4_K_S.gguf"), "m-UD-Q4_K_XL.gguf"),
        (("m-Q4_K_M.gguf", "m-UD-Q4_K_M.gguf"), "m-Q4_K_M.gguf"),
        (("m-Q4_0.gguf", "m-IQ4_XS.gguf", "m-Q4_K_S.gguf"), "m-Q4_K_S.gguf"),
        (("m-Q6_K.gguf", "m-Q5_K_M.gguf", "m-Q8_0.gguf"), "m-Q5_K_M.gguf"),
        (("m-IQ2_M.gguf", "m-Q3_K_L.gguf", "m-F16.gguf"), "m-Q3_K_L.gguf"),
        (("m-F32.gguf", "m-F16.gguf", "m-BF16.gguf"), "m-BF16.gguf"),
        (("m-f16.gguf", "m-Q7_X.gguf"), "m-Q7_X.gguf"),
        (("m-f16.gguf", "m.gguf"), "m.gguf"),
        (("gpt-oss-20b-Q4_K_M.gguf", "gpt-oss-20b-mxfp4.gguf"), "gpt-oss-20b-mxfp4.gguf"),
        (("m-Q4_K_M.gguf", "m-MXFP4.gguf"), "m-Q4_K_M.gguf"),
        (("only.gguf",), "only.gguf"),
    ],
)
def test_without_a_wish_the_best_of_some_five_bits_is_taken(files: tuple[str, ...], best: str) -> None:
    assert chosen(None, *files) == best
    assert chosen(None, *reversed(files)) == best


@pytest.mark.parametrize("wish", ["Q5_K_M", "q5_k_m"])
def test_a_wish_is_case_insensitive(wish: str) -> None:
    assert chosen(wish, "m-Q4_K_M.gguf", "m-q5_k_m.gguf") == "m-q5_k_m.gguf"


def test_unsloths_mix_is_another_quantization_but_stands_in_for_one_that_is_not_there() -> None:
    assert chosen("Q4_K_M", "m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf") == "m-Q4_K_M.gguf"
    assert chosen("Q4_K_M", "m-UD-Q4_K_M.gguf", "m-Q8_0.gguf") == "m-UD-Q4_K_M.gguf"
    assert chosen("UD-Q4_K_M", "m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf") == "m-UD-Q4_K_M.gguf"


def test_fp16_is_f16() -> None:
    assert chosen("FP16", "m-f16.gguf", "m-Q4_K_M.gguf") == "m-f16.gguf"


def test_of_several_the_one_nearest_to_the_root_then_the_shortest_name_is_meant() -> None:
    assert chosen("Q4_K_M", "old/m-Q4_K_M.gguf", "model-Q4_K_M.gguf", "model-v2-Q4_K_M.gguf") == "model-Q4_K_M.gguf"
    assert chosen(None, "a/m-Q4_K_M.gguf", "m-extra-Q4_K_M.gguf") == "m-extra-Q4_K_M.gguf"


def test_a_model_in_one_piece_is_meant_before_the_same_in_shards() -> None:
    assert chosen("Q8_0", "m-Q8_0-00001-of-00002.gguf", "m-Q8_0.gguf") == "m-Q8_0.gguf"


@pytest.mark.parametrize("wish", ["Q4_K_M", None])
def test_files_that_fit_alike_are_named(wish: str | None) -> None:
    with pytest.raises(ModelNotFound, match="2 files match Q4_K_M") as caught:
        chosen(wish, "a-Q4_K_M.gguf", "b-Q4_K_M.gguf", "c-Q8_0.gguf")
    assert caught.value.hint == "name one of the files: a-Q4_K_M.gguf, b-Q4_K_M.gguf"


def test_files_without_a_quantization_that_fit_alike_are_named() -> None:
    with pytest.raises(ModelNotFound, match="2 files match and none names its quantization"):
        chosen(None, "a.gguf", "b.gguf")


@pytest.mark.parametrize(
    ("wish", "hint"),
    [
        ("Q5_K", "did you mean Q5_K_S or Q5_K_M?"),
        ("UD-Q5_K", "did you mean Q5_K_S or Q5_K_M?"),
        ("Q2_K", "available: Q4_K_M, Q5_K_S, Q5_K_M, UD-Q8_K_XL"),
    ],
)
def test_a_wish_that_is_not_there_is_answered_with_what_is(wish: str, hint: str) -> None:
    with pytest.raises(ModelNotFound, match=f"the repository has no {wish}") as caught:
        chosen(wish, "m-Q4_K_M.gguf", "m-Q5_K_S.gguf", "m-Q5_K_M.gguf", "m-UD-Q8_K_XL.gguf")
    assert caught.value.hint == hint


def test_a_wish_where_no_file_names_a_quantization_is_answered_with_the_files() -> None:
    with pytest.raises(ModelNotFound) as caught:
        chosen("Q4_0", "a.gguf", "b.gguf")
    assert caught.value.hint == "name one of the files: a.gguf, b.gguf"


def test_a_long_list_is_cut() -> None:
    with pytest.raises(ModelNotFound) as caught:
        chosen("Q4_0", *(f"{number}.gguf" for number in range(40)))
    assert caught.value.hint.count(".gguf") == 5
    assert caught.value.hint.endswith(".gguf and 35 more")
    with pytest.raises(ModelNotFound) as caught:
        choose(models(*(f"{number}.gguf" for number in range(40))), "Q4_0", "o/n")
    assert caught.value.hint.endswith(" and 35 more; `llmrun fit hf:o/n` lists all")


def test_of_many_quantizations_the_nearest_are_named_in_their_order() -> None:
    names = ("Q2_K", "Q3_K_M", "Q3_K_L", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "F16")
    with pytest.raises(ModelNotFound) as caught:
        chosen("IQ1_M", *(f"m-{name}.gguf" for name in names))
    assert caught.value.hint == "available: Q2_K, Q3_K_M, Q3_K_L, Q4_0, Q4_K_M and 4 more"


def test_no_model_at_all_is_said() -> None:
    with pytest.raises(ModelNotFound, match="has no GGUF model"):
        choose((), None)


def test_the_nearest_files_are_a_hint() -> None:
    there = models("Qwen3-4B-Q4_K_M.gguf", "Qwen3-4B-Q8_0.gguf")
    assert nearest_files(there, "qwen3-4b-q4km.gguf").startswith("did you mean Qwen3-4B-Q4_K_M.gguf")
    assert nearest_files(there, "x") == "the repository has Qwen3-4B-Q4_K_M.gguf, Qwen3-4B-Q8_0.gguf"
    assert nearest_files((), "x") == "the repository has no GGUF model"


def test_quantizations_are_listed_by_size_once() -> None:
    big, small = RemoteFile("a-Q8_0.gguf", 9, None), RemoteFile("a-Q4_0.gguf", 3, None)
    again = RemoteFile("b-Q8_0.gguf", 10, None)
    offers = [OfferedModel("Q8_0", (big,)), OfferedModel("Q4_0", (small,)), OfferedModel("Q8_0", (again,))]
    assert quantizations(offers) == ["Q4_0", "Q8_0"]


def test_every_preferred_name_is_one_that_file_names_are_read_as() -> None:
    assert [name for name in PREFERRED if quantization_of(f"model-{name}.gguf") != name] == []
    assert len(set(PREFERRED)) == len(PREFERRED)
