"""Tests that a header read in parts equals the whole header or is read whole, and takes a fraction of the bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.base.errors import BadGGUF, ModelFileError, NetworkError, UnsupportedModel
from llmrun.formats.gguf import remote_header
from llmrun.formats.gguf.metadata import StringArray
from llmrun.formats.gguf.reader import GGUFFile
from llmrun.formats.gguf.remote_header import STEPPED_OVER, read_remote_header, read_sibling_header
from llmrun.formats.gguf.source import RangeSource
from llmrun.formats.gguf.vocabulary import MERGES, TOKENS
from tests.support.gguf.gguf_bytes import RawGGUF, RawTensor, scalar, spm_vocabulary, string, strings
from tests.support.gguf.gguf_files import Vocabulary, byte_characters, tiny_llama, tiny_spm_vocabulary
from tests.support.gguf.gguf_memory import read_gguf
from tests.support.gguf.gguf_mutations import Layout, broken, layout_of
from tests.support.tiers import examples

pytestmark = pytest.mark.push

PATH = Path("remote.gguf")


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shrink the windows, so that a tiny file takes as many steps as a large one."""
    sizes = {"FIRST_WINDOW": 2048, "_PROBE": 512, "_NEAR": 600, "_HEAD": 1024, "_SLACK": 400, "_LONGEST_MERGE": 64}
    for name, size in sizes.items():
        monkeypatch.setattr(remote_header, name, size)


class CountedSource(RangeSource):
    """A source that counts the bytes requested from it."""

    bytes_read: int = 0
    n_fetches: int = 0

    def read(self, offset: int, into: memoryview) -> None:
        super().read(offset, into)
        self.bytes_read += len(into)
        self.n_fetches += 1


def source_of(data: bytes) -> CountedSource:
    return CountedSource(lambda start, end: data[start:end], len(data), PATH)


def bpe_vocabulary(n_merges: int) -> Vocabulary:
    letters = byte_characters()
    pairs = [(a, b) for a in letters for b in letters][:n_merges]
    tokens = letters + tuple(a + b for a, b in pairs)
    return Vocabulary(tokens, (1,) * len(tokens), tuple(f"{a} {b}" for a, b in pairs), bos=0, eos=1)


def bpe_model(folder: Path, weight_type: str = "Q8_0", n_merges: int = 1500, **options: Any) -> bytes:
    path = folder / f"{weight_type}.gguf"
    return tiny_llama(
        path, weight_type=weight_type, layers=1, vocabulary=bpe_vocabulary(n_merges), **options
    ).read_bytes()


def assert_says_the_same(file: GGUFFile, whole: GGUFFile, but: frozenset[str] = frozenset()) -> None:
    assert file.tensors == whole.tensors
    assert (file.version, file.alignment, file.file_bytes) == (whole.version, whole.alignment, whole.file_bytes)
    assert whole.metadata.keys() - file.metadata.keys() <= STEPPED_OVER | but
    assert file.metadata.keys() - whole.metadata.keys() <= but
    for key in file.metadata.keys() - but:
        value, expected = file.metadata[key], whole.metadata[key]
        assert type(value) is type(expected)
        if isinstance(value, StringArray) and isinstance(expected, StringArray):
            assert list(value) == list(expected)
        else:
            np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("n_merges", [1, 11, 12, 13, 40, 200, 1500])
@pytest.mark.usefixtures("small_windows")
def test_a_header_in_parts_says_what_the_whole_one_says(tmp_path: Path, n_merges: int) -> None:
    data = bpe_model(tmp_path, n_merges=n_merges)
    file = read_remote_header(source_of(data))
    assert_says_the_same(file, read_gguf(data, PATH))
    assert file.metadata.keys().isdisjoint(STEPPED_OVER)


@pytest.mark.usefixtures("small_windows")
def test_a_sentencepiece_header_in_parts_says_the_same(tmp_path: Path) -> None:
    data = tiny_llama(tmp_path / "spm.gguf", vocabulary=tiny_spm_vocabulary()).read_bytes()
    assert_says_the_same(read_remote_header(source_of(data)), read_gguf(data, PATH))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.usefixtures("small_windows")
