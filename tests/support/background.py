"""A home for the background engines of a test, so that tests neither see nor leave behind engines of the user."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from llmrun.base.folders import cache_folder
from llmrun.serving.background.place import Folder, connect
from tests.support.cli.commands import llmrun

_MODULE = "llmrun.serving.background.main"
_GONE_S = 10.0


@dataclass(frozen=True)
class BackgroundHome:
    """A cache folder of its own, which also holds the sockets, and the environment of commands that use it.

    Commands may use background engines, although all other tests forbid that.
    """

    cache: Path
    env: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """The folder of sockets, locks and records of calls."""
        return self.cache / "run"

    def llmrun(self, *arguments: str | bytes, **options: Any) -> subprocess.CompletedProcess[bytes]:
        """Run llmrun as `tests.support.cli.commands.llmrun` does, in this home. `env` adds variables."""
        return llmrun(*arguments, **{**options, "env": {**self.env, **options.get("env", {})}})

    def engines(self) -> list[psutil.Process]:
        """Return the running engines of this home, including those that are still loading."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def engine(self) -> psutil.Process:
        """Return the only engine."""
        (found,) = self.engines()
        return found

    def name(self) -> str:
        """Return the name of the only socket."""
        (found,) = self.folder.glob("*.sock")
        return found.stem

    def connect(self) -> socket.socket:
        """Connect to the only engine."""
        with Folder(self.folder, os.open(self.folder, os.O_RDONLY)) as folder:
            connection = connect(folder, self.name(), _GONE_S)
        assert connection is not None
        return connection

    def files(self) -> set[str]:
        """Return the names of the files in the folder of sockets, without the records of calls."""
        if not self.folder.exists():
            return set()
        return {path.name for path in self.folder.iterdir() if path.suffix != ".called"}

    def wait_until_gone(self, seconds: float = _GONE_S) -> None:
        """Wait until no engine runs. Fails after this time."""
        end = time.monotonic() + seconds
        while found := self.engines():
            assert time.monotonic() < end, found
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill all engines and the processes that they have started."""
        for process in self.engines():
            with contextlib.suppress(psutil.NoSuchProcess):
                family = [*process.children(recursive=True), process]
                for each in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
                psutil.wait_procs(family, _GONE_S)

    def _owns(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return (
                process.status() != psutil.STATUS_ZOMBIE
                and any(_MODULE in word for word in process.cmdline())
                and process.environ().get("LLMRUN_CACHE_DIR") == str(self.cache)
            )
        return False


@contextmanager
def background_home(folder: Path, *, settings: str = 'keep_alive = "10m"\n') -> Iterator[BackgroundHome]:
    """Make a home in a new folder, and kill its engines at the end. Compiled kernels are shared with other tests.

    settings  the text of config.toml. With `keep_alive`, the first call starts an engine, also in a container.
    """
    cache = folder / "cache"
    cache.mkdir(parents=True)
    for name in ("kernels", "levels"):
        shared = cache_folder(name)
        shared.mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(shared.resolve(), target_is_directory=True)
    config = folder / "config.toml"
    config.write_text(settings)
    kept = {name: value for name, value in os.environ.items() if name != "LLMRUN_WARM"}
    own = {"LLMRUN_CACHE_DIR": cache, "LLMRUN_DATA_DIR": folder / "data", "LLMRUN_CONFIG": config}
    home = BackgroundHome(cache, {**kept, **{name: str(path) for name, path in own.items()}})
    try:
        yield home
    finally:
        home.kill()
