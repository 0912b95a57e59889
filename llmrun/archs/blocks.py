"""Parts that layers of many architectures are made of. Each matrix may have a bias in the file, and is used with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.kernels.plan_ops import Activation, Value

if TYPE_CHECKING:
    from llmrun.archs.hyperparameters import Hyperparameters
    from llmrun.archs.tensors import Tensors
    from llmrun.kernels.plan import Plan


def linear(p: Plan, tensors: Tensors, name: str, x: Value, rows: int) -> Value:
    """x . `name`.weight, plus `name`.bias if there is one."""
    out = p.linear(x, tensors.matrix(f"{name}.weight", x.width, rows))
    bias = tensors.optional_vector(f"{name}.bias", rows)
    return out if bias is None else p.bias(out, bias)


def linear_add(p: Plan, tensors: Tensors, name: str, x: Value, to: Value) -> None:
    """to += x . `name`.weight, plus `name`.bias if there is one."""
    if f"{name}.bias" in tensors:
        p.add(linear(p, tensors, name, x, to.width), to)
    else:
        p.linear_add(x, tensors.matrix(f"{name}.weight", x.width, to.width), to)


def queries_keys_values(
    p: Plan, tensors: Tensors, block: str, x: Value, c: Hyperparameters
) -> tuple[Value, Value, Value]:
    """From a matrix for each, or from one of all three (`attn_qkv`)."""
    rows = {"attn_q": c.query_width, "attn_k": c.kv_width, "attn_v": c.kv_width}
    if f"{block}.attn_qkv.weight" not in tensors:
        q, k, v = (linear(p, tensors, f"{block}.{name}", x, rows[name]) for name in rows)
        return q, k, v
    fused = tensors.matrix(f"{block}.attn_qkv.weight", x.width, sum(rows.values()))
    bias = tensors.optional_vector(f"{block}.attn_qkv.bias", sum(rows.values()))
    values, first = [], 0
    for name, count in rows.items():
        value = p.linear(x, fused.part(first, count))
        own = tensors.optional_vector(f"{block}.{name}.bias", count) if bias is None else bias[first : first + count]
        values.append(value if own is None else p.bias(value, np.ascontiguousarray(own)))
        first += count
    q, k, v = values
    return q, k, v


def gated(p: Plan, tensors: Tensors, block: str, x: Value, size: int, activation: Activation) -> Value:
    """activation(x . gate) * (x . up), of `size` features."""
    gate = linear(p, tensors, f"{block}.ffn_gate", x, size)
    up = linear(p, tensors, f"{block}.ffn_up", x, size)
    return p.gated(gate, up, activation)


def swiglu(p: Plan, tensors: Tensors, block: str, x: Value, size: int) -> Value:
    return gated(p, tensors, block, x, size, Activation.SILU)


def fused_swiglu(p: Plan, tensors: Tensors, block: str, x: Value, size: int) -> Value:
    """The same from one matrix (`ffn_up`), the gate's rows first."""
    fused = tensors.matrix(f"{block}.ffn_up.weight", x.width, 2 * size)
    return p.swiglu(p.linear(x, fused.part(0, size)), p.linear(x, fused.part(size, size)))


def embedding(p: Plan, tensors: Tensors, c: Hyperparameters, scale: float = 1.0) -> Value:
    return p.embed(tensors.matrix("token_embd.weight", c.width, c.vocabulary_size), scale)


def output(p: Plan, tensors: Tensors, h: Value, c: Hyperparameters) -> None:
    """Logits of the wanted rows; by the embedding's matrix where the file has no other."""
    name = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    p.output(h, tensors.matrix(name, c.width, c.vocabulary_size))
