"""Tests that break each rule of the vocabulary: BadGGUF names the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.base.errors import BadGGUF
from llmrun.formats.gguf.reader import GGUFFile
from llmrun.formats.gguf.vocabulary import SPECIAL_IDS
from tests.support.gguf.gguf_bytes import (
    BOOL,
    BPE_MERGES,
    BPE_TOKENS,
    F32,
    I32,
    U8,
    U32,
    U64,
    RawGGUF,
    bpe_vocabulary,
    numbers,
    scalar,
    spm_vocabulary,
    string,
    strings,
)
from tests.support.gguf.gguf_memory import read_gguf
from tests.support.tiers import examples

PREFIX = "tokenizer.ggml."
N = len(BPE_TOKENS)


def opened(changes: dict[str, bytes | None], keys: dict[str | bytes, bytes] | None = None) -> GGUFFile:
    """Open a file with a vocabulary (byte-level by default) and the given changes; None removes a key."""
    keys = dict(bpe_vocabulary() if keys is None else keys)
    for name, value in changes.items():
        keys.pop(PREFIX + name, None)
        if value is not None:
            keys[PREFIX + name] = value
    return read_gguf(RawGGUF(keys).build(), Path("model.gguf"))


def refusal(changes: dict[str, bytes | None], keys: dict[str | bytes, bytes] | None = None) -> str:
    with pytest.raises(BadGGUF) as caught:
        opened(changes, keys)
    return str(caught.value).removeprefix(f"not a valid GGUF file: model.gguf: {PREFIX}")


def tokens_with(*replaced: tuple[int, str | bytes]) -> bytes:
    tokens: list[str | bytes] = list(BPE_TOKENS)
    for index, value in replaced:
        tokens[index] = value
    return strings(tokens)


@pytest.mark.parametrize("keys", [bpe_vocabulary(), spm_vocabulary()], ids=["gpt2", "llama"])
def test_the_vocabularies_these_tests_start_from_are_correct(keys: dict[str | bytes, bytes]) -> None:
    assert opened({}, keys).has("tokenizer.ggml.tokens")


def test_the_least_vocabulary_is_accepted() -> None:
    optional = [str(key).removeprefix(PREFIX) for key in bpe_vocabulary()]
    needed = {"model", "tokens", "merges", "add_eos_token"}
    assert opened({name: None for name in optional if name not in needed})


@pytest.mark.parametrize("model", ["none", "no_vocab"])
def test_tokens_belong_to_a_tokenizer(model: str) -> None:
    assert refusal({"model": string(model)}) == f"model: is '{model}' although the file has tokenizer.ggml.tokens"


def test_a_wordpiece_vocabulary_has_no_bytes() -> None:
    types = numbers(I32, [1, 6, *[1] * (N - 2)])
    assert opened({"token_type": types})
    message = refusal({"token_type": types, "model": string("bert")})
    assert message == "token_type: token 1 has type 6 (byte), but a 'bert' tokenizer has no byte tokens"


RWKV = ["<s>", "<", "a", "ab", "\\n", "\\n\\n", "\\xe6", "\\xe6\\x97", "\\\\", "\\\\x"]


def test_an_rwkv_vocabulary_has_the_first_byte_of_each_token() -> None:
    """Otherwise, llama.cpp would loop until it ran out of memory."""
    model = {"model": string("rwkv")}
    assert opened({**model, "tokens": strings(RWKV)}, {})
    bytes_missing = {"<": 0x3C, "a": 0x61, "\\n": 0x0A, "\\xe6": 0xE6, "\\\\": 0x5C}
    for missing, byte in bytes_missing.items():
        message = refusal({**model, "tokens": strings([token for token in RWKV if token != missing])}, {})
        assert re.fullmatch(
            rf"tokens: token \d, '.*', begins with the byte 0x{byte:02X}, but there is no token for that byte, .*",
            message,
        )


def test_tokens_are_strings_and_there_is_one() -> None:
    assert refusal({"tokens": strings([])}) == "tokens: the vocabulary is empty"
    assert refusal({"tokens": numbers(U8, [1])}) == "tokens: must be an array of strings, not arr[u8]"
    assert refusal({"tokens": string("a")}).startswith("tokens: must be an array of strings, not str")


def test_the_model_is_named_by_a_string() -> None:
    assert refusal({"model": None}) == "model: the key is missing"
    assert refusal({"model": scalar(U32, 1)}) == "model: must be a string, not u32"
    assert refusal({"pre": scalar(U32, 1)}) == "pre: must be a string, not u32"


# Distinct tokens


def test_equal_tokens_are_refused_with_both_ids() -> None:
    assert refusal({"tokens": tokens_with((9, "b"))}) == "tokens: tokens 3 and 9 are both 'b'"
    assert refusal({"tokens": strings(["a"] * 3 + ["x"] * (N - 3))}).startswith("tokens: tokens 0 and 1 are both 'a'")


def test_empty_tokens_are_allowed_as_llama_cpp_renames_them() -> None:
    assert opened({"tokens": tokens_with((9, ""))})
    assert opened({"tokens": tokens_with((9, ""), (10, ""), (11, ""))})


def test_equal_tokens_are_found_beside_empty_ones() -> None:
    assert "tokens 2 and 4 are both 'a'" in refusal({"tokens": tokens_with((9, ""), (10, ""), (4, "a"))})


def test_a_token_with_the_name_an_empty_one_is_given_is_refused() -> None:
    message = refusal({"tokens": tokens_with((9, ""), (3, "[EMPTY_9]"))})
    assert message == "tokens: token 3 has the name that llama.cpp gives to empty token 9"
    assert opened({"tokens": tokens_with((9, ""), (3, "[EMPTY_8]"))})


@pytest.mark.parametrize("token", ["\0", "a\0b", "b\0"])
def test_a_token_with_a_nul_byte_is_refused(token: str) -> None:
    assert refusal({"tokens": tokens_with((9, token))}).startswith("tokens: token 9, '")


def test_a_token_that_is_not_utf_8_is_allowed() -> None:
    assert opened({"tokens": tokens_with((9, b"\xff\xfe"))}).strings(PREFIX + "tokens")[9] == "\ufffd\ufffd"


# Arrays parallel to the tokens


@pytest.mark.parametrize("name", ["scores", "token_type"])
@pytest.mark.parametrize("n", [0, 1, N - 1, N + 1])
def test_an_array_of_another_length_is_refused(name: str, n: int) -> None:
    value = numbers(F32 if name == "scores" else I32, [1] * n)
    assert refusal({name: value}) == f"{name}: must have {N} entries, one for each token, not {n}"


@pytest.mark.parametrize("name", ["scores", "token_type"])
@pytest.mark.parametrize("value", [numbers(U32, [1] * N), strings(["1"] * N), scalar(I32, 1)])
def test_an_array_of_another_type_is_refused(name: str, value: bytes) -> None:
    wanted = "arr[f32] or arr[i32]" if name == "scores" else "arr[i32]"
    assert refusal({name: value}).startswith(f"{name}: must be {wanted}, not ")


def test_a_score_that_is_not_a_number_is_refused() -> None:
    scores = [0.0] * N
    scores[5] = float("nan")
    assert refusal({"scores": numbers(F32, scores)}) == "scores: the score of token 5 is not a number"
    scores[5] = float("-inf")
    assert opened({"scores": numbers(F32, scores)})
    assert opened({"scores": numbers(I32, range(N))})


@pytest.mark.parametrize("type_", [-1, 7, 2**31 - 1, -(2**31)])
def test_a_token_type_outside_the_format_is_refused(type_: int) -> None:
    types = [1] * N
    types[4] = type_
    assert refusal({"token_type": numbers(I32, types)}) == f"token_type: token 4 must have type 0 to 6, not {type_}"


# Merges


@pytest.mark.parametrize("merge", ["", "a", " ", " a", "ab", "a ", "  ", "abcdefghijklmnopqrstuvwxyz012345"])
@pytest.mark.parametrize("index", [0, 2, 4])
def test_a_merge_that_is_not_two_strings_is_refused(merge: str, index: int) -> None:
    merges = [*BPE_MERGES[:index], merge, *BPE_MERGES[index:]]
    message = refusal({"merges": strings(merges)})
    assert message == f"merges: merge {index}, '{merge}', must be two strings separated by a space"


@pytest.mark.parametrize("merge", ["a b", "  b", "a  ", "a b c", "ü ï", "x" * 32 + " y", "x" * 30 + " y"])
def test_a_merge_of_two_strings_is_accepted(merge: str) -> None:
    # Covers 32-byte strings, whose length prefix has the same byte as a space.
    assert opened({"merges": strings([merge, "b c"])})
    assert opened({"merges": strings(["b c", merge])})
    assert opened({"merges": strings([merge])})


@pytest.mark.push
@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.text(" ab", max_size=6) | st.text(" ab", min_size=31, max_size=33), min_size=1, max_size=6))
def test_merges_are_accepted_exactly_when_llama_cpp_finds_two_strings_in_each(merges: list[str]) -> None:
    # Covers strings of 32 bytes, whose length prefix has the same byte as a space.
    borders = [(merge.find(" ", 1), len(merge)) for merge in merges]
    if all(0 < border < length - 1 for border, length in borders):
        assert opened({"merges": strings(merges)})
    else:
        assert refusal({"merges": strings(merges)}).startswith("merges: merge ")


def test_merges_are_needed_by_byte_level_tokenizers() -> None:
    assert refusal({"merges": None}) == "merges: the key is missing, but a 'gpt2' tokenizer needs it"
    assert opened({"merges": None, "pre": string("kimi-k2")})
    assert opened({"merges": None, "model": string("bert")})
    assert opened({"merges": strings([])})
    assert refusal({"merges": numbers(U8, [1])}).startswith("merges: must be an array of strings, not arr[u8]")


# Special ids and flags


@pytest.mark.parametrize("name", SPECIAL_IDS)
@pytest.mark.parametrize("id_", [N, 2**31, 2**32 - 1])
def test_a_special_id_outside_the_vocabulary_is_refused(name: str, id_: int) -> None:
    assert refusal({f"{name}_token_id": scalar(U32, id_)}) == (f"{name}_token_id: must be at most {N - 1}, not {id_}")


@pytest.mark.parametrize("name", [*SPECIAL_IDS, "padding"])
@pytest.mark.parametrize("value", [scalar(I32, -1), scalar(U64, 1), string("1"), numbers(U32, [1])])
def test_a_special_id_of_another_type_is_refused(name: str, value: bytes) -> None:
    assert refusal({f"{name}_token_id": value}).startswith(f"{name}_token_id: must be u32, not ")


@pytest.mark.parametrize("id_", [N, 2**32 - 1])
def test_a_padding_id_outside_the_vocabulary_is_let_through(id_: int) -> None:
    assert opened({"padding_token_id": scalar(U32, id_)})


@pytest.mark.parametrize("name", ["add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix"])
def test_a_flag_that_is_no_boolean_is_refused(name: str) -> None:
    assert refusal({name: scalar(U8, 1)}) == f"{name}: must be a boolean, not u8"


def test_suppressed_tokens_are_i32() -> None:
    message = "suppress_tokens: must be arr[i32], not arr[u32]"
    assert refusal({"suppress_tokens": numbers(U32, [1])}) == message


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_token_that_is_to_be_added_must_exist(name: str) -> None:
    """llama.cpp falls back to token 11 if a byte-level vocabulary names none, and asserts that it exists."""
    few: dict[str, bytes | None] = {"tokens": strings(["a", "b"]), "scores": None, "token_type": None}
    few |= {f"{id_}_token_id": None for id_ in (*SPECIAL_IDS, "padding")}
    few |= {"add_bos_token": scalar(BOOL, 0), "add_eos_token": scalar(BOOL, 0)}
    assert opened(few)
    few[f"add_{name}_token"] = scalar(BOOL, 1)
    assert refusal(few) == f"{name}_token_id: the key is missing, and its default of 11 is not among the 2 tokens"
    few[f"{name}_token_id"] = scalar(U32, 1)
    assert opened(few)


# SentencePiece


@pytest.mark.parametrize("byte", [0x00, 0x41, 0xFF])
def test_a_sentencepiece_vocabulary_spells_every_byte(byte: int) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a"]
    tokens[3 + byte] = "<0xZZ>"
    message = refusal({"tokens": strings(tokens)}, spm_vocabulary())
    assert message == f"tokens: no token for the byte 0x{byte:02X}, but a 'llama' tokenizer needs all 256"


def test_a_byte_may_be_spelt_as_itself() -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a"]
    tokens[3 + 0x41] = "A"
    assert opened({"tokens": strings(tokens)}, spm_vocabulary())
