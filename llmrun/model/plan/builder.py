"""The state of a plan while it is being built. The methods of every op family append to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmrun.model.plan.elementary import Rope
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.shapes import KVGroup, KVShape, LayerKV, LayerState, StateGroup, StateShape
from llmrun.model.plan.twin import Value


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive ops that run for one tile of rows after another, such as one half of a layer of an image encoder.

    A stage begins after the stage before it has run for all rows. The caller copies each tile into `takes`, and what
    the stage made of it out of `gives`.

    first, end  the ops from `first` up to, but not including, `end`
    gives       may be the same value as `takes`; None for stages that only store keys and values
    """

    name: str
    first: int
    end: int
    takes: Value
    gives: Value | None


@dataclass(slots=True)
class PlanBuilder:
    """The ops added to a plan so far, and the caches and ropes they use.

    logits  the logits, set by `output`; None if the model has none
    hidden  the hidden state that the backend returns on request, times `hidden_scale`
    given   the hidden state that the caller supplies for each row, in plans of draft heads; otherwise None
    groups  the layers that use the KV cache, grouped by cache shape
    states  the layers that have a recurrent state, grouped by the shape of the state
    ropes   the distinct rotary embeddings that layers use
    stages  the stages of an encoder of images; empty for text models, whose ops all run in each step
    ahead_in_windows_only  whether rows of images that look ahead (Batch.ahead) do so only in layers with a window
    """

    ops: list[Op] = field(default_factory=list)
    logits: Value | None = None
    hidden: Value | None = None
    hidden_scale: float = 1.0
    given: Value | None = None
    groups: list[KVGroup] = field(default_factory=list)
    states: list[StateGroup] = field(default_factory=list)
    ropes: list[Rope] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    ahead_in_windows_only: bool = False

    def next_layer(self, shape: KVShape) -> LayerKV:
        """Reserve the KV cache of one more layer of this shape."""
        shapes = [group.shape for group in self.groups]
        if shape not in shapes:
            shapes.append(shape)
            self.groups.append(KVGroup(shape))
        number = shapes.index(shape)
        self.groups[number].layers += 1
        return LayerKV(shape, number, self.groups[number].layers - 1)

    def next_state(self, shape: StateShape) -> LayerState:
        """Reserve the recurrent state of one more layer of this shape."""
        shapes = [group.shape for group in self.states]
        if shape not in shapes:
            shapes.append(shape)
            self.states.append(StateGroup(shape))
        number = shapes.index(shape)
        self.states[number].layers += 1
        return LayerState(shape, number, self.states[number].layers - 1)

    def last_layer(self, shape: KVShape) -> LayerKV:
        """Return the KV cache of the last layer of this shape."""
        [number] = [number for number, group in enumerate(self.groups) if group.shape == shape]
        return LayerKV(shape, number, self.groups[number].layers - 1)

    def rope_number(self, rope: Rope | None) -> int | None:
        """Return the index of a rope in `ropes`, appending it if it is new. Returns None if `rope` is None."""
        if rope is None:
            return None
        for number, known in enumerate(self.ropes):
            if known is rope:
                return number
        self.ropes.append(rope)
        return len(self.ropes) - 1
