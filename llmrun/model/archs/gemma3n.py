"""The `gemma3n` architecture: like gemma3, with four residual streams (AltUp) and an input for every layer.

Each layer predicts all streams from their values before the layer, runs only on the first stream, and then corrects the
other streams by the error of the prediction (https://arxiv.org/abs/2301.13310). LAuReL adds a low-rank product to
attention (https://arxiv.org/abs/2411.07501). Later layers attend to the keys and values of earlier layers. The
activations of the first layers are sparse.

llama.cpp reads few hyperparameters of the model. For all other hyperparameters, llama.cpp uses the values of the
published models, E2B and E4B. This module refuses other values.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import TYPE_CHECKING, Final

import numpy as np

from llmrun.model.archs.parts.architecture import (
    Architecture,
    Hyperparameters,
    PlanWriter,
    Windows,
    refuse_experts,
    windows_of,
)
from llmrun.model.archs.parts.gemma_layers import attention, check_storing, input_of_layer, inputs_of_layers
from llmrun.model.archs.parts.keys import Keys
from llmrun.model.plan.elementary import Pairing
from llmrun.model.plan.ops.activations import Activation

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan
    from llmrun.model.plan.twin import Value

_STREAMS: Final = 4
_TABLE_WIDTH: Final = 256  # number of features for each layer in the second embedding table
_RANK: Final = 64  # rank of LAuReL's product
STORING: Final = 20  # number of layers before the first layer that uses the KV cache of an earlier layer
_SPARSE: Final = 10  # number of layers with sparse activations
_DEVIATIONS: Final = 1.6448533535003662  # standard deviations above the mean, exceeded by 5 % of a normal distribution
_LOGIT_CAP: Final = 30.0

_WINDOWS = Windows(every=5)


class Config(Hyperparameters, frozen=True):
    """The hyperparameters of gemma3n. `windows` contains the window of each layer."""

    windows: tuple[int, ...]
    window_base: float

    @property
    def storing(self) -> int:
        return min(STORING, self.layers)


# --- the metadata -----------------------------------------------------------------------------------------------------


def read_config(file: GGUFFile) -> Config:
    keys = Keys(file)
    refuse_experts(keys)
    windows, base = windows_of(keys, every=_WINDOWS.every), keys.positive("rope.freq_base_swa", 10000.0)
    config = Config.of(keys, windows=windows, window_base=base)
    check_storing(keys, [config.attention(window) for window in windows], config.storing)
    _refuse_other_values(keys, config)
    return config


def _refuse_other_values(keys: Keys, config: Config) -> None:
    """Raise UnsupportedModel for hyperparameters that differ from the published models."""
    known = {
        "altup.num_inputs": _STREAMS,
        "altup.active_idx": 0,
        "embedding_length_per_layer_input": _TABLE_WIDTH,
        "attention.shared_kv_layers": config.layers - config.storing,
        "final_logit_softcapping": _LOGIT_CAP,
    }
    for key, value in known.items():
        if keys.number(key, value) != value:
            raise keys.unsupported(f"a {keys.name(key)} other than {value:g}")
    key, deviations = "activation_sparsity_scale", np.where(np.arange(config.layers) < _SPARSE, _DEVIATIONS, -inf)
    seen = keys.file.metadata.get(keys.name(key), deviations)
    is_known = isinstance(seen, np.ndarray) and seen.shape == deviations.shape
    # The converter computes this number with PyTorch, and PyTorch versions may round differently.
    if not (is_known and np.allclose(seen, deviations, rtol=1e-5, atol=0.0)):
        raise keys.unsupported(f"a {keys.name(key)} other than {_DEVIATIONS:g} in {_SPARSE} layers and -inf in others")


# --- the plan ---------------------------------------------------------------------------------------------------------


def plan(file: GGUFFile, config: Config) -> Plan:
    c, w = config, PlanWriter(file, config)
    rope = c.rope.rope(file, Pairing.NEOX)
    window_rope = c.rope.unscaled().with_base(c.window_base).rope(file, Pairing.NEOX)
    x = w.embed(scale=sqrt(c.width))
    of_layers = inputs_of_layers(w, x, c.layers, _TABLE_WIDTH, c.vocabulary_size)
    streams = [x, *_projected(w, "altup_proj", [x] * (_STREAMS - 1), like=x)]
    for layer, window in enumerate(c.windows):
        block = f"blk.{layer}"
        streams = _predicted(w, block, streams)
        h = w.rmsnorm(f"{block}.attn_norm", streams[0])
        shape, stores = c.attention(window), layer < c.storing
        a = attention(w, block, h, shape, window_rope if window else rope, stores=stores)
        y = w.rmsnorm(f"{block}.post_attention_norm", w.linear(f"{block}.attn_output", a, c.width))
        for other in (streams[0], h, _laurel(w, block, h)):
            w.plan.add(other, to=y)
        w.plan.scale(y, sqrt(0.5))
        w.plan.add(_feed_forward(w, block, y, c.feed_forward, is_sparse=layer < _SPARSE), to=y)
        _correct(w, block, streams, y)
        first = w.plan.multiply(streams[0], w.tensors.vector(f"{block}.altup_correct_scale.weight", c.width))
        y = input_of_layer(w, block, first, of_layers, layer, _TABLE_WIDTH, c.width)
        for stream in streams[1:]:
            w.plan.add(y, to=stream)
    x, *others = streams
    for y in _projected(w, "altup_unembd_proj", others, like=x):
        w.plan.add(y, to=x)
    w.plan.scale(x, 1 / _STREAMS)
    w.output_after_rmsnorm(x)
    w.plan.soft_cap_logits(_LOGIT_CAP)
    return w.finished()


def _projected(w: PlanWriter, name: str, values: list[Value], like: Value) -> list[Value]:
    """Multiply each value by its own matrix, and rescale the products to the Euclidean norm of `like`."""
    weight = w.tensors.experts(f"{name}.weight", like.width, like.width, len(values))
    parts = [weight.part(number * like.width, like.width) for number in range(len(values))]
    return [w.plan.match_length(w.plan.linear(x, part), like) for x, part in zip(values, parts, strict=True)]


def _router(w: PlanWriter, block: str, x: Value) -> Value:
    """Compute the features that determine AltUp's factors, one feature for each stream."""
    weight = w.tensors.vector(f"{block}.altup_router_norm.weight", x.width) / np.float32(x.width)
    h = w.plan.rmsnorm(x, weight, w.epsilon)
    return w.plan.activate(w.linear(f"{block}.altup_router", h, _STREAMS), Activation.TANH)


