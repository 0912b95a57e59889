"""The `llama` architecture: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Also SmolLM2, TinyLlama, Mistral of the first versions, and Llama 1 to 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np

from llmrun.archs.tensors import check_tensors, matrix, vector
from llmrun.errors import UnsupportedModel
from llmrun.gguf.problems import shown
from llmrun.kernels.plan import Plan
from llmrun.kernels.plan_ops import AttentionShape
from llmrun.kernels.rotations import Rope

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.gguf.reader import GGUFFile

# No model is near these; they keep a hostile header from asking for absurd amounts of work.
_MOST_LAYERS = 1024
_MOST_HEADS = 1024
_MOST_WIDTH = 1 << 20
_MOST_CONTEXT = 1 << 27
_MOST_FREQUENCY = 1e9  # in real models it is 1


@dataclass(frozen=True, slots=True)
class Config:
    """The hyperparameters, from the metadata."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary_size: int
    train_context: int
    norm_epsilon: float
    rope_dimensions: int
    rope_base: float
    rope_linear_factor: float

    @classmethod
    def read(cls, file: GGUFFile) -> Self:
        """Raises BadGGUF and UnsupportedModel."""
        _refuse_variants(file)
        width = file.integer("llama.embedding_length", minimum=1, maximum=_MOST_WIDTH)
        heads = file.integer("llama.attention.head_count", minimum=1, maximum=_MOST_HEADS)
        head_size = file.integer("llama.attention.key_length", width // heads, minimum=1, maximum=_MOST_WIDTH)
        kv_heads = file.integer("llama.attention.head_count_kv", heads, minimum=1, maximum=heads)
        value_size = file.integer("llama.attention.value_length", width // heads, minimum=1, maximum=_MOST_WIDTH)
        if heads % kv_heads:
            raise file.bad("llama.attention.head_count_kv", f"{kv_heads} seen, must divide {heads} heads")
        if head_size != value_size:
            raise _unsupported(file, f"keys of {head_size} and values of {value_size} features, they must be equal")
        if head_size % 16:
            raise _unsupported(file, f"heads of {head_size} features, must be a multiple of 16")
        rope_dimensions = file.integer("llama.rope.dimension_count", head_size, minimum=2, maximum=head_size)
        if rope_dimensions % 2:
            raise file.bad("llama.rope.dimension_count", f"{rope_dimensions} seen, must be even")
        return cls(
            layers=file.integer("llama.block_count", minimum=1, maximum=_MOST_LAYERS),
            width=width,
            feed_forward=file.integer("llama.feed_forward_length", minimum=1, maximum=_MOST_WIDTH),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            vocabulary_size=len(file.strings("tokenizer.ggml.tokens")),
            train_context=file.integer("llama.context_length", minimum=1, maximum=_MOST_CONTEXT),
            norm_epsilon=_positive(file, "llama.attention.layer_norm_rms_epsilon", None),
            rope_dimensions=rope_dimensions,
            rope_base=_positive(file, "llama.rope.freq_base", 10000.0),
            rope_linear_factor=_linear_factor(file),
        )


def check(file: GGUFFile) -> Config:
    """The config, with every tensor's shape held against it. Raises BadGGUF and UnsupportedModel."""
    c = Config.read(file)
    query, key = c.heads * c.head_size, c.kv_heads * c.head_size
    required: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (c.width, c.vocabulary_size),
        "output_norm.weight": (c.width,),
    }
    for layer in range(c.layers):
        block = f"blk.{layer}"
        required |= {
            f"{block}.attn_norm.weight": (c.width,),
            f"{block}.attn_q.weight": (c.width, query),
            f"{block}.attn_k.weight": (c.width, key),
            f"{block}.attn_v.weight": (c.width, key),
            f"{block}.attn_output.weight": (query, c.width),
            f"{block}.ffn_norm.weight": (c.width,),
            f"{block}.ffn_gate.weight": (c.width, c.feed_forward),
            f"{block}.ffn_up.weight": (c.width, c.feed_forward),
            f"{block}.ffn_down.weight": (c.feed_forward, c.width),
        }
    optional = {"output.weight": (c.width, c.vocabulary_size), "rope_freqs.weight": (c.rope_dimensions // 2,)}
    check_tensors(file, required, optional)
    return c


def plan(file: GGUFFile, config: Config) -> Plan:
    """The model as a plan."""
    c = config
    p, shape, rope = Plan(), AttentionShape(c.heads, c.kv_heads, c.head_size), Rope(_frequencies(file, c))
    x = p.embed(matrix(file, "token_embd.weight"))
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = p.rmsnorm(x, vector(file, f"{block}.attn_norm.weight"), c.norm_epsilon)
        q = p.linear(h, matrix(file, f"{block}.attn_q.weight"))
        k = p.linear(h, matrix(file, f"{block}.attn_k.weight"))
        v = p.linear(h, matrix(file, f"{block}.attn_v.weight"))
        a = p.attention(q, k, v, shape, rope)
        p.linear_add(a, matrix(file, f"{block}.attn_output.weight"), to=x)
        h = p.rmsnorm(x, vector(file, f"{block}.ffn_norm.weight"), c.norm_epsilon)
        gate = p.linear(h, matrix(file, f"{block}.ffn_gate.weight"))
        up = p.linear(h, matrix(file, f"{block}.ffn_up.weight"))
        p.linear_add(p.swiglu(gate, up), matrix(file, f"{block}.ffn_down.weight"), to=x)
    tied = "output.weight" not in file.tensors
    h = p.rmsnorm_wanted(x, vector(file, "output_norm.weight"), c.norm_epsilon)
    p.output(h, matrix(file, "token_embd.weight" if tied else "output.weight"))
    return p


def _frequencies(file: GGUFFile, config: Config) -> NDArray[np.float64]:
    """Radians a position, float64[pairs]. Llama 3.1 divides each by a factor that the file carries as a tensor."""
    exponents = np.arange(config.rope_dimensions // 2, dtype=np.float64) * 2 / config.rope_dimensions
    factors = np.ones(1, np.float32)
    if "rope_freqs.weight" in file.tensors:
        factors = vector(file, "rope_freqs.weight")
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise file.bad("rope_freqs.weight", "a factor that is not positive and finite")
    with np.errstate(over="ignore"):
        frequencies = config.rope_base**-exponents / config.rope_linear_factor / factors.astype(np.float64)
    if frequencies.max() > _MOST_FREQUENCY:
        where = "llama.rope.freq_base, its scaling and rope_freqs.weight"
        raise file.bad(where, f"{frequencies.max():g} radians a position, must be at most {_MOST_FREQUENCY:g}")
    return frequencies


def _refuse_variants(file: GGUFFile) -> None:
    """What shares the architecture's name and would be computed wrongly."""
    if file.integer("llama.expert_count", 0, minimum=0):
        raise _unsupported(file, f"a mixture of {file.integer('llama.expert_count')} experts")
    for key in ("llama.attention.head_count", "llama.attention.head_count_kv", "llama.feed_forward_length"):
        if isinstance(file.metadata.get(key), np.ndarray):
            raise _unsupported(file, f"a {key} for each layer")
    if file.number("llama.rope.scaling.attn_factor", 1.0) != 1.0:
        raise _unsupported(file, "a rope.scaling.attn_factor")


def _linear_factor(file: GGUFFile) -> float:
    """What positions are divided by. `llama.rope.scale_linear` is the old name of linear scaling's factor."""
    kind = file.string("llama.rope.scaling.type", "")
    if kind == "none":
        return 1.0
    if kind not in ("", "linear"):
        raise _unsupported(file, f"rope scaling '{shown(kind)}', supported are none, linear and Llama 3.1's")
    old = _positive(file, "llama.rope.scale_linear", 1.0)
    return _positive(file, "llama.rope.scaling.factor", old)


def _positive(file: GGUFFile, key: str, default: float | None) -> float:
    value = file.number(key) if default is None else file.number(key, default)
    if value <= 0:
        raise file.bad(key, f"{value} seen, must be above 0")
    return value


def _unsupported(file: GGUFFile, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model not supported: {shown(str(file.path), 300)}: {what}", hint="This model may run with --backend llama."
    )
