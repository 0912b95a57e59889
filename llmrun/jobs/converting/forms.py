"""The supported forms of models, and their hyperparameters in config.json.

All four forms are variants of Llama, so one table of tensors describes all of them. Keys and tensors are named as in
transformers in a checkpoint, and as in llama.cpp in a GGUF file.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi

import numpy as np
from numpy.typing import NDArray

from llmrun.base.errors import shown
from llmrun.formats.gguf.metadata import MAX_LAYERS
from llmrun.formats.gguf.writer import NewValue
from llmrun.jobs.converting.checkpoint import Checkpoint, JsonObject

_ATTENTION = ("attn_q", "attn_k", "attn_v")
_FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")
_MOST_TOKENS = 1 << 20  # The largest vocabularies have 262,144 tokens.


@dataclass(frozen=True, slots=True)
class Form:
    """A form, described by its differences from the other forms.

    architecture     the architecture's name in GGUF files
    interleaved      True if RoPE is interleaved in GGUF files, so that rows of queries and keys must be reordered
    biases           the matrices that may have a bias
    needs_biases     True if queries, keys and values require a bias
    head_norms       True if queries and keys are normalized
    head_size        the default for a missing head_dim in config.json; None: the width divided by the number of heads
    sliding_window   the default for a missing sliding_window in config.json
    """

    architecture: str
    interleaved: bool = False
    biases: tuple[str, ...] = _ATTENTION
    needs_biases: bool = False
    head_norms: bool = False
    head_size: int | None = None
    sliding_window: int | None = None


_ALL_BIASES = (*_ATTENTION, "attn_output", *_FEED_FORWARD)
FORMS = {
    "LlamaForCausalLM": Form("llama", interleaved=True, biases=_ALL_BIASES),
    "MistralForCausalLM": Form("llama", interleaved=True, biases=_ALL_BIASES, sliding_window=4096),
    "Qwen2ForCausalLM": Form("qwen2", needs_biases=True),
    "Qwen3ForCausalLM": Form("qwen3", head_norms=True, head_size=128),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model, and the attention window in tokens, or None."""

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    context: int
    window: int | None
    tied: bool


def form_of(config: JsonObject) -> Form:
    """Return the form of a model. Raises UnsupportedModel for other forms and for variants that GGUF cannot express."""
    names = config.array("architectures")
    if len(names) != 1 or not isinstance(names[0], str) or names[0] not in FORMS:
        found = ", ".join(shown(str(name), 40) for name in names[:3]) or "missing"
        raise config.unsupported("architectures", f"is {found}, but only {', '.join(FORMS)} can be converted")
    for key, expected in (("hidden_act", "silu"), ("partial_rotary_factor", 1)):
        if config.has(key) and config.values[key] != expected:
            seen = f"is {shown(str(config.values[key]), 40)}, but only {expected} can be converted"
            raise config.unsupported(key, seen)
    return FORMS[names[0]]


