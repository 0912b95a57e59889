"""Kernels by name, without importing Numba: object files in a content-addressed cache, compiled on first use.

The key covers everything the machine code depends on: the sources of the kernel's file and of the files it imports, its
parameters, the versions of Python, Numba and llvmlite, and the target. An entry is the sha256 of key and object, then
the object; it is checked before every load, because of 60 single-bit flips in a cached object 6 crashed and one gave
wrong results.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import llvmlite.binding as llvm

from llmrun import settings
from llmrun.errors import LlmrunError
from llmrun.kernels.levels import Target, host_target

_FOLDER = Path(__file__).parent
_IMPORT = re.compile(r"^(?:from llmrun\.kernels\.(\w+) import|from llmrun\.kernels import (.+))", re.MULTILINE)
_DIGEST_BYTES = 32

Progress = Callable[[int, int], None]  # (kernels ready, kernels to compile)

_Function = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 4)


@dataclass(frozen=True, slots=True)
class KernelName:
    """`function` of llmrun/kernels/`module`.py, built with `parameters` if it is a family."""

    module: str
    function: str
    parameters: tuple[tuple[str, int | str], ...] = ()

    @classmethod
    def of(cls, module: str, function: str, **parameters: int | str) -> KernelName:
        return cls(module, function, tuple(sorted(parameters.items())))


class Kernel:
    """Machine code at `address`, with the signature (op, step, thread, n_threads)."""

    def __init__(self, address: int) -> None:
        self.address = address
        self._function = _Function(address)

    def run(self, op: int, step: int, thread: int, n_threads: int) -> None:
        """Call it; the GIL is released meanwhile."""
        scratch = (ctypes.c_int64 * 2)()  # where Numba's calling convention returns None and an error nobody raises
        base = ctypes.addressof(scratch)
        self._function(base, base + 8, op, step, thread, n_threads)

    def __call__(self, *words: int) -> None:
        """Run alone, with `words` as the op record."""
        record = (ctypes.c_int64 * len(words))(*words)
        self.run(ctypes.addressof(record), 0, 0, 1)


class KernelCompileError(LlmrunError):
    """A kernel could not be compiled: a defect of ours, or a Numba that does not work here."""


_lock = threading.Lock()
_loaded: dict[tuple[KernelName, Target], Kernel] = {}
_engines: list[llvm.ExecutionEngine] = []  # own the machine code; alive as long as the process


def load_kernel(module: str, function: str, **parameters: int | str) -> Kernel:
    """One kernel of this process's level. Compiles it if the cache has none (about a second, once)."""
    name = KernelName.of(module, function, **parameters)
    return load_kernels([name])[name]


def load_kernels(
    names: Sequence[KernelName], progress: Progress | None = None, target: Target | None = None
) -> dict[KernelName, Kernel]:
    """Every kernel named, from memory, the cache or the compiler (in parallel, `progress` after each).

    Raises KernelCompileError.
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
    """The ELF objects of kernels for any target, also one this processor cannot run. Raises KernelCompileError."""
    return _images(names, target, None)


def _images(names: Sequence[KernelName], target: Target, progress: Progress | None) -> dict[KernelName, bytes]:
    images: dict[KernelName, bytes] = {}
    for name in names:
        image = _read(_key(name, target))
        if image is not None:
            images[name] = image
    missing = [name for name in names if name not in images]
    for done, (name, image) in enumerate(_compile(missing, target), 1):
        images[name] = image
        _write(_key(name, target), image)
        if progress is not None:
            progress(done, len(missing))
    return images


def _symbol(name: KernelName, target: Target) -> str:
    return f"llmrun_{_key(name, target)[:32]}"


def _link(images: dict[KernelName, bytes], target: Target) -> dict[KernelName, int]:
    engine = _execution_engine()
    _engines.append(engine)
    for image in images.values():
        engine.add_object_file(llvm.ObjectFileRef.from_data(image))
    engine.finalize_object()
    return {name: engine.get_function_address(_symbol(name, target)) for name in images}


def _execution_engine() -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_triple(llvm.get_default_triple()).create_target_machine(jit=True)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)


# --- the cache on disk -------------------------------------------------------------------------------------------


def _path(key: str) -> Path:
    return settings.cache_folder() / "kernels" / f"{key}.o"


def _digest(key: str, image: bytes) -> bytes:
    return hashlib.sha256(key.encode() + image).digest()


def _read(key: str) -> bytes | None:
    """The object in a cache entry, or None when there is none that can be trusted."""
    try:
        entry = _path(key).read_bytes()
    except OSError:
        return None
    digest, image = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
    return image if _digest(key, image) == digest else None


def _write(key: str, image: bytes) -> None:
    """Keep an object, all or nothing. A folder that cannot be written costs the next start a compile, no more."""
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
            try:
                file.write(_digest(key, image) + image)
                file.flush()
                os.fsync(file.fileno())
                file.close()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise


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
    """Digest of a kernel's file, the files of this folder it imports, theirs, and so on."""
    seen: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        source = (_FOLDER / f"{current}.py").read_bytes()
        seen[current] = source
        for direct, listed in _IMPORT.findall(source.decode()):
            waiting.extend([direct] if direct else [part.strip() for part in listed.split(",")])
    digest = hashlib.sha256()
    for current, source in sorted(seen.items()):
        digest.update(f"{current}\0{len(source)}\0".encode() + source)
    return digest.hexdigest()


