"""Targeted mutations of several tiny models. Most pass the reader and test the code behind it.

A seed and a case number always give the same bytes, so these two numbers are enough to reproduce a failure.
"""

from __future__ import annotations

import functools
import struct
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from llmrun.formats.quants.registry import BY_ID
from llmrun.model.tokenizers.kinds import PRE_TOKENIZERS
from tests.support.gguf.gguf_bytes import BOOL, F32, F64, I32, I64, STRING, U32, U64
from tests.support.gguf.gguf_files import tiny_llama, tiny_spm_vocabulary
from tests.support.gguf.gguf_mutations import Layout, broken, layout_of
from tests.support.models.model_drafts import Draft, Value, Weights, draft_of

Change = Callable[[Random, Draft], None]

# Arguments of tiny_llama. With one layer of 32 columns, a case takes a few milliseconds.
_SMALL: dict[str, Any] = {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "feed_forward": 32}
_BASES: tuple[dict[str, Any], ...] = (
    {"weight_type": "Q8_0"},
    {"weight_type": "Q4_0", "vocabulary": tiny_spm_vocabulary()},
    {"weight_type": "F32", "tied": False, "rope_scaling": "llama3", "chat_template": None},
    {"weight_type": "Q4_1", "layers": 2, "kv_heads": 2, "rope_scaling": "linear"},
    {"weight_type": "BF16", "vocabulary": tiny_spm_vocabulary(), "tied": False, "chat_template": None},
    {"weight_type": "F16", "feed_forward": 33, "head_size": 32},
    # Wide enough for types with blocks of 256.
    {"weight_type": "Q8_0", "width": 256, "heads": 4, "kv_heads": 2, "feed_forward": 256},
)

_SCALAR_KEYS = {
    U32: """
        llama.vocab_size llama.expert_count llama.expert_used_count llama.expert_shared_count llama.pooling_type
        llama.attention.key_length llama.attention.value_length llama.attention.sliding_window llama.expert_gating_func
        llama.attention.head_count_kv llama.rope.dimension_count llama.leading_dense_block_count
        llama.nextn_predict_layers llama.rope.scaling.original_context_length llama.attention.q_lora_rank
        llama.interleave_moe_layer_step llama.embedding_length_out llama.decoder_start_token_id general.file_type
        llama.rescale_every_n_layers general.quantization_version tokenizer.ggml.token_type_count""",
    I32: "general.sampling.top_k general.sampling.penalty_last_n general.sampling.mirostat",
    F32: """
        llama.rope.scaling.factor llama.rope.scaling.attn_factor llama.rope.scale_linear llama.rope.freq_base_swa
        llama.rope.scaling.yarn_ext_factor llama.rope.scaling.yarn_attn_factor llama.rope.scaling.yarn_beta_fast
        llama.rope.scaling.yarn_beta_slow llama.logit_scale llama.residual_scale llama.embedding_scale
        llama.attention.scale llama.attention.clamp_kqv llama.attention.max_alibi_bias llama.attn_logit_softcapping
        llama.attention.layer_norm_epsilon llama.expert_weights_scale llama.final_logit_softcapping
        general.sampling.temp general.sampling.top_p general.sampling.min_p general.sampling.penalty_repeat
        general.sampling.xtc_probability""",
    BOOL: "llama.attention.causal llama.use_parallel_residual llama.rope.scaling.finetuned llama.swin_norm",
    STRING: "llama.rope.scaling.type llama.tensor_data_layout general.type general.sampling.sequence",
}
_ARCHITECTURES = (
    *("llama", "llama4", "mistral3", "qwen2", "qwen3moe", "gemma3", "gemma4", "phi3", "gpt2", "falcon", "bert", "t5"),
    *("mamba", "rwkv7", "deepseek2", "clip", "wavtokenizer-dec", "llama-embed", "unknown-architecture", ""),
)
_TEXTS = (
    *("", "none", "linear", "yarn", "longrope", "llama3"),
    *("\x1b[2J\x07", "\u202eevil", "x" * 10_000, "\ufdd0", "\udcff"),
)
_NUMBERS = (
    *(0, 1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 48, 64, 96, 128, 255, 256, 257, 512, 1000, 4096, 65_536),
    *(2**20, 2**24, 2**27, 2**28, 2**30, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1),
)
_FLOATS = (
    *(0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 8.0, 1e-45, -1e-45, 1e-38, 1e-20, 1e-8, 1e-5, 1e5, 1e20, 3.4e38, -3.4e38),
    *(float("inf"), float("-inf"), float("nan")),
)
_BITS = {U32: 32, U64: 64, I32: 32, I64: 64, BOOL: 1}


