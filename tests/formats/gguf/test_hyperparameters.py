"""Tests that keys and tensor types that llama.cpp would assert on become our own errors first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from llmrun.base.errors import BadGGUF
from llmrun.formats.gguf.reader import GGUFFile
from llmrun.formats.quants.registry import BY_ID
from tests.support.gguf.gguf_bytes import F32, I32, U32, RawGGUF, RawTensor, numbers, scalar, string
from tests.support.gguf.gguf_memory import read_gguf


def opened(
    keys: Mapping[str, bytes], *, architecture: str = "llama", tensors: list[RawTensor] | None = None
) -> GGUFFile:
    written: dict[str | bytes, bytes] = {"general.architecture": string(architecture)}
    written |= {f"{architecture}.{key}": value for key, value in keys.items()}
    return read_gguf(RawGGUF(written, tensors or []).build(), Path("model.gguf"))


def u32(value: int) -> bytes:
    return scalar(U32, value)


GOOD: list[dict[str, bytes]] = [
    {},
    {"block_count": u32(1)},
    {"block_count": u32(512), "nextn_predict_layers": u32(512)},
    {"expert_count": u32(0), "expert_used_count": u32(0)},
    {"expert_count": u32(8), "expert_used_count": u32(8)},
    {"expert_count": u32(1024), "expert_used_count": numbers(U32, [0, 6, 6])},
    {"expert_count": u32(8), "expert_used_count": u32(2), "expert_group_count": u32(1)},
    {
        "expert_count": u32(8),
        "expert_used_count": u32(2),
        "expert_group_count": u32(4),
        "expert_group_used_count": u32(3),
    },
    {"attention.layer_norm_rms_epsilon": scalar(F32, 0.0)},
    *({"rope.scaling.type": string(kind)} for kind in ("none", "linear", "yarn", "longrope")),
]


@pytest.mark.parametrize("keys", GOOD)
def test_what_models_say_is_accepted(keys: Mapping[str, bytes]) -> None:
    assert opened(keys).string("general.architecture") == "llama"


BAD: list[tuple[dict[str, bytes], str]] = [
    ({"block_count": u32(0)}, r"llama\.block_count: must be at least 1, not 0"),
    ({"block_count": u32(513)}, r"llama\.block_count: must be at most 512, not 513"),
    ({"block_count": string("many")}, r"llama\.block_count: must be an integer, not str"),
    ({"block_count": u32(2), "nextn_predict_layers": u32(3)}, r"nextn_predict_layers: must be at most 2, not 3"),
    ({"expert_count": u32(1025)}, r"expert_count: must be at most 1024, not 1025"),
    ({"expert_count": scalar(I32, -1)}, r"expert_count: must be at least 0, not -1"),
    ({"expert_count": u32(8)}, r"expert_used_count: must be 1 to 8, not 0, because llama\.expert_count is 8"),
    ({"expert_count": u32(8), "expert_used_count": u32(9)}, r"expert_used_count: must be 1 to 8, not 9"),
    ({"expert_used_count": u32(2)}, r"expert_used_count: must be 0, not 2, because llama\.expert_count is 0"),
    ({"expert_used_count": numbers(U32, [0, 2])}, r"expert_used_count: must be 0, not 2"),
    ({"expert_group_count": u32(1)}, r"expert_group_count: must be at most 0, not 1"),
    (
        {"expert_count": u32(8), "expert_used_count": u32(2), "expert_group_count": u32(3)},
        r"expert_group_count: 8 experts cannot be divided into 3 equal groups",
    ),
    (
        {
            "expert_count": u32(8),
            "expert_used_count": u32(2),
            "expert_group_count": u32(2),
            "expert_group_used_count": u32(2),
        },
        r"expert_group_used_count: must be at most 1, not 2",
    ),
    ({"attention.layer_norm_rms_epsilon": scalar(F32, -1e-5)}, r"layer_norm_rms_epsilon: must be 0 or more, not -.*"),
    ({"attention.layer_norm_epsilon": scalar(F32, float("nan"))}, r"layer_norm_epsilon: must be finite, not nan"),
    (
        {"rope.scaling.type": string("\x1b[2Jsu")},
        r"scaling\.type: must be none or linear or yarn or longrope, not '\\x1b\[2Jsu",
    ),
]


@pytest.mark.parametrize(("keys", "words"), BAD)
def test_what_llama_cpp_asserts_is_refused(keys: Mapping[str, bytes], words: str) -> None:
    with pytest.raises(BadGGUF, match=f"model.gguf: .*{words}") as caught:
        opened(keys)
    assert str(caught.value).isprintable()


def test_the_rules_hold_for_every_architecture_but_half_models() -> None:
    with pytest.raises(BadGGUF, match=r"qwen3moe\.expert_used_count"):
        opened({"expert_count": u32(8)}, architecture="qwen3moe")
    opened({"block_count": u32(0)}, architecture="clip")
    opened({"expert_count": u32(1)}, architecture="hunyuan-dense")


# Types of tensors: 0 F32, 1 F16, 2 Q4_0, 8 Q8_0, 9 Q8_1, 15 Q8_K, 26 I32, 28 F64, 30 BF16


def tensor(name: str, type_id: int) -> RawTensor:
    return RawTensor(name, type_id, (256,), BY_ID[type_id].row_bytes(256))


@pytest.mark.parametrize(
    ("name", "type_id"),
    [
        *(("blk.0.attn_norm.weight", type_id) for type_id in (0, 1, 30)),
        *(("blk.0.attn_q.bias", type_id) for type_id in (0, 1, 30)),
        *(("blk.0.attn_q.weight", type_id) for type_id in (0, 1, 2, 8, 30)),
        ("rope_freqs.weight", 0),
        ("blk.0.ffn_gate_tid2eid.weight", 26),
        ("positions", 26),
    ],
)
def test_types_that_fit_a_tensors_part_are_accepted(name: str, type_id: int) -> None:
    assert name in opened({}, tensors=[tensor(name, type_id)]).tensors


@pytest.mark.parametrize(
    ("name", "type_id", "words"),
    [
        ("blk.0.attn_norm.weight", 8, "must have type F32 or F16 or BF16, not Q8_0"),
        ("blk.0.attn_q.bias", 2, "must have type F32 or F16 or BF16, not Q4_0"),
        ("output_norm.weight", 26, "must have type F32 or F16 or BF16, not I32"),
        ("rope_freqs.weight", 1, "must have type F32, not F16"),
        ("rope_factors_long.weight", 8, "must have type F32, not Q8_0"),
        *(("blk.0.attn_q.weight", type_id, "is not for weights") for type_id in (9, 15, 24, 25, 26, 27, 28)),
    ],
)
def test_types_that_no_product_is_made_of_are_refused(name: str, type_id: int, words: str) -> None:
    with pytest.raises(BadGGUF, match=f"{name}: .*{words}"):
        opened({}, tensors=[tensor(name, type_id)])
