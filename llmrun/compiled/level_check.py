"""Whether a processor runs what it says it runs: an instruction level is tried once, in a process that may die of it.

A hypervisor or an emulator can name instructions that it then refuses. What worked is remembered in the cache folder,
by processor and by what was tried.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path

from llmrun import child_processes, folders

# What the probe is made of.
_KERNELS = Path(__file__).resolve().parent.parent / "kernels"
_TRIED = ("level_probe.py", "code/dots.py", "code/simd.py", "code/unpack.py")
_WORKED = b"worked\n"
_PATIENCE_SECONDS = 60.0  # a trial takes half a second


def works(level: str, triple: str, cpu: str, features: str) -> bool:
    """Whether level_probe.py ends well for this target. Trusted where no process can be started."""
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
            timeout=_PATIENCE_SECONDS,
            check=False,
            env=child_processes.environment(),
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
    except OSError:
        return True
    except subprocess.TimeoutExpired:
        return False
    if done.returncode == 0:
        _remember(path)
    return done.returncode == 0


def _remember(path: Path) -> None:
    """Where it cannot be kept, the next start tries again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(_WORKED)
        Path(file.name).replace(path)
