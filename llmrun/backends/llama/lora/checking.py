"""Checks that llama.cpp applies all parts of an adapter. It leaves out parts that it does not apply without a word."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from llmrun.base.errors import UnsupportedModel
from llmrun.formats.gguf.problems import shown

if TYPE_CHECKING:
    from llmrun.formats.gguf.adapter import AdapterFile
    from llmrun.formats.gguf.reader import GGUFFile

# Tensors by which llama.cpp multiplies with ggml_mul_mat instead of build_lora_mm, in any of its src/models/*.cpp of
# llama-cpp-python 0.3.36, and tables from which it looks up rows without adapters.
_NOT_APPLIED: Final = (
    *("attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_kv_b"),
    *("ffn_latent_down", "ffn_latent_up", "per_layer_model_proj", "per_layer_token_embd"),
    *("altup_proj", "altup_router", "altup_unembd_proj", "indexer.attn_k", "indexer.attn_q_b", "indexer.proj"),
    *("ssm_f_a", "ssm_f_b", "ssm_g_a", "ssm_g_b", "ssm_beta", "time_mix_w1", "time_mix_w2", "time_mix_a1"),
    *("time_mix_a2", "time_mix_g1", "time_mix_g2", "time_mix_v1", "time_mix_v2", "time_mix_decay_w1"),
    "time_mix_decay_w2",
)

_NOT_IN_LATENT: Final = ("attn_q", "output")  # the same, in models that compress keys and values (MLA)


def check_applied(adapters: Iterable[AdapterFile], model: GGUFFile) -> None:
    """Raise UnsupportedModel if llama.cpp would ignore a part of an adapter."""
    for adapter in adapters:
        for name in adapter.pairs:
            if not is_applied(name, model):
                raise UnsupportedModel(
                    f"tensor not supported: {shown(str(adapter.file.path), 300)}: {shown(name)}: llama.cpp does not "
                    "apply adapters to it",
                    hint="try --backend cpu",
                )


def is_applied(name: str, model: GGUFFile) -> bool:
    """Return whether llama.cpp applies adapters to this tensor of a model."""
    kind = name.removesuffix(".weight").removeprefix("blk.").partition(".")[2] or name.removesuffix(".weight")
    is_latent = any(each.endswith("attn_kv_a_mqa.weight") for each in model.tensors)
    return kind not in _NOT_APPLIED and not (is_latent and kind in _NOT_IN_LATENT)
