"""Builds small libraries of kernels for tests, linked by zig as for a wheel, and simulates installations with them."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from llmrun.base.compiled import library, loading
from llmrun.base.compiled.host import host_target
from llmrun.base.compiled.kernel import TRIAL, KernelName
from scripts.kernel_libraries import PLATFORMS, Platform, build_libraries
from scripts.kernel_list import BASE_KERNELS, Shape


def own_platform() -> Platform | None:
    """Return the platform of this machine, or None if there are no wheels for it."""
    system = {"linux": "linux", "win32": "windows", "darwin": "macos"}.get(sys.platform, "")
    machine = {"AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    return PLATFORMS.get(f"{system}-{machine}")


def build_small(platforms: Sequence[Platform], folder: Path, names: Iterable[KernelName]) -> None:
    """Build libraries with the given kernels for this process's level, and with the kernels that test levels."""
    build_libraries(platforms, folder, [], kernels=_only([*names, TRIAL]))


def _only(names: Sequence[KernelName]) -> Callable[[str, Iterable[Shape]], Sequence[KernelName]]:
    own = host_target().level.name

    def kernels(name: str, shapes: Iterable[Shape]) -> Sequence[KernelName]:
        if name == library.BASE:
            return BASE_KERNELS
        return names if name in (own, library.EXTENDS.get(own)) else [TRIAL]

    return kernels


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Use the libraries in `folder`, as if they had been installed with llmrun."""
    with mock.patch.object(library, "folder", return_value=folder), mock.patch.object(loading, "_loaded", {}):
        forget()
        try:
            yield
        finally:
            forget()


def forget() -> None:
    """Forget which libraries are open."""
    library.index.cache_clear()
    library.library_of.cache_clear()
