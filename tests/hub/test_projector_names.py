"""Tests of which projectors belong to a model by name, with the names that publishers use."""

from __future__ import annotations

import pytest

from llmrun.hub.names import models_among
from llmrun.hub.projector_names import choices, only_of

MODEL = "gemma-3-4b-it-Q4_K_M.gguf"


def found(model: str, *others: str) -> list[tuple[str, ...]]:
    return [one.files for one in choices(model, [model, *others])]


@pytest.mark.parametrize(
    ("model", "projector"),
    [
        ("gemma-4-E2B-it-Q8_0.gguf", "mmproj-gemma-4-e2b-it-f16.gguf"),
        ("gemma-3-4b-it-UD-Q4_K_XL.gguf", "mmproj-F16.gguf"),
        ("gemma-3-4b-it-Q4_K_M.gguf", "mmproj-model-f16.gguf"),
        ("google_gemma-3-4b-it-Q4_K_M.gguf", "mmproj-google_gemma-3-4b-it-bf16.gguf"),
        ("gemma-3-4b-it-Q4_K_M.gguf", "mmproj-google_gemma-3-4b-it-bf16.gguf"),
        ("Ministral-3-3B-Instruct-2512-Q5_K_M.gguf", "Ministral-3-3B-Instruct-2512-BF16-mmproj.gguf"),
        ("Qwen2.5-VL-3B-Instruct.Q4_K_M.gguf", "Qwen2.5-VL-3B-Instruct.mmproj-Q8_0.gguf"),
        ("Qwen2.5-VL-3B-Instruct.i1-Q4_K_M.gguf", "Qwen2.5-VL-3B-Instruct.mmproj-Q8_0.gguf"),
        ("Qwen3-VL-2B-Instruct-F16.gguf", "mmproj-Qwen3VL-2B-Instruct-F16.gguf"),
        ("LFM2.5-VL-1.6B-Q4_0.gguf", "mmproj-LFM2.5-VL-1.6b-BF16.gguf"),
        ("gemma-3-12b-it-q4_0.gguf", "mmproj-model-f16-12B.gguf"),
        ("gemma-4-12b-it-qat-q4_0.gguf", "mmproj-gemma-4-12b-it-qat-q4_0.gguf"),
        ("BF16/medgemma-27b-it-BF16-00001-of-00001.gguf", "mmproj-BF16.gguf"),
        ("SmolVLM-256M-Instruct-Q8_0.gguf", "MMPROJ-SmolVLM-256M-Instruct-F16.GGUF"),
    ],
)
def test_names_of_publishers_are_recognized(model: str, projector: str) -> None:
    assert found(model, projector) == [(projector,)]


@pytest.mark.parametrize(
    "other",
    [
        "mmproj-gemma-3-12b-it-f16.gguf",
        "mmproj-Qwen2.5-VL-7B-Instruct-f16.gguf",
        "mmproj-gemma-4-E4B-it-bf16.gguf",
        "mmproj-model-f16-27B.gguf",
        "mmproj-gemma-3-4b-it-F16.imatrix.gguf",
        "imatrix_mmproj.gguf",
        "gemma-3-4b-it.imatrix",
        "mmproj-gemma-3-4b-it-F16.safetensors",
        "mmproj.txt",
    ],
)
def test_other_files_are_not_taken(other: str) -> None:
    assert found(MODEL, other) == []


def test_importance_matrices_of_projectors_are_not_models() -> None:
    assert models_among([MODEL, "mmproj-gemma-3-4b-it-F16.imatrix.gguf"]) == {MODEL: (MODEL,)}


def test_thinking_and_instruct_are_different_models() -> None:
    assert found("Qwen3VL-2B-Thinking-Q8_0.gguf", "mmproj-Qwen3VL-2B-Instruct-F16.gguf") == []


def test_q8_0_is_preferred_then_f16() -> None:
    """The other precisions follow, so that a file that is here already can be used."""
    names = [f"mmproj-{kind}.gguf" for kind in ("BF16", "F32", "F16", "Q8_0", "Q4_0")]
    assert found(MODEL, *names) == [tuple(f"mmproj-{kind}.gguf" for kind in ("Q8_0", "F16", "BF16", "F32", "Q4_0"))]


def test_a_better_match_of_another_model_is_its_own() -> None:
    """gpustack/gpustack#2261 and calcuis/gguf#53: the projector of another model was taken."""
    other, its_own = "gemma-3-4b-it-abliterated-Q8_0.gguf", "mmproj-gemma-3-4b-it-abliterated-F16.gguf"
    assert found(MODEL, other, its_own) == []
    assert found(MODEL, its_own) == [(its_own,)]
    own = "mmproj-gemma-3-4b-it-F16.gguf"
    assert found(MODEL, other, its_own, own) == [(own,)]
    assert found(other, MODEL, its_own, own) == [(its_own,)]


def test_named_projectors_win_over_nameless_ones() -> None:
    named = "mmproj-gemma-3-4b-it-F16.gguf"
    assert found(MODEL, "mmproj-F16.gguf", named) == [(named,)]


def test_two_projectors_are_two_choices() -> None:
    names = "mmproj-a_gemma-3-4b-it-F16.gguf", "mmproj-b_gemma-3-4b-it-F16.gguf"
    assert found(MODEL, *names) == [(names[0],), (names[1],)]


def test_the_nearest_folder_wins() -> None:
    model = "Q4/gemma-3-4b-it-Q4_K_M-00001-of-00001.gguf"
    assert found(model, "mmproj-F16.gguf", "Q4/mmproj-F16.gguf") == [("Q4/mmproj-F16.gguf",)]
    assert found(model, "mmproj-F16.gguf", "other/mmproj-F16.gguf") == [("mmproj-F16.gguf",)]
    assert found(model, "vision/mmproj-F16.gguf") == [("vision/mmproj-F16.gguf",)]


def test_nameless_projectors_of_several_models_are_uncertain() -> None:
    def certain(*files: str) -> list[bool]:
        return [one.is_certain for one in choices(MODEL, [MODEL, *files])]

    assert certain("mmproj-F16.gguf") == [True]
    assert certain("mmproj-F16.gguf", "gemma-3-4b-it-Q8_0.gguf") == [True]
    assert certain("mmproj-F16.gguf", "qwen.gguf") == [False]
    assert certain("mmproj-gemma-3-4b-it.gguf", "qwen.gguf") == [True]


def test_only_projectors_that_no_other_model_uses_are_its_own() -> None:
    own, shared = "mmproj-gemma-3-4b-it-F16.gguf", "mmproj-F16.gguf"
    assert only_of(MODEL, [MODEL, own]) == [own]
    assert only_of(MODEL, [MODEL, "gemma-3-4b-it-Q8_0.gguf", own]) == []
    assert only_of(MODEL, [MODEL, "qwen.gguf", shared]) == []
    assert only_of(MODEL, [MODEL, "qwen.gguf", own, shared]) == [own]