# --- the compiler, in children ---------------------------------------------------------------------------------------


def _compile(names: Sequence[KernelName], target: Target) -> Iterator[tuple[KernelName, bytes]]:
    """Compile in as many children as there are cores; yields in order of completion."""
    if not names:
        return
    n_children = min(len(names), os.cpu_count() or 1, 8)
    children = [_Child(target) for _ in range(n_children)]
    idle = list(children)
    try:
        with ThreadPoolExecutor(n_children) as pool:
            futures = [pool.submit(_compile_one, name, target, idle) for name in names]
            try:
                for future in as_completed(futures):
                    yield future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for child in children:
                    child.kill()
                raise
    finally:
        for child in children:
            child.close()


def _compile_one(name: KernelName, target: Target, idle: list[_Child]) -> tuple[KernelName, bytes]:
    child = idle.pop()  # one thread a child, so there is always one; list.pop is atomic
    try:
        return name, child.compile(name, _symbol(name, target))
    finally:
        idle.append(child)


class _Child:
    """A compiler process for one target. Numba optimizes for NUMBA_CPU_*, which it reads when it is imported."""

    _ids = itertools.count()

    def __init__(self, target: Target) -> None:
        self._target = target
        # The user's own NUMBA_* would change the machine code, or switch the compiler off, unseen by the key.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
        native = target.triple.partition("-")[0] == llvm.get_default_triple().partition("-")[0]
        environment.update(
            NUMBA_CPU_NAME=target.cpu if native else "generic",
            NUMBA_CPU_FEATURES=target.features if native else "",
            PYTHONPATH=os.pathsep.join(path or os.getcwd() for path in sys.path),  # noqa: PTH109
        )
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        # -P: modules are searched where this process does, not also in the folder it happens to stand in.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llmrun.kernels.compiler"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )

    def compile(self, name: KernelName, symbol: str) -> bytes:
        request = {
            "id": next(self._ids),
            "module": name.module,
            "name": name.function,
            "parameters": dict(name.parameters),
            "level_name": self._target.level.name,
            "triple": self._target.triple,
            "cpu": self._target.cpu,
            "features": self._target.features,
            "symbol": symbol,
        }
        stdin, stdout = self._pipes()
        with contextlib.suppress(BrokenPipeError):  # it has ended, and has said why on stderr
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        line = stdout.readline()
        header: dict[str, Any] = json.loads(line) if line else {"error": self._last_words(), "bytes": 0}
        image = stdout.read(header["bytes"])
        if len(image) < header["bytes"]:
            header["error"] = self._last_words()
        if header["error"]:
            raise KernelCompileError(
                f"kernel does not compile: {name.module}.{name.function} {dict(name.parameters)}: "
                f"{header['error'].strip().splitlines()[-1]}",
                hint="llmrun --debug shows the whole error",
            ) from RuntimeError(header["error"])
        return image

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip() or "the compiler process ended without a word"

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        for pipe in self._pipes():
            with contextlib.suppress(BrokenPipeError):  # what was left to send, to a process that has ended
                pipe.close()
        self._process.wait()
        self._errors.close()
