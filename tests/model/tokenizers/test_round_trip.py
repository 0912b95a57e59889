"""Tests that decoding ids returns the bytes of the original text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.model.tokenizers.text_tokenizer import decode_spelled, spelled
from tests.support.tokenizers.vocabularies import our_tokenizer

pytestmark = pytest.mark.push

any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2"])
@given(text=any_text, add_special=st.booleans(), parse_special=st.booleans())
def test_byte_level_ids_decode_to_the_text(name: str, text: str, add_special: bool, parse_special: bool) -> None:
    tokenizer = our_tokenizer(name)
    ids = tokenizer.encode(text, add_special=add_special, parse_special=parse_special).tolist()
    assert tokenizer.decode(ids).decode() == text


# Phi-3 drops white space after a special token, and U+2581 is how SentencePiece writes a space.
@pytest.mark.parametrize("name", ["llama-spm", "phi-3", "baichuan"])
@given(text=any_text.filter(lambda text: "▁" not in text), add_special=st.booleans())
def test_sentence_piece_ids_decode_to_the_text(name: str, text: str, add_special: bool) -> None:
    tokenizer = our_tokenizer(name)
    ids = tokenizer.encode(text, add_special=add_special, parse_special=False).tolist()
    assert tokenizer.decode(ids).decode() == text


@pytest.mark.parametrize("name", ["smollm2", "llama-spm"])
def test_the_bytes_of_an_answer_are_those_of_its_tokens(name: str) -> None:
    tokenizer = our_tokenizer(name)
    text = "Größe 😀: 12.5 µm\n\n  naïve"
    ids = tokenizer.encode(text, add_special=False, parse_special=False).tolist()
    joined = b"".join(tokenizer.token_bytes(id_) for id_ in ids)
    assert joined.decode().removeprefix(" ") == text
    assert tokenizer.decode(ids).decode() == text
    assert tokenizer.decode([]) == b""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama-spm", "<s>Hello world</s>"),
        ("llama-spm", "Hello world</s>"),
        ("qwen2", "<|im_start|>user\nHello <|im_end|>"),
        ("qwen2", "<|im_end|>"),
        ("llama-spm", ""),
    ],
)
def test_control_tokens_are_spelled(name: str, text: str) -> None:
    tokenizer = our_tokenizer(name)
    ids = tokenizer.encode(text, add_special=False, parse_special=True).tolist()
    assert decode_spelled(tokenizer, ids).decode() == text
    pieces = [spelled(tokenizer, token) for token in ids]
    assert all(pieces)
    assert b"".join(pieces).decode().replace("<s> ", "<s>").removeprefix(" ") == text