def test_merges_may_be_the_last_key_or_come_before_the_tokens(last: bool) -> None:
    merges = {MERGES: strings([f"a{n} b{n}" for n in range(800)])}
    tokens = {TOKENS: strings([f"t{n}" for n in range(50)]), "tokenizer.ggml.model": string("none of ours")}
    keys: dict[Any, bytes] = {"general.architecture": string("llama"), **(tokens | merges if last else merges | tokens)}
    data = RawGGUF(keys, [RawTensor("a"), RawTensor("b")]).build()
    source = source_of(data)
    assert_says_the_same(read_remote_header(source), read_gguf(data, PATH))
    assert source.bytes_read < len(data)


@pytest.mark.night
def test_of_a_vocabulary_as_large_as_llama_3s_less_than_half_is_read(tmp_path: Path) -> None:
    """The vocabulary has 128,256 tokens and 280,147 merges. For comparison, 1 % of a model of a billion weights is 7.7
    MB.
    """
    random = np.random.default_rng(0)
    words = ["".join(map(chr, random.integers(97, 123, size))) for size in random.integers(2, 12, 280_147)]
    tokens = [f"{index}{word}" for index, word in enumerate(words[:128_256])]
    keys: dict[Any, bytes] = {
        "general.architecture": string("llama"),
        "llama.block_count": scalar(4, 1),
        "tokenizer.ggml.model": string("gpt2"),
        TOKENS: strings(tokens),
        MERGES: strings([f"{word} {word}" for word in words]),
        "tokenizer.ggml.bos_token_id": scalar(4, 0),
        "tokenizer.ggml.eos_token_id": scalar(4, 0),
        "tokenizer.chat_template": string("{{ messages }} " * 300),
    }
    data = RawGGUF(keys, [RawTensor(f"blk.0.{n}") for n in range(150)]).build()
    source = source_of(data)
    assert_says_the_same(read_remote_header(source), read_gguf(data, PATH))
    assert source.bytes_read < 4_000_000 < len(data) / 2
    assert source.n_fetches < 20


def test_a_small_header_takes_one_read(tmp_path: Path) -> None:
    source = source_of(tiny_llama(tmp_path / "tiny.gguf", width=256, layers=4).read_bytes())
    read_remote_header(source)
    assert source.n_fetches == 1
    assert source.bytes_read <= 256 << 10


@pytest.mark.usefixtures("small_windows")
def test_a_sibling_takes_two_reads(tmp_path: Path) -> None:
    known = read_remote_header(source_of(bpe_model(tmp_path, "Q8_0")))
    data = bpe_model(tmp_path, "Q4_0", extra={"general.name": "a longer name", "quantize.imatrix.chunks_count": 7})
    source = source_of(data)
    file = read_sibling_header(source, known)
    assert_says_the_same(file, read_gguf(data, PATH), frozenset({"quantize.imatrix.chunks_count"}))
    assert file.string("general.name") == "a longer name"
    assert source.n_fetches == 2


@pytest.mark.usefixtures("small_windows")
def test_tensors_in_another_order_and_keys_of_the_first_file_alone_are_no_trouble() -> None:
    def model(tensors: list[str], extra: dict[Any, bytes]) -> bytes:
        keys: dict[Any, bytes] = {"general.architecture": string("llama"), **extra}
        keys |= {TOKENS: strings([f"t{n}" for n in range(500)]), "tokenizer.ggml.model": string("of nobody")}
        return RawGGUF(keys, [RawTensor(name) for name in tensors]).build()

    known = read_gguf(model(["a", "b", "c"], {"quantize.imatrix.file": string("of the first")}), PATH)
    data = model(["c", "a", "b"], {})
    source = source_of(data)
    assert_says_the_same(read_sibling_header(source, known), read_gguf(data, PATH))
    assert source.n_fetches == 2


