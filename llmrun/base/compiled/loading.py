"""Loads kernels for a given target, from an installed library if possible, and otherwise through the compiler."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from types import ModuleType

from llmrun import DISTRIBUTION, __version__
from llmrun.base.compiled import library
from llmrun.base.compiled.kernel import Kernel, KernelCompileError, KernelName, Progress
from llmrun.base.compiled.levels import Target
from llmrun.base.errors import KernelWarning

JIT = f'pip install "{DISTRIBUTION}[jit]"'  # installs Numba, which compiles kernels
REINSTALL = f"pip install --force-reinstall --no-deps {DISTRIBUTION}=={__version__}"

_lock = threading.Lock()
_loaded: dict[tuple[KernelName, Target], Kernel] = {}


def load_for(
    target: Target, names: Sequence[KernelName], progress: Progress | None = None, shipped: str = ""
) -> dict[KernelName, Kernel]:
    """Return a map from names to kernels.

    shipped   the library to look in; by default, the library of the target's level
    progress  see `compile_and_link`

    Raises KernelCompileError.
    """
    with _lock:
        wanted = [name for name in dict.fromkeys(names) if (name, target) not in _loaded]
        if wanted:
            trouble, addresses = _shipped(wanted, shipped or target.level.name)
            missing = [name for name in wanted if name not in addresses]
            if missing:
                addresses |= _compiled(missing, target, progress, trouble)
            for name, address in addresses.items():
                _loaded[name, target] = Kernel(address)
        return {name: _loaded[name, target] for name in names}


def has_library(level: str) -> bool:
    """Return whether this installation has a usable library for a level."""
    trouble, _ = _shipped((), level)
    return not trouble and library.index() is not None


def _shipped(names: Sequence[KernelName], level: str) -> tuple[str, dict[KernelName, int]]:
    """Return a description of what is wrong with the library, or "", and the addresses of the kernels that it has."""
    try:
        found = library.library_of(level)
    except library.BadLibrary as error:
        return str(error), {}
    if found is None:
        return "", {}
    addresses = {name: found.address(name) for name in names}
    return "", {name: address for name, address in addresses.items() if address is not None}


def identity_of(target: Target, name: KernelName) -> str:
    """Return text that identifies a kernel's machine code. Raises KernelCompileError."""
    trouble = ""
    try:
        found = library.identity(target.level)
    except library.BadLibrary as error:
        trouble, found = str(error), None
    return found or str(_compiler([name], trouble).key_of(name, target))


def _compiled(
    names: Sequence[KernelName], target: Target, progress: Progress | None, trouble: str
) -> dict[KernelName, int]:
    compiler = _compiler(names, trouble)
    if trouble:
        words = f"installed kernels cannot be used, so they are compiled on this machine: {trouble}"
        warnings.warn(f"{words}; to repair: {REINSTALL}", KernelWarning, stacklevel=4)
    addresses: dict[KernelName, int] = compiler.compile_and_link(names, target, progress)
    return addresses


def _compiler(names: Sequence[KernelName], trouble: str) -> ModuleType:
    """Return the module that compiles kernels. Raises KernelCompileError if Numba or llvmlite is not installed."""
    try:
        from llmrun.base.compiled import compiling
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("llvmlite", "numba"):
            raise
        raise _without_compiler(names, trouble) from error
    return compiling


def _without_compiler(names: Sequence[KernelName], trouble: str) -> KernelCompileError:
    """Return the error for kernels that can be neither loaded nor compiled."""
    if trouble:
        return KernelCompileError(f"cannot load kernels: {trouble}", hint=f"install llmrun again: {REINSTALL}")
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    hint = f"install Numba, which compiles kernels: {JIT}"
    return KernelCompileError(f"this installation lacks kernels: {names[0]}{more}", hint=hint)
