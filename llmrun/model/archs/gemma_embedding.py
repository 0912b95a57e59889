"""The `gemma-embedding` architecture: gemma3 without a causal mask and without logits."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING

from llmrun.model.archs.gemma3 import window_rope_of
from llmrun.model.archs.parts.architecture import (
    MOST_WIDTH,
    Architecture,
    Hyperparameters,
    PlanWriter,
    refuse_experts,
    windows_of,
)
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing
from llmrun.model.plan.ops.activations import Activation

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of gemma-embedding. A window of 0 means that rows attend to the whole sequence.

    `dense` is the number of features between the two matrices that follow pooling, or 0 if no matrices follow pooling.
    """

    windows: tuple[int, ...]
    window_base: float
    dense: int


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    return Config.of(
        keys,
        encoder=True,
        windows=windows_of(keys, every=6),
        window_base=keys.positive("rope.freq_base_swa", 10000.0),
        dense=keys.integer("dense_2_feat_out", 0, minimum=0, maximum=MOST_WIDTH),
    )


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope, window_rope = w.rope(Pairing.NEOX), window_rope_of(w, c, c.window_base)
    x = w.embed(scale=sqrt(c.width))
    for layer, window in enumerate(c.windows):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        q, k, v = w.queries_keys_values(block, h)
        q, k = w.headnorm(f"{block}.attn_q_norm", q), w.headnorm(f"{block}.attn_k_norm", k)
        shape = replace(c.attention(), around=window // 2) if window else c.attention()
        a = w.plan.attention(q, k, v, shape, window_rope if window else rope)
        y = w.linear(f"{block}.attn_output", a, c.width)
        w.plan.add(w.rmsnorm(f"{block}.post_attention_norm", y), to=x)
        h = w.rmsnorm(f"{block}.ffn_norm", x)
        y = w.linear(f"{block}.ffn_down", w.gated(block, h, Activation.GELU), c.width)
        w.plan.add(w.rmsnorm(f"{block}.post_ffw_norm", y), to=x)
    w.plan.hidden = _dense(w, c, w.rmsnorm_wanted("output_norm", x))
    w.tensors.leave_out("output.weight")  # llama.cpp loads this matrix, but computes no logits
    return w.finished()


def _dense(w: PlanWriter, c: Config, x: Value) -> Value:
    """Append the matrices that Sentence Transformers applies after pooling.

    The matrices are linear, so the mean of the outputs equals the output for the mean.
    """
    if "dense_2.weight" not in w.tensors:
        return x
    return w.linear("dense_3", w.linear("dense_2", x, c.dense), c.width)


ARCHITECTURE = Architecture(
    "gemma-embedding", read_config, plan, models="EmbeddingGemma", notes="embeddings, sliding window both ways"
)
