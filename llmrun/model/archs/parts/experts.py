"""Functions for mixtures of experts, which read the hyperparameters and add the ops to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct

from llmrun.formats.gguf.metadata import MAX_EXPERTS
from llmrun.model.archs.parts.architecture import MOST_WIDTH, Hyperparameters, feed_forward_of
from llmrun.model.archs.parts.keys import MOST_LAYERS, Keys
from llmrun.model.plan.ops.activations import Activation
from llmrun.model.plan.ops.experts import ExpertGroups, Gating

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.archs.parts.architecture import PlanWriter
    from llmrun.model.plan.twin import Routing, Value

_SIZE: Final = "expert_feed_forward_length"
_GATINGS: Final = {1: Gating.SOFTMAX, 2: Gating.SIGMOID}


class Experts(Struct, frozen=True):
    """The experts of a layer: `count` feed-forward networks with `feed_forward` features each.

    Each row uses `used` of the networks.

    normalized  True if the weights of the used experts are divided by their sum
    scale       factor that is applied to the weights last
    groups      None if rows can use all experts
    """

    count: int
    used: int
    feed_forward: int
    gating: Gating
    normalized: bool
    scale: float
    groups: ExpertGroups | None = None


class MixtureConfig(Hyperparameters, frozen=True):
    """The hyperparameters of models with a shared expert and with dense first layers.

    dense   number of layers before the first layer with experts
    shared  number of features of the shared expert; 0 without a shared expert
    unused  number of unused layers at the end, which are for multi-token prediction
    """

    experts: Experts
    dense: int
    shared: int
    unused: int = 0


def has_experts(keys: Keys) -> bool:
    return keys.integer("expert_count", 0, minimum=0, maximum=MAX_EXPERTS) > 0


def experts_of(
    keys: Keys, feed_forward: int, *, normalized: bool, gating: Gating = Gating.SOFTMAX, scale: float = 1.0
) -> Experts:
    """Read the hyperparameters of the experts. Raises BadGGUF and UnsupportedModel."""
    count, used = keys.integer("expert_count", minimum=1, maximum=MAX_EXPERTS), _used(keys)
    return Experts(
        count=count,
        used=used,
        feed_forward=feed_forward,
        gating=gating,
        normalized=normalized,
        scale=scale,
        groups=_groups(keys, count, used),
    )


def _groups(keys: Keys, count: int, used: int) -> ExpertGroups | None:
    # The GGUF reader has already checked that the groups are of equal size, and that some but not all groups are used.
    groups = keys.integer("expert_group_count", 0, minimum=0, maximum=count)
    if groups <= 1:
        return None
    key = "expert_group_used_count"
    groups_used = keys.integer(key, minimum=1, maximum=groups)
    if groups_used * (count // groups) < used:
        raise keys.bad(key, f"{groups_used} of {groups} groups have fewer than {used} experts")
    return ExpertGroups(groups, groups_used)


def expert_size(keys: Keys) -> int:
    """Return the number of features of each expert."""
    return keys.of_all_layers(_SIZE, minimum=1, maximum=MOST_WIDTH)


def expert_size_or_share(keys: Keys) -> int:
    """Return the number of features of each expert.

    If the file does not specify the number, return the feed-forward size divided by the number of used experts.
    """
    return keys.of_all_layers(_SIZE, 0, minimum=0, maximum=MOST_WIDTH) or feed_forward_of(keys) // _used(keys)


def shared_size(keys: Keys, default: int) -> int:
    """Return the number of features of the shared expert, which processes every row."""
    return keys.integer("expert_shared_feed_forward_length", 0, minimum=0, maximum=MOST_WIDTH) or default


def shared_size_by_count(keys: Keys) -> int:
    """Return the total size of all shared experts, for files that specify the number of shared experts."""
    return expert_size(keys) * shared_count(keys)


def shared_count(keys: Keys) -> int:
    return keys.integer("expert_shared_count", minimum=1, maximum=MAX_EXPERTS)


def leading_dense(keys: Keys) -> int:
    """Return the number of dense layers before the first layer with experts."""
    return keys.integer("leading_dense_block_count", 0, minimum=0, maximum=MOST_LAYERS)


def scale_of(keys: Keys) -> float:
    return keys.scale("expert_weights_scale", 1.0)


def gating_of(keys: Keys, default: Gating | None = None) -> Gating:
    """Return the gating function specified in the file, or the default if the file contains no gating function or 0.

    Raises BadGGUF and UnsupportedModel.
    """
    number = keys.integer("expert_gating_func", None if default is None else 0, minimum=0, maximum=255)
    if number == 0 and default is not None:
        return default
    if number not in _GATINGS:
        raise keys.unsupported(f"a {keys.name('expert_gating_func')} of {number}")
    return _GATINGS[number]


def _used(keys: Keys) -> int:
    # The GGUF reader has already checked that this number is at most `expert_count`.
    return keys.of_all_layers("expert_used_count", minimum=1, maximum=MAX_EXPERTS)


def add_feed_forward(w: PlanWriter, block: str, h: Value, experts: Experts | None, shared: int, to: Value) -> None:
    """Add the output of a layer's feed-forward for h to `to`.

    The feed-forward is dense if `experts` is None. `shared` is the number of features of the shared expert, or 0.
    """
    if experts is None:
        w.linear_add(f"{block}.ffn_down", w.swiglu(block, h), to=to)
        return
    if shared:
        w.plan.add(shared_expert(w, block, h, shared, to.width), to=to)
    add_experts(w, block, h, experts, to=to)


def add_experts(
    w: PlanWriter, block: str, h: Value, experts: Experts, to: Value, activation: Activation = Activation.SILU
) -> None:
    """Add the weighted sum of the experts' outputs for h to `to`. Biases are added if the file contains them."""
    routing = routing_of(w, block, h, experts)
    w.plan.combine(expert_outputs(w, block, h, experts, routing, activation), routing, to)


