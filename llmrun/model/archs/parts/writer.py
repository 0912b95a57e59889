"""A writer that architectures use to build their plans from the tensors of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmrun.model.archs.parts.tensors import Tensors
from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.archs.parts.hyperparameters import Hyperparameters
    from llmrun.model.plan.elementary import Pairing, Rope
    from llmrun.model.plan.shapes import AttentionShape


class PlanWriter:
    """A writer that adds ops to `plan`. Methods accept the names of weight tensors, without the suffix `.weight`.

    If the file also contains a tensor with the suffix `.bias`, that bias is added. All methods raise BadGGUF and
    UnsupportedModel for tensors that do not match the config.
    """

    def __init__(self, file: GGUFFile, config: Hyperparameters) -> None:
        self.plan = Plan()
        self.tensors = Tensors(file)
        self._config = config

    def finished(self) -> Plan:
        self.tensors.finish()
        return self.plan

    def leave_out_layers(self, first: int, count: int) -> None:
        """Accept the tensors of `count` layers, although no op uses the tensors."""
        self.tensors.leave_out(*(f"blk.{layer}." for layer in range(first, first + count)))

    @property
    def epsilon(self) -> float:
        return self._config.norm_epsilon

    # --- whole rows ---

    def embed(self, scale: float = 1.0, name: str = "token_embd") -> Value:
        c = self._config
        return self.plan.embed(self.tensors.matrix(f"{name}.weight", c.width, c.vocabulary_size), scale)

    def embed_positions(self) -> Value:
        c = self._config
        return self.plan.embed_positions(self.tensors.matrix("position_embd.weight", c.width, c.train_context))

    def rmsnorm(self, name: str, x: Value) -> Value:
        return self.plan.rmsnorm(x, self.tensors.vector(f"{name}.weight", x.width), self.epsilon)

    def headnorm(self, name: str, x: Value, head_size: int | None = None) -> Value:
        """Apply RMSNorm to each head, with the same weight for all heads.

        Pass `head_size` if the size differs between layers.
        """
        weight = self.tensors.vector(f"{name}.weight", head_size or self._config.head_size)
        return self.plan.headnorm(x, weight, self.epsilon)

    def layernorm(self, name: str, x: Value) -> Value:
        weight = self.tensors.vector(f"{name}.weight", x.width)
        bias = self.tensors.optional_vector(f"{name}.bias", x.width)
        return self.plan.layernorm(x, weight, bias, self.epsilon)

    def rmsnorm_wanted(self, name: str, x: Value) -> Value:
        return self.plan.rmsnorm_wanted(x, self.tensors.vector(f"{name}.weight", x.width), self.epsilon)

    def layernorm_wanted(self, name: str, x: Value) -> Value:
        weight = self.tensors.vector(f"{name}.weight", x.width)
        return self.plan.layernorm_wanted(
            x, weight, self.tensors.optional_vector(f"{name}.bias", x.width), self.epsilon
        )

    # --- matrices ---

    def linear(self, name: str, x: Value, rows: int) -> Value:
        out = self.plan.linear(x, self.tensors.matrix(f"{name}.weight", x.width, rows))
        return self._biased(f"{name}.bias", out)

    def linear_add(self, name: str, x: Value, to: Value) -> None:
        """Add x . weight + bias to `to`."""
        if f"{name}.bias" in self.tensors:
            self.plan.add(self.linear(name, x, to.width), to)
        else:
            self.plan.linear_add(x, self.tensors.matrix(f"{name}.weight", x.width, to.width), to)

    def head_linear(self, name: str, x: Value, rows: int, heads: int) -> Value:
        """Multiply each head of x by its own matrix with `rows` outputs."""
        weight = self.tensors.experts(f"{name}.weight", x.width // heads, rows, heads)
        return self.plan.head_linear(x, weight, heads)

    def queries_keys_values(
        self, block: str, x: Value, shape: AttentionShape | None = None
    ) -> tuple[Value, Value, Value]:
        """Compute queries, keys and values from three matrices, or from one fused matrix (`attn_qkv`).

        Pass `shape` if the shape differs between layers.
        """
        s = shape or self._config.attention()
        kv_width = s.kv_heads * s.head_size
        rows = {"attn_q": s.heads * s.head_size, "attn_k": kv_width, "attn_v": kv_width}
        if f"{block}.attn_qkv.weight" not in self.tensors:
            q, k, v = (self.linear(f"{block}.{name}", x, rows[name]) for name in rows)
            return q, k, v
        fused = self.tensors.matrix(f"{block}.attn_qkv.weight", x.width, sum(rows.values()))
        bias = self.tensors.optional_vector(f"{block}.attn_qkv.bias", sum(rows.values()))
        values, first = [], 0
        for name, count in rows.items():
            value = self.plan.linear(x, fused.part(first, count))
            if bias is None:
                value = self._biased(f"{block}.{name}.bias", value)
            else:
                value = self.plan.bias(value, np.ascontiguousarray(bias[first : first + count]))
            values.append(value)
            first += count
        q, k, v = values
        return q, k, v

    def queries(self, block: str, x: Value, shape: AttentionShape) -> Value:
        """Compute queries without keys and values."""
        rows, fused = shape.heads * shape.head_size, f"{block}.attn_qkv.weight"
        if fused not in self.tensors:
            return self.linear(f"{block}.attn_q", x, rows)
        all_rows = rows + 2 * shape.kv_heads * shape.head_size
        return self.plan.linear(x, self.tensors.matrix(fused, x.width, all_rows).part(0, rows))

    def gated(self, block: str, x: Value, activation: Activation, size: int | None = None) -> Value:
        """Compute activation(x . gate) * (x . up). Pass `size` (in features) if the size differs between layers."""
        size = size or self._config.feed_forward
        gate = self.linear(f"{block}.ffn_gate", x, size)
        return self.plan.gated(gate, self.linear(f"{block}.ffn_up", x, size), activation)

    def swiglu(self, block: str, x: Value) -> Value:
        return self.gated(block, x, Activation.SILU)

    def fused_swiglu(self, block: str, x: Value) -> Value:
        """Compute SwiGLU from one matrix (`ffn_up`), which contains the rows of gate followed by the rows of up."""
        size = self._config.feed_forward
        fused = self.tensors.matrix(f"{block}.ffn_up.weight", x.width, 2 * size)
        return self.plan.swiglu(self.plan.linear(x, fused.part(0, size)), self.plan.linear(x, fused.part(size, size)))

    # --- logits ---

    def output_after_rmsnorm(self, x: Value, scale: float = 1.0, norm: str = "output_norm") -> None:
        """Compute the logits of the requested rows, times `scale`."""
        weight = self.tensors.vector(f"{norm}.weight", x.width)
        h = self.plan.rmsnorm_wanted(x, _scaled(weight, scale), self.epsilon)
        self._output(h, scale)

    def output_after_layernorm(self, x: Value, scale: float = 1.0) -> None:
        weight = self.tensors.vector("output_norm.weight", x.width)
        bias = self.tensors.optional_vector("output_norm.bias", x.width)
        scaled_bias = None if bias is None else _scaled(bias, scale)
        h = self.plan.layernorm_wanted(x, _scaled(weight, scale), scaled_bias, self.epsilon)
        self._output(h, scale)

    def _output(self, h: Value, scale: float) -> None:
        """Compute the logits from h, which is `scale` times the hidden state."""
        self.plan.hidden, self.plan.hidden_scale = h, scale
        self.plan.output(h, self.tensors.matrix(f"{self.output_name}.weight", h.width, self._config.vocabulary_size))

    @property
    def output_name(self) -> str:
        """The name of the output matrix, or of the embedding matrix for files without an output matrix."""
        return "output" if "output.weight" in self.tensors else "token_embd"

    # --- rotary positions ---

    def rope(self, pairing: Pairing) -> Rope:
        """Return the Rope, including any frequency factors in the file."""
        return self._config.rope.rope_of(self.tensors, pairing)

    def _biased(self, name: str, x: Value) -> Value:
        bias = self.tensors.optional_vector(name, x.width)
        return x if bias is None else self.plan.bias(x, bias)


def _scaled(weight: NDArray[np.float32], scale: float) -> NDArray[np.float32]:
    """Scale the weight of the last norm. The logits are linear in this weight, so scaling needs no extra op."""
    return weight if scale == 1.0 else weight * np.float32(scale)
