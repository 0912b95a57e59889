"""Settings for every test: no user settings, and caches kept between runs.

Also defines the options --quick, which compiles only the engine's kernels, and --no-skips.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

HERE = Path(__file__).resolve().parent
# Folders whose tests run kernels, some of them on import; --quick leaves them out.
KERNEL_ROOMS = ("archs", "backends", "compiled", "fidelity", "kernels", "plan", "soak", "tokenizers")

CACHE = HERE.parent / ".tests-cache"

for variable in [name for name in os.environ if name.startswith("LLMRUN_") and name != "LLMRUN_TEST_CACHE"]:
    del os.environ[variable]
# Without bytecode, each process that a test starts would compile our sources again, which takes a tenth of a second.
for variable in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS", "PYTHONDONTWRITEBYTECODE"):
    os.environ.pop(variable, None)

# Compiled kernels are kept between runs (they take seconds each), in a folder that is not the user's own.
os.environ["LLMRUN_CACHE_DIR"] = str(CACHE / "cache")
os.environ["LLMRUN_DATA_DIR"] = str(CACHE / "data")
CACHE.mkdir(exist_ok=True)
os.environ["LLMRUN_CONFIG"] = str(CACHE / "config.toml")
Path(os.environ["LLMRUN_CONFIG"]).touch()

# nohup ignores SIGHUP, and so would every program that a test starts.
if sys.platform != "win32":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# NumPy's own threads spin while they wait for each other; beside other tests, that costs far more than they save.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# A deadline is a timing assertion, which fails on a busy machine without a bug.
settings.register_profile("llmrun", deadline=None, print_blob=True)
settings.load_profile("llmrun")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out what is slow or compiles kernels (a minute)")
    parser.addoption("--no-skips", action="store_true", help="fail where a test would be skipped")


def pytest_configure(config: pytest.Config) -> None:
    """Give quick runs no compiler and no kernels except the engine's, so that a test that needs another one fails."""
    if config.getoption("quick"):
        empty = TemporaryDirectory(prefix="llmrun-quick-")
        config.add_cleanup(empty.cleanup)
        os.environ["LLMRUN_CACHE_DIR"] = empty.name
        from llmrun.backends.engine_kernels import ENGINE_KERNELS
        from llmrun.compiled.store import load_kernels

        load_kernels(ENGINE_KERNELS)  # takes a few seconds
        blocker = str(HERE / "support" / "no_compiling")
        sys.path.insert(0, blocker)  # child processes that compile inherit this path
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (blocker, os.environ.get("PYTHONPATH"))))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    room = collection_path.relative_to(HERE).parts[:1] if collection_path.is_relative_to(HERE) else ()
    return True if config.getoption("quick") and room and room[0] in KERNEL_ROOMS else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("quick"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("no_skips"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and --no-skips allows none: {call.excinfo.value if call.excinfo else ''}"
    return report
