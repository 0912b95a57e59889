"""The installed llama-cpp-python with a few lines of ours added, to simulate builds that crash, hang, return nonsense
or do not match."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

DIES = "import os, signal\nos.kill(os.getpid(), signal.{})\n"
HANGS = "import time\ntime.sleep(600)\n"
NOT_INSTALLED = """
import sys

class Refuser:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "llama_cpp":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuser())
"""


def fake_llama(folder: Path, *, when_imported: str = "", when_decoding: str = "", more: str = "") -> Path:
    """Create a package to put on the module path and return its folder.

    when_imported  code that runs when the library is loaded
    when_decoding  body of a fake llama_decode, which returns 0 afterwards
    more           code that runs after all declarations
    """
    real = _installed()
    package = folder / "llama_cpp"
    package.mkdir(parents=True)
    for entry in real.iterdir():
        if entry.name not in ("llama_cpp.py", "__pycache__"):
            (package / entry.name).symlink_to(entry)
    body = (real / "llama_cpp.py").read_text(encoding="utf-8")
    # `from __future__` must stay first, so the code goes after the module's own imports.
    source = body.replace("\nimport ctypes\n", f"\nimport ctypes\n{when_imported}\n", 1) if when_imported else body
    if when_decoding:
        indented = "".join(f"    {line}\n" for line in when_decoding.splitlines())
        source += f"\n\ndef llama_decode(*arguments):\n{indented}    return 0\n"
    (package / "llama_cpp.py").write_text(f"{source}\n{more}\n", encoding="utf-8")
    return folder


def other_library(folder: Path, source: str, *, has_the_rest: bool = True, name: str = "llama") -> Path:
    """Compile C source to a libllama.so, or a library of another name, and return its folder, which exists already.

    has_the_rest  whether the functions that the source does not define are those of the installed library
    """
    (folder / f"{name}.c").write_text(source)
    real = _installed() / "lib"
    rest = [f"-L{real}", "-Wl,--no-as-needed", f"-l{name}", f"-Wl,-rpath,{real}"] if has_the_rest else []
    command = ["cc", "-shared", "-fPIC", "-o", f"lib{name}.so", f"{name}.c", *rest]
    subprocess.run(command, check=True, cwd=folder)
    return folder


def without_llama(folder: Path) -> Path:
    """Create a folder for the module path that hides llama-cpp-python."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(NOT_INSTALLED)
    return folder


def _installed() -> Path:
    found = importlib.util.find_spec("llama_cpp")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent
