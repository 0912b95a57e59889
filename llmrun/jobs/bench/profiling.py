"""Profiles a step of the CPU engine op by op, and compares each op with the limits of the machine.

Each thread records the time after every op and every barrier (timed_team.py). The same steps also run without these
timestamps, to measure the overhead of timing.
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
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.cpu.cache_size import MAX_ROWS
from llmrun.backends.cpu.lowering import Needs, StepShape
from llmrun.backends.cpu.ops.linear import quantizing_needs
from llmrun.backends.cpu.ops.registry import cpu_op, needs_of
from llmrun.backends.cpu.speeds.measured import MachineLimits
from llmrun.base.types import LOGITS, Batch
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.plan.ops.linear import Product

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from llmrun.backends.base import Progress
    from llmrun.backends.cpu.timed_team import StepTimes, TimedTeam
    from llmrun.model.plan.plan import Plan

_IN_A_ROW = 8  # the maximum number of consecutive steps before switching between the timed and the normal team
_LEAST_TURNS = 3
_FAR_OVER = 2.0  # Stop before _LEAST_TURNS once the time exceeds this multiple of the requested seconds.
_SETTLED = 0.98  # A step counts as faster only if it takes less than this share of the best time so far.


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The times of a step of `rows` tokens after `depth` tokens of context."""

    rows: int
    depth: int
    normal: list[float]  # seconds of each repetition
    timed: list[float]
    times: list[list[StepTimes]]  # for each timed repetition, the times of its steps


def measure_step(backend: CpuBackend, rows: int, depth: int, seconds: float) -> MeasuredStep:
    """Measure the step with and without timing the ops.

    The two variants alternate every few steps, so that changes in the machine's speed affect both.
    """
    random = np.random.default_rng(0)
    backend.kv.free(0)
    found = MeasuredStep(rows, depth, [], [], [])

    def run(team: TimedTeam | None = None) -> float:
        _go_back(random, backend, depth)
        if team is not None:
            team.taken_times()  # discard the times of steps that `_go_back` ran
        batch = _batch(random, backend, rows, depth)
        begun = time.perf_counter()
        backend.forward(batch)
        return time.perf_counter() - begun

    step = _warm(run, seconds / 4)
    in_a_row = max(1, min(_IN_A_ROW, round(seconds / 2 / _LEAST_TURNS / step)))
    # Unless steps are long, run one uncounted step after each switch between teams, while the threads wake up.
    settles = step < seconds / 4 / _LEAST_TURNS
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
            for _ in range(in_a_row):
                found.timed.append(run(team))
                found.times.append(team.taken_times())
    return found


def _go_back(random: np.random.Generator, backend: CpuBackend, depth: int) -> None:
    """Shorten the sequence to `depth` tokens. If the cache keeps fewer tokens, compute the missing tokens.

    The last token runs alone, so that the next step begins at a recurrent state, as in normal decoding.
    """
    kept = backend.kv.truncate(0, depth)
    for end in (depth - 1, depth):
        if kept < end:
            backend.forward(_batch(random, backend, end - kept, kept))
            kept = end


def _goes_on(turns: int, taken: float, seconds: float) -> bool:
    """Return whether to take another turn.

    At least one turn always runs. Turns continue until the requested time is up and _LEAST_TURNS have run, but stop
    earlier if reaching _LEAST_TURNS would take far longer than requested.
    """
    return turns == 0 or taken < seconds or (turns < _LEAST_TURNS and taken < _FAR_OVER * seconds)


def _warm(run: Callable[[], float], seconds: float) -> float:
    """Call `run` until three runs in a row bring no improvement or `seconds` have passed. Return the best time."""
    begun = time.perf_counter()
    best, since = run(), 0
    while since < 3 and time.perf_counter() - begun < seconds:
        taken = run()
        since = since + 1 if taken > _SETTLED * best else 0
        best = min(best, taken)
    return best


def _batch(random: np.random.Generator, backend: CpuBackend, rows: int, start: int) -> Batch:
    """Return a batch of random tokens for one sequence that requests the logits of the last token."""
    tokens = random.integers(0, backend.info.vocabulary_size, rows).astype(np.int32)
    positions = np.arange(start, start + rows, dtype=np.int32)
    want = (positions == start + rows - 1) * np.uint8(LOGITS)
    return Batch(tokens, np.zeros(rows, np.int32), positions, want)


_QUANTIZE = "quantize"  # the kind of ops that quantize the input of a matmul to int8
_LAYER = re.compile(r"blk\.(\d+)\.")
_LIMIT_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class SpeedLimits:
    """The limits of the machine, as medians of measurements taken between the steps."""

    read_bandwidth: float  # Bytes per second that all threads together read from memory.
    multiply_rate: float  # Int8 multiply-adds per second of all threads together.


