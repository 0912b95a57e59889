"""Tests of what a name means, and that no text becomes a path outside its folders."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmrun.base.errors import LlmrunError, ModelNotFound, UsageError
from llmrun.formats.gguf.quantization import quantization_named
from llmrun.hub.catalog import Wanted
from llmrun.hub.names import Expected, HeldSource, HubSource, UrlSource, safe_segments
from llmrun.hub.resolve.model_file import LocalPath, understand
from tests.support.tiers import examples


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the user's config.toml and models.toml, with an empty home."""
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "home"))
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    return tmp_path


def wanted(text: str) -> Wanted:
    found = understand(text)
    assert isinstance(found, Wanted)
    return found


def refused(text: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        understand(text)
    assert str(caught.value).isprintable()
    assert caught.value.hint.isprintable()
    return caught.value


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("model.gguf", "model.gguf"),
        ("MODEL.GGUF", "MODEL.GGUF"),
        ("./qwen3", "qwen3"),
        ("../qwen3:4b", "../qwen3:4b"),
        ("folder/model", "folder/model"),
        ("/models/a.gguf", "/models/a.gguf"),
        (r"C:\models\a.gguf", r"C:\models\a.gguf"),
        ("C:/models/a", "C:/models/a"),
        ("file:///models/a.gguf", "/models/a.gguf"),
        ("/no\nsuch\x00file", "/no\nsuch\x00file"),
    ],
)
def test_files_are_files(text: str, path: str) -> None:
    assert understand(text) == LocalPath(Path(path))


def test_a_home_is_expanded_and_one_that_is_not_there_is_left(own: Path) -> None:
    assert understand("~/a.gguf") == LocalPath(own / "home" / "a.gguf")
    for text in ("~no-such-user/a.gguf", "~\0", "~\ud800/a"):
        assert understand(text) == LocalPath(Path(text))


def test_a_name_is_one_of_the_catalogue() -> None:
    found = wanted("Qwen3:4B-Q8_0")
    assert found.name == "qwen3:4b-q8_0"
    assert found.sources == (HubSource("Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q8_0.gguf"),)
    assert found.expected == (Expected("Qwen3-4B-Q8_0.gguf"),)
    with pytest.raises(ModelNotFound) as caught:
        understand("qwen3-4b")
    assert caught.value.hint == "did you mean qwen3:4b?"


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("hf:owner/repo", HubSource("owner/repo")),
        ("HF:owner/repo", HubSource("owner/repo")),
        ("hf://owner/repo", HubSource("owner/repo")),
        ("huggingface://owner/repo", HubSource("owner/repo")),
        ("hf.co/owner/repo", HubSource("owner/repo")),
        ("huggingface.co/owner/repo", HubSource("owner/repo")),
        ("hf:owner/repo:latest", HubSource("owner/repo")),
        ("hf:owner/repo:q5_k_m", HubSource("owner/repo", quantization="Q5_K_M")),
        ("hf.co/owner/repo:UD-Q4_K_XL", HubSource("owner/repo", quantization="UD-Q4_K_XL")),
        ("hf:owner/repo:fp16", HubSource("owner/repo", quantization="F16")),
        ("hf:owner/repo/a.gguf", HubSource("owner/repo", "a.gguf")),
        ("hf:owner/repo/sub/dir/a.GGUF", HubSource("owner/repo", "sub/dir/a.GGUF")),
        ("hf:owner/repo/a-00001-of-00003.gguf", HubSource("owner/repo", "a-00001-of-00003.gguf")),
        ("hf:owner/repo@v1.0", HubSource("owner/repo", revision="v1.0")),
        ("hf:owner/repo:Q8_0@refs/pr/1", HubSource("owner/repo", quantization="Q8_0", revision="refs/pr/1")),
        (f"hf:owner/repo/a.gguf@{COMMIT}", HubSource("owner/repo", "a.gguf", revision=COMMIT)),
        ("https://huggingface.co/owner/repo", HubSource("owner/repo")),
        ("https://hf.co/owner/repo/", HubSource("owner/repo")),
        ("https://huggingface.co/owner/repo/tree/v2", HubSource("owner/repo", revision="v2")),
        ("https://huggingface.co/owner/repo/blob/main/a.gguf", HubSource("owner/repo", "a.gguf")),
        (
            "https://huggingface.co/owner/repo/resolve/refs%2Fpr%2F1/sub/a.gguf?download=true",
            HubSource("owner/repo", "sub/a.gguf", revision="refs/pr/1"),
        ),
    ],
)
def test_the_hub_is_named_in_many_ways(text: str, source: HubSource) -> None:
    found = wanted(text)
    assert found == Wanted(str(source), (source,))
    assert wanted(str(source)) == found