def others(folder: Path) -> dict[str, bytes]:
    """Return files that are not siblings of bpe_model's."""
    return {
        "another shape": bpe_model(folder, "Q4_0", width=128),
        "another number of heads": bpe_model(folder, "Q4_0", kv_heads=4),
        "another context": bpe_model(folder, "Q4_0", context=1024),
        "more tensors": bpe_model(folder, "Q4_0", tied=False),
        "another vocabulary": bpe_model(folder, "Q4_0", n_merges=700),
        "another architecture": RawGGUF({"general.architecture": string("gemma")}, [RawTensor("a")]).build(),
        "no vocabulary": RawGGUF({"general.architecture": string("llama")}, [RawTensor("a")]).build(),
        "another tokenizer": tiny_llama(folder / "spm.gguf", vocabulary=tiny_spm_vocabulary(), layers=1).read_bytes(),
        "bytes behind the last tensor": bpe_model(folder, "Q4_0") + bytes(100),
    }


@pytest.mark.usefixtures("small_windows")
def test_what_is_no_sibling_is_read_for_itself(tmp_path: Path) -> None:
    known = read_remote_header(source_of(bpe_model(tmp_path, "Q8_0")))
    for data in others(tmp_path).values():
        file = read_sibling_header(source_of(data), known)
        assert_says_the_same(file, read_gguf(data, PATH))


@pytest.mark.usefixtures("small_windows")
def test_arrays_before_the_vocabulary_must_be_equal_too(tmp_path: Path) -> None:
    """In bpe_model's files, the keys of `extra` follow the vocabulary, so this test writes the file by hand."""

    def model(numbers: Any, words: list[str] | None = None) -> bytes:
        keys: dict[Any, bytes] = {"general.architecture": string("llama"), "llama.numbers": numbers}
        keys |= {"llama.words": strings(words)} if words else {}
        keys |= {TOKENS: strings([f"t{n}" for n in range(500)]), "tokenizer.ggml.model": string("of nobody")}
        return RawGGUF(keys, [RawTensor("a"), RawTensor("b")]).build()

    one, other = (b"\x09\0\0\0\x04\0\0\0\x02\0\0\0\0\0\0\0" + bytes([n, 0, 0, 0, n, 0, 0, 0]) for n in (1, 2))
    known = read_gguf(model(one), PATH)
    for data, n_fetches in ((model(one), 2), (model(other), 3), (model(one, ["a"]), 3)):
        source = source_of(data)
        assert_says_the_same(read_sibling_header(source, known), read_gguf(data, PATH))
        assert (source.n_fetches <= 2) == (n_fetches == 2)


def test_a_file_without_tensors_has_no_siblings() -> None:
    data = RawGGUF({"general.architecture": string("llama"), **spm_vocabulary()}).build()
    known = read_gguf(data, PATH)
    assert read_sibling_header(source_of(data), known).tensors == {}


@pytest.mark.usefixtures("small_windows")
@pytest.mark.parametrize(
    "value",
    [scalar(4, 1), strings(["a"]), b"\x09\0\0\0\x09\0\0\0" + bytes(8), b"\x09\0\0\0\x63\0\0\0" + bytes(8)],
    ids=["a number", "strings", "arrays", "an unknown type"],
)
def test_a_vocabulary_of_wrong_types_is_refused_by_the_strict_reader(value: bytes) -> None:
    keys: dict[Any, bytes] = {"general.architecture": string("llama"), **spm_vocabulary()}
    keys["tokenizer.ggml.token_type"] = value
    data = RawGGUF(keys, [RawTensor("a")]).build()
    with pytest.raises(BadGGUF) as caught:
        read_remote_header(source_of(data))
    with pytest.raises(BadGGUF) as strict:
        read_gguf(data, PATH)
    assert str(caught.value) == str(strict.value)


@pytest.mark.usefixtures("small_windows")
def test_merges_that_are_none_are_read_whole(tmp_path: Path) -> None:
    """A string without a space could be a name instead of a merge, so the header is read whole."""
    for merges in (["nospace"] * 500, [f"a{n} b" for n in range(500)] + ["nospace"]):
        keys: dict[Any, bytes] = {"general.architecture": string("llama"), MERGES: strings(merges)}
        data = RawGGUF(keys, [RawTensor("a")]).build()
        assert_says_the_same(read_remote_header(source_of(data)), read_gguf(data, PATH))


