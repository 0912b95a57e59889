"""Compiles the kernels that no installed library contains, caches them, and loads them into memory.

The cache key covers everything that the machine code depends on: the source files of the kernel and of the modules it
imports, its parameters, the versions of Python, Numba and llvmlite, and the target. cache.py stores the objects on
disk. Only child processes import Numba. In the main process, only this module imports llvmlite.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import version
from typing import Any

import llvmlite.binding as llvm

from llmrun.base.compiled.cache import KernelCache
from llmrun.base.compiled.kernel import KernelCompileError, KernelName, Progress
from llmrun.base.compiled.levels import Target, elf_triple
from llmrun.base.compiled.sources import digest_of
from llmrun.base.machine.cpu_count import most_threads
from llmrun.base.processes import commands
from llmrun.base.processes.child import Child
from llmrun.base.processes.frames import BadMessage, Codec, FrameTooLong

# If Numba is not installed, importing this module fails here, with a ModuleNotFoundError of that name.
_VERSIONS = (version("numba"), version("llvmlite"))


_libraries: list[llvm.ResourceTracker] = []  # these trackers own the machine code, so they are never freed
_numbers = itertools.count()  # makes the names of libraries unique


def compile_and_link(names: Sequence[KernelName], target: Target, progress: Progress | None) -> dict[KernelName, int]:
    """Load kernels from the cache, or compile them, and return their addresses. Raises KernelCompileError.

    Kernels are compiled in parallel. `progress` is called before the first kernel and after each kernel, but not if all
    kernels are cached.
    """
    return _link(images_for(names, [target], progress)[target])


def images_for(
    names: Sequence[KernelName], targets: Sequence[Target], progress: Progress | None
) -> dict[Target, dict[KernelName, bytes]]:
    """Return the objects of kernels for targets that differ only in their triples.

    Numba compiles each kernel, and LLVM optimizes it, only once for all targets. These two steps take three quarters of
    the time. Raises KernelCompileError.
    """
    cache = KernelCache()
    images: dict[Target, dict[KernelName, bytes]] = {target: {} for target in targets}
    for name in names:
        for target in targets:
            image = cache.read(key_of(name, target))
            if image is not None:
                images[target][name] = image
    missing = [name for name in names if any(name not in images[target] for target in targets)]
    if missing and progress is not None:
        progress(0, len(missing))
    for done, (name, made) in enumerate(_compile(missing, targets, cache), 1):
        for target, image in made.items():
            images[target][name] = image
        if progress is not None:
            progress(done, len(missing))
    cache.warn()
    return images


def _link(images: dict[KernelName, bytes]) -> dict[KernelName, int]:
    """Load objects and return the addresses of their kernels."""
    builder = llvm.JITLibraryBuilder().add_current_process()  # this process provides memcpy
    for name, image in images.items():
        builder.add_object_img(image).export_symbol(name.symbol)
    try:
        library = builder.link(_linker(), f"kernels {next(_numbers)}")
    except RuntimeError as error:
        raise KernelCompileError(f"cannot load compiled kernels: {error}") from error
    _libraries.append(library)
    return {name: library[name.symbol] for name in images}


@functools.cache
def _linker() -> llvm.LLJIT:
    """Return a linker for objects of this system.

    LLVM's older linker maps the sections of an object separately, and aborts the process if they are more than 2 GiB
    apart, which can happen when the weights of a large model are in memory. JITLink maps each object as a whole, but
    llvmlite does not offer it on Windows.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    # Names in ELF objects have no prefix, unlike names in macOS's format.
    machine = llvm.Target.from_triple(elf_triple()).create_target_machine(jit=True)
    return llvm.create_lljit_compiler(machine, use_jit_link=sys.platform != "win32")


# --- the key --------------------------------------------------------------------------------------------------------


