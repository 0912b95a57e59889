"""Architectures: their declaration and choice, the hyperparameters that all of them share, and the writer of plans.

Each file of `model/archs/` declares one architecture, and is imported only for a model of that architecture. Otherwise,
planning one model would import sixty files. The limits of the hyperparameters protect against malicious headers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from msgspec import Struct, structs

from llmrun.base.errors import UnsupportedModel, shown
from llmrun.model.archs.parts.keys import MOST_LAYERS, VECTOR, Keys
from llmrun.model.archs.parts.rope_settings import RopeSettings
from llmrun.model.archs.parts.tensors import Tensors
from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.shapes import ALL, AttentionShape
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.elementary import Pairing, Rope


def _no_head(file: GGUFFile, config: Any) -> Plan | None:
    return None


class Windows(Struct, frozen=True):
    """The layers that have a sliding window, if the file does not list them.

    every            the last layer of each `every` layers has no window; 0 if all layers have a window
    default          the window in tokens if the file does not specify one
    first            True if the first layer of each `every` layers has no window, instead of the last layer
    only_with        the number of layers of the only models with windows; 0 if all models have windows
    unused           True if the window in the file is never used
    """

    every: int = 0
    default: int = 0
    first: bool = False
    only_with: int = 0
    unused: bool = False


class Architecture(Struct, frozen=True):
    """An architecture that llmrun supports.

    name         the value of `general.architecture`. The module has the same name, with "_" for "-"
    read_config  a function that reads the config from a file
    plan         a function that builds the plan, and checks every tensor against the config
    models       the common names of the architecture's models
    notes        the unusual features of the architecture
    draft_plan   a function that builds the plan of the draft head, or returns None for files without a draft head
    windows      the layers that have a sliding window in llama.cpp, for sizes that are computed without a plan
    """

    name: str
    read_config: Callable[[GGUFFile], Any]
    plan: Callable[[GGUFFile, Any], Plan]
    models: str
    notes: str = ""
    draft_plan: Callable[[GGUFFile, Any], Plan | None] = _no_head
    windows: Windows | None = None


# Error messages list only these architectures, because the full list would be too long.
_KNOWN_BEST = ("llama", "qwen3", "gemma3", "phi3")


def architecture_of(file: GGUFFile) -> Architecture:
    """Return the architecture of a file. Raises UnsupportedModel if the architecture is not registered."""
    name = file.string("general.architecture")
    found = architecture_named(name)
    if found is None:
        raise UnsupportedModel(
            f"architecture not supported: {shown(str(file.path), 300)}: '{shown(name)}'; the CPU engine supports "
            f"{len(_modules())} architectures, such as {', '.join(_KNOWN_BEST)}",
            hint="This model may run with --backend llama. docs/models.md lists all architectures.",
        )
    return found


def architecture_named(name: str) -> Architecture | None:
    """Return the architecture with the given name, or None if llmrun does not support it."""
    module = name.replace("-", "_")
    found = _declared_in(module) if module in _modules() else None
    return found if found is not None and found.name == name else None


def architectures() -> dict[str, Architecture]:
    """Import every file of `model/archs/`, and return all architectures by name."""
    found = [_declared_in(module) for module in sorted(_modules())]
    return {architecture.name: architecture for architecture in found}


@cache
def _modules() -> frozenset[str]:
    """Return the names of the files in `model/archs/`, each of which declares an architecture."""
    folder = Path(__file__).parent.parent
    return frozenset(found.name for found in iter_modules([str(folder)]) if not found.ispkg)


def _declared_in(module: str) -> Architecture:
    found: Architecture = import_module(f"llmrun.model.archs.{module}").ARCHITECTURE
    return found


def table() -> str:
    """Return the table of architectures for docs/models.md, with the columns name, models and notes."""
    rows = [("`general.architecture`", "models", "notes"), ("---", "---", "---")]
    rows += [(f"`{name}`", found.models, found.notes) for name, found in architectures().items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def plan_of_header(file: GGUFFile) -> Plan:
    """Return the plan of a model for computing sizes, without reading weights. Raises BadGGUF and UnsupportedModel."""
    architecture = architecture_of(file)
    made_up = file.with_placeholder_weights()
    return architecture.plan(made_up, architecture.read_config(made_up))


def draft_plan_of_header(file: GGUFFile) -> Plan | None:
    """Return the plan of a model's draft head for computing sizes, or None if the file contains no draft head."""
    architecture = architecture_of(file)
    made_up = file.with_placeholder_weights()
    return architecture.draft_plan(made_up, architecture.read_config(made_up))


