"""The energy that processors and GPUs took while something ran, by their own counters.

RAPL is the processor package's (Intel, and AMD through the same files), NVML an NVIDIA GPU's. What is told by neither
(fans, disks, losses of the power supply, memory on many machines) is in no figure here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from llmrun.machine.processor import text_of

Value = TypeVar("Value")

_MOST_WATTS = 1000.0  # of one package: how soon its counter may come round
_POWER_INTERVAL = 0.1  # seconds between two readings of a GPU that counts no energy: NVML's own are about as far apart


class EnergySource(Protocol):
    """Something that counts joules.

    name      "RAPL package", "NVML"
    interval  read it at least so often, in seconds; 0: reading it at the ends is enough
    """

    name: str
    interval: float

    def joules(self) -> float:
        """Since the last call, or since any earlier moment for the first one. Raises OSError."""


class RaplPackage:
    """One processor package of Linux's powercap tree. Its counter of microjoules goes back to 0 at its range."""

    name = "RAPL package"

    def __init__(self, zone: Path) -> None:
        """Raises OSError, ValueError where the counter cannot be read (on most systems only root may)."""
        self._counter = zone / "energy_uj"
        self._range = int((zone / "max_energy_range_uj").read_text())
        self._last = self._read()
        self.interval = self._range / 1e6 / _MOST_WATTS / 2

    def _read(self) -> int:
        return int(self._counter.read_text())

    def joules(self) -> float:
        before, self._last = self._last, self._read()
        used = self._last - before
        return (used if used >= 0 else used + self._range) / 1e6


class NvmlCounter:
    """A GPU that counts the energy it took, in millijoules."""

    name = "NVML"
    interval = 0.0

    def __init__(self, nvml: Any, device: Any) -> None:
        """Raises OSError where the GPU does not count."""
        self._read: Callable[[], float] = _translated(nvml, nvml.nvmlDeviceGetTotalEnergyConsumption, device)
        self._last = self._read()

    def joules(self) -> float:
        before, self._last = self._last, self._read()
        return (self._last - before) / 1e3


class NvmlPower:
    """A GPU that tells its power, in milliwatts: the sum over time, by trapezoids."""

    name = "NVML"
    interval = _POWER_INTERVAL

    def __init__(self, nvml: Any, device: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises OSError where the GPU does not tell."""
        self._clock = clock
        self._read: Callable[[], float] = _translated(nvml, nvml.nvmlDeviceGetPowerUsage, device)
        self._last = (clock(), self._read())

    def joules(self) -> float:
        (then, before), self._last = self._last, (self._clock(), self._read())
        now, power = self._last
        return (now - then) * (before + power) / 2 / 1e3


def _translated(nvml: Any, question: Callable[[Any], Value], device: Any) -> Callable[[], Value]:
    def ask() -> Value:
        try:
            return question(device)
        except nvml.NVMLError as error:
            raise OSError(f"NVML: {error}") from error

    return ask


def rapl_sources(root: Path = Path("/")) -> list[EnergySource]:
    """The packages only: their cores and caches are zones below them, and `psys` holds them once more."""
    sources: list[EnergySource] = []
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        if (text_of(zone / "name") or "").startswith("package"):
            with contextlib.suppress(OSError, ValueError):  # not readable: not a source
                sources.append(RaplPackage(zone))
    return sources


def nvml_sources() -> list[EnergySource]:
    sources: list[EnergySource] = []
    nvml = _nvml()
    for device in _devices(nvml):
        for kind in (NvmlCounter, NvmlPower):
            with contextlib.suppress(OSError):  # older GPUs, and slices of one: not counted
                sources.append(kind(nvml, device))
                break
    return sources


def gpu_names() -> list[str]:
    """Return the names of NVIDIA's GPUs, without starting anything on them."""
    nvml = _nvml()
    with contextlib.suppress(OSError):
        return [str(_translated(nvml, nvml.nvmlDeviceGetName, device)()) for device in _devices(nvml)]
    return []


@dataclass(frozen=True, slots=True)
class NvidiaCard:
    """A GPU as NVIDIA's driver tells of it; bytes are 0 where it does not (parts of one, shared memory)."""

    name: str
    driver: str
    memory: int
    memory_free: int


def nvidia_cards() -> list[NvidiaCard]:
    """NVIDIA's GPUs and the driver's version; none without a driver that works. Nothing is started."""
    nvml = _nvml()
    cards = []
    with contextlib.suppress(OSError):
        for device in _devices(nvml):
            name = str(_translated(nvml, nvml.nvmlDeviceGetName, device)())
            driver = str(_translated(nvml, lambda _: nvml.nvmlSystemGetDriverVersion(), device)())
            total = free = 0
            with contextlib.suppress(OSError):
                told = _translated(nvml, nvml.nvmlDeviceGetMemoryInfo, device)()
                total, free = int(told.total), int(told.free)
            cards.append(NvidiaCard(name, driver, total, free))
    return cards


@functools.cache
def _nvml() -> Any:
    """The library, started once; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError):
        return None
    return pynvml


def _devices(nvml: Any) -> list[Any]:
    if nvml is None:
        return []
    try:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []


@dataclass(slots=True)
class Reading:
    """`joules` of all sources together, and `seconds`, once the measurement is over. None: a counter failed."""

    source: str  # names of the sources: "RAPL package + NVML"
    joules: float | None = None
    seconds: float = 0.0


class EnergyMeter:
    """Reads sources. For a model that runs on the processor alone give those of RAPL alone: idle GPUs count too."""

    def __init__(self, sources: Sequence[EnergySource]) -> None:
        self._sources = sources

    @contextlib.contextmanager
    def measure(self) -> Iterator[Reading]:
        """Measure the energy used inside the `with`, None without a source. Measurements must not overlap."""
        reading = Reading(" + ".join(dict.fromkeys(source.name for source in self._sources)))
        sampler = _Sampler(self._sources)
        started = time.monotonic()
        try:
            yield reading
        finally:
            reading.joules = sampler.stop()
            reading.seconds = time.monotonic() - started


class _Sampler:
    """Sums what sources count; in a thread of its own where one must be read between the ends."""

    def __init__(self, sources: Sequence[EnergySource]) -> None:
        self._sources = sources
        self._joules: float | None = 0.0 if sources else None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._read()
        if self._joules is not None:
            self._joules = 0.0  # that was from before
        self._interval = min((source.interval for source in sources if source.interval > 0), default=0.0)
        if self._interval:
            self._thread = threading.Thread(target=self._sample, name="llmrun-energy", daemon=True)
            self._thread.start()

    def stop(self) -> float | None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        self._read()
        return self._joules

    def _sample(self) -> None:
        while not self._over.wait(self._interval):
            self._read()

    def _read(self) -> None:
        for source in self._sources:
            try:
                joules = source.joules()
            except (OSError, ValueError):
                self._joules = None  # and stays None: a part of a sum is no sum
                return
            if self._joules is not None:
                self._joules += joules
