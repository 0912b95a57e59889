"""The hyperparameters that all architectures share, with the limits a hostile header is held to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Self

from llmrun.archs.parts.keys import MOST_LAYERS, VECTOR, Keys
from llmrun.archs.parts.rope_settings import RopeSettings
from llmrun.plan.kv_shapes import AttentionShape

# No model is near these; they keep a hostile header from asking for absurd amounts of work.
MOST_HEADS: Final = 1024
MOST_WIDTH: Final = 1 << 20
MOST_CONTEXT: Final = 1 << 27

RMS_EPSILON: Final = "attention.layer_norm_rms_epsilon"
LAYER_NORM_EPSILON: Final = "attention.layer_norm_epsilon"


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Sizes of the layers, the norms' epsilon, rotary positions. An architecture with more has a subclass."""

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

    @classmethod
    def of(cls, keys: Keys, *, kv_heads: int | None = None, **more: Any) -> Self:
        """Read from the metadata of an architecture whose layers are alike; `kv_heads` of one where not all layers have
        any, `more` as `of_largest` has it. Raises BadGGUF and UnsupportedModel."""
        if kv_heads is None:
            kv_heads = keys.of_all_layers("attention.head_count_kv", heads_of(keys), minimum=1, maximum=heads_of(keys))
        config = cls.of_largest(keys, kv_heads=kv_heads, feed_forward=feed_forward_of(keys), **more)
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
        **more: Any,
    ) -> Self:
        """The same where layers differ: heads and rotary positions are those of layers without a window, KV heads and
        feed-forward the most that a layer has.

        `head_size` is that of an architecture whose keys and values differ, `unused_layers` those at the end that its
        plan leaves out, `more` the fields of a subclass.
        """
        _refuse_variants(keys, unused_layers)
        width, heads = width_of(keys), heads_of(keys)
        if heads % kv_heads:
            raise keys.bad("attention.head_count_kv", f"{kv_heads} seen, must divide {heads} heads")
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
            **more,
        )

    def attention(self, window: int = 0) -> AttentionShape:
        """The heads of a layer, that see so many positions (0: all before)."""
        return AttentionShape(self.heads, self.kv_heads, self.head_size, window)


def refuse_experts(keys: Keys) -> None:
    """For architectures that have none here. Raises UnsupportedModel."""
    experts = keys.integer("expert_count", 0, minimum=0, maximum=MOST_WIDTH)
    if experts:
        raise keys.unsupported(f"a mixture of {experts} experts")


def windows_of(keys: Keys, *, every: int, default: int | None = None) -> tuple[int, ...]:
    """For each layer, how many positions a row sees, its own among them; 0: all before it.

    All layers but each `every`th have the window, unless the file has another number, or says it for each layer. A
    `default` of None: the file must name the window; 0: where it names none, or 0, no layer has one.
    """
    layers = layers_of(keys)
    window = keys.integer("attention.sliding_window", default, minimum=int(default != 0), maximum=MOST_CONTEXT)
    key = "attention.sliding_window_pattern"
    if keys.is_array(key):
        return tuple(window if value else 0 for value in keys.of_each_layer(key, layers))
    every = keys.integer(key, every, minimum=0, maximum=MOST_LAYERS)
    return tuple(window if every == 0 or layer % every < every - 1 else 0 for layer in range(layers))


def layers_of(keys: Keys) -> int:
    return keys.integer("block_count", minimum=1, maximum=MOST_LAYERS)


def layers_ahead(keys: Keys) -> int:
    """At the end of all, which predict tokens further ahead than the next; at least one that does not must remain."""
    return keys.integer("nextn_predict_layers", 0, minimum=0, maximum=layers_of(keys) - 1)


def width_of(keys: Keys) -> int:
    return keys.integer("embedding_length", minimum=1, maximum=MOST_WIDTH)


def heads_of(keys: Keys) -> int:
    return keys.of_all_layers("attention.head_count", minimum=1, maximum=min(width_of(keys), MOST_HEADS))


def feed_forward_of(keys: Keys) -> int:
    return keys.of_all_layers("feed_forward_length", minimum=1, maximum=MOST_WIDTH)


def head_size_of(keys: Keys) -> int:
    """Of layers without a window."""
    return _head_size(keys, "", width_of(keys) // heads_of(keys))


def window_head_size_of(keys: Keys) -> int:
    """Of layers with a window, where those have heads of another size."""
    return _head_size(keys, "_swa", head_size_of(keys))


def _head_size(keys: Keys, kind: str, default: int) -> int:
    key = keys.integer(f"attention.key_length{kind}", default, minimum=1, maximum=MOST_WIDTH)
    value = keys.integer(f"attention.value_length{kind}", default, minimum=1, maximum=MOST_WIDTH)
    if key != value:
        raise keys.unsupported(f"keys of {key} and values of {value} features, they must be equal")
    if key % VECTOR:
        raise keys.unsupported(f"heads of {key} features, must be a multiple of {VECTOR}")
    return key


def _refuse_other_heads_in_windows(keys: Keys, head_size: int, dimensions: int) -> None:
    alike = {
        "attention.key_length_swa": head_size,
        "attention.value_length_swa": head_size,
        "rope.dimension_count_swa": dimensions,
    }
    for name, expected in alike.items():
        if keys.integer(name, expected, minimum=0, maximum=MOST_CONTEXT) != expected:
            raise keys.unsupported(f"a {keys.name(name)} other than that of layers without a window")


def _refuse_variants(keys: Keys, unused_layers: int) -> None:
    if not keys.flag("attention.causal", default=True):
        raise keys.unsupported(f"not a model that generates text: {keys.name('attention.causal')} is false")
    if layers_ahead(keys) != unused_layers:
        raise keys.unsupported("layers that predict tokens further ahead")
