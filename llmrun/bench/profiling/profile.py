"""Where the time of a step goes: each op of the CPU engine's plan, beside what it reads and multiplies and what this
machine can do.

The threads note the time themselves, after every op and every barrier (timed_team.py); the same steps without that are
timed beside it, so that its cost is seen.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.backend import MAX_ROWS, CpuBackend
from llmrun.backends.cpu.lowering.needs import Needs, StepShape
from llmrun.backends.cpu.ops.linear import quantizing_needs
from llmrun.backends.cpu.ops.registry import CPU_OPS, needs_of
from llmrun.backends.cpu.speeds.limits import MachineLimits
from llmrun.gguf.reader import open_gguf
from llmrun.plan.ops.linear import Product
from llmrun.types import Batch

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from llmrun.backends.base import Progress
    from llmrun.backends.cpu.timed_team import StepTimes
    from llmrun.plan.plan import Plan

_QUANTIZE = "quantize"  # the kind of what makes the input of a product int8
_LAYER = re.compile(r"blk\.(\d+)\.")
_IN_A_ROW = 8  # steps, at most, before the other kind of team has its turn
_LEAST_TURNS = 3
_FAR_OVER = 2.0  # times the seconds that were asked for: then fewer turns have to do
_SETTLED = 0.98  # of the best time so far: a step that is not below it brings nothing new
_LIMIT_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class SpeedLimits:
    """What the machine can do at most, measured between the steps: medians."""

    read_bandwidth: float  # bytes a second, from memory, all threads together
    multiply_rate: float  # int8 multiply-adds a second, all threads together


@dataclass(frozen=True, slots=True)
class Spent:
    """Time, and what was done in it.

    seconds   a mean over the middle half of the steps, and over the threads
    waiting   of them, at the barrier: for threads that had more to do or were not running
    needs     what had to be read and multiplied (needs.py)

    A share of 1.0 is the machine's limit. One of bandwidth may be above it where weights or keys are in a cache since
    the step before: the limit is that of memory. Both are 0 where nothing of the kind is needed. Work on floats has no
    limit here: attention over many rows is far from both, and bound by neither.
    """

    seconds: float
    waiting: float
    needs: Needs
    limits: SpeedLimits

    @property
    def bytes_per_second(self) -> float:
        """Of weights and KV cache; activations are in caches, and not counted."""
        return self._rate(self.needs.memory_bytes)

    @property
    def products_per_second(self) -> float:
        """Of int8."""
        return self._rate(self.needs.products)

    @property
    def float_products_per_second(self) -> float:
        return self._rate(self.needs.float_products)

    @property
    def bandwidth_share(self) -> float:
        return self.bytes_per_second / self.limits.read_bandwidth

    @property
    def multiply_share(self) -> float:
        return self.products_per_second / self.limits.multiply_rate

    @property
    def bound(self) -> str:
        """The limit that is nearer: "memory" or "multiply"; empty where nothing of either is needed."""
        if not self.needs.memory_bytes and not self.needs.products:
            return ""
        return "memory" if self.bandwidth_share >= self.multiply_share else "multiply"

    @property
    def share(self) -> float:
        """Of the limit that is nearer."""
        return max(self.bandwidth_share, self.multiply_share)

    def _rate(self, count: int) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class OpProfile:
    """One op of the plan, or the quantizing before it.

    layer        None: before the first or after the last
    name         of the tensor, of quantizing the first one that it is for: "blk.3.ffn_down.weight"; empty where the op
                 has no matrix
    weight_type  "q4_k"; empty where the op multiplies by no matrix
    """

    kind: str
    layer: int | None
    name: str
    weight_type: str
    spent: Spent


@dataclass(frozen=True, slots=True)
class KindProfile:
    """All ops of a kind, and of a weight type where they have one. `count`: how many in the plan."""

    kind: str
    weight_type: str
    count: int
    spent: Spent


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One kind of step; a prompt longer than the engine takes at once is all of its steps together. Times are means
    over the middle half of the repetitions.

    rows                tokens of it: 1 is decode
    depth               tokens in the KV cache before
    repetitions         timed ones, as many again without the times of ops
    step_seconds        of the normal team: what a user gets
    timed_step_seconds  of the team that takes the time of ops
    ops                 in the order of the plan
    kinds               the same in sums, the longest first
    total               sum of all ops
    """

    rows: int
    depth: int
    repetitions: int
    step_seconds: float
    timed_step_seconds: float
    ops: tuple[OpProfile, ...]
    kinds: tuple[KindProfile, ...]
    total: Spent

    @property
    def timing_cost(self) -> float:
        """By how much of the step's time the timing makes it longer; noise may make it negative."""
        return self.timed_step_seconds / self.step_seconds - 1

    @property
    def outside_seconds(self) -> float:
        """Of a timed step, no op's: Python, and waking the team and its caller."""
        return self.timed_step_seconds - self.total.seconds


