"""The hyperparameters that all architectures share, with limits that protect against malicious headers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

from llmrun.model.archs.parts.keys import MOST_LAYERS, VECTOR, Keys
from llmrun.model.archs.parts.rope_settings import RopeSettings
from llmrun.model.plan.shapes import ALL, AttentionShape

# These limits, far above the values in real models, prevent malicious headers from causing too much work.
MOST_HEADS: Final = 1024
MOST_WIDTH: Final = 1 << 20
MOST_CONTEXT: Final = 1 << 27

RMS_EPSILON: Final = "attention.layer_norm_rms_epsilon"
LAYER_NORM_EPSILON: Final = "attention.layer_norm_epsilon"


@dataclass(frozen=True, slots=True)
class Hyperparameters:
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
