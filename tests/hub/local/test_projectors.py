"""Tests of where the projector of a model is found on this machine, and of which projector is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmrun.base.errors import ModelFileError, ModelNotFound, UnsupportedModel, UsageError
from llmrun.hub.local.projectors import check_pair, only_projectors_of, projector_for, projectors_of
from llmrun.options.settings import MMPROJ_OFF
from tests.support.hub.model_stores import Stores, gguf
from tests.support.vision.projectors import tiny_projector, tiny_text_model

MODEL, PROJECTOR = gguf(), gguf(salt=1)


def in_folder(folder: Path, *names: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(MODEL)
    return [folder / name for name in names]


def test_the_projector_in_the_models_folder_is_found(tmp_path: Path) -> None:
    model, projector, _ = in_folder(tmp_path, "m-Q4_K_M.gguf", "mmproj-m-F16.gguf", "m.imatrix.gguf")
    assert projector_for(model) == projector
    assert projector_for(model, MMPROJ_OFF) is None
    projector.unlink()
    assert projector_for(model) is None


def test_a_named_file_is_used_as_it_is(tmp_path: Path) -> None:
    model, other, beside = in_folder(tmp_path, "m.gguf", "vision.gguf", "mmproj-x-F16.gguf")
    assert projector_for(model, str(other)) == other
    assert projector_for(model, "MMPROJ-x-f16.gguf") == beside
    with pytest.raises(ModelNotFound, match=r"--mmproj: no\.gguf: no such file") as error:
        projector_for(model, "no.gguf")
    assert error.value.hint == "next to the model: mmproj-x-F16.gguf"
    with pytest.raises(ModelNotFound):
        projector_for(model, "a\0b")


def test_two_matches_ask_for_a_choice(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    model = tiny_text_model(tmp_path, "gemma3").rename(folder / "m-F32.gguf")
    projector = tiny_projector(tmp_path, "gemma3")
    for owner in "ab":
        (folder / f"mmproj-{owner}_m-F32.gguf").write_bytes(projector.read_bytes())
    with pytest.raises(UsageError, match=r"m-F32\.gguf: several projectors match: mmproj-a_m-F32") as error:
        projector_for(model)
    assert error.value.hint == "choose one with --mmproj, such as --mmproj mmproj-a_m-F32.gguf; --no-mmproj uses none"
    (folder / "mmproj-b_m-F32.gguf").write_bytes(MODEL)
    assert projector_for(model) == folder / "mmproj-a_m-F32.gguf"


def test_headers_decide_about_nameless_projectors_of_several_models(tmp_path: Path) -> None:
    """gpustack/gpustack#2261: the projector of another model in the same folder was taken."""
    fitting, other = tiny_text_model(tmp_path, "gemma3"), tiny_text_model(tmp_path, "pixtral")
    projector = tiny_projector(tmp_path, "gemma3").rename(tmp_path / "mmproj-F32.gguf")
    assert projector_for(fitting) == projector
    assert projector_for(other) is None


def test_a_projector_of_another_width_is_refused(tmp_path: Path) -> None:
    model = tiny_text_model(tmp_path, "gemma3")
    check_pair(tiny_projector(tmp_path, "gemma3"), model)
    with pytest.raises(ModelFileError, match="does not fit the model"):
        check_pair(tiny_projector(tmp_path, "gemma3", text_width=128), model)


def test_a_projector_with_deepstack_is_not_refused(tmp_path: Path) -> None:
    """ggml-org/llama.cpp#20899 and lmstudio-ai/lmstudio-bug-tracker#1665: correct projectors were refused.

    The rows are several hidden sizes wide, which is not the model's width.
    """
    check_pair(tiny_projector(tmp_path, "qwen3vl_merger"), tiny_text_model(tmp_path, "qwen3vl_merger"))


def test_audio_projectors_are_refused_by_name(tmp_path: Path) -> None:
    audio = tiny_projector(tmp_path, "gemma3", extra={"clip.has_vision_encoder": False})
    with pytest.raises(UnsupportedModel, match="no encoder for images"):
        check_pair(audio, tiny_text_model(tmp_path, "gemma3"))


