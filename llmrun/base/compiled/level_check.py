"""Checks that the processor can really execute the instructions it reports.

A hypervisor or an emulator may report instructions that it does not execute. Therefore each instruction level is tried
once, in a child process that may crash. Successes are recorded in the cache folder, under a key that consists of
the processor and the code of the probe.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from llmrun.base import child_processes, folders

# The folder with the probe's source files, which are part of the key.
_KERNELS = Path(__file__).resolve().parents[2] / "kernels"
_TRIED = ("level_probe.py", "code/dots.py", "code/simd.py", "code/unpack.py")
_WORKED = b"worked\n"
_TIMEOUT_SECONDS = 60.0  # the probe usually takes half a second


def works(level: str, triple: str, cpu: str, features: str) -> bool:
    """Return whether level_probe.py succeeds for this target.

    Raises OSError if no child process can be started, and TimeoutError if it takes too long, as on a very busy machine.
    """
    sources = [(_KERNELS / name).read_bytes() for name in _TRIED]
    tried = "\0".join([level, triple, cpu, features, version("llvmlite"), version("numba")]).encode()
    path = folders.cache_folder() / "levels" / hashlib.sha256(b"\0".join([tried, *sources])).hexdigest()
    with contextlib.suppress(OSError):
        if path.read_bytes() == _WORKED:
            return True
    command = child_processes.command("kernels.level_probe", level, triple, cpu, features)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            env=child_processes.environment(),
            **child_processes.in_own_session(),  # the parent handles Ctrl-C
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(errno.ETIMEDOUT, f"no result after {_TIMEOUT_SECONDS:g} s") from None
    if done.returncode == 0:
        _remember(path)
    return done.returncode == 0


def _remember(path: Path) -> None:
    """Record a success. If it cannot be recorded, the next run repeats the probe."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(_WORKED)
        Path(file.name).replace(path)