@functools.cache
def bases() -> tuple[tuple[Draft, Layout], ...]:
    """Return the valid models and the positions of their fields."""
    with tempfile.TemporaryDirectory() as folder:
        drafts = [draft_of(tiny_llama(Path(folder) / "base.gguf", **(_SMALL | row))) for row in _BASES]
    return tuple((draft, layout_of(draft.build())) for draft in drafts)


def mutant(seed: int, case: int) -> bytes:
    """Return case `case` of `seed`: a model with one to three mutations, or sometimes a broken structure."""
    random = Random(seed << 40 | case)
    draft, layout = random.choices(bases(), weights=(4, 4, 3, 3, 3, 2, 1))[0]
    if random.random() < 0.1:
        return broken(random, layout)
    changed = draft.copy()
    for _ in range(random.choice((1, 1, 1, 2, 2, 3))):
        random.choice(random.choices(_GROUPS, weights=(4, 3, 2, 3))[0])(random, changed)
    data = bytearray(changed.build())
    if random.random() < 0.05:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    return bytes(data)


# Metadata


def _number(random: Random, type_id: int, near: Any = None) -> Any:
    """Return a random value of the type. Half of them are close to `near`, if given."""
    if type_id in (F32, F64):
        return random.choice(_FLOATS)
    value = random.choice(_NUMBERS)
    if near is not None and random.random() < 0.5:
        value = random.choice((near - 1, near + 1, near * 2, near // 2, near ^ 1 << random.randrange(16)))
    bits = _BITS.get(type_id, 8)
    value %= 2**bits
    return value - 2**bits if type_id in (I32, I64) and value >= 2 ** (bits - 1) else value


def _set_scalar(random: Random, draft: Draft) -> None:
    """Replace the value of an existing key with another of the same type."""
    key = random.choice([key for key, value in draft.keys.items() if not isinstance(value.content, list)])
    value = draft.keys[key]
    content = _text(random) if value.type_id == STRING else _number(random, value.type_id, value.content)
    draft.keys[key] = Value(value.type_id, content)


def _text(random: Random) -> bytes:
    return random.choice(_TEXTS).encode(errors="surrogateescape")


def _add_scalar(random: Random, draft: Draft) -> None:
    type_id = random.choices(tuple(_SCALAR_KEYS), weights=(8, 2, 8, 1, 2))[0]
    content = _text(random) if type_id == STRING else _number(random, type_id)
    draft.keys[random.choice(_SCALAR_KEYS[type_id].split())] = Value(type_id, content)


def _change_type(random: Random, draft: Draft) -> None:
    """Replace a number with one of another type, or with an array of up to three."""
    key = random.choice([key for key, value in draft.keys.items() if isinstance(value.content, int | float)])
    type_id = random.choice((U32, I32, U64, I64, F32, F64))
    content = _number(random, type_id)
    draft.keys[key] = Value(type_id, [content] * random.choice((0, 1, 2, 3)) if random.random() < 0.4 else content)


def _drop_key(random: Random, draft: Draft) -> None:
    if draft.keys:
        del draft.keys[random.choice(tuple(draft.keys))]


def _rename_key(random: Random, draft: Draft) -> None:
    key = random.choice(tuple(draft.keys))
    other = random.choice(("evil\x1b]0;x\x07", "k" * 300, "general.architecture.", "llama.block_count"))
    draft.keys = {other if name == key else name: value for name, value in draft.keys.items()}


def _change_architecture(random: Random, draft: Draft) -> None:
    """Change the architecture. Half of the time, rename its keys too, so that the loader gets further."""
    name = random.choice(_ARCHITECTURES)
    draft.keys["general.architecture"] = Value(STRING, name.encode())
    if random.random() < 0.5:
        draft.keys = {
            f"{name}{key[5:]}" if isinstance(key, str) and key.startswith("llama.") else key: value
            for key, value in draft.keys.items()
        }


# Tensors

_POISONS = (
    *(struct.pack("<e", value) for value in (float("nan"), float("inf"), float("-inf"), 65_504.0, 0.0, 6e-8)),
    *(struct.pack("<f", value) for value in (float("nan"), float("inf"), float("-inf"), 3.4e38, 1e-45, -1.0)),
    *(b"\0", b"\xff", b"\x7f\xff", b"\x80"),
)


def _replace_tensor(draft: Draft, index: int, **changes: Any) -> None:
    old = draft.tensors[index]
    draft.tensors[index] = Weights(**{**vars(old), **changes})


def _noise(random: Random, draft: Draft) -> None:
    """Overwrite some weights with random bytes: a few bytes, a part of a tensor or all of it."""
    index = random.randrange(len(draft.tensors))
    data = bytearray(draft.tensors[index].data or b"\0")
    length = random.choice((1, 4, min(64, len(data)), len(data)))
    start = random.randrange(len(data) - length + 1)
    data[start : start + length] = random.randbytes(length)
    _replace_tensor(draft, index, data=bytes(data))


def _poison(random: Random, draft: Draft) -> None:
    """Insert NaN, infinity, huge values or zero into a tensor, in one place or everywhere."""
    index = random.randrange(len(draft.tensors))
    data, poison = draft.tensors[index].data, random.choice(_POISONS)
    if random.random() < 0.5:
        filled = (poison * (len(data) // len(poison) + 1))[: len(data)]
    else:
        start = random.randrange(max(len(data) - len(poison), 1)) & -4
        filled = (data[:start] + poison + data[start + len(poison) :])[: len(data)]
    _replace_tensor(draft, index, data=filled)


def _fit_data(random: Random, tensor: Weights) -> bytes | None:
    """Return the data resized for the tensor's type and shape, or None if no file can hold such a tensor."""
    type_ = BY_ID[tensor.type_id]
    if tensor.shape[0] % type_.block_weights:
        return None
    n_bytes = type_.row_bytes(tensor.shape[0]) * prod(tensor.shape[1:])
    if not 0 < n_bytes < 2**20:
        return None
    return (tensor.data * (n_bytes // max(len(tensor.data), 1) + 1))[:n_bytes] or random.randbytes(n_bytes)


def _change_weight_type(random: Random, draft: Draft) -> None:
    """Change the type of one tensor or of every matrix, which reinterprets their bytes."""
    type_id = random.choice(tuple(BY_ID))
    one = random.randrange(len(draft.tensors))
    everywhere = random.random() < 0.5
    for index, tensor in enumerate(draft.tensors):
        if index == one or (everywhere and len(tensor.shape) > 1):
            data = _fit_data(random, Weights(tensor.name, type_id, tensor.shape, tensor.data))
            if data is not None:
                _replace_tensor(draft, index, type_id=type_id, data=data)


def _change_shape(random: Random, draft: Draft) -> None:
    index = random.randrange(len(draft.tensors))
    tensor = draft.tensors[index]
    shape = list(tensor.shape)
    kind = random.randrange(4)
    if kind == 0:
        shape.reverse()
    elif kind == 1 and len(shape) < 4:
        shape.append(random.choice((1, 1, 2)))
    else:
        axis = random.randrange(len(shape))
        shape[axis] = max(1, random.choice((shape[axis] - 1, shape[axis] + 1, shape[axis] * 2, shape[axis] // 2, 1)))
    data = _fit_data(random, Weights(tensor.name, tensor.type_id, shape, tensor.data))
    if data is not None:
        _replace_tensor(draft, index, shape=shape, data=data)


def _drop_tensor(random: Random, draft: Draft) -> None:
    if len(draft.tensors) > 1:  # the other changes need one
        del draft.tensors[random.randrange(len(draft.tensors))]


_NAMES = """output.weight rope_freqs.weight blk.0.attn_q.bias blk.1.attn_q.weight blk.0.attn_rot_embd token_types.weight
blk.0.attn_output.bias blk.0.ffn_up.bias blk.0.attn_q_norm.weight output_norm.bias cls.weight blk.0.ffn_gate_inp.weight
blk.0.ffn_up_exps.weight blk.999999999.attn_q.weight evil\x1b[2J.weight \x9b31m\u202e"""  # most are known to llama.cpp


def _rename_tensor(random: Random, draft: Draft) -> None:
    _replace_tensor(draft, random.randrange(len(draft.tensors)), name=random.choice([*_NAMES.split(), "n" * 63]))


def _add_tensor(random: Random, draft: Draft) -> None:
    like = random.choice(draft.tensors)
    draft.tensors.append(Weights(random.choice(_NAMES.split()), like.type_id, like.shape, like.data))


# Vocabularies, merges, special tokens and chat templates

PREFIX = "tokenizer.ggml."

_KINDS = ("gpt2", "llama", "bert", "t5", "rwkv", "plamo2", "gemma4", "none", "no_vocab", "")
_TOKENS = (
    *(b"", b" ", b"\n", b"\xff\xfe", b"\xe2\x96", "\u2581".encode(), b"<0x41>", b"<0xZZ>", b"[EMPTY_3]"),
    *(b"<|im_end|>", b"</s>", b"<|endoftext|>", b"<|eot_id|>", b"\x1b[31m", b"a" * 5000, b"\xef\xb7\x90"),
    *("Ġ".encode(), "日本語".encode(), "\u0301".encode()),
)
_MERGES = (b"a", b" ", b"", b"  ", b"a b c", b"\xff \xfe", b"no such", "Ġ Ġ".encode(), b"a" * 3000 + b" b")
_TEMPLATES = (
    *(b"", b" ", b"{{", b"{% for m in messages %}", b"{{ messages[0].content }}", b"{{ 1/0 }}", b"x" * 5000),
    *(b"{% if true %}", b"\x1b[2J", b"{{ raise_exception('no') }}", b"{{ cycler.__init__.__globals__ }}"),
    b"\xef\xb7\x90",
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


def _rearranged(random: Random, before: list[Any]) -> list[Any]:
    """Reverse, shuffle, empty, double or truncate an array."""
    length = random.choice((1, 2, 16, 255, 256, 290))
    return list(random.choice((before[::-1], random.sample(before, len(before)), [], before * 2, before[:length])))


_IDS = (0, 1, 2, 3, 100, 296, 297, 2**31, 2**32 - 1)  # the vocabulary of tiny_llama has 297 tokens
_special_tokens = " ".join(f"{name}_token_id" for name in _SPECIAL.split())

OF_VOCABULARIES: tuple[Change, ...] = (
    *(_set("tokens", STRING, _one_other(_TOKENS)), _set("tokens", STRING, _one_other(_TOKENS))),
    *(_set("tokens", STRING, _rearranged), _set("token_type", I32, _rearranged), _set("merges", STRING, _rearranged)),
    _set("tokens", STRING, lambda random, tokens: [random.randbytes(8).replace(b"\0", b"0") for _ in tokens]),
    _set("token_type", I32, _one_other((0, 1, 2, 3, 4, 5, 6, 7, -1))),
    _set("token_type", I32, lambda random, types: random.choices(random.choices(range(7), k=3), k=len(types))),
    _set("scores", F32, lambda random, _: random.choices(random.choices(_FLOATS, k=3), k=297)),
    _set("merges", STRING, _one_other(_MERGES)),
    _set("model", STRING, lambda random, _: random.choice(_KINDS).encode()),
    _set("pre", STRING, lambda random, _: random.choice((*PRE_TOKENIZERS, "unknown-split")).encode()),
    *(_set(_special_tokens, U32, lambda random, _: random.choice(_IDS)),) * 2,
    _set(_FLAGS, BOOL, lambda random, _: random.randrange(2)),
    _set("suppress_tokens precompiled_charsmap", I32, lambda random, _: random.choices((-1, 0, 5, 10**6), k=2)),
    _set("chat_template chat_template.tool_use", STRING, lambda random, _: random.choice(_TEMPLATES), "tokenizer."),
)
OF_METADATA: tuple[Change, ...] = (
    *(_set_scalar, _set_scalar, _set_scalar, _add_scalar, _add_scalar, _change_type),
    *(_drop_key, _rename_key, _change_architecture),
)
OF_WEIGHTS: tuple[Change, ...] = (_noise, _noise, _poison, _poison, _change_weight_type)
OF_TENSORS: tuple[Change, ...] = (_change_shape, _change_shape, _drop_tensor, _rename_tensor, _add_tensor)
_GROUPS: tuple[tuple[Change, ...], ...] = (OF_METADATA, OF_WEIGHTS, OF_TENSORS, OF_VOCABULARIES)