def test_any_folder_of_a_snapshot_may_have_the_projector(stores: Stores) -> None:
    model, projector = stores.shared("o/n", {"Q4/m-Q4_K_M.gguf": MODEL, "mmproj-F16.gguf": PROJECTOR})
    assert projector_for(model) == projector
    assert projectors_of(model) == (projector,)


def test_a_snapshot_may_use_the_projector_of_another_revision(stores: Stores) -> None:
    old = stores.shared("o/n", {"m-Q4_K_M.gguf": gguf(salt=2), "mmproj-F16.gguf": PROJECTOR}, ref=None)[1]
    (model,) = stores.shared("o/n", {"m-Q4_K_M.gguf": MODEL}, number=2)
    assert projector_for(model) == old
    new = stores.shared("o/n", {"m-Q4_K_M.gguf": MODEL, "mmproj-F16.gguf": gguf(salt=3)}, number=3)[1]
    assert projector_for(new.with_name("m-Q4_K_M.gguf")) == new


def test_other_repositories_are_not_searched(stores: Stores) -> None:
    (model,) = stores.shared("o/n", {"m-Q4_K_M.gguf": MODEL})
    stores.shared("o/other", {"mmproj-m-F16.gguf": PROJECTOR})
    assert projector_for(model) is None


def test_ollamas_layer_is_the_projector(stores: Stores) -> None:
    model = stores.ollama(MODEL, "sees", "4b", projectors=[PROJECTOR])
    other = stores.ollama(gguf(salt=5), "text", "4b")
    found = projector_for(model)
    assert found is not None
    assert found.parent == model.parent
    assert found.read_bytes() == PROJECTOR
    assert projector_for(other) is None


def test_the_layer_of_ollama_that_fits_is_taken(stores: Stores, tmp_path: Path) -> None:
    text, sees = tiny_text_model(tmp_path, "gemma3"), tiny_projector(tmp_path, "gemma3")
    model = stores.ollama(text.read_bytes(), "two", "4b", projectors=[PROJECTOR, sees.read_bytes()])
    found = projector_for(model)
    assert found is not None
    assert found.read_bytes() == sees.read_bytes()


def test_lm_studios_folder_is_searched(stores: Stores) -> None:
    model = stores.lm_studio("org/model/model-Q4_K_M.gguf", MODEL)
    projector = stores.lm_studio("org/model/mmproj-model-F16.gguf", PROJECTOR)
    stores.lm_studio("org/other/mmproj-model-F16.gguf", PROJECTOR)
    assert projector_for(model) == projector


def test_a_link_leads_to_the_folder_of_the_file(stores: Stores, tmp_path: Path) -> None:
    model, projector = in_folder(tmp_path / "elsewhere", "m-Q4_K_M.gguf", "mmproj-m-F16.gguf")
    link = stores.models / "mine.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(model)
    assert projector_for(link) == projector
    assert only_projectors_of(link) == ()
    nearer = stores.own("mine.mmproj-F16.gguf", PROJECTOR)
    assert projector_for(link) == nearer
    assert only_projectors_of(link) == (nearer,)


def test_nameless_projectors_mark_no_other_models(tmp_path: Path) -> None:
    model, other, _ = in_folder(tmp_path, "m-Q4_K_M.gguf", "other.gguf", "mmproj-F16.gguf")
    assert projectors_of(model) == projectors_of(other) == ()
    other.unlink()
    assert projectors_of(model) == (tmp_path / "mmproj-F16.gguf",)


def test_models_on_missing_disks_keep_their_projectors(tmp_path: Path) -> None:
    model = tmp_path / "gemma-3.gguf"
    projector = tmp_path / "gemma-3-12b.mmproj-F16.gguf"
    for path in (model, projector):
        path.write_bytes(gguf())
    assert only_projectors_of(model) == (projector,)
    (tmp_path / "gemma-3-12b.gguf").symlink_to(tmp_path / "missing" / "gemma-3-12b.gguf")
    assert only_projectors_of(model) == ()
