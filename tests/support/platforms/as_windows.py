"""Runs code in a Python that looks like Python for Windows: `python -m ...as_windows CODE [ARGUMENTS]`.

First, the libraries are imported as usual, because they must match the real system. Then `sys.platform` changes, and
the names that exist only on POSIX are removed.
"""

from __future__ import annotations

import importlib
import signal
import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

from tests.support.platforms.windows_names import ABSENT_MODULES, ABSENT_NAMES

# The modules of libraries that our code imports, directly or lazily, and the modules of the standard library that check
# the platform when they are imported.
LIBRARIES = (
    *("asyncio", "concurrent.futures", "filelock", "h11", "httpx2", "huggingface_hub"),
    *("huggingface_hub.hf_api", "jinja2", "jinja2.sandbox", "jsonschema", "llguidance", "llvmlite.binding"),
    *("logging.handlers", "markdown_it", "multiprocessing.shared_memory", "numba", "numba.core.cgutils"),
    *("numba.extending", "numpy", "platformdirs", "prompt_toolkit", "prompt_toolkit.input.defaults"),
    *("prompt_toolkit.input.posix_utils", "prompt_toolkit.input.vt100", "prompt_toolkit.output.defaults"),
    *("prompt_toolkit.output.vt100", "psutil", "pynvml", "referencing", "rich.console", "rich.markdown"),
    *("rich.progress", "rich.table", "shutil", "ssl", "starlette.applications", "starlette.requests"),
    *("starlette.responses", "starlette.routing", "subprocess", "tarfile", "tempfile", "typer"),
    *("urllib.request", "uuid", "uvicorn", "uvicorn.config", "uvicorn.protocols.http.h11_impl"),
    *("uvicorn.server", "webbrowser", "zipfile"),
)


class _Absent(MetaPathFinder):
    """Refuses the modules that Windows does not have."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] in ABSENT_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def become_windows() -> None:
    """Make this process look like one on Windows."""
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in ABSENT_MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, _Absent())
    for module, names in ABSENT_NAMES.items():
        kept = _copy_without(importlib.import_module(module), names.split())
        sys.modules[module] = kept
    sys.modules["signal"].SIGBREAK = signal.SIGQUIT  # type: ignore[attr-defined]  # any number that can be handled
    sys.modules["msvcrt"] = SimpleNamespace(kbhit=lambda: False)  # type: ignore[assignment]
    sys.platform = "win32"


def _copy_without(module: types.ModuleType, names: Sequence[str]) -> types.ModuleType:
    """Return a copy of a module for modules that import it later. The standard library keeps using the original."""
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update({name: value for name, value in vars(module).items() if name not in names})
    return copy


if __name__ == "__main__":
    code, sys.argv = sys.argv[1], ["llmrun", *sys.argv[2:]]
    become_windows()
    exec(compile(code, "as Windows", "exec"))