# These limits, far above the values in real models, prevent malicious headers from causing too much work.
MOST_HEADS: Final = 1024
MOST_WIDTH: Final = 1 << 20
MOST_CONTEXT: Final = 1 << 27

RMS_EPSILON: Final = "attention.layer_norm_rms_epsilon"
LAYER_NORM_EPSILON: Final = "attention.layer_norm_epsilon"


class Hyperparameters(Struct, frozen=True):
    """The sizes of the layers, the epsilon of the norms, the RoPE settings, and the presence of a causal mask.

    Architectures may add fields in a subclass.
    """

    layers: int
    width: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary_size: int
    train_context: int
    norm_epsilon: float
    rope: RopeSettings
    is_causal: bool  # True if rows attend to earlier positions only

    @classmethod
    def of(cls, keys: Keys, *, kv_heads: int | None = None, feed_forward: int | None = None, **more: Any) -> Self:
        """Read the hyperparameters of a model whose layers all have the same sizes.

        Pass `kv_heads` if some layers have no KV heads, and `feed_forward` if some layers have no dense feed-forward.
        `more` is passed to `of_largest`. Raises BadGGUF and UnsupportedModel.
        """
        if kv_heads is None:
            kv_heads = keys.of_all_layers("attention.head_count_kv", heads_of(keys), minimum=1, maximum=heads_of(keys))
        if feed_forward is None:
            feed_forward = feed_forward_of(keys)
        config = cls.of_largest(keys, kv_heads=kv_heads, feed_forward=feed_forward, **more)
        _refuse_other_heads_in_windows(keys, config.head_size, config.rope.dimensions)
        return config

    @classmethod
    def of_largest(
        cls,
        keys: Keys,
        *,
        epsilon: str = RMS_EPSILON,
        kv_heads: int,
        feed_forward: int,
        head_size: int | None = None,
        unused_layers: int = 0,
        encoder: bool = False,
        **more: Any,
    ) -> Self:
        """Read the hyperparameters of a model whose layers have different sizes. Raises BadGGUF and UnsupportedModel.

        The head counts and RoPE settings come from layers without a sliding window. `kv_heads` and `feed_forward`
        are the maximum over all layers. Pass `head_size` if keys and values have different sizes. `unused_layers` is
        the number of layers at the end that the plan omits. The layers of an `encoder` have no causal
        mask. `more` contains the fields of a subclass.
        """
        if not (encoder or keys.flag("attention.causal", default=True)):
            raise keys.unsupported(f"the model does not generate text ({keys.name('attention.causal')} is false)")
        if layers_ahead(keys) != unused_layers:
            raise keys.unsupported("layers for multi-token prediction")
        width, heads = width_of(keys), heads_of(keys)
        if heads % kv_heads:
            raise keys.bad(
                "attention.head_count_kv", f"must be a divisor of {heads}, the number of heads, not {kv_heads}"
            )
        if head_size is None:
            head_size = head_size_of(keys)
        train_context = keys.integer("context_length", minimum=1, maximum=MOST_CONTEXT)
        return cls(
            layers=layers_of(keys) - unused_layers,
            width=width,
            feed_forward=feed_forward,
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            vocabulary_size=len(keys.file.strings("tokenizer.ggml.tokens")),
            train_context=train_context,
            norm_epsilon=keys.positive(epsilon),
            rope=RopeSettings.of(keys, head_size, train_context),
            is_causal=not encoder,
            **more,
        )

    def with_sections_of(self, keys: Keys, *, interleaved: bool = True) -> Self:
        """Return the hyperparameters with the sections of M-RoPE. Raises BadGGUF and UnsupportedModel."""
        return structs.replace(self, rope=self.rope.with_sections_of(keys, self.head_size, interleaved=interleaved))

    def attention(self, window: int = 0) -> AttentionShape:
        """Return the attention shape of a layer with the given window (0 means all earlier positions).

        Without a causal mask, rows attend to the whole sequence.
        """
        around = None if self.is_causal else ALL
        return AttentionShape(self.heads, self.kv_heads, self.head_size, window, around=around)


def refuse_experts(keys: Keys) -> None:
    """Raise UnsupportedModel if the model has experts. Architectures without support for experts call this function."""
    experts = keys.integer("expert_count", 0, minimum=0, maximum=MOST_WIDTH)
    if experts:
        raise keys.unsupported(f"a mixture of {experts} experts")


def windows_of(keys: Keys, *, every: int, default: int | None = None) -> tuple[int, ...]:
    """Return the window size of each layer. A window includes the row's own position; 0 means all earlier positions.

    Every `every`-th layer has no window and all other layers have a window, unless the file specifies another period or
    a value per layer. If `default` is None, the file must specify the window. If `default` is 0 and the file does not
    specify a window, no layer has a window.
    """
    layers = layers_of(keys)
    window = keys.integer("attention.sliding_window", default, minimum=int(default != 0), maximum=MOST_CONTEXT)
    key = "attention.sliding_window_pattern"
    if keys.is_array(key):
        return tuple(window if value else 0 for value in keys.of_each_layer(key, layers))
    every = keys.integer(key, every, minimum=0, maximum=MOST_LAYERS)
    return tuple(window if every == 0 or layer % every < every - 1 else 0 for layer in range(layers))


def attention_layers(keys: Keys) -> tuple[tuple[bool, ...], int]:
    """Return (True for each attention layer, the number of KV heads of the attention layers).

    Layers without attention have no KV heads. Raises BadGGUF and UnsupportedModel.
    """
    key, layers = "attention.head_count_kv", layers_of(keys)
    if not keys.is_array(key):
        return (True,) * layers, keys.integer(key, minimum=1, maximum=MOST_HEADS)
    counts = keys.of_each_layer(key, layers)
    some = set(counts) - {0}
    if len(some) > 1:
        raise keys.unsupported(f"different values of {keys.name(key)} in different layers")
    kv_heads = some.pop() if some else 1  # the value is not used without attention layers
    if not 1 <= kv_heads <= MOST_HEADS:
        raise keys.bad(key, f"must be 0 to {MOST_HEADS}, not {kv_heads}")
    return tuple(count > 0 for count in counts), kv_heads


def layers_of(keys: Keys) -> int:
    return keys.integer("block_count", minimum=1, maximum=MOST_LAYERS)


def layers_ahead(keys: Keys) -> int:
    """Return the number of layers at the end for multi-token prediction.

    At least one other layer must remain.
    """
    return keys.integer("nextn_predict_layers", 0, minimum=0, maximum=layers_of(keys) - 1)


def width_of(keys: Keys) -> int:
    return keys.integer("embedding_length", minimum=1, maximum=MOST_WIDTH)


def heads_of(keys: Keys) -> int:
    return keys.of_all_layers("attention.head_count", minimum=1, maximum=min(width_of(keys), MOST_HEADS))


def feed_forward_of(keys: Keys) -> int:
    return keys.of_all_layers("feed_forward_length", minimum=1, maximum=MOST_WIDTH)


def optional_feed_forward_of(keys: Keys) -> int:
    """Return the number of features of the dense feed-forward, or 0 if the file does not specify the number."""
    return keys.of_all_layers("feed_forward_length", 0, minimum=0, maximum=MOST_WIDTH)


def head_size_of(keys: Keys) -> int:
    """Return the head size of layers without a sliding window."""
    return _head_size(keys, "", width_of(keys) // heads_of(keys))


def window_head_size_of(keys: Keys) -> int:
    """Return the head size of the sliding-window layers, which may differ from the head size of the other layers."""
    return _head_size(keys, "_swa", head_size_of(keys))


def _head_size(keys: Keys, kind: str, default: int) -> int:
    key = keys.integer(f"attention.key_length{kind}", default, minimum=1, maximum=MOST_WIDTH)
    value = keys.integer(f"attention.value_length{kind}", default, minimum=1, maximum=MOST_WIDTH)
    if key != value:
        raise keys.unsupported(f"keys and values of different sizes, {key} and {value} features")
    if key % VECTOR:
        raise keys.unsupported(f"the head size must be a multiple of {VECTOR}, not {key}")
    return key


def _refuse_other_heads_in_windows(keys: Keys, head_size: int, dimensions: int) -> None:
    alike = {
        "attention.key_length_swa": head_size,
        "attention.value_length_swa": head_size,
        "rope.dimension_count_swa": dimensions,
    }
    for name, expected in alike.items():
        if keys.integer(name, expected, minimum=0, maximum=MOST_CONTEXT) != expected:
            raise keys.unsupported(f"{keys.name(name)} differs from the value of layers without a window")


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

    def embed(self, scale: float = 1.0, name: str = "token_embd", *, image_scale: float = 1.0) -> Value:
        """Look up the embeddings of tokens, times `scale`, and place the rows of images, times `image_scale`."""
        c = self._config
        x = self.plan.embed(self.tensors.matrix(f"{name}.weight", c.width, c.vocabulary_size), scale)
        self.plan.place_images(x, image_scale)
        return x

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
