"""Starts and stops background engines in random ways, and checks that nothing is left over.

All engines have the same tiny model, and one more engine stays from the first case to the last one.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.soak.driver import Broken, Case, Soak
from tests.support.background import BackgroundHome, background_home
from tests.support.cli.commands import LLMRUN, ROOT
from tests.support.gguf.gguf_files import tiny_llama

assert sys.platform != "win32", "background engines need Unix sockets"

_LONG, _SHORT = 4000, 20  # tokens of answers, of which the long one takes about a second
_START_S = 3.0  # the longest time after which a starting process is killed
_PATIENCE_S = 180.0
_NOTE = "so this process continues the answer itself"


def starts(soak: Soak) -> Iterator[Case]:
    """Start an engine, and end it in a random way, or disturb its start."""
    with background_home(soak.folder, settings="") as home:
        engines = Engines(home, soak.folder)
        acts = (
            *(engines.expire, engines.stop, engines.stop_by_force, engines.terminate, engines.kill),
            *(engines.remove_socket, engines.remove_folder, engines.kill_starter, engines.kill_client),
            *(engines.kill_starting_engine, engines.change_model),
        )

        def case(number: int) -> str:
            chance = soak.random(number)
            act = acts[number % len(acts)]
            act(chance)
            engines.expect_nothing()
            return act.__name__.replace("_", " ")

        yield case
        engines.end()


class Engines:
    """A home with a model, the answer of a run without an engine, and the engine that stays."""

    def __init__(self, home: BackgroundHome, folder: Path) -> None:
        self._home = home
        self._model = tiny_llama(folder / "model.gguf", weight_type="Q4_1", context=8192)
        self._other_model = Path(shutil.copy(self._model, folder / "steady.gguf"))
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._env = {**home.env, "TMPDIR": str(self._temporary)}
        self._right = [self._finished(self._started(keep_alive="0", tokens=count))[0] for count in (_LONG, _SHORT)]
        self._finished(self._started(self._other_model, keep_alive="-1"))
        self._steady = home.engine()
        self._finished(self._started(self._other_model))  # from now on, the engine has all its threads and files
        self._held = self._steady.num_fds(), self._steady.num_threads()
        self._files = home.files()
        self._may_stay: set[str] = set()  # files of killed processes, which the next engine removes

    # Each of these methods starts an engine, and returns when it has ended.

    def expire(self, _: random.Random) -> None:
        """Let the engine leave by itself."""
        self._warm(keep_alive="1s")

    def stop(self, _: random.Random) -> None:
        self._warm()
        self._command("stop", str(self._model))
        if self._engine() is not None:
            raise Broken("`llmrun stop` returned too early")

    def stop_by_force(self, chance: random.Random) -> None:
        """Stop the engine in the middle of an answer, which the client must continue."""
        with self._answering(chance):
            self._command("stop", "--force", str(self._model))

    def terminate(self, chance: random.Random) -> None:
        """Send SIGTERM during an answer, which the engine must finish, or after it."""
        if chance.random() < 0.5:
            self._warm()
            self._signal(signal.SIGTERM)
        else:
            with self._answering(chance, notes=0):
                self._signal(signal.SIGTERM)

    def kill(self, chance: random.Random) -> None:
        """Kill the engine during an answer or after it. The next start removes its files."""
        if chance.random() < 0.5:
            self._warm()
            self._signal(signal.SIGKILL)
        else:
            with self._answering(chance):
                self._signal(signal.SIGKILL)
        self._may_stay = self._home.files() - self._files

    def remove_socket(self, _: random.Random) -> None:
        """Remove the socket. The engine must leave, and the next client starts another one."""
        self._warm()
        for name in self._home.files() - self._files:
            if name.endswith(".sock"):
                (self._home.folder / name).unlink()
        self._warm(keep_alive="1s")

    def remove_folder(self, chance: random.Random) -> None:
        """Move the folder away, as at logout, and bring it back for the steady engine, which must not notice."""
        self._warm()
        aside = self._home.folder.with_name("aside")
        os.kill(self._steady.pid, signal.SIGSTOP)
        try:
            self._home.folder.rename(aside)
            if chance.random() < 0.5:
                self._warm(keep_alive="1s")
            self._wait_until_ended()
            if self._home.folder.exists():
                self._home.folder.rmdir()  # fails if anything is left in the folder
        finally:
            aside.rename(self._home.folder)
            os.kill(self._steady.pid, signal.SIGCONT)
        self._may_stay |= self._home.files() - self._files  # the files of the engine that could not find its folder

    def kill_starter(self, chance: random.Random) -> None:
        """Kill the client while its engine loads. The engine must end, at once or after its keep-alive time."""
        process = self._started(keep_alive="1s")
        time.sleep(chance.uniform(0, _START_S))
        process.kill()
        process.communicate()
        self._may_stay |= {name for name in self._home.files() if name.endswith(".lock")}

    def kill_starting_engine(self, chance: random.Random) -> None:
        """Kill the engine while it loads. Its client must answer without it."""
        process = self._started(keep_alive="1s")
        while process.poll() is None and (engine := self._engine()) is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, _START_S / 2))
        if (engine := self._engine()) is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.kill()
        self._expect(process, 0, 1)
        self._may_stay |= self._home.files() - self._files

    def kill_client(self, chance: random.Random) -> None:
        """Kill or interrupt a client of the steady engine during an answer, which must end."""
        process = self._started(self._other_model)
        self._wait_for_text(process, chance)
        process.send_signal(chance.choice((signal.SIGKILL, signal.SIGINT, signal.SIGHUP, signal.SIGTERM)))
        process.communicate(timeout=_PATIENCE_S)
        self._until(lambda: self._answers() == 0, "the answer continues without its client")

    def change_model(self, _: random.Random) -> None:
        """Change the model's file. The next client must not get an answer from the old engine."""
        self._warm()
        old = self._engine()
        os.utime(self._model)
        self._warm(keep_alive="1s")
        new = self._engine()
        if old is not None and new is not None and old.pid == new.pid:
            raise Broken("the engine of the earlier file has answered")

    # Checks

    def expect_nothing(self) -> None:
        """Check that the engine has ended, and that it has left no files and no processes."""
        self._wait_until_ended()
        left = self._home.files() - self._files - self._may_stay
        if left:
            raise Broken(f"left over: {sorted(left)}")
        self._may_stay &= self._home.files()
        if left := {path.name for path in self._temporary.iterdir()}:
            raise Broken(f"temporary files are left over: {sorted(left)}")
        if not self._steady.is_running():
            logs = {path.name: path.read_text() for path in self._home.folder.glob("*.log")}
            free = psutil.virtual_memory().available  # engines leave when memory is short
            raise Broken(f"the steady engine has ended: {sorted(self._home.files())}, {logs}, {free:,} bytes free")

    def end(self) -> None:
        """Check that the steady engine has lost nothing, and that a last engine removes what killed processes left."""
        self._until(
            lambda: self._held == (self._steady.num_fds(), self._steady.num_threads()), "descriptors or threads"
        )
        self._warm()
        self._command("stop", "--all")
        left = {name for name in self._home.files() if not name.endswith(".lock")}  # a later run removes locks
        if left or self._home.engines() or self._processes():
            raise Broken(f"left over: {sorted(left)}, {self._processes()}")

    def _warm(self, keep_alive: str = "1h") -> None:
        """Run a client, which starts an engine unless one is running."""
        self._expect(self._started(keep_alive=keep_alive, tokens=_SHORT), 0)

    @contextmanager
    def _answering(self, chance: random.Random, notes: int = 1) -> Iterator[None]:
        """Start an engine and an answer, and check the answer at the end. Short answers may be complete before that."""
        self._warm()
        process = self._started()
        self._wait_for_text(process, chance)
        yield
        self._expect(process, *range(notes + 1))

    def _wait_for_text(self, process: subprocess.Popen[bytes], chance: random.Random) -> None:
        assert process.stdout is not None
        select.select([process.stdout], [], [], _PATIENCE_S)
        time.sleep(chance.uniform(0, 0.5))

    def _expect(self, process: subprocess.Popen[bytes], *notes: int) -> None:
        """Check that the answer is that of a run without an engine, and the number of notes about ended engines."""
        answer, errors = self._finished(process)
        if answer not in self._right:
            raise Broken(f"another answer: {answer[:300]!r}, not {self._right[0][:300]!r}")
        if errors.count(_NOTE) not in notes:
            raise Broken(f"wrong number of notes, expected {notes}: {errors}")

    def _finished(self, process: subprocess.Popen[bytes]) -> tuple[bytes, str]:
        output, errors = process.communicate(timeout=_PATIENCE_S)
        if process.returncode != 0:
            raise Broken(f"exit code {process.returncode}: {errors.decode()[-500:]}")
        return output, errors.decode()

    def _started(
        self, model: Path | None = None, *, keep_alive: str | None = None, tokens: int = _LONG
    ) -> subprocess.Popen[bytes]:
        words = ["generate", "--raw", "-m", str(model or self._model), "--backend", "cpu", "--temp", "0"]
        words += ["-n", str(tokens), "-q", *([] if keep_alive is None else ["--keep-alive", keep_alive]), "Hello"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [*LLMRUN, *words], cwd=ROOT, env=self._env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )

    def _command(self, *words: str) -> str:
        done = subprocess.run([*LLMRUN, *words], cwd=ROOT, env=self._env, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Broken(f"{' '.join(words)}: {done.stderr}")
        return done.stdout

    def _answers(self) -> int:
        engines = json.loads(self._command("ps", "--json"))["engines"]
        return sum(engine["answers"] or 0 for engine in engines)

    def _signal(self, number: int) -> None:
        if (engine := self._engine()) is None:
            raise Broken("no engine is running")
        engine.send_signal(number)

    def _engine(self) -> psutil.Process | None:
        """Return the engine besides the steady one, or None."""
        return next((each for each in self._home.engines() if each.pid != self._steady.pid), None)

    def _wait_until_ended(self) -> None:
        self._until(lambda: self._engine() is None, "the engine does not end")

    def _processes(self) -> list[psutil.Process]:
        """Return all processes of this home, such as those that render chat templates."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(self._temporary):
                    found.append(process)
        return found

    def _until(self, condition: Callable[[], bool], problem: str) -> None:
        end = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > end:
                raise Broken(problem)
            time.sleep(0.05)
