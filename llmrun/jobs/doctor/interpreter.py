"""The doctor's checks of the Python interpreter, of the packages that llmrun requires, and of the network."""

from __future__ import annotations

import importlib.util
import platform
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from llmrun import __version__
from llmrun.base.amounts import format_seconds
from llmrun.base.machine import shell
from llmrun.base.machine.system import installed_version
from llmrun.engine.constraint.base import LLGUIDANCE
from llmrun.hub.remote.huggingface import Ping, ping_hub
from llmrun.jobs.doctor.examine import NOTE, OK, PROBLEM, Finding, Machine
from llmrun.jobs.doctor.folders import shown_path

SECTION = "Python"
_PIP_INSTALL = (sys.executable, "-m", "pip", "install")
_OLDEST, _NEWEST = (3, 11), (3, 14)
_NEEDED = {"numpy": "numpy", "huggingface-hub": "huggingface_hub", "pillow": "PIL"}
_SHOWN = ("numba", "llvmlite", "numpy")  # Numba and llvmlite are optional, because only the kernel compiler needs them


def look_at_python(machine: Machine) -> Iterator[Finding]:
    del machine
    bits = 64 if sys.maxsize > 1 << 32 else 32
    environment = sys.prefix if sys.prefix != sys.base_prefix else None
    facts = {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "bits": bits,
        "virtual_environment": environment,
    }
    where = f"in {shown_path(Path(environment))}" if environment else "not in a virtual environment"
    words = f"{platform.python_implementation()} {platform.python_version()}, {bits}-bit, {where}"
    words = words.replace("CPython", "Python", 1)
    advice = ""
    if bits != 64:
        advice = "Install a 64-bit Python, because models need more than 4 GB of address space."
    elif not _OLDEST <= sys.version_info[:2] <= _NEWEST:
        advice = f"Use Python 3.{_OLDEST[1]} to 3.{_NEWEST[1]}. Other versions are not tested."
    elif sysconfig.get_config_var("Py_GIL_DISABLED"):
        advice = "Use a build of Python that is not free-threaded. Free-threaded builds are not tested."
    yield Finding(SECTION, "python", PROBLEM if advice else OK, words, advice, facts=facts)
    yield _libraries()
    if importlib.util.find_spec("llguidance") is None:
        words = "llguidance is missing, so response formats and tools do not work"
        advice = "Install llguidance. If there is no wheel for this platform, pip needs Rust and a C compiler:"
        yield Finding(SECTION, "formats", NOTE, words, advice, shell.words([*_PIP_INSTALL, LLGUIDANCE]))


def _libraries() -> Finding:
    versions = {name: installed_version(name) for name in dict.fromkeys((*_SHOWN, *_NEEDED))}
    missing = [name for name, module in _NEEDED.items() if importlib.util.find_spec(module) is None]
    facts = {"version": __version__, **{name.replace("-", "_"): version for name, version in versions.items()}}
    if missing:
        command = shell.words([*_PIP_INSTALL, *missing])
        words = f"llmrun {__version__}, missing {', '.join(missing)}"
        return Finding(SECTION, "llmrun", PROBLEM, words, "Install the missing packages:", command, facts)
    names = ", ".join(f"{name} {versions[name]}" for name in _SHOWN if versions[name])
    return Finding(SECTION, "llmrun", OK, f"llmrun {__version__} with {names}", facts=facts)


NETWORK = "Network"


def look_at_hub(machine: Machine) -> Iterator[Finding]:
    reach = ping_hub(offline=machine.offline)
    yield _hub(reach)
    words = "a Hugging Face token is set up" if reach.token else "no Hugging Face token; only gated models need one"
    yield Finding(NETWORK, "token", OK, words, facts={"present": reach.token})


def _hub(reach: Ping) -> Finding:
    facts = {
        "endpoint": reach.endpoint or None,
        "reachable": reach.seconds is not None,
        "seconds": reach.seconds,
        "offline": reach.offline,
        "trouble": reach.trouble or None,
        "proxies": list(reach.proxies),
    }
    name = urlsplit(reach.endpoint).netloc or "the Hugging Face Hub"
    proxies = [variable for variable in reach.proxies if not variable.lower().startswith("no_")]
    through = f" through {proxies[0]}" if proxies else ""
    if reach.seconds is not None:
        return Finding(NETWORK, "hub", OK, f"{name} answers in {format_seconds(reach.seconds)}{through}", facts=facts)
    if reach.offline:
        return Finding(NETWORK, "hub", NOTE, f"{name} was not contacted: offline mode", facts=facts)
    words = f"{name} cannot be reached{through}: {reach.trouble}"
    advice = "Downloads do not work, but the models on this machine do."
    return Finding(NETWORK, "hub", NOTE, words, advice, facts=facts)
