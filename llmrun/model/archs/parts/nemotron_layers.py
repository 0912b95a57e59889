"""The layers of Nemotron-H models, each of which is Mamba-2, attention or a feed-forward network."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from llmrun.model.archs.parts.architecture import (
    LAYER_NORM_EPSILON,
    MOST_WIDTH,
    RMS_EPSILON,
    Hyperparameters,
    attention_layers,
    layers_ahead,
    layers_of,
)
from llmrun.model.archs.parts.recurrent_layers import RecurrentSizes, mamba, recurrent_sizes_of
from llmrun.model.plan.ops.activations import Activation

if TYPE_CHECKING:
    from llmrun.model.archs.parts.architecture import PlanWriter
    from llmrun.model.archs.parts.keys import Keys
    from llmrun.model.plan.twin import Value


class NemotronConfig(Hyperparameters, frozen=True):
    """The hyperparameters of Nemotron-H models.

    feed_forwards  number of features of each layer's feed-forward network; 0 for layers without such a network
    looks_back     True for each layer that is an attention layer; only for layers without a feed-forward
    sizes          sizes of the Mamba-2 layers
    unused         number of unused layers at the end, which are for multi-token prediction
    """

    feed_forwards: tuple[int, ...]
    looks_back: tuple[bool, ...]
    sizes: RecurrentSizes
    unused: int

    @classmethod
    def read(cls, keys: Keys, **more: Any) -> Self:
        """Read the hyperparameters. `more` contains the fields of a subclass. Raises BadGGUF and UnsupportedModel."""
        looks_back, kv_heads = attention_layers(keys)
        feed_forwards = keys.in_each_layer("feed_forward_length", layers_of(keys), minimum=0, maximum=MOST_WIDTH)
        unused = layers_ahead(keys)
        return cls.of(
            keys,
            epsilon=RMS_EPSILON if keys.has(RMS_EPSILON) else LAYER_NORM_EPSILON,
            kv_heads=kv_heads,
            feed_forward=max(feed_forwards),
            unused_layers=unused,
            unused=unused,
            feed_forwards=feed_forwards,
            looks_back=looks_back,
            sizes=recurrent_sizes_of(keys),
            **more,
        )


# A function that adds the output of a layer's feed-forward network: (w, block, h, features, to)
AddFeedForward = Callable[["PlanWriter", str, "Value", int, "Value"], None]


def add_layers(w: PlanWriter, c: NemotronConfig, add_feed_forward: AddFeedForward) -> None:
    """Add the embedding, all layers and the output to the plan."""
    shape = c.attention()
    x = w.embed()
    for layer in range(c.layers):
        block = f"blk.{layer}"
        h = w.rmsnorm(f"{block}.attn_norm", x)
        if c.feed_forwards[layer]:
            add_feed_forward(w, block, h, c.feed_forwards[layer], x)
        elif c.looks_back[layer]:
            q, k, v = w.queries_keys_values(block, h)
            w.linear_add(f"{block}.attn_output", w.plan.attention(q, k, v, shape, None), to=x)
        else:
            w.linear_add(f"{block}.ssm_out", mamba(w, block, h, c.sizes), to=x)
    w.output_after_rmsnorm(x)
    w.leave_out_layers(c.layers, c.unused)


def add_ungated(w: PlanWriter, up: str, down: str, h: Value, size: int, to: Value) -> None:
    """Add the output of an ungated feed-forward network to `to`. `up` and `down` are the names of the matrices."""
    w.linear_add(down, w.plan.activate(w.linear(up, h, size), Activation.RELU_SQUARED), to=to)