@dataclass(frozen=True, slots=True)
class Profile:
    """Of one model on this machine."""

    path: str
    threads: int
    kv_type: str
    limits: SpeedLimits
    decode: StepProfile
    prefill: StepProfile
    train_context: int  # tokens; 0: not known


def profile(
    path: Path,
    *,
    threads: int | None = None,
    kv_type: str = "f16",
    prompt: int = 256,
    depth: int = 0,
    seconds: float = 2.0,
    progress: Progress | None = None,
) -> Profile:
    """Measure a decode step of one token and a prefill of `prompt` tokens, each with `depth` tokens before it.

    Each is measured for about `seconds`. Tokens are random: no kernel's time depends on them. Takes 1 GiB beside the
    model, for the machine's limits. Raises ModelFileError, UnsupportedModel, DoesNotFit.
    """
    with open_gguf(path) as file:
        context = depth + max(prompt, 1)
        options = OpenOptions(context_size=context, threads=threads, kv_type=kv_type, progress=progress)
        backend = CpuBackend(file, options)
    with closing(backend):
        machine = MachineLimits(backend.info.threads)
        found = [_limits(machine)]
        measured = []
        for rows in (1, prompt):
            measured.append(_measure(backend, rows, depth, seconds))
            found.append(_limits(machine))
        limits = SpeedLimits(*np.median(np.concatenate(found), axis=0).tolist())
        decode, prefill = (_step_profile(backend, step, limits) for step in measured)
        return Profile(str(path), backend.info.threads, kv_type, limits, decode, prefill, backend.info.train_context)


def _limits(machine: MachineLimits) -> NDArray[np.float64]:
    """float64[rounds, 2]: as Limits has them."""
    return np.array([[machine.read_bandwidth(), machine.multiply_rate()] for _ in range(_LIMIT_ROUNDS)])


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Measured:
    rows: int
    depth: int
    normal: list[float]  # seconds of each repetition
    timed: list[float]
    times: list[list[StepTimes]]  # of each timed repetition: of its steps


def _measure(backend: CpuBackend, rows: int, depth: int, seconds: float) -> _Measured:
    """Turns of a few steps each, normal and timed by turns: what changes with time changes for both."""
    random = np.random.default_rng(0)
    backend.kv.free(0)
    if depth:
        backend.forward(_batch(random, backend, depth, 0))
    found = _Measured(rows, depth, [], [], [])

    def run() -> float:
        backend.kv.truncate(0, depth)
        batch = _batch(random, backend, rows, depth)
        begun = time.perf_counter()
        backend.forward(batch)
        return time.perf_counter() - begun

    step = _warm(run, seconds / 4)
    in_a_row = max(1, min(_IN_A_ROW, round(seconds / 2 / _LEAST_TURNS / step)))
    settles = step < seconds / 4 / _LEAST_TURNS  # threads that wake up cost a long step nothing that can be seen
    begun = time.perf_counter()
    turns = 0
    while _goes_on(turns, time.perf_counter() - begun, seconds):
        turns += 1
        if settles:
            run()
        found.normal.extend(run() for _ in range(in_a_row))
        with backend.timed() as team:
            if settles:
                run()
                team.taken_times()
            for _ in range(in_a_row):
                found.timed.append(run())
                found.times.append(team.taken_times())
    return found


def _goes_on(turns: int, taken: float, seconds: float) -> bool:
    """Return whether another turn is due: for the time that was asked for, and for a few turns unless they take far
    longer. One is always taken."""
    return turns == 0 or taken < seconds or (turns < _LEAST_TURNS and taken < _FAR_OVER * seconds)


def _warm(run: Callable[[], float], seconds: float) -> float:
    """Run until three times in a row have brought nothing better, or the time is over; returns the best."""
    begun = time.perf_counter()
    best, since = run(), 0
    while since < 3 and time.perf_counter() - begun < seconds:
        taken = run()
        since = since + 1 if taken > _SETTLED * best else 0
        best = min(best, taken)
    return best


def _batch(random: np.random.Generator, backend: CpuBackend, rows: int, start: int) -> Batch:
    """Random tokens of one sequence, the last one's logits asked for."""
    tokens = random.integers(0, backend.info.vocabulary_size, rows).astype(np.int32)
    positions = np.arange(start, start + rows, dtype=np.int32)
    return Batch(tokens, np.zeros(rows, np.int32), positions, positions == start + rows - 1)


