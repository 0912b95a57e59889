"""Tests of the notation of --lora."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.backends.base import OpenOptions
from llmrun.backends.lora_files import LoraOption
from llmrun.backends.registry import check_options
from llmrun.base.errors import ModelFileError, ModelNotFound, UsageError
from llmrun.base.types import LARGEST_SCALE


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("a.gguf", LoraOption("a", Path("a.gguf"), 1.0)),
        ("dir/a.gguf:0.5", LoraOption("a", Path("dir/a.gguf"), 0.5)),
        ("style=dir/a.gguf", LoraOption("style", Path("dir/a.gguf"), 1.0)),
        ("style=a.gguf:-2", LoraOption("style", Path("a.gguf"), -2.0)),
        ("C:\\a.gguf", LoraOption("C:\\a", Path("C:\\a.gguf"), 1.0)),
        ("./a=b.gguf:0", LoraOption("a=b", Path("a=b.gguf"), 0.0)),
        ("a:b.gguf", LoraOption("a:b", Path("a:b.gguf"), 1.0)),
    ],
)
def test_an_adapter_has_a_name_and_a_scale(text: str, option: LoraOption) -> None:
    assert LoraOption.parse(text) == option


@pytest.mark.parametrize("text", ["", "name=", ":0.5", "a.gguf:nan", "a.gguf:inf", "a.gguf:-1001", "a.gguf:1e300"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="invalid value for --lora"):
        LoraOption.parse(text)


@pytest.mark.push
@given(
    st.from_regex(r"[a-z][a-z0-9_.-]{0,9}", fullmatch=True),
    st.from_regex(r"/[a-z=:/.]{1,19}", fullmatch=True),
    st.floats(-LARGEST_SCALE, LARGEST_SCALE),
)
def test_the_text_means_the_same_option(name: str, path: str, scale: float) -> None:
    option = LoraOption(name, Path(path), scale)
    assert LoraOption.parse(option.text) == option


def test_missing_adapters_are_found_before_the_model(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    check_options(OpenOptions(backend="scripted", adapters=[f"{tmp_path / 'a.gguf'}:0.5"]))
    with pytest.raises(ModelNotFound, match=r"no such adapter: .*b\.gguf"):
        check_options(OpenOptions(backend="scripted", adapters=[f"{tmp_path / 'b.gguf'}:0.5"]))


def test_adapters_of_peft_get_the_converter_that_they_need(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        with pytest.raises(ModelFileError) as refused:
            LoraOption.parse(str(path)).check()
        assert "convert_lora_to_gguf.py" in refused.value.hint
