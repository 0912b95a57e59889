"""Mutations of a model's vocabulary, merges, special tokens and chat template."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.support.gguf.gguf_bytes import BOOL, F32, I32, STRING, U32
from tests.support.models.model_drafts import Draft, Value

Change = Callable[[Random, Draft], None]

PREFIX = "tokenizer.ggml."
TOKENS, TYPES, SCORES, MERGES = (PREFIX + name for name in ("tokens", "token_type", "scores", "merges"))

_KINDS = ("gpt2", "llama", "bert", "t5", "rwkv", "plamo2", "gemma4", "none", "no_vocab", "")
_SPLITS = (
    *("default", "smollm", "llama-bpe", "llama3", "qwen2", "qwen35", "gpt-2", "deepseek-llm", "falcon", "starcoder"),
    *("tekken", "gpt-4o", "chameleon", "jais", "bloom", "viking", "poro-chat", "superbpe", "trillion", "seed-coder"),
    *("command-r", "refact", "mpt", "olmo", "dbrx", "smaug-bpe", "exaone", "minerva-7b", "kimi-k2", "unknown-split"),
)
_TOKENS = (
    *(b"", b" ", b"\n", b"\xff\xfe", b"\xe2\x96", "\u2581".encode(), b"<0x41>", b"<0xZZ>", b"[EMPTY_3]"),
    *(b"<|im_end|>", b"</s>", b"<|endoftext|>", b"<|eot_id|>", b"\x1b[31m", b"a" * 5000, b"\xef\xb7\x90"),
    *("Ġ".encode(), "日本語".encode(), "\u0301".encode()),
)
_TEMPLATES = (
    *("", " ", "{{", "{% for m in messages %}", "{{ messages[0].content }}", "{{ 1/0 }}", "x" * 5000),
    *("{% if true %}", "\x1b[2J", "{{ raise_exception('no') }}", "{{ cycler.__init__.__globals__ }}", "\ufdd0"),
)
_SPECIAL = (
    *("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "cls", "mask", "fim_pre", "fim_suf", "fim_pad"),
)
_FLAGS = ("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces")


def _content(draft: Draft, key: str) -> list[object]:
    """Return a copy of an array to modify, empty if the key is missing."""
    value = draft.keys.get(key)
    return list(value.content) if value is not None and isinstance(value.content, list) else []


def _change_token(random: Random, draft: Draft) -> None:
    tokens = _content(draft, TOKENS)
    if tokens:
        tokens[random.randrange(len(tokens))] = random.choice(_TOKENS)
        draft.keys[TOKENS] = Value(STRING, tokens)


def _change_many_tokens(random: Random, draft: Draft) -> None:
    """Change every token: reverse the order, append a letter, use random bytes, or truncate."""
    tokens = [bytes(token) for token in _content(draft, TOKENS) if isinstance(token, bytes)]
    kind = random.randrange(4)
    if kind == 0:
        tokens.reverse()
    elif kind == 1:
        tokens = [token + b"x" for token in tokens]
    elif kind == 2:
        tokens = [random.randbytes(random.randrange(1, 9)).replace(b"\0", b"0") for _ in tokens]
    else:
        tokens = [token[: random.randrange(1, 4)] + b"%d" % index for index, token in enumerate(tokens)]
    draft.keys[TOKENS] = Value(STRING, list(tokens))


def _change_length(random: Random, draft: Draft) -> None:
    """Use fewer or more tokens than the embedding has rows, in all arrays or in one of them."""
    keys = [key for key in (TOKENS, TYPES, SCORES) if key in draft.keys]
    if not keys:
        return
    length = random.choice((0, 1, 2, 16, 255, 256, 290, 400))
    for key in keys if random.random() < 0.7 else [random.choice(keys)]:
        content = _content(draft, key)
        more = [b"more%d" % i if key == TOKENS else 1 for i in range(len(content), length)]
        draft.keys[key] = Value(draft.keys[key].type_id, content[:length] + more)


def _change_types(random: Random, draft: Draft) -> None:
    types = _content(draft, TYPES)
    if not types:
        return
    kind = random.randrange(3)
    if kind == 0:
        types = [random.choice((0, 1, 2, 3, 4, 5, 6))] * len(types)
    elif kind == 1:
        types = [random.randrange(7) for _ in types]
    else:
        types[random.randrange(len(types))] = random.choice((0, 1, 2, 3, 4, 5, 6, 7, -1))
    draft.keys[TYPES] = Value(I32, types)


def _change_scores(random: Random, draft: Draft) -> None:
    n = len(_content(draft, TOKENS))
    choices = (0.0, 1.0, -1e30, 3.4e38, float("inf"), float("-inf"), float("nan"))
    value = random.choice(choices)
    scores = [value] * n if random.random() < 0.5 else [random.uniform(-100, 0) for _ in range(n)]
    if scores and random.random() < 0.5:
        scores[random.randrange(n)] = random.choice(choices)
    draft.keys[SCORES] = Value(F32, scores)


def _change_merges(random: Random, draft: Draft) -> None:
    merges = [bytes(merge) for merge in _content(draft, MERGES) if isinstance(merge, bytes)]
    kind = random.randrange(5)
    if kind == 0:
        random.shuffle(merges)
    elif kind == 1:
        merges = []
    elif kind == 2:
        merges += merges
    elif kind == 3 and merges:
        odd = (b"a", b" ", b"", b"  ", b"a b c", b"\xff \xfe", b"no such", "Ġ Ġ".encode(), b"a" * 3000 + b" b")
        merges[random.randrange(len(merges))] = random.choice(odd)
    else:
        merges += [b"%c %c" % (random.randrange(33, 127), random.randrange(33, 127)) for _ in range(50)]
    draft.keys[MERGES] = Value(STRING, list(merges))


def _change_kind(random: Random, draft: Draft) -> None:
    draft.keys[PREFIX + "model"] = Value(STRING, random.choice(_KINDS).encode())


def _change_split(random: Random, draft: Draft) -> None:
    draft.keys[PREFIX + "pre"] = Value(STRING, random.choice(_SPLITS).encode())


def _change_special(random: Random, draft: Draft) -> None:
    n = len(_content(draft, TOKENS))
    token = random.choice((0, 1, 2, 3, 100, n - 1, n, 2**31, 2**32 - 1))
    draft.keys[f"{PREFIX}{random.choice(_SPECIAL)}_token_id"] = Value(U32, token % 2**32)


def _change_flag(random: Random, draft: Draft) -> None:
    draft.keys[PREFIX + random.choice(_FLAGS)] = Value(BOOL, random.randrange(2))


def _change_template(random: Random, draft: Draft) -> None:
    key = random.choice(("tokenizer.chat_template", "tokenizer.chat_template", "tokenizer.chat_template.tool_use"))
    draft.keys[key] = Value(STRING, random.choice(_TEMPLATES).encode())


def _add_array(random: Random, draft: Draft) -> None:
    name = random.choice(("suppress_tokens", "precompiled_charsmap", "added_tokens"))
    draft.keys[PREFIX + name] = Value(I32, [random.choice((-1, 0, 5, 10**6)) for _ in range(random.randrange(4))])


OF_VOCABULARIES: tuple[Change, ...] = (
    *(_change_token, _change_token, _change_many_tokens, _change_length, _change_types, _change_scores),
    *(_change_merges, _change_merges, _change_kind, _change_split, _change_special, _change_special, _change_flag),
    *(_change_template, _add_array),
)
