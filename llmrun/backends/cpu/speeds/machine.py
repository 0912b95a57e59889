"""The measured speeds of this machine's ops. They are stored (kept.py), because measuring takes about a second."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

from llmrun.backends.cpu.speeds.figures import WIDTHS, AttentionSpeed, LinearSpeed, RowSpeed
from llmrun.backends.cpu.speeds.kept import Known, keep_speeds, kept_speeds
from llmrun.backends.cpu.speeds.limits import MachineLimits
from llmrun.backends.cpu.speeds.ops import OpSpeeds

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmrun.model.plan.kv_shapes import AttentionShape

_MACHINE_BYTES = 256 << 20

Speed = TypeVar("Speed", LinearSpeed, RowSpeed, AttentionSpeed)


@dataclass(slots=True)
class Speeds:
    """The measured speeds for one number of threads. Each speed is measured when it is first requested.

    Measuring a weight type takes about 0.3 s. The methods raise the same errors as `load_kernels`.
    """

    n_threads: int
    known: Known = field(default_factory=dict)
    _measuring: OpSpeeds | None = None

    @classmethod
    def of_this_machine(cls, n_threads: int, *, afresh: bool = False) -> Speeds:
        """Load the stored speeds. If `afresh` is true, ignore them, so that all speeds are measured again."""
        return cls(n_threads, {} if afresh else kept_speeds(n_threads))

    def linear(self, packed: str) -> LinearSpeed:
        """Return the speed of matrix products with weights in the given packed form (Matrix.packed)."""
        return self._speed(f"linear {packed}", LinearSpeed, lambda ops: ops.linear(packed))

    def rows(self, name: str) -> RowSpeed:
        """Return the speed of "rmsnorm", "swiglu" or "quantize"."""
        return self._speed(f"rows {name}", RowSpeed, lambda ops: self._all_rows(ops)[name])

    def _all_rows(self, measuring: OpSpeeds) -> dict[str, RowSpeed]:
        """Measure all row-wise ops together, and record their speeds."""
        found = measuring.rows()
        self.known |= {f"rows {name}": asdict(speed) for name, speed in found.items()}
        return found

    def attention(self, shape: AttentionShape, kv_type: str) -> AttentionSpeed:
        name = f"attention {shape.heads} {shape.kv_heads} {shape.head_size} {shape.value_size} {kv_type}"
        return self._speed(name, AttentionSpeed, lambda ops: ops.attention(shape, kv_type))

    def read_bandwidth(self) -> float:
        """Return the memory bandwidth of all threads together, in bytes per second. It limits every backend."""
        kept = self.known.get("limits", {})
        if kept.keys() != {"read"} or not _are_speeds(list(kept.values())):
            machine = MachineLimits(self.n_threads, _MACHINE_BYTES)
            kept = self.known["limits"] = {"read": sorted(machine.read_bandwidth() for _ in range(3))[1]}
        return float(kept["read"])

    def _speed(self, name: str, kind: type[Speed], measure: Callable[[OpSpeeds], Speed]) -> Speed:
        kept = self.known.get(name)
        if kept is not None and kept.keys() == {one.name for one in fields(kind)} and _are_speeds(list(kept.values())):
            return kind(**kept)
        self._measuring = self._measuring or OpSpeeds(self.n_threads)
        measured = measure(self._measuring)
        self.known[name] = asdict(measured)
        return measured

    def keep(self) -> None:
        """Store the measured speeds for later processes, and free the memory used for measuring."""
        if self._measuring is None:
            return
        self._measuring = None
        keep_speeds(self.n_threads, self.known)


def _are_speeds(values: list[Any]) -> bool:
    """Return whether all values are positive numbers, or lists of one positive number per width."""
    numbers: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple) and len(value) != len(WIDTHS):
            return False
        numbers += value if isinstance(value, list | tuple) else [value]
    return all(isinstance(one, float) and math.isfinite(one) and one > 0 for one in numbers)
