"""models.toml: ours is complete, and a wrong one is refused where it is wrong."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.errors import ModelNotFound, UsageError
from llmrun.hub.catalog import (
    SAMPLING_KEYS,
    HubSource,
    PypiSource,
    load_catalog,
    read_catalog,
    shipped_catalog,
)
from llmrun.settings import Settings
from llmrun.types import SamplingParams

GOOD = {
    "description": '"a model"',
    "license": '"MIT"',
    "parameters": "7",
    "quantization": '"Q8_0"',
    "file": '"model.gguf"',
    "size": "12",
    "sha256": f'"{"0" * 64}"',
    "sources": '["hf:owner/repo/model.gguf"]',
}


def written(folder: Path, name: str = "tiny", *, leave_out: str = "", **keys: str) -> Path:
    path = folder / "models.toml"
    lines = [f"{key} = {value}" for key, value in (GOOD | keys).items() if key != leave_out]
    path.write_text(f"[models.{name!r}]\n" + "\n".join(lines))
    return path


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the user's config.toml and models.toml."""
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    return tmp_path


def test_our_own_catalogue_is_whole() -> None:
    catalog = load_catalog()
    assert catalog.find(Settings().model).quantization == "Q4_1"
    for entry in catalog.entries.values():
        assert entry.size > entry.parameters / 2  # 4 bits a weight is the least there is
        assert any(isinstance(source, HubSource) for source in entry.sources)
        assert catalog.find(entry.name) is entry


def test_it_lies_above_the_package_in_a_source_tree() -> None:
    assert shipped_catalog() == Path(__file__).resolve().parents[2] / "models.toml"


@pytest.mark.parametrize("name", ["smollm2:135m", "SmolLM2:135M", "smollm2"])
def test_a_name_an_alias_and_any_case_find_the_same(name: str) -> None:
    assert load_catalog().find(name).name == "smollm2:135m"


def test_a_family_of_one_needs_no_variant(own: Path) -> None:
    written(own, "single:3b")
    assert load_catalog().find("single").name == "single:3b"


def test_a_family_of_two_is_asked_about(own: Path) -> None:
    path = written(own, "pair:1b")
    path.write_text(path.read_text() + "\n" + path.read_text().replace("pair:1b", "pair:2b"))
    with pytest.raises(ModelNotFound, match="names 2 models") as caught:
        load_catalog().find("pair")
    assert caught.value.hint == "say one of pair:1b, pair:2b"


def test_an_unknown_name_gets_the_closest(own: Path) -> None:
    with pytest.raises(ModelNotFound) as caught:
        load_catalog().find("smolm2:135")
    assert caught.value.hint.startswith("did you mean smollm2:135m")
    with pytest.raises(ModelNotFound) as caught:
        load_catalog().find("zzzzz")
    assert "smollm2:135m" in caught.value.hint


def test_the_users_entry_replaces_ours(own: Path) -> None:
    written(own, "smollm2:135m", sampling="{ temperature = 0.2, top_k = 5 }")
    entry = load_catalog().find("smollm2:135m")
    assert (entry.size, dict(entry.sampling)) == (12, {"temperature": 0.2, "top_k": 5})
    assert load_catalog().find("smollm2:360m")


def test_sources_are_read_in_order(own: Path) -> None:
    sources = '["pypi:a-b==1.0.post1", "hf:o/r/sub/dir/model.gguf"]'
    entry = read_catalog(written(own, sources=sources, wheel_bytes="5"))["tiny"]
    assert entry.sources == (PypiSource("a-b", "1.0.post1"), HubSource("o/r", "sub/dir/model.gguf"))
    assert [str(source) for source in entry.sources] == ["pypi:a-b==1.0.post1", "hf:o/r/sub/dir/model.gguf"]
    assert entry.wheel_bytes == 5


def test_sampling_defaults_have_the_names_of_the_sampler() -> None:
    assert set(SAMPLING_KEYS) <= set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("key", list(GOOD))