def test_a_repository_of_the_catalogue_brings_its_facts_but_promises_nothing() -> None:
    found = wanted("hf:Qwen/Qwen3-4B-GGUF:Q5_K_M")
    assert found.entry is not None
    assert (found.entry.name, found.expected) == ("qwen3:4b", ())


def test_the_host_of_hf_endpoint_is_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "http://127.0.0.1:8080/hub/owner/repo/resolve/main/a.gguf"
    assert isinstance(wanted(url).sources[0], UrlSource)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:8080/hub/")
    assert wanted(url).sources == (HubSource("owner/repo", "a.gguf"),)
    assert wanted("https://huggingface.co/owner/repo").sources == (HubSource("owner/repo"),)


@pytest.mark.parametrize(
    "text",
    [
        "hf:",
        "hf:..",
        "hf:../..",
        "hf:owner",
        "hf:owner/",
        "hf:/owner/repo",
        "hf:owner/..",
        "hf:owner/repo/../../a.gguf",
        "hf:owner/repo//a.gguf",
        "hf:owner/repo/.hidden.gguf",
        "hf:owner/repo/a.bin",
        "hf:owner/repo/a.gguf:Q4_K_M",
        "hf:owner/repo/a-00002-of-00003.gguf",
        "hf:owner/repo:",
        "hf:owner/repo:best",
        "hf:owner/repo@",
        "hf:owner/repo@../x",
        "hf:owner/repo@a@b",
        "hf:owner/repo\x00",
        "hf:owner/re\x1b[31mpo",
        "hf:owner/rеpo",  # a Cyrillic letter
        "hf:owner/repo/C:/a.gguf",
        "hf:owner/nul",
        "hf:owner/" + "a" * 300,
        "hf:owner/repo/" + "a/" * 20 + "a.gguf",
        "https://huggingface.co/",
        "https://huggingface.co/owner",
        "https://huggingface.co/datasets/owner/repo",
        "https://huggingface.co/owner/repo/blob/main/README.md",
        "https://huggingface.co/owner/repo/blob/main/..%2F..%2Fa.gguf",
        "https://huggingface.co/owner/repo/discussions/1",
        "https://huggingface.co/%2e%2e/repo",
    ],
)
def test_what_cannot_be_at_the_hub_is_refused(text: str) -> None:
    assert refused(text).exit_code == 2


def test_a_name_without_its_owner_gets_repositories_of_that_name() -> None:
    assert refused("hf:Qwen3-4B-GGUF").hint == "did you mean hf:Qwen/Qwen3-4B-GGUF or hf:unsloth/Qwen3-4B-GGUF?"


def test_any_other_url_is_a_file() -> None:
    found = wanted("https://example.org/models/my%20model.gguf?token=secret#part")
    assert found.sources == (UrlSource("https://example.org/models/my%20model.gguf?token=secret"),)
    assert found.expected == (Expected("my model.gguf"),)
    assert found.name == "https://example.org/models/my%20model.gguf"  # as messages show it
    assert wanted("http://127.0.0.1:8000/a.gguf").sources == (UrlSource("http://127.0.0.1:8000/a.gguf"),)
    assert wanted("http://[::1]:8000/a.gguf").expected == (Expected("a.gguf"),)
    shards = wanted("https://example.org/a-00001-of-00002.gguf").expected
    assert [shard.file for shard in shards] == ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    "text",
    [
        "http://example.org/a.gguf",
        "http://127.0.0.1.example.org/a.gguf",
        "https://example.org/a.bin",
        "https://example.org/",
        "https:///a.gguf",
        "https://",
        "https://example.org:0/a.gguf",
        "https://example.org:99999/a.gguf",
        "https://[::1/a.gguf",
        "https://example.org/%2e%2e%2fa.gguf",
        "https://example.org/%00.gguf",
        "https://example.org/a b.gguf",
        "https://exаmple.org/a.gguf",  # a Cyrillic letter
        "https://example.org/a.gguf\x07",
        "https://example.org/" + "a" * 300 + ".gguf",
        "https://example.org/a-00002-of-00003.gguf",
        "ftp://example.org/a.gguf",
        "oci://quay.io/models/a",
        "docker://a/b",
        "s3://bucket/a.gguf",
        "javascript://a",
    ],
)
def test_what_is_not_the_address_of_a_model_is_refused(text: str) -> None:
    refused(text)


def test_a_password_in_an_address_is_not_repeated() -> None:
    error = refused("https://user:secret@example.org/a.gguf")
    assert "secret" not in str(error) + error.hint


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("ollama:qwen3:4b", HeldSource("ollama", "qwen3:4b")),
        ("ollama://library/qwen3", HeldSource("ollama", "library/qwen3")),
        ("Ollama:hf.co/owner/repo:Q4_K_M", HeldSource("ollama", "hf.co/owner/repo:Q4_K_M")),
        ("lmstudio:owner/repo/a.gguf", HeldSource("lmstudio", "owner/repo/a.gguf")),
    ],
)
def test_another_programs_models_are_named_by_it(text: str, source: HeldSource) -> None:
    assert wanted(text) == Wanted(str(source), (source,))


