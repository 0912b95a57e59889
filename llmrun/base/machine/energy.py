"""Measures the energy that processors and GPUs use, with their own counters.

RAPL counts the energy used by processor packages (on Intel, and on AMD through the same files). NVML counts the energy
used by NVIDIA GPUs. Neither counter includes fans, disks or power supply losses, and on many machines neither includes
memory.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from llmrun.base.machine.processor import text_of

Value = TypeVar("Value")

_MOST_WATTS = 1000.0  # upper bound for one package, which limits how soon its counter can wrap around
_POWER_INTERVAL = 0.1  # seconds between power readings, about as often as NVML updates them


class EnergySource(Protocol):
    """A counter of joules.

    name      "RAPL package" or "NVML"
    interval  the longest time allowed between two readings, in seconds; 0 if one reading at the start and one at the
              end are enough
    """

    name: str
    interval: float

    def joules(self) -> float:
        """Return the energy used since the previous call, in joules.

        The first call may include energy used at any earlier time. Raises OSError if the counter cannot be read.
        """


class RaplPackage:
    """One processor package in Linux's powercap tree. Its counter of microjoules wraps around to 0."""

    name = "RAPL package"

    def __init__(self, zone: Path) -> None:
        """Open the counter of a zone. Raises OSError or ValueError if it cannot be read.

        On most systems, only root may read it.
        """
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
    """A GPU that counts the energy it uses, in millijoules."""

    name = "NVML"
    interval = 0.0

    def __init__(self, nvml: Any, device: Any) -> None:
        """Open the energy counter of a GPU. Raises OSError if the GPU does not have one."""
        self._read: Callable[[], float] = _translated(nvml, nvml.nvmlDeviceGetTotalEnergyConsumption, device)
        self._last = self._read()

    def joules(self) -> float:
        before, self._last = self._last, self._read()
        return (self._last - before) / 1e3


class NvmlPower:
    """A GPU that only reports its power, in milliwatts. Energy is integrated with the trapezoidal rule."""

    name = "NVML"
    interval = _POWER_INTERVAL

    def __init__(self, nvml: Any, device: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """Start reading the power of a GPU. Raises OSError if the GPU does not report its power."""
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
    """Return the processor packages whose counters can be read.

    Other zones are excluded so that no energy is counted twice: cores and caches are parts of a package, and the `psys`
    zone includes the packages.
    """
    sources: list[EnergySource] = []
    for zone in sorted((root / "sys/class/powercap").glob("intel-rapl:*")):
        if (text_of(zone / "name") or "").startswith("package"):
            with contextlib.suppress(OSError, ValueError):  # skip packages that cannot be read
                sources.append(RaplPackage(zone))
    return sources


def nvml_sources() -> list[EnergySource]:
    """Return the counters of the GPUs that CUDA can use. Other programs may be using hidden GPUs."""
    sources: list[EnergySource] = []
    nvml = _nvml()
    for device in _visible(nvml, _devices(nvml)):
        for kind in (NvmlCounter, NvmlPower):
            with contextlib.suppress(OSError):  # older GPUs and MIG slices have no energy counter
                sources.append(kind(nvml, device))
                break
    return sources


def gpu_names() -> list[str]:
    """Return the names of the NVIDIA GPUs without running anything on them."""
    nvml = _nvml()
    with contextlib.suppress(OSError):
        return [str(_translated(nvml, nvml.nvmlDeviceGetName, device)()) for device in _devices(nvml)]
    return []


@dataclass(frozen=True, slots=True)
class NvidiaCard:
    """A GPU as reported by NVIDIA's driver. Memory sizes are 0 if unknown (MIG slices, shared memory)."""

    name: str
    driver: str
    memory: int
    memory_free: int


def nvidia_cards() -> list[NvidiaCard]:
    """Return the NVIDIA GPUs and their driver version, or an empty list if there is no working driver.

    Nothing is run on the GPUs.
    """
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
    """Return the initialized NVML library, or None if there is no driver."""
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


def _visible(nvml: Any, devices: list[Any]) -> list[Any]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES does not hide, or an empty list if that is unknown.

    The variable contains numbers or prefixes of UUIDs. CUDA ignores everything after the first invalid entry. It
    numbers the fastest GPU first, but NVML follows the order on the bus, so numbers are ambiguous if the GPUs differ.
    """
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None or not devices:
        return devices
    try:
        names = {nvml.nvmlDeviceGetName(device) for device in devices}
        identifiers = [nvml.nvmlDeviceGetUUID(device) for device in devices]
    except nvml.NVMLError:
        return []
    numbers_match = len(names) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    visible = []
    for entry in map(str.strip, listed.split(",")):
        if entry.isdecimal():
            matching = devices[int(entry) : int(entry) + 1] if numbers_match else []
        else:
            matching = [device for device, uuid in zip(devices, identifiers, strict=True) if uuid.startswith(entry)]
        if not entry or len(matching) != 1:
            break
        visible += matching
    return visible


@dataclass(slots=True)
class Reading:
    """The result of a measurement, filled in when it ends: the energy from all sources, and the duration.

    `joules` is None if a counter failed.
    """

    source: str  # the names of the sources, for example "RAPL package + NVML"
    joules: float | None = None
    seconds: float = 0.0


class EnergyMeter:
    """Measures energy with the given sources.

    For models that run only on the CPU, pass only the RAPL sources, because idle GPUs use energy too.
    """

    def __init__(self, sources: Sequence[EnergySource]) -> None:
        self._sources = sources

    @contextlib.contextmanager
    def measure(self) -> Iterator[Reading]:
        """Measure the energy used inside the `with` block. Measurements must not overlap.

        `joules` is None if there are no sources.
        """
        reading = Reading(" + ".join(dict.fromkeys(source.name for source in self._sources)))
        sampler = _Sampler(self._sources)
        started = time.monotonic()
        try:
            yield reading
        finally:
            reading.joules = sampler.stop()
            reading.seconds = time.monotonic() - started


class _Sampler:
    """Sums the energy from all sources. Starts a thread if a source must be read during the measurement."""

    def __init__(self, sources: Sequence[EnergySource]) -> None:
        self._sources = sources
        self._joules: float | None = 0.0 if sources else None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._read()
        if self._joules is not None:
            self._joules = 0.0  # the first reading covers the time before the measurement
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
                self._joules = None  # it stays None, because a partial sum would be misleading
                return
            if self._joules is not None:
                self._joules += joules