def test_a_missing_key_is_named(own: Path, key: str) -> None:
    path = written(own, leave_out=key)
    with pytest.raises(UsageError) as caught:
        read_catalog(path)
    assert str(caught.value) == f"catalogue: {path}: tiny: {key}: missing"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("description", "3"),
        ("description", '""'),
        ("description", '"two\\nlines"'),
        ("license", '"\\u001b[31m"'),
        ("parameters", "0"),
        ("parameters", "-1"),
        ("parameters", "1.5"),
        ("parameters", "true"),
        ("parameters", '"135M"'),
        ("quantization", "4"),
        ("file", '"../model.gguf"'),
        ("file", '"a/model.gguf"'),
        ("file", '".gguf"'),
        ("file", '"model.bin"'),
        ("file", '"model.gguf\\n"'),
        ("size", "0"),
        ("size", '"12"'),
        ("sha256", '""'),
        ("sha256", f'"{"0" * 63}"'),
        ("sha256", f'"{"A" * 64}"'),
        ("sources", "[]"),
        ("sources", '"hf:owner/repo/model.gguf"'),
        ("sources", "[1]"),
        ("sources", '["hf:owner/model.gguf"]'),
        ("sources", '["hf:owner/repo/../model.gguf"]'),
        ("sources", '["hf:owner/repo/model.bin"]'),
        ("sources", '["hf:../repo/model.gguf"]'),
        ("sources", '["https://host/model.gguf"]'),
        ("sources", '["pypi:name"]'),
        ("sources", '["pypi:--index-url==1"]'),
        ("sources", '["pypi:name==1.0"]'),
        ("aliases", '"tiny"'),
        ("aliases", '["UPPER"]'),
        ("aliases", "[3]"),
        ("sampling", "3"),
        ("sampling", "{ temperature = -1 }"),
        ("sampling", '{ temperature = "hot" }'),
        ("sampling", "{ top_p = nan }"),
        ("sampling", "{ warmth = 1.0 }"),
        ("wheel_bytes", "5"),
        ("surprise", "1"),
    ],
)
def test_a_wrong_value_is_named_with_file_entry_and_key(own: Path, key: str, value: str) -> None:
    path = written(own, **{key: value})
    with pytest.raises(UsageError) as caught:
        read_catalog(path)
    message = str(caught.value)
    expected = "wheel_bytes" if value == '["pypi:name==1.0"]' else key
    assert message.startswith(f"catalogue: {path}: tiny: {expected}")
    assert message.isprintable()


@pytest.mark.parametrize("name", ["Upper", "a:b:c", "-dash", "a/b", "a b", "", ":", "x.gguf/../.."])
def test_a_name_that_could_not_be_typed_is_refused(own: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"models\.toml"):
        read_catalog(written(own, name))


@pytest.mark.parametrize(
    "text",
    ["models = 3", "[models]\ntiny = 3", "[model.tiny]", "version = 1", "[models.", "a = " + "[" * 5000, "\0"],
)
def test_a_file_of_another_shape_is_refused_by_name(own: Path, text: str) -> None:
    path = own / "models.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_catalog()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_models_cannot_share_an_alias_or_a_file(own: Path) -> None:
    written(own, aliases='["smollm2"]')
    with pytest.raises(UsageError, match="aliases: 'smollm2' already names another model"):
        load_catalog()
    written(own, file='"SmolLM2-135M-Instruct.Q4_1.gguf"')
    with pytest.raises(UsageError, match="is also the file of smollm2:135m"):
        load_catalog()


KEYS = st.sampled_from([*GOOD, "aliases", "sampling", "wheel_bytes", "x"])
VALUES = st.sampled_from(
    ['""', "0", "-1", "1e400", "[]", "{}", "[[]]", "1979-05-27", '"hf:a/b/c.gguf"', "true", *GOOD.values()]
)


@given(st.dictionaries(KEYS, VALUES))
def test_any_table_is_an_entry_or_a_usage_error_that_names_it(
    tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str]
) -> None:
    folder = tmp_path_factory.getbasetemp()
    if all(keys.get(key) in (None, value) for key, value in GOOD.items()) and keys.keys() <= GOOD.keys():
        assert read_catalog(written(folder, **keys))["tiny"].size == 12
        return
    with contextlib.suppress(UsageError):
        entry = read_catalog(written(folder, **keys))["tiny"]
        assert entry.sources
        assert entry.size > 0
        assert len(entry.sha256) == 64
