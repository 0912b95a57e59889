"""Ops that update a recurrent state row by row.

They are the gated delta rule, the state space duality (SSD) of Mamba-2, and the selective scan of Mamba-1.

All have a matrix S per head, which starts as zeros. A row has a key and a query vector, which several heads may share,
a value vector per head, and a gate per head, from which its decay is computed: exp(rate * softplus(gate + bias)). The
selective scan has a single head, but a gate for each feature of the value and a rate for each element of S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmrun.model.plan.builder import PlanBuilder
from llmrun.model.plan.elementary import sigmoid_reference, softplus_reference
from llmrun.model.plan.ops.base import Op
from llmrun.model.plan.shapes import LayerState, MatrixState
from llmrun.model.plan.twin import Value

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.plan.twin import Run


@dataclass(frozen=True, slots=True)
class DeltaRule(Op):
    """An op that computes the gated delta rule (https://arxiv.org/abs/2412.06464), for each row and head:

        S = decay * S
        S = S + key * (sigmoid(beta) * (value - key . S))
        out = query . S

    q and k have a vector for each key head, v one for each head. `gate` and `beta` have one feature per head. `rate`
    and `bias` are float32[heads]. Head h uses key head h // shared % key heads.
    """

    q: Value
    k: Value
    v: Value
    gate: Value
    beta: Value
    rate: NDArray[np.float32]
    bias: NDArray[np.float32]
    shared: int
    state: LayerState
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.q, self.k, self.v, self.gate, self.beta)

    def twin(self, run: Run) -> None:
        shape = self.state.shape
        assert isinstance(shape, MatrixState)
        head = np.arange(shape.heads) // self.shared % shape.key_heads
        queries, keys = (run.heads(value, shape.key_size)[:, head] for value in (self.q, self.k))
        decays, _ = decay_reference(run.values[self.gate], self.rate, self.bias)
        betas, values = sigmoid_reference(run.values[self.beta]), run.heads(self.v, shape.value_size)
        run.put_parts(self.out, delta_rule_reference(queries, keys, values, decays, betas))


@dataclass(frozen=True, slots=True)
class Ssd(Op):
    """An op that computes the recurrence of Mamba-2 (https://arxiv.org/abs/2405.21060), for each row and head:

        S = decay * S + b * (softplus(gate + bias) * x)
        out = c . S + skip * x

    b and c have a vector for each key head, x one for each head. `gate` has one feature per head. `rate`, `bias` and
    `skip` are float32[heads]. The paper calls `gate` dt, `rate` A, `skip` D, and key heads groups. Head h uses key head
    h // shared % key heads.
    """

    x: Value
    b: Value
    c: Value
    gate: Value
    rate: NDArray[np.float32]
    bias: NDArray[np.float32]
    skip: NDArray[np.float32]
    shared: int
    state: LayerState
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x, self.b, self.c, self.gate)

    def twin(self, run: Run) -> None:
        shape = self.state.shape
        assert isinstance(shape, MatrixState)
        head = np.arange(shape.heads) // self.shared % shape.key_heads
        b, c = (run.heads(value, shape.key_size)[:, head] for value in (self.b, self.c))
        decays, steps = decay_reference(run.values[self.gate], self.rate, self.bias)
        x = run.heads(self.x, shape.value_size)
        run.put_parts(self.out, ssd_reference(x, b, c, decays, steps) + self.skip[:, None] * x)


@dataclass(frozen=True, slots=True)
class SelectiveScan(Op):
    """An op that computes the recurrence of Mamba-1 (https://arxiv.org/abs/2312.00752), for each row:

        S = exp(rate * step) * S + b * (step * x), with step = softplus(gate + bias)
        out = c . S + skip * x

    b and c have a feature for each row of S; x and `gate` have one for each column. `rate` is float32[columns, rows],
    `bias` and `skip` are float32[columns]. The paper calls `gate` delta, `rate` A and `skip` D.
    """

    x: Value
    b: Value
    c: Value
    gate: Value
    rate: NDArray[np.float32]
    bias: NDArray[np.float32]
    skip: NDArray[np.float32]
    state: LayerState
    out: Value

    @property
    def inputs(self) -> tuple[Value, ...]:
        return (self.x, self.b, self.c, self.gate)

    def twin(self, run: Run) -> None:
        x, b, c = (run.values[value] for value in (self.x, self.b, self.c))
        steps = softplus_reference(run.values[self.gate] + self.bias)
        run.values[self.out] = selective_scan_reference(x, b, c, steps, self.rate) + self.skip * x


class RecurrenceWords(NamedTuple):
    """The op record of `delta_rule`, `ssd` and `selective_scan`. In the last two, q is c, k is b, and v is x.

    shared       number of consecutive heads with the same key head: head h uses h // shared % key_heads
    beta         only used by `delta_rule`
    rate         in `selective_scan`, of each 16 columns in turn, float32[key size, 16]
    skip         not used by `delta_rule`
    state        address of the layer's states, `state_bytes` per sequence
    row_bytes    bytes of a row in a replay buffer
    scratch      address of the threads' scratch memory, `scratch_bytes` per thread, for a part of a head's matrix
    """

    q: int
    q_stride: int
    k: int
    k_stride: int
    v: int
    v_stride: int
    gate: int
    gate_stride: int
    beta: int
    beta_stride: int
    out: int
    out_stride: int
    rate: int
    bias: int
    skip: int
    heads: int
    key_heads: int
    shared: int
    key_size: int
    value_size: int
    state: int
    state_bytes: int
    row_bytes: int
    scratch: int
    scratch_bytes: int


def decay_reference(
    gates: NDArray[np.float32], rate: NDArray[np.float32], bias: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (decays, steps), each float32[rows, heads], where steps = softplus(gates + bias)."""
    steps = softplus_reference(gates + bias)
    return np.exp(rate * steps), steps


def delta_rule_reference(
    queries: NDArray[np.float32],
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
    decays: NDArray[np.float32],
    betas: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Compute the gated delta rule for all positions of one sequence.

    queries and keys are float32[rows, heads, key size], values float32[rows, heads, value size], decays and betas
    float32[rows, heads]. Returns float32[rows, heads, value size].
    """
    state = np.zeros((*keys.shape[1:], values.shape[2]), values.dtype)
    rows = []
    for query, key, value, decay, beta in zip(queries, keys, values, decays, betas, strict=True):
        state *= decay[:, None, None]
        change = beta[:, None] * (value - np.einsum("hk,hkv->hv", key, state))
        state += key[:, :, None] * change[:, None, :]
        rows.append(np.einsum("hk,hkv->hv", query, state))
    return np.stack(rows)


def ssd_reference(
    x: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    decays: NDArray[np.float32],
    steps: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Compute the recurrence of Mamba-2, without the skip connection, for all positions of one sequence.

    x is float32[rows, heads, value size], b and c float32[rows, heads, key size], decays and steps float32[rows,
    heads]. Returns float32[rows, heads, value size].
    """
    state = np.zeros((*b.shape[1:], x.shape[2]), x.dtype)
    rows = []
    for row, key, query, decay, step in zip(x, b, c, decays, steps, strict=True):
        state *= decay[:, None, None]
        state += key[:, :, None] * (step[:, None] * row)[:, None, :]
        rows.append(np.einsum("hk,hkv->hv", query, state))
    return np.stack(rows)


def selective_scan_reference(
    x: NDArray[np.float32],
    b: NDArray[np.float32],
    c: NDArray[np.float32],
    steps: NDArray[np.float32],
    rate: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Compute the recurrence of Mamba-1, without the skip connection, for all positions of one sequence.

    x and steps are float32[rows, columns], b and c float32[rows, key size], rate float32[columns, key size]. Returns
    float32[rows, columns].
    """
    state = np.zeros_like(rate)
    rows = []
    for row, key, query, step in zip(x, b, c, steps, strict=True):
        state *= np.exp(rate * step[:, None])
        state += key * (step * row)[:, None]
        rows.append(state @ query)
    return np.stack(rows)


class RecurrenceOps(PlanBuilder):
    __slots__ = ()

    def delta_rule(
        self,
        q: Value,
        k: Value,
        v: Value,
        gate: Value,
        beta: Value,
        *,
        rate: NDArray[np.float32],
        bias: NDArray[np.float32],
        key_heads: int,
        shared: int,
    ) -> Value:
        """Append a gated delta rule. See DeltaRule."""
        heads = len(rate)
        shape = MatrixState(heads, key_heads, k.width // key_heads, v.width // heads, gates=2)
        out = v.like(v.width)
        self.ops.append(DeltaRule(q, k, v, gate, beta, rate, bias, shared, self.next_state(shape), out))
        return out

    def ssd(
        self,
        x: Value,
        b: Value,
        c: Value,
        gate: Value,
        *,
        rate: NDArray[np.float32],
        bias: NDArray[np.float32],
        skip: NDArray[np.float32],
        key_heads: int,
    ) -> Value:
        """Append the recurrence of Mamba-2. Consecutive heads share a key head. See Ssd."""
        heads = len(rate)
        shape = MatrixState(heads, key_heads, b.width // key_heads, x.width // heads, gates=1)
        out = x.like(x.width)
        self.ops.append(Ssd(x, b, c, gate, rate, bias, skip, heads // key_heads, self.next_state(shape), out))
        return out

    def selective_scan(
        self,
        x: Value,
        b: Value,
        c: Value,
        gate: Value,
        *,
        rate: NDArray[np.float32],
        bias: NDArray[np.float32],
        skip: NDArray[np.float32],
    ) -> Value:
        """Append the recurrence of Mamba-1. See SelectiveScan."""
        shape = MatrixState(1, 1, b.width, x.width, gates=x.width)
        out = x.like(x.width)
        self.ops.append(SelectiveScan(x, b, c, gate, rate, bias, skip, self.next_state(shape), out))
        return out