@pytest.mark.usefixtures("small_windows")
def test_more_merges_than_there_should_be_are_refused_by_the_strict_reader() -> None:
    merges = strings([f"a{n} b{n}" for n in range(800)])
    fewer = merges[:8] + b"\x14" + bytes(7) + merges[16:]
    data = RawGGUF({"general.architecture": string("llama"), MERGES: fewer}, [RawTensor("a")]).build()
    with pytest.raises(BadGGUF):
        read_remote_header(source_of(data))


def test_a_fetch_that_fails_or_comes_back_short_ends_the_reading(tmp_path: Path) -> None:
    data = bpe_model(tmp_path)

    def broken_off(start: int, end: int) -> bytes:
        return data[start : end - 1]

    def refused(start: int, end: int) -> bytes:
        raise NetworkError("no network")

    with pytest.raises(ModelFileError, match=r"remote.gguf: bytes 0 to \d+ were requested, but only \d+ bytes arrived"):
        read_remote_header(RangeSource(broken_off, len(data), PATH))
    with pytest.raises(NetworkError):
        read_remote_header(RangeSource(refused, len(data), PATH))


def test_what_is_somewhere_else_does_not_change_and_closes(tmp_path: Path) -> None:
    source = source_of(bpe_model(tmp_path))
    with read_remote_header(source) as file:
        file.check_unchanged()
        file.check_in_place()


# --- broken files -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Layout]:
    folder = tmp_path_factory.mktemp("bases")
    data = [bpe_model(folder, weight_type, 120, width=32, heads=2, feed_forward=32) for weight_type in ("Q8_0", "Q4_0")]
    return [layout_of(one) for one in data]


def outcome(read: Callable[[], GGUFFile]) -> GGUFFile | str:
    try:
        return read()
    except (BadGGUF, UnsupportedModel) as error:
        return type(error).__name__


def described(file: GGUFFile) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(tensor.name, tensor.type.name, tensor.shape) for tensor in file.tensors.values()]


def check_mutant(data: bytes, base: Layout, known: GGUFFile) -> Iterator[str]:
    """Check a mutant's header read in parts and as a sibling's, and yield the outcomes.

    Raises AssertionError for a wrong outcome.
    """
    whole = outcome(lambda: read_gguf(data, PATH))
    for read in (lambda: read_remote_header(source_of(data)), lambda: read_sibling_header(source_of(data), known)):
        file = outcome(read)
        if isinstance(file, str):
            assert file == whole
            yield "refused"
        elif isinstance(whole, str):
            # The damage is in a part that was not read, so the parts that were read must be unchanged.
            if data.endswith(base.data[base.tensors[0].start :]):
                assert described(file) == described(read_gguf(base.data, PATH))
            yield "not seen"
        else:
            assert file.tensors == whole.tensors
            yield "opened"


@pytest.mark.night
@pytest.mark.usefixtures("small_windows")
def test_of_broken_files_nothing_wrong_is_said(bases: list[Layout]) -> None:
    known = read_gguf(bases[0].data, PATH)
    seen: Counter[str] = Counter()
    for case in range(1500):
        random = Random(f"remote {case}")
        base = random.choice(bases)
        seen.update(check_mutant(broken(random, base), base, known))
    assert min(seen[kind] for kind in ("refused", "not seen", "opened")) > 50, seen


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_bytes_changed_anywhere_change_no_answer(bases: list[Layout], data: st.DataObject) -> None:
    base = data.draw(st.sampled_from(bases))
    changed = bytearray(base.data)
    for at in data.draw(st.lists(st.integers(0, base.header_end - 1), min_size=1, max_size=4)):
        changed[at] = data.draw(st.integers(0, 255))
    assert list(check_mutant(bytes(changed), base, read_gguf(bases[0].data, PATH)))


@pytest.mark.usefixtures("small_windows")
def test_merges_whose_end_is_not_found_in_time_are_read_from_where_they_were_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_header, "_MOST_PROBES", 1)
    data = bpe_model(tmp_path)
    assert_says_the_same(read_remote_header(source_of(data)), read_gguf(data, PATH))