@functools.cache
def key_of(name: KernelName, target: Target) -> str:
    """Return the key of a kernel's entry in the cache."""
    parts = [
        digest_of(name.module),
        name.function,
        name.parameters,
        sys.implementation.cache_tag,
        *_VERSIONS,
        target.level.name,
        target.triple,
        target.cpu,
        target.features,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# --- compiler processes ----------------------------------------------------------------------------------------------


def _compile(
    names: Sequence[KernelName], targets: Sequence[Target], cache: KernelCache
) -> Iterator[tuple[KernelName, dict[Target, bytes]]]:
    """Compile and cache kernels, and yield the objects of each kernel as soon as they are ready.

    Up to 8 compiler processes run at a time, one for each processor that this process may use.
    """
    if not names:
        return
    n_children = min(len(names), most_threads(), 8)
    children: list[_Child] = []
    own, lock, given_up = threading.local(), threading.Lock(), threading.Event()

    def compile_objects(name: KernelName) -> dict[Target, bytes]:
        """Compile a kernel in this thread's compiler process, which is replaced after _KERNELS_OF_A_CHILD kernels."""
        if getattr(own, "left", 0) == 0:
            with lock:
                if given_up.is_set():
                    raise KernelCompileError("kernel compilation was stopped")
                if hasattr(own, "child"):
                    children.remove(own.child)
                    own.child.close()
                own.child, own.left = _Child(targets), _KERNELS_OF_A_CHILD
                children.append(own.child)
        own.left -= 1
        images: dict[Target, bytes] = own.child.compile(name)
        return images

    def compile_one(name: KernelName) -> tuple[KernelName, dict[Target, bytes]]:
        compiled = functools.cache(compile_objects)
        images: dict[Target, bytes] = {}
        for target in targets:

            def image(target: Target = target) -> bytes:
                return compiled(name)[target]

            images[target] = cache.make(key_of(name, target), image, given_up)
        return name, images

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


# Numba becomes slower with every kernel and never frees memory. After a hundred kernels of attention, a process took
# 1.4 GB, and 1.6 times as long for a kernel as a new process.
_KERNELS_OF_A_CHILD = 32
_LONGEST = 1 << 28  # limit on the bytes of an answer; the largest object file has 200 KB
_KEPT_STDERR = 1 << 16
_END_S = 10.0


class _Child:
    """A compiler process for targets that differ only in their triples.

    Numba reads the target from NUMBA_CPU_* when it is imported.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        """Start the process. Raises LlmrunError."""
        self._targets, target = targets, targets[0]
        native = target.triple.partition("-")[0] == elf_triple().partition("-")[0]
        environment = {
            **commands.environment(),
            "NUMBA_CPU_NAME": target.cpu if native else "generic",
            "NUMBA_CPU_FEATURES": target.features if native else "",
        }
        self._requests: Codec[dict[str, Any]] = Codec(dict[str, Any])
        self._answers: Codec[tuple[str, list[bytes]]] = Codec(tuple[str, list[bytes]])
        self._process = Child(
            commands.command("kernels.compiler"),
            purpose="a kernel compiler",
            environment=environment,
            kept_stderr=_KEPT_STDERR,
        )

    def compile(self, name: KernelName) -> dict[Target, bytes]:
        """Compile a kernel and return its object file for each target. Raises KernelCompileError."""
        target = self._targets[0]
        request = {
            "module": name.module,
            "name": name.function,
            "parameters": dict(name.parameters),
            "level_name": target.level.name,
            "triples": [target.triple for target in self._targets],
            "cpu": target.cpu,
            "features": target.features,
            "symbol": name.symbol,
        }
        self._process.send(self._requests.encode(request))
        images: list[bytes] = []
        try:
            answer = self._process.receive(_LONGEST)
            if answer is None:
                error = self._exit_message()
            else:
                error, images = self._answers.decode(answer)
        except (FrameTooLong, BadMessage) as bad:
            error = f"the compiler process sent an invalid answer: {bad}"
        if error:
            raise KernelCompileError(
                f"cannot compile kernel: {name}: {error.strip().splitlines()[-1]}",
                hint="run llmrun with --debug to see the full error",
            ) from RuntimeError(error)
        return dict(zip(self._targets, images, strict=True))

    def _exit_message(self) -> str:
        self._process.wait(_END_S)
        return self._process.last_words.strip() or "the compiler process exited without an error message"

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.end(_END_S)