def _predicted(w: PlanWriter, block: str, streams: list[Value]) -> list[Value]:
    """Predict each stream after the layer: the stream before the layer, plus a weighted sum of all streams."""
    factors = w.linear(f"{block}.altup_predict_coef", _router(w, block, streams[0]), _STREAMS * _STREAMS)
    predicted = []
    for number, stream in enumerate(streams):
        first = _STREAMS * number
        total = w.plan.plus_weighted(stream, streams[0], factors, first)
        for at, other in enumerate(streams[1:], first + 1):
            w.plan.add_weighted(other, factors, at, to=total)
        predicted.append(total)
    return predicted


def _correct(w: PlanWriter, block: str, predicted: list[Value], y: Value) -> None:
    """Correct the predicted streams in place, given y, the first stream after the layer. y is overwritten."""
    factors = w.linear(f"{block}.altup_correct_coef", _router(w, block, y), _STREAMS)
    w.plan.add(predicted[0], to=y, scale=-1.0)
    for number, stream in enumerate(predicted):
        w.plan.add_weighted(y, factors, number, to=stream, offset=1.0)


def _laurel(w: PlanWriter, block: str, h: Value) -> Value:
    y = w.linear(f"{block}.laurel_r", w.linear(f"{block}.laurel_l", h, _RANK), h.width)
    return w.rmsnorm(f"{block}.laurel_post_norm", y)


def _feed_forward(w: PlanWriter, block: str, x: Value, size: int, *, is_sparse: bool) -> Value:
    h = w.rmsnorm(f"{block}.ffn_norm", x)
    gate, up = w.linear(f"{block}.ffn_gate", h, size), w.linear(f"{block}.ffn_up", h, size)
    if is_sparse:
        gate = w.plan.cut_off(gate, _DEVIATIONS)
    y = w.linear(f"{block}.ffn_down", w.plan.gated(gate, up, Activation.GELU), x.width)
    return w.rmsnorm(f"{block}.post_ffw_norm", y)


ARCHITECTURE = Architecture(
    "gemma3n", read_config, plan, models="Gemma 3n, text", notes="sliding window, AltUp, LAuReL", windows=_WINDOWS
)
