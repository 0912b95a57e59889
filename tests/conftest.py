"""Settings for every test: no user settings, caches kept between runs, and the options that choose a tier."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support.cli import forking
from tests.support.tiers import (
    ELSEWHERE,
    EXAMPLES,
    Tier,
    changed_rooms,
    chosen_tier,
    digests,
    first_tier,
    folders_of,
    leaves_out,
    record_night,
    selected,
)

if TYPE_CHECKING:
    from tests.support.hub.model_stores import Stores

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent / ".tests-cache"
_SOURCES = pytest.StashKey[Mapping[str, str]]()  # digests of the sources when the run began
# Options of pytest that leave out tests.
_OMITTING = ("collectonly", "deselect", "ignore", "ignore_glob", "keyword", "lf", "markexpr")

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

os.environ["LLMRUN_WARM"] = "0"  # no test leaves a background engine behind, unless it uses the fixture `engines`

# nohup ignores SIGHUP, and a shell's & ignores SIGINT in scripts, and so would every program that a test starts.
if sys.platform != "win32":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# NumPy's own threads spin while they wait for each other; beside other tests, that costs far more than they save.
os.environ["OPENBLAS_NUM_THREADS"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "how much to test (docs/testing.md) [default: what every push must pass]")
    group.addoption("--quick", action="store_true", help="only fast tests that compile no kernel")
    group.addoption("--night", action="store_true", help="every case at every instruction-set level")
    group.addoption("--no-skips", action="store_true", help="fail where a test would be skipped")
    group.addoption("--record", action="store_true", help="store the scores of real models instead of comparing them")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the tier.

    Quick runs load the engine's kernels and block the compiler, so tests that need other kernels fail.
    """
    tier = chosen_tier(config)
    # A deadline is a timing assertion, which fails on a busy machine without a bug.
    settings.register_profile("llmrun", deadline=None, print_blob=True, max_examples=EXAMPLES[tier])
    settings.load_profile("llmrun")
    config.stash[_SOURCES] = digests()
    forking.is_enabled &= tier is not Tier.NIGHT
    if tier is Tier.EDIT:
        os.environ["LLMRUN_CACHE_DIR"] = str(CACHE / "quick")
        from llmrun.base.compiled.host import load_kernel
        from llmrun.formats.layouts.tokens import SAMPLING_KERNEL

        load_kernel(*SAMPLING_KERNEL)  # compiling it takes a few seconds, once
        blocker = str(HERE / "support" / "no_compiling")
        sys.path.insert(0, blocker)  # child processes that compile inherit this path
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (blocker, os.environ.get("PYTHONPATH"))))


def pytest_report_header(config: pytest.Config) -> list[str]:
    from llmrun.base.compiled import library

    kernels = "compiled on this machine" if library.index() is None else "from the libraries of this installation"
    changed = changed_rooms() if chosen_tier(config) is Tier.PUSH else []
    names = " and ".join(f"llmrun/{room}" for room in changed)
    words = [f"{names} changed since the last night run, so their night tests run too"] if changed else []
    return [f"kernels: {kernels}", *words]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import the files that have no tests for this run, because imports take much of a quick run."""
    if config.getoption("markexpr") or not collection_path.match("test_*.py"):
        return None
    tier = chosen_tier(config)
    if tier is Tier.PUSH and collection_path.relative_to(HERE.parent).as_posix().startswith(
        folders_of(changed_rooms())
    ):
        tier = Tier.NIGHT
    return leaves_out(tier, collection_path.read_text(encoding="utf-8")) or None


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Collect no cases of functions that only later tiers run. In a quick run, they would be half of all cases.

    A test that is named on the command line is collected and deselected, so that pytest does not call it unknown.
    """
    config, tier = collector.config, chosen_tier(collector.config)
    if not name.startswith("test_") or any("::" in argument for argument in config.args):
        return None
    folders = folders_of(changed_rooms()) if tier is Tier.PUSH else ()
    is_later = first_tier(getattr(obj, "pytestmark", ())) > tier and not collector.nodeid.startswith(folders)
    return [] if is_later else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = chosen_tier(config)
    kept = selected(items, tier, changed_rooms() if tier is Tier.PUSH else ())
    if not config.getoption("markexpr"):
        kept = [item for item in kept if not any(item.get_closest_marker(mark) for mark in ELSEWHERE)]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept


@pytest.fixture
def saw(record_property: Callable[[str, object], None]) -> Callable[[int, str, int], None]:
    """Return a function with which a test of the project itself reports how many things it saw.

    It fails if they are fewer than `least`, because a search that finds nothing finds no fault.
    """

    def report(count: int, what: str, least: int) -> None:
        record_property(what, count)
        assert count >= least, f"only {count:,} {what} instead of at least {least:,}"

    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    seen = [pair for report in terminalreporter.getreports("passed") for pair in report.user_properties]
    if seen:
        terminalreporter.line("Seen by tests of the project itself: " + ", ".join(f"{n:,} {what}" for what, n in seen))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """After a whole night run has passed, record the digests of the sources at its start."""
    config = session.config
    is_worker = hasattr(config, "workerinput")
    is_part = config.args != config.getini("testpaths") or any(config.getoption(name, None) for name in _OMITTING)
    if chosen_tier(config) is Tier.NIGHT and exitstatus == 0 and not is_worker and not is_part:
        record_night(config.stash[_SOURCES])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.config.getoption("no_skips"):
        report.outcome = "failed"
        report.longrepr = f"skipped, and --no-skips allows none: {call.excinfo.value if call.excinfo else ''}"
    return report


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let commands use background engines in a folder of their own, and end all of these engines after the test.

    Returns the folder of sockets, which the first engine creates.
    """
    if sys.platform == "win32":
        pytest.skip("needs Unix sockets")
    from tests.support.background import background_home
    from tests.support.serving.fake_engine import end_all

    with background_home(tmp_path / "engines", settings="") as home:
        monkeypatch.setenv("LLMRUN_CACHE_DIR", str(home.cache))
        monkeypatch.delenv("LLMRUN_WARM")
        monkeypatch.delenv("CI", raising=False)
        yield home.folder
        end_all()


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    """Folders for models of all programs, which take the places of the user's own."""
    from tests.support.hub.model_stores import Stores  # few files need it

    made = Stores(tmp_path)
    made.enter(monkeypatch)
    return made
