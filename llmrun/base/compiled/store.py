"""Loads kernels by name. Each kernel is compiled on first use and then loaded from a cache, without importing Numba.

The cache key covers everything that the machine code depends on: the source files of the kernel and of the modules it
imports, its parameters, the versions of Python, Numba and llvmlite, and the target. cache.py stores the objects on
disk.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from llmrun.base.compiled.cache import KernelCache
from llmrun.base.compiled.levels import Target, elf_triple, host_target
from llmrun.base.errors import LlmrunError
from llmrun.base.machine.cpu_count import most_threads
from llmrun.base.processes import commands
from llmrun.base.processes.child import Child
from llmrun.base.processes.frames import BadMessage, Codec, FrameTooLong


def create_linker(machine: llvm.TargetMachine) -> llvm.LLJIT:
    """Return a linker for objects of this target.

    LLVM's older linker maps the sections of an object separately, and aborts the process if they are more than 2 GiB
    apart, which can happen when the weights of a large model are in memory. JITLink maps each object as a whole, but
    llvmlite does not offer it on Windows.
    """
    return llvm.create_lljit_compiler(machine, use_jit_link=sys.platform != "win32")


_PACKAGE = Path(__file__).resolve().parents[2]
# Machine code depends on imports from these folders. In `from FOLDER import NAMES`, the names are modules.
_ROOMS = r"kernels|formats\.layouts|formats\.quants|model\.plan"
_IMPORT = re.compile(rf"^from llmrun\.((?:{_ROOMS})[\w.]*) import (.+)", re.MULTILINE)

Progress = Callable[[int, int], None]  # called with (number of kernels ready, number of kernels to compile)

_Function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 4)


@dataclass(frozen=True, slots=True)
class KernelName:
    """The name of a kernel.

    module      dotted name of the module, below llmrun.kernels
    function    name of the kernel or kernel family in the module
    parameters  parameters of the kernel family
    """

    module: str
    function: str
    parameters: tuple[tuple[str, int | str], ...] = ()

    @classmethod
    def of(cls, module: str, function: str, **parameters: int | str) -> KernelName:
        return cls(module, function, tuple(sorted(parameters.items())))


class Kernel:
    """A compiled kernel: machine code at `address` with the signature (op, step, thread, n_threads)."""

    def __init__(self, address: int) -> None:
        self.address = address
        self._function = _Function(address)

    def run(self, op: int, step: int, thread: int, n_threads: int) -> None:
        """Run the kernel without holding the GIL."""
        # Numba's calling convention requires one buffer for the return value and another for an exception.
        scratch = (ctypes.c_int64 * 2)()
        base = ctypes.addressof(scratch)
        self._function(base, base + 8, op, step, thread, n_threads)

    def __call__(self, *words: int) -> None:
        """Run the kernel on a single thread, with `words` as the op record."""
        record = (ctypes.c_int64 * len(words))(*words)
        self.run(ctypes.addressof(record), 0, 0, 1)


class KernelCompileError(LlmrunError):
    """A kernel could not be compiled or loaded, because of a bug in llmrun or an installation that does not work."""


_lock = threading.Lock()
_loaded: dict[tuple[KernelName, Target], Kernel] = {}
_libraries: list[llvm.ResourceTracker] = []  # these trackers own the machine code, so they are never freed
_numbers = itertools.count()  # makes the names of libraries unique


def load_kernel(module: str, function: str, **parameters: int | str) -> Kernel:
    """Return one kernel for this process's target. Compiling a kernel that is not cached takes about a second."""
    name = KernelName.of(module, function, **parameters)
    return load_kernels([name])[name]


def load_kernels(
    names: Sequence[KernelName], progress: Progress | None = None, target: Target | None = None
) -> dict[KernelName, Kernel]:
    """Return a map from names to kernels. Kernels that are neither in memory nor in the cache are compiled.

    Kernels are compiled in parallel. `progress` is called before the first kernel and after each kernel, but not if all
    kernels are cached. Raises KernelCompileError.
    """
    target = target or host_target()
    with _lock:
        wanted = [name for name in dict.fromkeys(names) if (name, target) not in _loaded]
        if wanted:
            images = _images(wanted, target, progress)
            for name, address in _link(images, target).items():
                _loaded[name, target] = Kernel(address)
        return {name: _loaded[name, target] for name in names}


def object_images(names: Sequence[KernelName], target: Target) -> dict[KernelName, bytes]:
    """Return the ELF objects of kernels for any target, even one that this processor cannot run.

    Raises KernelCompileError.
    """
    return _images(names, target, None)


def _images(names: Sequence[KernelName], target: Target, progress: Progress | None) -> dict[KernelName, bytes]:
    cache = KernelCache()
    images: dict[KernelName, bytes] = {}
    for name in names:
        image = cache.read(_key(name, target))
        if image is not None:
            images[name] = image
    missing = [name for name in names if name not in images]
    if missing and progress is not None:
        progress(0, len(missing))
    for done, (name, image) in enumerate(_compile(missing, target, cache), 1):
        images[name] = image
        if progress is not None:
            progress(done, len(missing))
    cache.warn()
    return images


def _symbol(name: KernelName, target: Target) -> str:
    return f"llmrun_{_key(name, target)[:32]}"


def _link(images: dict[KernelName, bytes], target: Target) -> dict[KernelName, int]:
    """Load objects and return the addresses of their kernels."""
    builder = llvm.JITLibraryBuilder().add_current_process()  # this process provides memcpy
    for name, image in images.items():
        builder.add_object_img(image).export_symbol(_symbol(name, target))
    try:
        library = builder.link(_linker(), f"kernels {next(_numbers)}")
    except RuntimeError as error:
        raise KernelCompileError(f"cannot load compiled kernels: {error}") from error
    _libraries.append(library)
    return {name: library[_symbol(name, target)] for name in images}


