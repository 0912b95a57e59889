"""Stores the measured speeds of this machine's ops in the cache folder, because measuring takes about a second.

Stored speeds are used if they are well formed, less than a month old, and were measured with the same processor,
instruction-set level, number of threads and llmrun version. Missing speeds are measured.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llmrun import __version__, folders
from llmrun.backends.cpu.speeds.figures import WIDTHS, AttentionSpeed, LinearSpeed, RowSpeed
from llmrun.backends.cpu.speeds.limits import MachineLimits
from llmrun.backends.cpu.speeds.ops import OpSpeeds
from llmrun.compiled.levels import host_target

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmrun.plan.kv_shapes import AttentionShape

_MOST_SECONDS = 30 * 24 * 3600
_MOST_FILE_BYTES = 1 << 20
_MACHINE_BYTES = 256 << 20

Speed = TypeVar("Speed", LinearSpeed, RowSpeed, AttentionSpeed)


@dataclass(slots=True)
class Speeds:
    """The measured speeds for one number of threads. Each speed is measured when it is first requested.

    Measuring a weight type takes about 0.3 s. The methods raise the same errors as `load_kernels`.
    """

    n_threads: int
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    _measuring: OpSpeeds | None = None

    @classmethod
    def of_this_machine(cls, n_threads: int, *, afresh: bool = False) -> Speeds:
        """Load the stored speeds. If `afresh` is true, ignore them, so that all speeds are measured again."""
        return cls(n_threads, {} if afresh else _kept(n_threads))

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
        path = _path(self.n_threads)
        body = {"measured": time.time(), "machine": _machine(self.n_threads), "speeds": self.known}
        with contextlib.suppress(OSError):  # if storing fails, the next process measures again, which takes a second
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as part:
                json.dump(body, part)
            Path(part.name).replace(path)


def _kept(n_threads: int) -> dict[str, dict[str, Any]]:
    path = _path(n_threads)
    try:
        if path.stat().st_size > _MOST_FILE_BYTES:
            return {}
        body = json.loads(path.read_text(encoding="utf-8"))
        age = time.time() - body["measured"]
        if body["machine"] != _machine(n_threads) or not 0 <= age < _MOST_SECONDS:
            return {}
        return {name: dict(values) for name, values in body["speeds"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}  # the file is missing or damaged, so the speeds are measured again


def _are_speeds(values: list[Any]) -> bool:
    """Return whether all values are positive numbers, or lists of one positive number per width."""
    numbers: list[Any] = []
    for value in values:
        if isinstance(value, list | tuple) and len(value) != len(WIDTHS):
            return False
        numbers += value if isinstance(value, list | tuple) else [value]
    return all(isinstance(one, float) and math.isfinite(one) and one > 0 for one in numbers)


def _machine(n_threads: int) -> list[Any]:
    target = host_target()
    return [target.cpu, target.level.name, n_threads, os.cpu_count(), __version__]


def _path(n_threads: int) -> Path:
    return folders.cache_folder() / "speeds" / f"{n_threads}.json"