@dataclass(frozen=True, slots=True)
class Spent:
    """The time and the work of one or more ops.

    seconds   the mean over the middle half of the steps and over the threads
    waiting   the part of `seconds` spent waiting at the barrier for threads that had more work or were not scheduled
    needs     the number of bytes read and of multiplications done (cpu/lowering.py)

    A share of 1.0 means that the machine's limit was reached. The bandwidth share may exceed 1.0 if weights or keys are
    still in a CPU cache from the previous step, because the limit is measured in main memory. A share is 0 if the ops
    do no work of that kind. Floating-point work is not compared with a limit, so attention over many rows, which is
    mostly floating-point work, stays far below both limits.
    """

    seconds: float
    waiting: float
    needs: Needs
    limits: SpeedLimits

    @property
    def bytes_per_second(self) -> float:
        """Bytes of weights and KV cache read per second. Activations stay in CPU caches and are not counted."""
        return self._rate(self.needs.memory_bytes)

    @property
    def products_per_second(self) -> float:
        """Int8 multiply-adds per second."""
        return self._rate(self.needs.products)

    @property
    def float_products_per_second(self) -> float:
        """Floating-point multiply-adds per second."""
        return self._rate(self.needs.float_products)

    @property
    def bandwidth_share(self) -> float:
        """The share of the memory bandwidth that was reached."""
        return self.bytes_per_second / self.limits.read_bandwidth

    @property
    def multiply_share(self) -> float:
        """The share of the int8 multiply rate that was reached."""
        return self.products_per_second / self.limits.multiply_rate

    def _rate(self, count: int) -> float:
        return count / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class OpProfile:
    """The profile of one op in the plan, or of the quantization of its input.

    layer        the index of the layer; None before the first layer and after the last
    name         the name of the weight tensor, such as "blk.3.ffn_down.weight"; for quantization, the first tensor
                 that uses the result; empty if the op has no matrix
    weight_type  the type of the weights, such as "q4_k"; empty if the op does not multiply by a matrix
    """

    kind: str
    layer: int | None
    name: str
    weight_type: str
    spent: Spent


@dataclass(frozen=True, slots=True)
class KindProfile:
    """The profile of all ops with the same kind and weight type. `count` is the number of these ops in the plan."""

    kind: str
    weight_type: str
    count: int
    spent: Spent


@dataclass(frozen=True, slots=True)
class StepProfile:
    """The profile of a decode step or of a prefill.

    A prompt that the engine splits into several steps counts as one step. Times are means over the middle half of the
    repetitions.

    rows                the number of tokens in the step; 1 for decode
    depth               the number of tokens that are already in the KV cache
    repetitions         the number of timed repetitions, and also of untimed repetitions
    step_seconds        seconds per step without timing, as in normal use
    timed_step_seconds  seconds per step with timing
    ops                 the ops in the order of the plan
    kinds               the ops grouped by kind, longest time first
    total               the sum of all ops
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
        """The slowdown caused by timing the ops, as a share of the step's time. Noise may make this share negative."""
        return self.timed_step_seconds / self.step_seconds - 1

    @property
    def outside_seconds(self) -> float:
        """The seconds of a timed step outside all ops, spent in Python and on waking the team and its caller."""
        return self.timed_step_seconds - self.total.seconds


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of one model on this machine."""

    path: str
    threads: int
    kv_type: str
    limits: SpeedLimits
    decode: StepProfile
    prefill: StepProfile
    train_context: int  # tokens; 0 if unknown


def profile(
    path: Path,
    *,
    threads: int | None = None,
    kv_type: str | None = None,
    prompt: int = 256,
    depth: int = 0,
    seconds: float = 2.0,
    progress: Progress | None = None,
) -> Profile:
    """Profile a decode step of one token and a prefill of `prompt` tokens, both after `depth` tokens of context.

    Each step is measured for about `seconds`. The tokens are random, because no kernel's time depends on them.
    Measuring the machine's limits requires 1 GiB of memory in addition to the model. Raises ModelFileError,
    UnsupportedModel and DoesNotFit.
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
            measured.append(measure_step(backend, rows, depth, seconds))
            found.append(_limits(machine))
        limits = SpeedLimits(*np.median(np.concatenate(found), axis=0).tolist())
        decode, prefill = (_step_profile(backend, step, limits) for step in measured)
        return Profile(
            path=str(path),
            threads=backend.info.threads,
            kv_type=backend.info.kv_type,
            limits=limits,
            decode=decode,
            prefill=prefill,
            train_context=backend.info.train_context,
        )


def _limits(machine: MachineLimits) -> NDArray[np.float64]:
    """Return float64[rounds, 2], with the read bandwidth and the multiply rate of each round."""
    return np.array([[machine.read_bandwidth(), machine.multiply_rate()] for _ in range(_LIMIT_ROUNDS)])


# --- measurements by op -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _OpPart:
    """A unit of the profile: an op, or the quantization of an op's input."""

    origin: int  # the op's index in the plan
    quantizes: bool


def _step_profile(backend: CpuBackend, measured: MeasuredStep, limits: SpeedLimits) -> StepProfile:
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
    """Return float64[2, repetitions, parts], the time and the waiting time of each part, as means over the threads.

    `numbers` maps each record to the index of its part.
    """
    sums = np.zeros((2, len(times), max(numbers) + 1))
    for repetition, steps in enumerate(times):
        for step in steps:
            for kind, seconds in enumerate((step.working + step.waiting, step.waiting)):
                np.add.at(sums[kind, repetition], numbers, seconds.mean(axis=0))
    return sums


def _typical(seconds: list[float]) -> NDArray[np.int64]:
    """Return the indices of the repetitions whose total time is in the middle half of all total times.

    Per-op medians would miss disturbances that hit a different op each time. Over 416 decode steps of SmolLM2, the
    median of the total time was 3.45 ms, the sum of the per-op medians was 3.24 ms, and this method gave 3.46 ms.
    """
    quarter = len(seconds) // 4
    return np.argsort(seconds)[quarter : len(seconds) - quarter]


def _shapes(rows: int, depth: int) -> list[StepShape]:
    """Return the steps into which the backend splits a batch."""
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
        kind=_QUANTIZE if part.quantizes else cpu_op(type(op)).name,
        layer=_layer(plan, part.origin),
        name=matrix.name if matrix else "",
        weight_type=matrix.kind if matrix and not part.quantizes else "",
        spent=spent,
    )


def _layer(plan: Plan, index: int) -> int | None:
    """Return the layer of an op, taken from the name of its matrix.

    Ops without a matrix prepare the input of the next matrix, so these ops belong to the layer of the next matrix.
    """
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
