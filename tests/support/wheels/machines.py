"""Machines that have llmrun from a wheel, and neither Numba nor llvmlite: this one, and others in emulators.

`scripts/test_wheels` installs the wheels in .venv-wheels. The code of the tests comes from this checkout, but llmrun
does not: Python's path has a folder that contains nothing but a link to `tests`.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from scripts import windows_python
from tests.support.arm.machines import PROCESSORS, arm_home, python_of
from tests.support.kernels.runs import LEVELS_HERE

ROOT = Path(__file__).resolve().parents[3]
INSTALLED = ROOT / ".venv-wheels"
DISTRIBUTIONS = INSTALLED / "dist"  # a link to the folder that has the wheels
MUSL = ROOT / ".venv-musl"
_AVX_VNNI = Path(__file__).parent / "avxvnni"
_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Machine:
    """A machine.

    folder    the folder in .venv-wheels that has its wheel
    levels    the levels to test; the first is the best
    emulates  whether each vector instruction raises a signal, so only tiny models are quick enough
    """

    folder: str
    levels: tuple[str, ...]
    emulates: bool = False


MACHINES = {
    "linux": Machine("linux", LEVELS_HERE),
    "Haswell": Machine("linux", ("avx2",)),
    "Nehalem": Machine("linux", ("portable",)),
    "avxvnni": Machine("linux", ("avxvnni",), emulates=True),
    "musl": Machine("musl", LEVELS_HERE),
    "windows": Machine("windows", LEVELS_HERE),
    **{name: Machine("arm", (processor.level,)) for name, processor in PROCESSORS.items()},
}


def has(folder: str) -> bool:
    """Return whether `scripts/test_wheels` found and installed a wheel in this folder."""
    return (INSTALLED / folder / "installed").exists()


def there(name: str, path: Path) -> str:
    """Return the path of a file of this machine on another one."""
    return windows_python.windows_path(path) if name == "windows" else str(path)


def run_on(
    name: str, home: Path, *arguments: str, text: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python on a machine, with `text` as its input, and with llmrun's caches, data and settings in `home`."""
    command, paths = _python(name)
    own = {
        "LLMRUN_CACHE_DIR": there(name, home / "cache"),
        "LLMRUN_DATA_DIR": there(name, home / "data"),
        "LLMRUN_CONFIG": there(name, home / "config.toml"),
        "PYTHONSAFEPATH": "1",  # the working directory has the checkout's llmrun
    }
    home.mkdir(exist_ok=True)
    (home / "config.toml").touch()
    done = subprocess.run(
        [*command, *arguments],
        input=text,
        env=os.environ | paths | own | environment,
        cwd=ROOT,
        capture_output=True,
        encoding="utf-8",
        timeout=_TIMEOUT_S,
        check=False,
    )
    done.stdout = done.stdout.replace("\r\n", "\n")
    return done


def _python(name: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of a machine's Python and the environment variables that it needs."""
    folder, tests = INSTALLED / MACHINES[name].folder, INSTALLED / "checkout"
    match MACHINES[name].folder:
        case "windows":
            paths = {"PYTHONPATH": there(name, tests)}
            return ["wine", str(folder / "python.exe")], windows_python.environment(folder) | paths
        case "musl":
            return [str(MUSL / "bin" / "python3")], {"PYTHONPATH": f"{folder}:{tests}"}
        case "arm":
            return [str(python_of(name))], arm_home() | {"PYTHONPATH": f"{folder}:{tests}"}
    python = folder / "bin" / "python"
    if name == "avxvnni":
        return [str(python)], {"PYTHONPATH": f"{_AVX_VNNI}:{tests}", "LD_PRELOAD": str(_vpdpbusd())}
    return [str(python if name == "linux" else _old_x86(name, folder))], {"PYTHONPATH": str(tests)}


def _vpdpbusd() -> Path:
    """Return the library that emulates AVX-VNNI."""
    source = _AVX_VNNI / "vpdpbusd.c"
    library = INSTALLED / f"vpdpbusd-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def _old_x86(processor: str, installed: Path) -> Path:
    """Return the Python of a processor that QEMU emulates, with the libraries of a virtual environment."""
    folder = INSTALLED / processor
    python = folder / "bin" / "python"
    if not python.exists():
        python.parent.mkdir(parents=True, exist_ok=True)
        (folder / "pyvenv.cfg").write_bytes((installed / "pyvenv.cfg").read_bytes())
        (folder / "lib").symlink_to(installed / "lib")
        real = (installed / "bin" / "python").resolve()
        # With -0, Python takes this script as its executable, and starts other processes with it.
        python.write_text(
            f'#!/bin/sh\nexec qemu-x86_64-static -cpu {processor} -0 "$0" {real} "$@"\n', encoding="utf-8"
        )
        python.chmod(0o755)
    return python