@functools.cache
def _linker() -> llvm.LLJIT:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # Names in ELF objects have no prefix, unlike names in macOS's format.
    machine = llvm.Target.from_triple(elf_triple()).create_target_machine(jit=True)
    return create_linker(machine)


# --- the key --------------------------------------------------------------------------------------------------------


@functools.cache
def _key(name: KernelName, target: Target) -> str:
    parts = [
        _source_digest(name.module),
        name.function,
        name.parameters,
        sys.implementation.cache_tag,
        version("numba"),
        version("llvmlite"),
        target.level.name,
        target.triple,
        target.cpu,
        target.features,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@functools.cache
def _source_digest(module: str) -> str:
    return hashlib.sha256(json.dumps(sorted(sources(module).items())).encode()).hexdigest()


def sources(module: str) -> dict[str, str]:
    """Return the digests of a kernel's source file and of all files that it imports, directly or indirectly, by name.

    Only imports from the folders that machine code depends on are included.
    """
    seen: dict[str, str] = {}
    waiting = [f"kernels.{module}"]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen[current], imported = _source(current)
            waiting.extend(imported)
    return seen


@functools.cache
def _source(module: str) -> tuple[str, list[str]]:
    """Return the digest of a module's source, and the names of the modules that the source imports.

    The result is cached, because most kernels share most of their files.
    """
    source = _path_of(module).read_bytes()
    return hashlib.sha256(source).hexdigest(), _imported_files(source.decode())


def _imported_files(source: str) -> list[str]:
    """Return the dotted names (below the package) of the imported modules that machine code depends on."""
    files = []
    for module, names in _IMPORT.findall(source):
        is_file = _path_of(module).is_file()
        files += [module] if is_file else [f"{module}.{name.strip()}" for name in names.split(",")]
    return files


def _path_of(module: str) -> Path:
    """Return the file of a module, given as a dotted name below the package."""
    return _PACKAGE.joinpath(*module.split(".")).with_suffix(".py")


# --- compiler processes ----------------------------------------------------------------------------------------------


def _compile(names: Sequence[KernelName], target: Target, cache: KernelCache) -> Iterator[tuple[KernelName, bytes]]:
    """Compile and cache kernels, and yield each kernel when it is finished.

    Up to 8 compiler processes run at a time, one for each processor that this process may use.
    """
    if not names:
        return
    n_children = min(len(names), most_threads(), 8)
    children: list[_Child] = []
    own, lock, given_up = threading.local(), threading.Lock(), threading.Event()

    def compile_object(name: KernelName) -> bytes:
        """Compile a kernel in this thread's compiler process, which is started for the thread's first kernel."""
        if not hasattr(own, "child"):
            with lock:
                if given_up.is_set():
                    raise KernelCompileError("kernel compilation was stopped")
                own.child = _Child(target)
                children.append(own.child)
        image: bytes = own.child.compile(name, _symbol(name, target))
        return image

    def compile_one(name: KernelName) -> tuple[KernelName, bytes]:
        return name, cache.make(_key(name, target), lambda: compile_object(name), given_up)

    try:
        with ThreadPoolExecutor(n_children) as pool:
            futures = [pool.submit(compile_one, name) for name in names]
            try:
                for future in as_completed(futures):
                    yield future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                with lock:
                    given_up.set()
                    for child in children:
                        child.kill()
                raise
    finally:
        for child in children:
            child.close()


_LONGEST = 1 << 28  # bytes of an answer; the largest object file has 200 KB
_KEPT_STDERR = 1 << 16
_END_S = 10.0


class _Child:
    """A compiler process for one target. Numba reads the target from NUMBA_CPU_* when it is imported."""

    def __init__(self, target: Target) -> None:
        """Start the process. Raises LlmrunError."""
        self._target = target
        native = target.triple.partition("-")[0] == llvm.get_default_triple().partition("-")[0]
        environment = {
            **commands.environment(),
            "NUMBA_CPU_NAME": target.cpu if native else "generic",
            "NUMBA_CPU_FEATURES": target.features if native else "",
        }
        self._requests: Codec[dict[str, Any]] = Codec(dict[str, Any])
        self._answers: Codec[tuple[str, bytes]] = Codec(tuple[str, bytes])
        self._process = Child(
            commands.command("kernels.compiler"),
            purpose="a kernel compiler",
            environment=environment,
            kept_stderr=_KEPT_STDERR,
        )

    def compile(self, name: KernelName, symbol: str) -> bytes:
        """Compile a kernel and return its object file. Raises KernelCompileError."""
        request = {
            "module": name.module,
            "name": name.function,
            "parameters": dict(name.parameters),
            "level_name": self._target.level.name,
            "triple": self._target.triple,
            "cpu": self._target.cpu,
            "features": self._target.features,
            "symbol": symbol,
        }
        self._process.send(self._requests.encode(request))
        try:
            answer = self._process.receive(_LONGEST)
            error, image = (self._exit_message(), b"") if answer is None else self._answers.decode(answer)
        except (FrameTooLong, BadMessage) as bad:
            error, image = f"the compiler process sent an invalid answer: {bad}", b""
        if error:
            raise KernelCompileError(
                f"cannot compile kernel: {name.module}.{name.function} {dict(name.parameters)}: "
                f"{error.strip().splitlines()[-1]}",
                hint="run llmrun with --debug to see the full error",
            ) from RuntimeError(error)
        return image

    def _exit_message(self) -> str:
        self._process.wait(_END_S)
        return self._process.last_words.strip() or "the compiler process exited without an error message"

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.end(_END_S)
