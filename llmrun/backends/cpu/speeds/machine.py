"""Measures how fast this machine runs each kind of op, using plans of a few ops and placeholder weights.

The speed of reading weights is measured with more weights than fit in the caches. Large and small matrices are both
measured to find the fixed cost of an op. Steps with many rows are measured at three widths, because the activations of
wide models do not fit in the caches.

The results are stored (measured.py), because measuring takes about a second. Other programs make results too slow, so
the load of the machine is watched during each measurement. Results from a busy machine are marked, and measured again
as soon as the machine is quiet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from llmrun.backends.cpu.lower import kv_shapes, lower
from llmrun.backends.cpu.speeds.measured import (
    TAKEN,
    WIDTHS,
    AttentionSpeed,
    Known,
    LinearSpeed,
    MachineLimits,
    RowSpeed,
    keep_speeds,
    kept_speeds,
)
from llmrun.backends.cpu.timed_team import TimedTeam
from llmrun.backends.cpu.weights import PackedLayout, PackedMatrix
from llmrun.base.compiled.host import load_kernels
from llmrun.base.machine.load import Load, disturbance, disturbance_now, watched
from llmrun.formats.layouts.arena import address_of, allocate_huge
from llmrun.formats.layouts.kv import BLOCK, GROUP
from llmrun.formats.layouts.linear import WIDE, WIDENED_TYPES
from llmrun.model.plan.elementary import Rope, rotations_of
from llmrun.model.plan.matrix import Matrix
from llmrun.model.plan.ops.embedding import Embed
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.shapes import AttentionShape

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = 256  # the number of rows in a step with many rows

_REGION = 256 << 20  # bytes of weights, which is more than most caches hold
_LARGE, _SMALL = 16 << 20, 384 << 10  # bytes per matrix
_N_LARGE, _N_SMALL = 12, 150
_COLUMNS = 2048
_KIND_OF_WIDE = min(WIDENED_TYPES)  # any widened type, because all widened types have the same memory layout
_BYTE = 0x2C  # the byte in all weights, which is not denormal when read as float16, float32 or a scale
_LAYERS = 8  # the number of attention layers in a trial
# The number of features between attention layers. Without this bottleneck, the matrices for 32 heads of 576 and 512
# features would take 306 MiB.
_BETWEEN = 512
_DEPTH = 512  # the context length at which attention is measured
_PATCHES = 2048  # the number of rows that each row of an image attends to when the attention of encoders is measured
# Processors are faster for the first few milliseconds. We saw a drop from 1,170 to 620 G multiply-adds per second.
_WARM_SECONDS, _SECONDS = 0.03, 0.08


class OpSpeeds:
    """A benchmark of ops with `n_threads` threads. The benchmark allocates more than 256 MiB of memory."""

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self.load = Load.empty()  # the machine's load during all measurements since a caller last reset this load
        self._region = allocate_huge(_REGION, "memory to measure its speed")
        self._region[:] = _BYTE

    def linear(self, packed: str) -> LinearSpeed:
        """Measure matrix products with weights in the given packed form (Matrix.packed).

        Raises the same errors as `load_kernels`.
        """
        kind = _KIND_OF_WIDE if packed == WIDE else packed
        before = self._reading(kind)
        multiply = tuple(self._multiplying(kind, width) for width in WIDTHS)
        after = self._reading(kind)  # measured twice, because read speeds differed by up to a third
        return LinearSpeed(2 / (1 / before[0] + 1 / after[0]), (before[1] + after[1]) / 2, multiply)

    def rows(self) -> dict[str, RowSpeed]:
        """Measure "rmsnorm", "swiglu" and "quantize"."""
        found: dict[str, list[list[float]]] = {name: [[], []] for name in ("rmsnorm", "swiglu", "quantize")}
        for width in WIDTHS:
            trial = _RowTrial(self._region, width, self._n_threads, self.load)
            for index, rows in enumerate((1, ROWS)):
                for name, seconds in trial.seconds(rows).items():
                    found[name][index].append(seconds / rows)
        return {name: RowSpeed(tuple(one), tuple(many)) for name, (one, many) in found.items()}

    def attention(self, shape: AttentionShape, kv_type: str) -> AttentionSpeed:
        """Measure one layer of this shape. Without a causal mask, many rows attend to _PATCHES rows each."""
        depth = _DEPTH if shape.around is None else _PATCHES - ROWS
        trial = _AttentionTrial(self._region, shape, kv_type, self._n_threads, self.load, depth)
        both = shape.head_size + shape.value_size
        features = shape.heads * shape.head_size + shape.kv_heads * both
        rope_one, empty, step = trial.seconds(1, 0)
        _, deep, _ = trial.seconds(1, _DEPTH)
        rope_many, many, _ = trial.seconds(ROWS, ROWS if shape.around is None else depth)
        kv_bytes = _DEPTH * shape.block_bytes(kv_type) / BLOCK
        attended = ROWS * ROWS + ROWS * (ROWS + 1) // 2 if shape.around is None else ROWS * _PATCHES
        products = shape.heads * both * attended
        return AttentionSpeed(
            op=empty,
            read=kv_bytes / max(deep - empty, 1e-9),
            multiply=products / many,
            rope_one=rope_one / features,
            rope_many=rope_many / ROWS / features,
            step=step,
        )

    def _reading(self, kind: str) -> tuple[float, float]:
        """Measure LinearSpeed.read and LinearSpeed.op, with a barrier after each matrix product.

        Large and small matrices are measured in the same steps so that changes over time affect both.
        """
        group = PackedLayout.of(_matrix("", kind, 16, _COLUMNS)).group_bytes
        large, small = (16 * max(1, size // group) for size in (_LARGE, _SMALL))
        rows = [large] * _N_LARGE + [small] * _N_SMALL
        matrices = [_matrix(f"w{number}", kind, n, _COLUMNS) for number, n in enumerate(rows)]
        plan = Plan()
        x = plan.embed(_matrix("x", "f32", 16, _COLUMNS))
        outputs = {n: plan.linear(x, matrix) for n, matrix in ((large, matrices[0]), (small, matrices[-1]))}
        for n, matrix in zip(rows[1:-1], matrices[1:-1], strict=True):
            plan.linear_add(x, matrix, outputs[n])
        trial = _Trial(plan, self._region, self._n_threads, self.load, max_rows=1)
        # The first two products have no barrier between them.
        order = trial.of("linear.int8", "linear.floats").nonzero()[0][2:]
        large_seconds, small_seconds, _ = trial.steps(1, 0, [order[: _N_LARGE - 1], order[_N_LARGE - 1 :]])
        read = large // 16 * group * (_N_LARGE - 1) / large_seconds
        return read, max(1e-9, small_seconds / (_N_SMALL - 1) - small // 16 * group / read)

    def _multiplying(self, kind: str, columns: int) -> float:
        rows = max(256, (4 << 20) // columns)
        plan = Plan()
        x = plan.embed(_matrix("x", "f32", 16, columns))
        plan.linear(x, _matrix("w", kind, rows, columns))
        trial = _Trial(plan, self._region, self._n_threads, self.load, max_rows=ROWS)
        seconds, _ = trial.steps(ROWS, 0, [trial.of("linear.int8", "linear.floats")])
        return ROWS * rows * columns / seconds


def _matrix(name: str, kind: str, rows: int, columns: int) -> Matrix:
    return Matrix.of_bytes(name, kind, rows, columns, np.empty(0, np.uint8))


class _Trial:
    """A plan whose weights fill `region` in order, starting again at the beginning when the region is full.

    The embedding table "x" is filled with ones, because denormal activations would be slow.
    """

    def __init__(
        self,
        plan: Plan,
        region: NDArray[np.uint8],
        n_threads: int,
        load: Load,
        *,
        max_rows: int,
        kv_type: str = "f16",
        depth: int = _DEPTH,
    ) -> None:
        width = next(op.table.columns for op in plan.ops if isinstance(op, Embed))
        head = plan.rmsnorm_wanted(next(op.out for op in plan.ops if isinstance(op, Embed)), _ones(width), 1e-5)
        plan.output(head, _matrix("logits", "f32", 16, width))
        packed, at = {}, 0
        for matrix in plan.matrices:
            layout = PackedLayout.of(matrix)
            if matrix.kind == "f32":
                data = _ones(layout.n_bytes // 4).view(np.uint8)
            elif layout.n_bytes > len(region):
                data = np.full(layout.n_bytes, _BYTE, np.uint8)
            else:
                at = at if at + layout.n_bytes <= len(region) else 0
                data, at = region[at : at + layout.n_bytes], at + layout.n_bytes
            packed[matrix.name] = PackedMatrix(matrix, layout, data)
        n_blocks = -(-(depth + max_rows) // BLOCK)
        kv = [np.zeros(shape, np.uint8) for shape in kv_shapes(plan, [n_blocks] * len(plan.windows), kv_type)]
        self._plan = plan
        self._lowered = lower(plan, packed, kv, kv_type=kv_type, max_rows=max_rows, n_threads=n_threads)
        load_kernels(self._lowered.kernels)
        self._lowered.link()
        self._n_threads = n_threads
        self._load = load
        self._table = np.arange(n_blocks, dtype=np.int32)

    def steps(self, rows: int, start: int, groups: Sequence[NDArray[Any]]) -> list[float]:
        """Return the time in seconds that each group of records takes per step, as the median of many steps.

        A group is a mask or an array of indices. The last value is the time that a step spends outside its ops,
        including the embedding, during which the threads wake up.
        """
        tokens = np.zeros(rows, np.int32)
        positions = np.arange(start, start + rows, dtype=np.int32)
        tables = np.full((len(self._plan.windows), rows), address_of(self._table), np.int64)
        wanted = np.array([rows - 1], np.int32)
        logits = np.empty((1, self._lowered.logits_width), np.float32)
        rotations = rotations_of(self._plan.ropes, positions)
        team = TimedTeam(self._lowered, self._n_threads)
        try:
            wall: list[float] = []
            started, n_warm = time.perf_counter(), 1
            with watched(self._load):
                while not wall or time.perf_counter() - started < _WARM_SECONDS + _SECONDS:
                    begun = time.perf_counter()
                    n_warm += begun - started < _WARM_SECONDS
                    team.run(tokens, positions, tables, wanted, rotations, logits)
                    wall.append(time.perf_counter() - begun)
            n_warm = min(n_warm, len(wall) - 1)
            times = team.taken_times()[n_warm:]
        finally:
            team.close()
        spent = np.array([(one.working + one.waiting).mean(axis=0) for one in times])  # [steps, records]
        besides = np.array(wall[n_warm:]) - spent[:, ~self.of("linear.embed")].sum(axis=1)
        return [float(np.median(taken)) for taken in (*(spent[:, group].sum(axis=1) for group in groups), besides)]

    def of(self, *modules: str) -> NDArray[np.bool_]:
        """Return a mask, bool[records], of the records whose kernels are in these modules.

        The last record is excluded because it computes the logits.
        """
        found = np.array([kernel.module in modules for kernel in self._lowered.kernels])
        found[-1] = False
        return found


class _RowTrial(_Trial):
    def __init__(self, region: NDArray[np.uint8], width: int, n_threads: int, load: Load) -> None:
        plan = Plan()
        x = plan.embed(_matrix("x", "f32", 16, width))
        h = plan.rmsnorm(x, _ones(width), 1e-5)
        plan.linear(plan.swiglu(x, h), _matrix("w", "q8_0", 16, width))
        super().__init__(plan, region, n_threads, load, max_rows=ROWS)

    def seconds(self, rows: int) -> dict[str, float]:
        """Return the time in seconds of the first op of each kind, keyed by the op's name."""
        names = {name: number for number, name in enumerate(("rmsnorm", "swiglu", "quantize"), 1)}
        groups = [np.arange(len(self._lowered.kernels)) == number for number in names.values()]
        return dict(zip(names, self.steps(rows, 0, groups), strict=False))


