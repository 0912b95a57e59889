"""Tests that the code does not need what Python has only on POSIX, as far as Linux can show that.

`scripts/test_windows` runs tests in Python for Windows. `scripts/check` lets mypy check the code for all systems.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from platformdirs.macos import MacOS
from platformdirs.unix import Unix
from platformdirs.windows import Windows, get_win_folder_from_env_vars

from tests.support.platforms.windows_names import ABSENT_MODULES

if sys.platform == "win32":
    pytest.skip("these tests imitate Windows", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llmrun"
FILES = sorted(PACKAGE.rglob("*.py"))

# Ray's own clusters do not exist on Windows, and these two modules run only in them.
RAY_ONLY = ("llmrun.jobs.batching.workers.ray_driver", "llmrun.jobs.batching.workers.ray_driver")
IMPORT_ALL = f"""
import importlib, pkgutil
import llmrun
names = [module.name for module in pkgutil.walk_packages(llmrun.__path__, "llmrun.")]
for name in names:
    if not name.endswith("__main__") and name not in {RAY_ONLY!r}:
        importlib.import_module(name)
print(len(names))
"""
RUN = """
from llmrun.__main__ import main
main()
"""
_STARTING = {"preexec_fn", "start_new_session", "process_group", "creationflags"}
# Only these may use the arguments directly: `commands` has the functions for all others.
_MAY_START = ("base/processes/commands.py",)


def as_windows(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.support.platforms.as_windows", code, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )


@pytest.mark.push
def test_every_module_imports_without_posix() -> None:
    done = as_windows(IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= len(FILES) - 1


@pytest.mark.night
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import fcntl", "ModuleNotFoundError"),
        ("import os; os.fork", "AttributeError"),
        ("import signal; signal.SIGKILL", "AttributeError"),
        ("from select import poll", "ImportError"),
    ],
)
def test_what_windows_lacks_is_missing_there(code: str, error: str) -> None:
    done = as_windows(code)
    assert (done.returncode, error in done.stderr) == (1, True)


@pytest.mark.night
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["list"], ["conversations"]])
def test_commands_run_without_posix(arguments: list[str], tmp_path: Path) -> None:
    done = as_windows(RUN, *arguments, LLMRUN_DATA_DIR=str(tmp_path / "größe 1"), HF_HOME=str(tmp_path / "hub"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_the_documentation_names_the_folders_of_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.setenv("LOCALAPPDATA", "%LOCALAPPDATA%")
    monkeypatch.setattr("platformdirs.windows._RESOLVE_WIN_FOLDER", get_win_folder_from_env_vars)
    for name in [name for name in os.environ if name.startswith("XDG_")]:
        monkeypatch.delenv(name)
    text = (ROOT / "docs" / "using.md").read_text(encoding="utf-8")
    for system, kind in (("Linux", Unix), ("macOS", MacOS), ("Windows", Windows)):
        folders = kind("llmrun", appauthor=False)  # as in folders.py
        data, cache, config = (
            str(path).replace("/home/x", "~").replace("/", "\\" if system == "Windows" else "/")
            for path in (folders.user_data_path, folders.user_cache_path, folders.user_config_path / "config.toml")
        )
        assert f"| {system} | `{data}` | `{cache}` | `{config}` |" in text


def posix_only(source: str) -> Iterator[str]:
    """Yield the places in a file that would fail or differ on Windows, but that mypy does not find."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"line {node.lineno}: Windows has no {name}" for name in names if name in ABSENT_MODULES)
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Attribute) and ast.unparse(inner) == "os.name":
            yield f"line {inner.lineno}: mypy knows sys.platform, but not os.name"
        if isinstance(inner, ast.Call):
            yield from (f"line {inner.lineno}: {words}" for words in _calls(inner))


def _calls(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    method = name.rpartition(".")[2]
    keywords = {keyword.arg for keyword in call.keywords}
    if keywords & _STARTING:
        yield "use in_own_session or in_own_group of base/processes/commands.py"
    if "text" in keywords and method in ("run", "Popen", "check_output") and "encoding" not in keywords:
        yield "output is decoded with the code page of Windows: name an encoding"
    if (method in ("read_text", "write_text") or name == "open") and not _has_encoding(call, method):
        yield "text is in the code page of Windows: name an encoding"
    if name in ("os.rename", "os.link"):
        yield "Windows does not replace files with it: use Path.replace"
    if method in ("add_reader", "add_writer", "start_unix_server", "open_unix_connection"):
        yield "the event loop of Windows has no such function"
    if name == "os.open" and not any(
        word in ast.unparse(call) for word in ("O_BINARY", "flags", "_FLAGS", "os.devnull")
    ):
        yield "line ends would be translated on Windows: add O_BINARY"


def _has_encoding(call: ast.Call, method: str) -> bool:
    if any(keyword.arg == "encoding" for keyword in call.keywords) or "b" in "".join(_constants(call)):
        return True
    return (
        len(call.args) > ("write" in method) and method != "open"
    )  # Path.read_text(encoding), Path.write_text(text, encoding)


def _constants(call: ast.Call) -> Iterator[str]:
    for argument in call.args[1:2]:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


# Files that only POSIX reaches, or that exist only there; their contents are ASCII.
EXCEPTIONS = {
    "base/machine/memory.py": "/proc",
    "base/machine/processor.py": "sysctl of macOS",
    "hub/local/safe_writes.py": "flock, and folders that can be opened only on POSIX",
    "serving/background/place.py": "Unix sockets, and a folder that can be opened only on POSIX",
}


@pytest.mark.push
def test_code_that_only_posix_runs_is_found(saw: Callable[[int, str, int], None]) -> None:
    names = {path.relative_to(PACKAGE).as_posix(): path for path in FILES}
    found = {name: list(posix_only(path.read_text(encoding="utf-8"))) for name, path in names.items()}
    wrong = {name: words for name, words in found.items() if words and name not in (*EXCEPTIONS, *_MAY_START)}
    assert wrong == {}
    assert [name for name in EXCEPTIONS if not found[name]] == []
    saw(len(FILES), "files for Windows", 560)


@pytest.mark.parametrize(
    "source",
    [
        "import fcntl",
        "from termios import tcgetattr",
        "if os.name == 'nt': pass",
        "subprocess.Popen(command, start_new_session=True)",
        "subprocess.run(command, text=True)",
        "path.read_text()",
        "path.write_text(text)",
        "open(path)",
        "os.rename(a, b)",
        "loop.add_reader(descriptor, ready)",
        "os.open(path, os.O_RDWR)",
    ],
)
def test_posix_only_code_is_seen(source: str) -> None:
    assert len(list(posix_only(source))) == 1


def test_portable_code_passes() -> None:
    source = """
def f():
    import fcntl
    os.open(path, os.O_RDWR | O_BINARY)
    path.read_text(encoding="ascii"), path.read_text("utf-8"), path.write_text(text, "utf-8"), open(path, "rb")
    subprocess.run(command, text=True, encoding="utf-8")
"""
    assert list(posix_only(source)) == []
