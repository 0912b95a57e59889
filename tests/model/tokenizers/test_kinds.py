"""Tests of which tokenizers are supported, and of what each name means, against llama.cpp on tiny vocabularies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from llmrun.base.compiled.kernel import KernelName
from llmrun.base.errors import UnsupportedModel
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.tokenizers.kinds import PRE_TOKENIZERS, load_tokenizer, tokenizer_kernels
from llmrun.model.tokenizers.text_tokenizer import Tokenizer
from llmrun.model.tokenizers.vocabulary import ENDING_TEXTS, ROLES, FillTokens
from tests.support.gguf.gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    tiny_spm_vocabulary,
    tiny_vocabulary,
    write_gguf,
)
from tests.support.tokenizers.llama_vocabulary import LlamaVocabulary
from tests.support.tokenizers.random_text import random_texts


def both(folder: Path, vocabulary: Vocabulary, **extra: Any) -> tuple[Tokenizer, LlamaVocabulary]:
    """Return our tokenizer and llama.cpp's for one vocabulary.

    `extra` replaces keys of `tokenizer.ggml.`; None removes one.
    """
    metadata = {"general.architecture": "llama", "general.name": "tiny", **vocabulary.metadata()}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in extra.items()}
    path = write_gguf(folder / "vocabulary.gguf", {k: v for k, v in metadata.items() if v is not None}, {})
    return load_tokenizer(open_gguf(path)), LlamaVocabulary(path)


def with_tokens(base: Vocabulary, *texts: str, kind: int = NORMAL) -> Vocabulary:
    scores = (*base.scores, *(-50.0 for _ in texts)) if base.scores else ()
    return replace(base, tokens=(*base.tokens, *texts), types=(*base.types, *(kind,) * len(texts)), scores=scores)


def assert_same(ours: Tokenizer, oracle: LlamaVocabulary, *special: str) -> None:
    assert (ours.bos_id, ours.eos_id) == tuple(id_ if id_ >= 0 else None for id_ in (oracle.bos_id, oracle.eos_id))
    assert ours.end_of_generation == oracle.end_of_generation()
    assert ours.fill_tokens == oracle.fill_tokens()
    assert [ours.token_bytes(id_) for id_ in range(oracle.size)] == [
        oracle.token_bytes(id_) for id_ in range(oracle.size)
    ]
    for text in random_texts(3, 60, [*special, "zqx", "<|im_end|>", " ", "12345 's 'LL"]):
        for add in (False, True):
            for parse in (False, True):
                got = ours.encode(text, add_special=add, parse_special=parse).tolist()
                expected = oracle.encode(text, add_special=add, parse_special=parse)
                if add and oracle.add_bos and expected[:2] == [oracle.bos_id] * 2:
                    expected = expected[1:]
                assert got == expected, (text, add, parse)


@pytest.mark.night
@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_a_pre_tokenizer_s_name_means_what_it_means_in_llama_cpp(name: str, tmp_path: Path) -> None:
    """Covers patterns, adding BOS, default ids, and whether a piece that is a token ("zqx") is merged first."""
    vocabulary = replace(with_tokens(tiny_vocabulary(), "zqx"), pre=name, bos=None, eos=None)
    ours, oracle = both(tmp_path, vocabulary, add_bos_token=None)
    assert_same(ours, oracle)


@pytest.mark.push
def test_a_file_without_a_pre_tokenizer_has_the_default_one(tmp_path: Path) -> None:
    ours, oracle = both(tmp_path, tiny_vocabulary(), pre=None)
    assert_same(ours, oracle)


@pytest.mark.push
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("add_eos", [True, False])
@pytest.mark.parametrize("base", [tiny_vocabulary(), tiny_spm_vocabulary()], ids=["gpt2", "llama"])
def test_bos_and_eos_are_added_as_the_file_says(base: Vocabulary, add_bos: bool, add_eos: bool, tmp_path: Path) -> None:
    ours, oracle = both(tmp_path, base, add_bos_token=add_bos, add_eos_token=add_eos)
    assert_same(ours, oracle, "<s>", "</s>", "<|im_start|>")
    plain = ours.encode("x", add_special=False, parse_special=False).tolist()
    # The answer follows a rendered template, so no EOS is added, whatever the file says.
    assert ours.encode_rendered("x").tolist() == ([ours.bos_id] if add_bos else []) + plain


@pytest.mark.push
@pytest.mark.parametrize("base", [tiny_vocabulary(), tiny_spm_vocabulary()], ids=["gpt2", "llama"])
def test_there_is_one_bos_whoever_writes_it(base: Vocabulary, tmp_path: Path) -> None:
    ours, _ = both(tmp_path, base, add_bos_token=True)
    assert ours.bos_id is not None
    written = ours.token_text(ours.bos_id) + "a"
    for ids in (
        ours.encode("a", add_special=True, parse_special=True),
        ours.encode(written, add_special=True, parse_special=True),
        ours.encode_rendered("a"),
        ours.encode_rendered(written),
    ):
        assert ids.tolist().count(ours.bos_id) == 1
        assert ids[0] == ours.bos_id
    typed = ours.encode_rendered(ours.protect(written)).tolist()
    assert typed[0] == ours.bos_id
    assert typed[1:] == ours.encode(written, add_special=False, parse_special=False).tolist()


@pytest.mark.push
@pytest.mark.parametrize("prefix", [True, False])
def test_a_space_goes_before_a_text_as_the_file_says(prefix: bool, tmp_path: Path) -> None:
    ours, oracle = both(tmp_path, tiny_spm_vocabulary(), add_space_prefix=prefix)
    assert_same(ours, oracle, "<s>", "</s>")
    ids = ours.encode(" Hello", add_special=True, parse_special=False).tolist()
    assert ours.decode(ids) == b" Hello"


SINGLES = sorted({*ENDING_TEXTS, *(text for role in ROLES for text in role.texts)})
COMBINATIONS = {
    "harmony": ("<|return|>", "<|call|>", "<|end|>"),
    "harmony without call": ("<|return|>", "<|end|>"),
    "solar": ("<|calls|>", "<|flush|>", "<|end|>"),
    "solar without calls": ("<|flush|>", "<|end|>"),
    "gemma 4": ("<|tool_response>", "</s>"),
    "many turns": ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "</s>", "<EOT>"),
    "fill in the middle": ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<reponame>"),
    **{text: (text,) for text in SINGLES},
}


@pytest.mark.night
@pytest.mark.parametrize("texts", COMBINATIONS.values(), ids=COMBINATIONS)
def test_tokens_end_an_answer_by_their_spelling(texts: tuple[str, ...], tmp_path: Path) -> None:
    base = tiny_vocabulary()
    plain = replace(base, tokens=("<a>", "<b>", "<c>", *base.tokens[3:]), bos=0, eos=1)
    ours, oracle = both(tmp_path, with_tokens(plain, *texts), unknown_token_id=None)
    assert ours.end_of_generation == oracle.end_of_generation()
    assert ours.fill_tokens == oracle.fill_tokens()
    if "<|end|>" not in texts[1:]:
        assert_same(ours, oracle, *texts)


@pytest.mark.push
@pytest.mark.parametrize("name", ["harmony", "solar"])
def test_a_control_token_that_ends_no_answer_is_control_all_the_same(name: str, tmp_path: Path) -> None:
    """llama.cpp treats these tokens as words, so a user could type them. Here no typed text becomes one."""
    ours, _ = both(tmp_path, with_tokens(tiny_vocabulary(), *COMBINATIONS[name]))
    end = ours.vocabulary_size - 1
    assert ours.token_text(end) == "<|end|>"
    assert ours.encode("<|end|>", add_special=False, parse_special=True).tolist() == [end]
    assert end not in ours.encode("<|end|>", add_special=False, parse_special=False)
    assert end not in ours.encode_rendered(ours.protect("<|end|>"))


@pytest.mark.push
@pytest.mark.parametrize("key", ["eot", "eom", "fim_pad", "fim_rep", "fim_sep", "fim_pre", "prefix", "middle"])
def test_a_key_names_a_token_that_its_spelling_does_not(key: str, tmp_path: Path) -> None:
    vocabulary = with_tokens(tiny_vocabulary(), "<PAD>", "<REPO>", "<|file_sep|>", "<PRE>", "<MID>")
    ours, oracle = both(tmp_path, vocabulary, **{f"{key}_token_id": 40})
    assert_same(ours, oracle, "<PAD>", "<PRE>")


@pytest.mark.push
@pytest.mark.parametrize(
    "pieces", [("fim", "|"), ("fim", ""), ("code", "|"), ("", "|")], ids=["<|fim_", "<fim_", "<|code_", "<|"]
)
@pytest.mark.parametrize("add_bos", [True, False])
def test_tokens_for_filling_are_found_by_their_spelling(pieces: tuple[str, str], add_bos: bool, tmp_path: Path) -> None:
    word, bar = pieces
    texts = [f"<{bar}{word}{'_' * bool(word)}{role}{bar}>" for role in ("prefix", "suffix", "middle")]
    vocabulary = with_tokens(tiny_vocabulary(), *texts, "<|file_sep|>", "<|repo_name|>")
    ours, oracle = both(tmp_path, vocabulary, add_bos_token=add_bos)
    first = len(vocabulary.tokens) - 5
    bos = ours.bos_id if add_bos else None
    assert ours.fill_tokens == FillTokens(bos, first, first + 1, first + 2, first + 4, first + 3)
    assert ours.fill_tokens == oracle.fill_tokens()


@pytest.mark.push
def test_the_old_key_of_a_token_wins(tmp_path: Path) -> None:
    """llama.cpp reads the former names, such as `prefix_token_id`, after the present ones."""
    keys = {"fim_pre_token_id": 40, "prefix_token_id": 41, "fim_suf_token_id": 42, "fim_mid_token_id": 43}
    ours, oracle = both(tmp_path, tiny_vocabulary(), **keys, add_bos_token=False)
    assert ours.fill_tokens == oracle.fill_tokens() == FillTokens(None, 41, 42, 43, None, None)


@pytest.mark.push
@pytest.mark.parametrize("missing", ["<PRE>", "<SUF>", "<MID>"])
def test_a_vocabulary_without_one_of_three_tokens_cannot_fill(missing: str, tmp_path: Path) -> None:
    texts = [text for text in ("<PRE>", "<SUF>", "<MID>", "<REPO>") if text != missing]
    ours, oracle = both(tmp_path, with_tokens(tiny_vocabulary(), *texts))
    assert ours.fill_tokens is oracle.fill_tokens() is None


@pytest.mark.push
@pytest.mark.parametrize("base", [tiny_vocabulary(), tiny_spm_vocabulary()], ids=["gpt2", "llama"])
def test_tokens_of_every_kind(base: Vocabulary, tmp_path: Path) -> None:
    vocabulary = with_tokens(base, "<word>", "  ", "   ", kind=USER_DEFINED)
    vocabulary = with_tokens(vocabulary, "<not used>", "zzz", kind=UNUSED)
    vocabulary = with_tokens(vocabulary, "<ctl>", "<ctl> ", "<ctl>x", kind=CONTROL)
    ours, oracle = both(tmp_path, vocabulary)
    assert_same(ours, oracle, "<word>", "   ", "<not used>", "<ctl>", "<ctl> x")


@pytest.mark.push
@pytest.mark.parametrize(
    ("pre", "name", "mask"),
    [("jina-v2-de", "tiny", "<mask>"), ("gpt-2", "Modern-BERT tiny", "[MASK]"), ("gpt-2", "a Phi-3", "<mask>")],
)
def test_white_space_belongs_to_a_token_by_the_names_llama_cpp_goes_by(
    pre: str, name: str, mask: str, tmp_path: Path
) -> None:
    texts = (mask, "</s>", "<unk>", "<s>", "<|end|>", "<|user|>")
    base = with_tokens(tiny_vocabulary(), *texts, kind=CONTROL)
    metadata = {"general.architecture": "llama", **replace(base, pre=pre).metadata(), "general.name": name}
    path = write_gguf(tmp_path / "vocabulary.gguf", metadata, {})
    assert_same(load_tokenizer(open_gguf(path)), LlamaVocabulary(path), *(f" \n{text} \t" for text in texts))


@pytest.mark.push
def test_characters_that_are_no_tokens_are_written_in_bytes_as_llama_cpp_does(tmp_path: Path) -> None:
    """Gemma 4 uses BPE on characters. Merge results that are not tokens are spelled in bytes too, and runs of newlines
    stay whole.
    """
    bytes_ = tuple(f"<0x{byte:02X}>" for byte in range(256) if byte != 0x7A)
    merges = ("▁ a", "b c", "é x", "▁a b", "\n \n", "a é", "bc é")
    tokens = ("<bos>", "<eos>", *bytes_, *"▁abcdé\n", "▁a", "bc", "▁ab", "\n\n", "\n\n\n", "aé")
    types = (CONTROL, CONTROL, *(BYTE,) * 255, *(NORMAL,) * (len(tokens) - 257))
    vocabulary = Vocabulary(tokens, types, merges, model="gemma4", bos=0, eos=1)
    ours, oracle = both(tmp_path, vocabulary)
    source = ["a b", " ab abc bcé éx aéx", "z\u007fzz 中é", "\n\n\n\n a\n\n\nb\n", "<bos> ▁a", ""]
    for text in [*source, *random_texts(5, 300)]:
        for add in (False, True):
            got = ours.encode(text, add_special=add, parse_special=False).tolist()
            assert got == oracle.encode(text, add_special=add, parse_special=False), text
    assert [ours.token_bytes(id_) for id_ in range(oracle.size)] == [
        oracle.token_bytes(id_) for id_ in range(oracle.size)
    ]
    assert ours.end_of_generation == oracle.end_of_generation()


@pytest.mark.push
def test_bytes_without_a_token_are_left_out_as_llama_cpp_does(tmp_path: Path) -> None:
    base = tiny_vocabulary()
    renamed = {"a": "<lost 1>", "Ġ": "<lost 2>", "Ã": "<lost 3>", "Ġthe": "<lost 4>"}
    ours, oracle = both(tmp_path, replace(base, tokens=tuple(renamed.get(token, token) for token in base.tokens)))
    for text in ["a cat and the hat", "ä", "the the", *random_texts(5, 200)]:
        got = ours.encode(text, add_special=False, parse_special=False).tolist()
        assert got == oracle.encode(text, add_special=False, parse_special=False), text


@pytest.mark.push
def test_a_token_without_text_does_no_harm(tmp_path: Path) -> None:
    ours, oracle = both(tmp_path, with_tokens(tiny_vocabulary(), "", "Ġ["))
    empty = ours.vocabulary_size - 2
    assert ours.token_bytes(empty) == oracle.token_bytes(empty) == f"[EMPTY_{empty}]".encode()
    assert_same(ours, oracle, f"[EMPTY_{empty}]")


@pytest.mark.push
def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, tiny_vocabulary())
    ids = ours.encode("a\ud800b\ud83d\ude00", add_special=False, parse_special=False)
    assert ours.decode(ids.tolist()).decode() == "a\ufffdb😀"
    assert ours.unprotect(ours.protect("a\udfff")) == "a\ufffd"


@pytest.mark.push
@pytest.mark.parametrize("token", [-1, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(token: int, tmp_path: Path) -> None:
    ours, _ = both(tmp_path, tiny_vocabulary())
    with pytest.raises(ValueError, match="out of range"):
        ours.token_bytes(token)
    with pytest.raises(ValueError, match="out of range"):
        ours.token_text(token)


@pytest.mark.push
def test_token_text_is_fit_to_be_shown(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, tiny_vocabulary())
    assert ours.token_text(1) == "<|im_start|>"
    assert ours.token_text(ours.encode(" the", add_special=False, parse_special=False)[0]) == " the"
    assert ours.token_text(ours.encode("é", add_special=False, parse_special=False)[0]) == "\\xc3"


@pytest.mark.parametrize(
    ("model", "words"),
    [("rwkv", "RWKV"), ("plamo2", "PLaMo-2")],
)
def test_a_kind_out_of_scope_is_refused_in_one_plain_line(model: str, words: str, tmp_path: Path) -> None:
    vocabulary = Vocabulary(tuple("abc"), (NORMAL,) * 3, model=model, scores=(0.0,) * 3, bos=0, eos=1, unknown=2)
    metadata = {"general.architecture": "llama", **vocabulary.metadata()}
    file = open_gguf(write_gguf(tmp_path / "vocabulary.gguf", metadata, {}))
    with pytest.raises(UnsupportedModel) as caught:
        load_tokenizer(file)
    assert f"tokenizer.ggml.model: '{model}', which is {words}; llmrun supports BPE" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


def test_the_kernels_to_compile_are_known_before_the_tokenizer_is_loaded(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", **tiny_spm_vocabulary().metadata()}
    file = open_gguf(write_gguf(tmp_path / "vocabulary.gguf", metadata, {}))
    assert set(tokenizer_kernels(file)) == {
        KernelName.of("tokens.token_table", "build"),
        KernelName.of("tokens.special_tokens", "build"),
        KernelName.of("tokens.special_tokens", "find"),
        KernelName.of("tokens.spm_merge", "find_joined"),
        KernelName.of("tokens.spm_merge", "merge"),
    }