def routing_of(w: PlanWriter, block: str, h: Value, experts: Experts) -> Routing:
    """Choose the experts of each row.

    The router's bias affects both the choice of experts and their weights, while `exp_probs_b` affects only the choice.
    """
    logits = w.linear(f"{block}.ffn_gate_inp", h, experts.count)
    return w.plan.route(
        logits,
        experts.used,
        experts.gating,
        normalized=experts.normalized,
        scale=experts.scale,
        selection_bias=w.tensors.optional_vector(f"{block}.exp_probs_b.bias", experts.count),
        groups=experts.groups,
    )


def expert_outputs(
    w: PlanWriter, block: str, h: Value, experts: Experts, routing: Routing, activation: Activation
) -> Value:
    """Compute the outputs of each row's experts for h."""
    gate, up = _gate_and_up(w, block, h, experts.feed_forward, routing)
    return _expert_linear(w, f"{block}.ffn_down_exps", w.plan.gated(gate, up, activation), h.width, routing)


def ungated_expert_outputs(
    w: PlanWriter, block: str, h: Value, experts: Experts, routing: Routing, activation: Activation
) -> Value:
    """Compute the outputs of each row's experts for h, without gates: activation(h . up) . down."""
    up = _expert_linear(w, f"{block}.ffn_up_exps", h, experts.feed_forward, routing)
    return _expert_linear(w, f"{block}.ffn_down_exps", w.plan.activate(up, activation), h.width, routing)


def shared_expert(w: PlanWriter, block: str, h: Value, feed_forward: int, width: int) -> Value:
    """Compute the output of the shared expert for h."""
    gate = w.linear(f"{block}.ffn_gate_shexp", h, feed_forward)
    up = w.linear(f"{block}.ffn_up_shexp", h, feed_forward)
    return w.linear(f"{block}.ffn_down_shexp", w.plan.swiglu(gate, up), width)


def add_gated_shared_expert(w: PlanWriter, block: str, h: Value, feed_forward: int, to: Value) -> None:
    """Add the output of the shared expert, times the sigmoid of a one-feature gate, to `to`."""
    gate = w.linear(f"{block}.ffn_gate_inp_shexp", h, 1)
    w.plan.add_gated(shared_expert(w, block, h, feed_forward, to.width), gate, to=to)


def _gate_and_up(w: PlanWriter, block: str, h: Value, rows: int, routing: Routing) -> tuple[Value, Value]:
    """Compute gate and up from two tensors, or from one fused tensor (`ffn_gate_up_exps`)."""
    fused = f"{block}.ffn_gate_up_exps.weight"
    if fused in w.tensors:
        halves = w.tensors.halves_of_experts(fused, h.width, rows, routing.experts)
        return w.plan.expert_linear(h, halves[0], routing), w.plan.expert_linear(h, halves[1], routing)
    gate = _expert_linear(w, f"{block}.ffn_gate_exps", h, rows, routing)
    return gate, _expert_linear(w, f"{block}.ffn_up_exps", h, rows, routing)


def _expert_linear(w: PlanWriter, name: str, x: Value, rows: int, routing: Routing) -> Value:
    weight = w.tensors.experts(f"{name}.weight", x.width, rows, routing.experts)
    out = w.plan.expert_linear(x, weight, routing)
    if f"{name}.bias" not in w.tensors:
        return out
    bias: NDArray[np.float32] = w.tensors.vector(f"{name}.bias", rows, routing.experts)
    return w.plan.expert_bias(out, bias.reshape(routing.experts, rows), routing)