@pytest.mark.parametrize(
    "text", ["ollama:", "ollama:../x", "ollama:a:", "ollama:a:b:c", "ollama:a:../b", "lmstudio:/etc/x", "lmstudio:a:b"]
)
def test_what_another_program_cannot_have_is_refused(text: str) -> None:
    refused(text)


@pytest.mark.parametrize("text", ["", " ", "\n", "a" * 5000])
def test_no_name_at_all_and_one_without_end_are_refused(text: str) -> None:
    assert len(str(refused(text))) < 200


# Short names


def test_a_short_name_of_the_user_stands_for_anything_and_wins(own: Path) -> None:
    (own / "models.toml").write_text(
        '[shortnames]\n"qwen3" = "hf://owner/repo"\n"ibm/granite" = "qwen3:4b"\nmine = "/a.gguf"\nbad = "oci://a/b"\n'
        'olla = "ollama://qwen3:4b"\nloop = "pool"\npool = "loop"\n'
    )
    assert wanted("QWEN3").sources == (HubSource("owner/repo"),)
    assert wanted("ibm/granite").name == "qwen3:4b"
    assert understand("mine") == LocalPath(Path("/a.gguf"))
    assert wanted("olla").sources == (HeldSource("ollama", "qwen3:4b"),)
    assert "oci://" in str(refused("bad"))
    assert "short names refer to one another in a loop" in str(refused("loop"))


# Arbitrary text

STARTS = (
    *("hf:", "hf://", "hf.co/", "huggingface://", "https://huggingface.co/", "https://example.org/"),
    *("http://127.0.0.1/", "ollama:", "lmstudio:", "file://", "oci://", "C:\\", "~", "./", "/", ""),
)
NAMES = (
    "owner",
    "repo",
    "owner/repo",
    "qwen3",
    "qwen3:4b",
    "llama3.2:3b",
    "a.gguf",
    "con.gguf",
    "nul",
    ".gguf",
    "a" * 300,
)
ENDINGS = (
    "-q8_0",
    "-instruct",
    ":Q4_K_M",
    ":best",
    "@main",
    "@refs/pr/1",
    "-00001-of-00002.gguf",
    "-00002-of-00002.gguf",
)
MIDDLES = ("/", ":", "@", ".", "..", "../", "//", "\\", "/resolve/main/", "/blob/main/", "/tree/x", "?", "#", "%")
ODD = ("%2e%2e", "%2F", "%00", "\0", "\x1b[31m", "\n", "．", "／", "＠", "е", "\u202e", "\ud800", " ")
PIECES = st.sampled_from((*NAMES, *ENDINGS, *MIDDLES, *ODD))
TEXTS = st.one_of(
    st.text(),
    st.builds("{}{}".format, st.sampled_from(STARTS), st.lists(PIECES, max_size=7).map("".join)),
    st.builds("hf:owner/repo{}".format, st.text(max_size=20)),
)


@pytest.mark.push
@settings(max_examples=examples(500), deadline=None)
@given(TEXTS)
@example("hf:owner/repo/" + "a" * 300 + ".gguf")
def test_any_text_is_understood_or_refused_and_never_leaves_its_folder(text: str) -> None:
    said: list[str] = []
    try:
        found = understand(text)
    except LlmrunError as error:
        said += [str(error), error.hint]
    else:
        check_paths(found)
        said += [found.name] if isinstance(found, Wanted) else []
    assert all(words.isprintable() and len(words) < 5000 for words in said)


def check_paths(found: Wanted | LocalPath) -> None:
    if isinstance(found, LocalPath):
        return
    for source in found.sources:
        if isinstance(source, HubSource):
            assert len(safe_segments(source.repository)) == 2
            safe_segments(source.revision)
            if source.file is not None:
                safe_segments(source.file)
                assert source.file.lower().endswith(".gguf")
            assert source.quantization is None or quantization_named(source.quantization) == source.quantization
        if isinstance(source, HeldSource):
            safe_segments(source.name.partition(":")[0])
    for expected in found.expected:
        assert len(safe_segments(expected.file)) == 1


@pytest.mark.parametrize("host", ["hf.co", "huggingface.co"])
def test_a_page_of_the_hub_without_its_scheme_is_that_page(host: str) -> None:
    wanted = understand(f"{host}/o/r/blob/main/x.gguf")
    assert isinstance(wanted, Wanted)
    assert wanted.sources == (HubSource("o/r", "x.gguf"),)