# --- what was measured, by op -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _OpPart:
    """What is told as one: an op of the plan with all its records, but for the quantizing of its input."""

    origin: int  # index in the plan
    quantizes: bool


def _step_profile(backend: CpuBackend, measured: _Measured, limits: SpeedLimits) -> StepProfile:
    of_records = [
        _OpPart(origin, kernel.function == "quantize")
        for origin, kernel in zip(backend.lowered.origins, backend.lowered.kernels, strict=True)
    ]
    parts = list(dict.fromkeys(of_records))
    typical = _typical(measured.timed)
    taken, waited = _by_part(measured.times, [parts.index(part) for part in of_records])[:, typical].mean(axis=1)
    timed = float(np.take(measured.timed, typical).mean())
    steps = _shapes(measured.rows, measured.depth)
    profiles = []
    for part, seconds, waiting in zip(parts, taken.tolist(), waited.tolist(), strict=True):
        needs = sum((_needs(backend, part, step) for step in steps), Needs())
        profiles.append(_op_profile(backend.plan, part, Spent(seconds, waiting, needs, limits)))
    return StepProfile(
        rows=measured.rows,
        depth=measured.depth,
        repetitions=len(measured.timed),
        step_seconds=float(np.take(measured.normal, _typical(measured.normal)).mean()),
        timed_step_seconds=timed,
        ops=tuple(profiles),
        kinds=_kinds(profiles),
        total=_together([one.spent for one in profiles]),
    )


def _by_part(times: list[list[StepTimes]], numbers: list[int]) -> NDArray[np.float64]:
    """float64[2, repetitions, parts]: time taken, and waiting of it, means over the threads. `numbers`: the part that
    each record belongs to."""
    sums = np.zeros((2, len(times), max(numbers) + 1))
    for repetition, steps in enumerate(times):
        for step in steps:
            for kind, seconds in enumerate((step.working + step.waiting, step.waiting)):
                np.add.at(sums[kind, repetition], numbers, seconds.mean(axis=0))
    return sums


def _typical(seconds: list[float]) -> NDArray[np.int64]:
    """The repetitions in the middle half by their time, over which means are taken.

    The median of each op would leave out what strikes another op each time: SmolLM2's decode, 416 steps: all ops
    together 3.45 ms in the median, 3.24 the sum of their medians, 3.46 so.
    """
    quarter = len(seconds) // 4
    return np.argsort(seconds)[quarter : len(seconds) - quarter]


def _shapes(rows: int, depth: int) -> list[StepShape]:
    """The steps that the backend makes of a batch."""
    starts = range(0, rows, MAX_ROWS)
    return [
        StepShape(min(MAX_ROWS, rows - start), depth + start, wanted=int(start + MAX_ROWS >= rows)) for start in starts
    ]


def _needs(backend: CpuBackend, part: _OpPart, step: StepShape) -> Needs:
    op = backend.plan.ops[part.origin]
    if part.quantizes:
        assert isinstance(op, Product)
        return quantizing_needs(op, step)
    return needs_of(op, backend.info.kv_type, step)


def _op_profile(plan: Plan, part: _OpPart, spent: Spent) -> OpProfile:
    op = plan.ops[part.origin]
    matrix = op.matrix
    return OpProfile(
        kind=_QUANTIZE if part.quantizes else CPU_OPS[type(op)].name,
        layer=_layer(plan, part.origin),
        name=matrix.name if matrix else "",
        weight_type=matrix.kind if matrix and not part.quantizes else "",
        spent=spent,
    )


def _layer(plan: Plan, index: int) -> int | None:
    """By the name of the next matrix: an op without one prepares what it is multiplied by."""
    names = (matrix.name for op in plan.ops[index:] if (matrix := op.matrix))
    found = _LAYER.match(next(names, ""))
    return int(found[1]) if found else None


def _kinds(profiles: list[OpProfile]) -> tuple[KindProfile, ...]:
    groups: dict[tuple[str, str], list[Spent]] = {}
    for one in profiles:
        groups.setdefault((one.kind, one.weight_type), []).append(one.spent)
    kinds = (KindProfile(*group, len(spent), _together(spent)) for group, spent in groups.items())
    return tuple(sorted(kinds, key=lambda kind: -kind.spent.seconds))


def _together(spent: list[Spent]) -> Spent:
    return Spent(
        sum(one.seconds for one in spent),
        sum(one.waiting for one in spent),
        sum((one.needs for one in spent), Needs()),
        spent[0].limits,
    )