def read_shape(config: JsonObject, form: Form) -> Shape:
    """Read the sizes of a model. Raises ModelFileError and UnsupportedModel."""
    layers = config.integer("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise config.bad("num_hidden_layers", f"must be at most {MAX_LAYERS}, not {layers}")
    vocabulary = config.integer("vocab_size")
    if vocabulary > _MOST_TOKENS:  # IDs without a token need placeholders, so memory grows with the size
        raise config.bad("vocab_size", f"must be at most {_MOST_TOKENS:,}, not {vocabulary:,}")
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    head_size = config.integer("head_dim", form.head_size or width // heads)
    if heads % kv_heads or head_size % 2 or not head_size:
        raise config.bad("num_attention_heads", f"of {heads} does not fit {kv_heads} KV heads of size {head_size}")
    return Shape(
        layers=layers,
        width=width,
        feed_forward=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary=vocabulary,
        context=config.integer("max_position_embeddings"),
        window=_window(config, form, layers),
        tied=config.boolean("tie_word_embeddings", False),
    )


def _window(config: JsonObject, form: Form, layers: int) -> int | None:
    """Return the smallest attention window of any layer in tokens, or None if no layer has a window."""
    if "sliding_window" not in config.values and form.sliding_window is not None:
        return form.sliding_window
    window = config.integer("sliding_window", None)
    if form.architecture != "llama":
        first = config.integer("max_window_layers", 0, minimum=0)  # Qwen uses windows from this layer onwards
        used = config.boolean("use_sliding_window", False) and first < layers
        return window if used else None
    return window if form.sliding_window is not None else None  # LlamaForCausalLM ignores the key


def hyperparameters(checkpoint: Checkpoint, form: Form, shape: Shape) -> dict[str, NewValue]:
    """Return the GGUF metadata of the architecture. Raises ModelFileError and UnsupportedModel."""
    config = checkpoint.config
    keys: dict[str, NewValue] = {
        "vocab_size": shape.vocabulary,
        "context_length": min(shape.context, shape.window or shape.context),
        "embedding_length": shape.width,
        "block_count": shape.layers,
        "feed_forward_length": shape.feed_forward,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_size,
        "attention.value_length": shape.head_size,
        "attention.layer_norm_rms_epsilon": config.positive("rms_norm_eps"),
        "rope.dimension_count": shape.head_size,
        "rope.freq_base": _rope(config).positive("rope_theta", config.positive("rope_theta", 10_000.0)),
        **_rope_scaling(config, shape),
    }
    return {f"{form.architecture}.{key}": value for key, value in keys.items()}


def _rope(config: JsonObject) -> JsonObject:
    """Return the settings of RoPE, which version 5 of transformers stores in `rope_parameters`."""
    rope = config.object("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    for key, value in rope.values.items():
        if isinstance(value, dict):
            raise rope.unsupported(key, "has settings for some layers only, which cannot be converted")
    return rope


def _rope_type(rope: JsonObject) -> str:
    return rope.string("rope_type", rope.string("type", "default"))


def _rope_scaling(config: JsonObject, shape: Shape) -> dict[str, NewValue]:
    rope = _rope(config)
    kind = _rope_type(rope)
    if kind in ("default", "llama3"):  # llama3 is expressed by a tensor of factors
        return {}
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.positive("factor")}
    if kind != "yarn":
        seen = f"is '{shown(kind, 40)}', but only default, linear, llama3 and yarn can be converted"
        raise rope.unsupported("rope_type", seen)
    for key, default in (("beta_fast", 32), ("beta_slow", 1), ("truncate", True)):
        if rope.has(key) and rope.values[key] != default:
            seen = f"is {shown(str(rope.values[key]), 40)}, but GGUF files of this form can only have {default}"
            raise rope.unsupported(key, seen)
    for key in ("mscale", "mscale_all_dim"):
        if rope.has(key):
            raise rope.unsupported(key, "cannot be converted")
    factor = rope.positive("factor")
    magnitude = rope.positive("attention_factor", None)
    scaling: dict[str, NewValue] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": rope.integer("original_max_position_embeddings", shape.context),
    }
    if magnitude is not None:
        # attention_factor replaces YaRN's default magnitude, whereas attn_factor multiplies that default.
        scaling["rope.scaling.attn_factor"] = magnitude / (0.1 * log(factor) + 1 if factor > 1 else 1)
    return scaling


def rope_factors(config: JsonObject, shape: Shape) -> NDArray[np.float32] | None:
    """Return the divisors of the frequencies for Llama 3.1, float32[head_size / 2], or None for other models.

    Frequencies with a wavelength above original_context / low_freq_factor are divided by the factor. Frequencies with a
    wavelength below original_context / high_freq_factor are kept, and frequencies in between are interpolated.
    """
    rope = _rope(config)
    if _rope_type(rope) != "llama3":
        return None
    base = rope.positive("rope_theta", config.positive("rope_theta", 10_000.0))
    factor, low, high = (rope.positive(key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise rope.bad("low_freq_factor", f"must be below high_freq_factor ({high:g}), not {low:g}")
    context = rope.integer("original_max_position_embeddings")
    wavelengths = 2 * pi * base ** (np.arange(0, shape.head_size, 2) / shape.head_size)
    kept = np.clip((context / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / factor + kept)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Module:
    """A module of the model: a matrix with an optional bias, or the weights of a norm.

    hf_name, name  the module's names in the checkpoint and in GGUF files
    outputs        the number of rows, or of weights of a norm
    inputs         the number of columns, or None for a norm
    bias           True if the module may have a bias
    heads          the number of heads with rows to reorder, or 0
    """

    hf_name: str
    name: str
    outputs: int
    inputs: int | None = None
    bias: bool = False
    needs_bias: bool = False
    heads: int = 0

    def rows(self) -> NDArray[np.int64]:
        """Return the indices of the rows in the order of the GGUF file, int64[outputs].

        transformers rotates feature i of a head together with feature i + size / 2, whereas GGUF's interleaved RoPE
        rotates features 2 i and 2 i + 1.
        """
        order = np.arange(self.outputs, dtype=np.int64)
        return order.reshape(self.heads, 2, -1).swapaxes(1, 2).reshape(-1) if self.heads else order


def modules_of(form: Form, shape: Shape) -> list[Module]:
    """Return all modules of a model, in the order of the GGUF file."""
    modules = [Module("model.embed_tokens", "token_embd", shape.vocabulary, shape.width)]
    for layer in range(shape.layers):
        modules += _layer(form, shape, f"model.layers.{layer}", f"blk.{layer}")
    modules.append(Module("model.norm", "output_norm", shape.width))
    if not shape.tied:
        modules.append(Module("lm_head", "output", shape.vocabulary, shape.width))
    return modules


def _layer(form: Form, shape: Shape, hf: str, block: str) -> list[Module]:
    width, features = shape.width, shape.feed_forward
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size

    def matrix(hf_name: str, name: str, outputs: int, inputs: int, heads: int = 0) -> Module:
        needs_bias = form.needs_biases and name in _ATTENTION
        heads = heads if form.interleaved else 0
        return Module(
            hf_name=f"{hf}.{hf_name}",
            name=f"{block}.{name}",
            outputs=outputs,
            inputs=inputs,
            bias=name in form.biases,
            needs_bias=needs_bias,
            heads=heads,
        )

    def norm(hf_name: str, name: str, size: int) -> Module:
        return Module(f"{hf}.{hf_name}", f"{block}.{name}", size)

    head_norms = [
        norm("self_attn.q_norm", "attn_q_norm", shape.head_size),
        norm("self_attn.k_norm", "attn_k_norm", shape.head_size),
    ]
    return [
        norm("input_layernorm", "attn_norm", width),
        matrix("self_attn.q_proj", "attn_q", queries, width, shape.heads),
        matrix("self_attn.k_proj", "attn_k", keys, width, shape.kv_heads),
        matrix("self_attn.v_proj", "attn_v", keys, width),
        *(head_norms if form.head_norms else []),
        matrix("self_attn.o_proj", "attn_output", width, queries),
        norm("post_attention_layernorm", "ffn_norm", width),
        matrix("mlp.gate_proj", "ffn_gate", features, width),
        matrix("mlp.up_proj", "ffn_up", features, width),
        matrix("mlp.down_proj", "ffn_down", width, features),
    ]