class _AttentionTrial(_Trial):
    """A trial of attention layers with matrix products between them.

    Without these products, the threads would fall asleep, and waking up would take 20 us. In a model, waking up takes 2
    to 8 us.
    """

    def __init__(
        self, region: NDArray[np.uint8], shape: AttentionShape, kv_type: str, n_threads: int, load: Load, depth: int
    ) -> None:
        plan, rope = Plan(), Rope(np.full(shape.head_size // 2, 0.01))
        wide = shape.heads * shape.head_size
        widths = (wide, shape.kv_heads * shape.head_size, shape.kv_heads * shape.value_size)
        q, k, v = (plan.embed(_matrix(f"x{n}", "f32", 16, width)) for n, width in enumerate(widths))
        for layer in range(_LAYERS):
            q = plan.attention(q, k, v, shape, rope)
            few = plan.linear(q, _matrix(f"down{layer}", "f32" if q.width % GROUP else "q8_0", _BETWEEN, q.width))
            q = plan.linear(few, _matrix(f"up{layer}", "q8_0", wide, _BETWEEN))
        super().__init__(plan, region, n_threads, load, max_rows=ROWS, kv_type=kv_type, depth=depth)

    def seconds(self, rows: int, start: int) -> tuple[float, float, float]:
        """Return three times in seconds: RoPE and storing per layer, attention per layer, and overhead per step."""
        groups = [self.of("attention.rope"), self.of("attention.attention")]
        later = [group.nonzero()[0][group.sum() // _LAYERS :] for group in groups]
        rope, attention, step = self.steps(rows, start, later)
        return rope / (_LAYERS - 1), attention / (_LAYERS - 1), step


def _ones(n: int) -> NDArray[np.float32]:
    return np.ones(n, np.float32)


_MACHINE_BYTES = 256 << 20
_IMAGES = "images"  # the subject with the factor for images
_OTHER = 0.1  # the relative change of this factor from which it is stored again

Speed = TypeVar("Speed", LinearSpeed, RowSpeed, AttentionSpeed)


# The read speed of Q4_K weights, as a share of the memory bandwidth. Two threads of a Zen 3 reached 0.95 to 0.98. One
# thread reached 0.68 to 1.35, because other virtual machines shared the bandwidth.
_READ_SHARE = 0.9


@dataclass(slots=True)
class Speeds:
    """The measured speeds for one number of threads. Each speed is measured when it is first requested.

    A kept speed that was measured on a busy machine is measured again if the machine is quiet. Measuring a weight type
    takes about 0.3 s. The methods raise the same errors as `load_kernels`.
    """

    n_threads: int
    known: Known = field(default_factory=dict)
    _measuring: OpSpeeds | None = None
    _measured: set[str] = field(default_factory=set)  # subjects that this process has measured
    _used: set[str] = field(default_factory=set)
    _is_quiet: bool | None = None  # None until a speed from a busy machine is requested
    _only_known: bool = False

    @classmethod
    def of_this_machine(cls, n_threads: int, *, afresh: bool = False) -> Speeds:
        """Load the stored speeds. If `afresh` is true, ignore the stored speeds and measure all speeds again."""
        return cls(n_threads, {} if afresh else kept_speeds(n_threads))

    @property
    def disturbance(self) -> str:
        """What disturbed the measurement of the speeds that this object has returned, or ""."""
        return next(filter(None, (self._disturbed(name) for name in sorted(self._used))), "")

    @contextmanager
    def only_known(self) -> Iterator[None]:
        """In this context, raise LookupError for speeds that have never been measured, instead of measuring them."""
        used, self._used, self._only_known = self._used, set(), True
        try:
            yield
        finally:
            self._used, self._only_known = used, False

    def linear(self, packed: str) -> LinearSpeed:
        """Return the speed of matrix products with weights in the given packed form (Matrix.packed)."""
        return self._speed(f"linear {packed}", LinearSpeed, lambda ops: ops.linear(packed))

    def rows(self, name: str) -> RowSpeed:
        """Return the speed of "rmsnorm", "swiglu" or "quantize"."""
        return self._speed(f"rows {name}", RowSpeed, lambda ops: self._all_rows(ops)[name])

    def _all_rows(self, measuring: OpSpeeds) -> dict[str, RowSpeed]:
        """Measure all row-wise ops together, and record their speeds."""
        found = measuring.rows()
        for name, speed in found.items():
            self._record(f"rows {name}", structs.asdict(speed), measuring.load)
        return found

    def attention(self, shape: AttentionShape, kv_type: str) -> AttentionSpeed:
        mask = "" if shape.around is None else " unmasked"
        name = f"attention {shape.heads} {shape.kv_heads} {shape.head_size} {shape.value_size} {kv_type}{mask}"
        return self._speed(name, AttentionSpeed, lambda ops: ops.attention(shape, kv_type))

    def read_bandwidth(self) -> float:
        """Return the total memory bandwidth of all threads in bytes per second, a limit for every backend."""
        self._used.add("limits")
        kept = self.known.get("limits", {})
        is_usable = kept.keys() == {"read"} and _are_speeds(list(kept.values()))
        if self._only_known and not is_usable:
            raise LookupError("limits")
        if not is_usable or self._is_due("limits"):
            machine, load = MachineLimits(self.n_threads, _MACHINE_BYTES), Load.empty()
            with watched(load):
                kept = {"read": sorted(machine.read_bandwidth() for _ in range(3))[1]}
            self._record("limits", kept, load)
        return float(kept["read"])

    def weights_read(self) -> float:
        """Return roughly how many bytes of weights per second a decoding step reads.

        Unlike `linear`, this method compiles only one small kernel, so it takes about a second on a new machine.
        """
        if self.knows_weights:
            return self.linear("q4_k").read
        return _READ_SHARE * self.read_bandwidth()

    @property
    def knows_weights(self) -> bool:
        """True if the speed of the most common weight type has been measured."""
        return "linear q4_k" in self.known

    def _speed(self, name: str, kind: type[Speed], measure: Callable[[OpSpeeds], Speed]) -> Speed:
        self._used.add(name)
        kept = self.known.get(name)
        is_usable = kept is not None and kept.keys() == {one.name for one in structs.fields(kind)}
        is_usable = is_usable and kept is not None and _are_speeds(list(kept.values()))
        if self._only_known and not is_usable:
            raise LookupError(name)
        if kept is not None and is_usable and not self._is_due(name):
            return kind(**kept)
        self._measuring = self._measuring or OpSpeeds(self.n_threads)
        load = self._measuring.load = Load.empty()
        measured = measure(self._measuring)
        self._record(name, structs.asdict(measured), load)
        return measured

    def _is_due(self, name: str) -> bool:
        """Return whether a kept speed must be measured again: it was disturbed, and now the machine is quiet."""
        if name in self._measured or not self._disturbed(name):
            return False
        if self._is_quiet is None:
            self._is_quiet = not disturbance_now(self.n_threads)
        return self._is_quiet

    def _disturbed(self, name: str) -> str:
        taken = self.known.get(TAKEN, {}).get(name)
        return str(taken.get("disturbed", "")) if isinstance(taken, dict) else ""

    def _record(self, name: str, values: dict[str, Any], load: Load) -> None:
        self.known[name] = values
        taken = {"at": time.time(), "disturbed": disturbance(load, self.n_threads)}
        self.known.setdefault(TAKEN, {})[name] = taken
        self._measured.add(name)

    @property
    def image_factor(self) -> float:
        """The time that images have taken, divided by the time with assumed speeds (vision_costs.py); 0 if unknown."""
        kept = self.known.get(_IMAGES, {}).get("factor")
        return float(kept) if kept is not None and _are_speeds([kept]) else 0.0

    def keep_image_factor(self, factor: float) -> None:
        """Store the factor for later processes, unless nearly the same factor is stored."""
        if abs(factor - self.image_factor) > _OTHER * factor:
            self.known = kept_speeds(self.n_threads)  # another process may have stored speeds since
            self._record(_IMAGES, {"factor": factor}, Load.empty())
            self.keep()

    def keep(self) -> None:
        """Store the measured speeds for later processes, and free the memory used for measuring."""
        self._measuring = None
        if self._measured:
            keep_speeds(self.n_threads, self.known)


def _are_speeds(values: list[Any]) -> bool:
    """Return whether all values are positive numbers, or lists of one positive number per width."""
    numbers: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple) and len(value) != len(WIDTHS):
            return False
        numbers += value if isinstance(value, list | tuple) else [value]
    return all(isinstance(one, float) and math.isfinite(one) and one > 0 for one in numbers)
