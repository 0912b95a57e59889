"""Mutations of a model's vocabulary, merges, special tokens and chat template."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from tests.support.gguf.gguf_bytes import BOOL, F32, I32, STRING, U32
from tests.support.models.model_drafts import Draft, Value

Change = Callable[[Random, Draft], None]

PREFIX = "tokenizer.ggml."
_ARRAYS = {"tokens": STRING, "token_type": I32, "scores": F32}

_KINDS = ("gpt2", "llama", "bert", "t5", "rwkv", "plamo2", "gemma4", "none", "no_vocab", "")
_SPLITS = """
default smollm llama-bpe llama3 qwen2 qwen35 gpt-2 deepseek-llm falcon starcoder tekken gpt-4o chameleon jais
bloom viking poro-chat superbpe trillion seed-coder command-r refact mpt olmo dbrx smaug-bpe exaone minerva-7b kimi-k2
unknown-split"""
_TOKENS = (
    *(b"", b" ", b"\n", b"\xff\xfe", b"\xe2\x96", "\u2581".encode(), b"<0x41>", b"<0xZZ>", b"[EMPTY_3]"),
    *(b"<|im_end|>", b"</s>", b"<|endoftext|>", b"<|eot_id|>", b"\x1b[31m", b"a" * 5000, b"\xef\xb7\x90"),
    *("Ġ".encode(), "日本語".encode(), "\u0301".encode()),
)
_MERGES = (b"a", b" ", b"", b"  ", b"a b c", b"\xff \xfe", b"no such", "Ġ Ġ".encode(), b"a" * 3000 + b" b")
_TEMPLATES = (
    *("", " ", "{{", "{% for m in messages %}", "{{ messages[0].content }}", "{{ 1/0 }}", "x" * 5000),
    *("{% if true %}", "\x1b[2J", "{{ raise_exception('no') }}", "{{ cycler.__init__.__globals__ }}", "\ufdd0"),
)
_SPECIAL = "bos eos eot eom unknown seperator padding cls mask fim_pre fim_suf fim_pad"
_FLAGS = "add_bos_token add_eos_token add_sep_token add_space_prefix remove_extra_whitespaces"


def _set(keys: str, type_id: int, content: Callable[[Random, list[Any]], Any], prefix: str = PREFIX) -> Change:
    """Return a change of one of some keys. `content` gets a copy of the key's array, which is empty if it has none."""

    def change(random: Random, draft: Draft) -> None:
        key = prefix + random.choice(keys.split())
        before = draft.keys[key].content if key in draft.keys else []
        draft.keys[key] = Value(type_id, content(random, list(before) if isinstance(before, list) else []))

    return change


def _one_other(others: tuple[Any, ...]) -> Callable[[Random, list[Any]], list[Any]]:
    """Return a function that replaces one element by one of `others`."""

    def content(random: Random, before: list[Any]) -> list[Any]:
        if before:
            before[random.randrange(len(before))] = random.choice(others)
        return before

    return content


def _other_tokens(random: Random, tokens: list[Any]) -> list[Any]:
    """Change every token: reverse the order, append a letter, use random bytes, or truncate."""
    match random.randrange(4):
        case 0:
            return tokens[::-1]
        case 1:
            return [token + b"x" for token in tokens]
        case 2:
            return [random.randbytes(random.randrange(1, 9)).replace(b"\0", b"0") for _ in tokens]
    return [token[: random.randrange(1, 4)] + b"%d" % index for index, token in enumerate(tokens)]


def _other_scores(random: Random, scores: list[Any]) -> list[Any]:
    choices = (0.0, 1.0, -1e30, 3.4e38, float("inf"), float("-inf"), float("nan"))
    value, n = random.choice(choices), len(scores) or 300
    return [value] * n if random.random() < 0.5 else [*(random.uniform(-100, 0) for _ in range(n - 1)), value]


def _other_merges(random: Random, merges: list[Any]) -> list[Any]:
    more = [b"%c %c" % (random.randrange(33, 127), random.randrange(33, 127)) for _ in range(50)]
    return list(random.choice((random.sample(merges, len(merges)), [], merges + merges, merges + more)))


def _change_length(random: Random, draft: Draft) -> None:
    """Use fewer or more tokens than the embedding has rows, in all arrays or in one of them."""
    keys = [key for key in _ARRAYS if PREFIX + key in draft.keys]
    length = random.choice((0, 1, 2, 16, 255, 256, 290, 400))
    for key in keys if random.random() < 0.7 else keys[:1]:
        content = draft.keys[PREFIX + key].content
        if isinstance(content, list):
            more = [b"more%d" % i if key == "tokens" else 1 for i in range(len(content), length)]
            draft.keys[PREFIX + key] = Value(_ARRAYS[key], content[:length] + more)


def _template(random: Random, _: object) -> bytes:
    return random.choice(_TEMPLATES).encode()


_IDS = (0, 1, 2, 3, 100, 296, 297, 2**31, 2**32 - 1)  # the vocabulary of tiny_llama has 297 tokens
_special_tokens = " ".join(f"{name}_token_id" for name in _SPECIAL.split())

OF_VOCABULARIES: tuple[Change, ...] = (
    *(_set("tokens", STRING, _one_other(_TOKENS)), _set("tokens", STRING, _one_other(_TOKENS)), _change_length),
    *(_set("tokens", STRING, _other_tokens), _set("scores", F32, _other_scores)),
    _set("token_type", I32, _one_other((0, 1, 2, 3, 4, 5, 6, 7, -1))),
    _set("token_type", I32, lambda random, types: random.choices(random.choices(range(7), k=3), k=len(types))),
    *(_set("merges", STRING, _other_merges), _set("merges", STRING, _one_other(_MERGES))),
    _set("model", STRING, lambda random, _: random.choice(_KINDS).encode()),
    _set("pre", STRING, lambda random, _: random.choice(_SPLITS.split()).encode()),
    *(_set(_special_tokens, U32, lambda random, _: random.choice(_IDS)),) * 2,
    _set(_FLAGS, BOOL, lambda random, _: random.randrange(2)),
    _set(
        "suppress_tokens precompiled_charsmap", I32, lambda random, _: random.choices(_IDS[:5], k=random.randrange(4))
    ),
    _set(
        "chat_template chat_template.tool_use",
        STRING,
        lambda random, _: random.choice(_TEMPLATES).encode(),
        "tokenizer.",
    ),
)
