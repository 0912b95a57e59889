"""Damages the cache of compiled kernels in every way, and checks that each answer stays the same to the last bit."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.team import TEAM_KERNELS
from llmrun.compiled import store as kernel_store
from llmrun.compiled.levels import PORTABLE, host_levels, host_target, target_for
from llmrun.compiled.store import object_images
from llmrun.engine.engine import Engine
from llmrun.folders import cache_folder
from tests.soak.driver import Broken, Case, Soak
from tests.support.cli.commands import LLMRUN, ROOT
from tests.support.gguf.gguf_files import tiny_llama

_TIMEOUT_S = 300  # for simultaneous first runs on a slow machine
_VOCABULARY = 297  # tiny_llama's vocabulary size
_AT_ONCE = 4
_DAMAGES = ("foreign", "exchanged", "litter")  # tests/compiled/test_store.py has more, one entry at a time


def store(soak: Soak) -> Iterator[Case]:
    """Flip a bit in most cases, which takes milliseconds. The others start processes."""
    damage = Damage(soak.folder)
    rare: dict[int, Callable[[int], str]] = {
        0: lambda number: damage.flip_bit(soak.random(number), in_process=False),
        20: lambda number: damage.harm(number // 100, soak.random(number)),
        40: lambda number: damage.kill_first_run(soak.random(number)),
        60: lambda number: damage.leave_no_room(),
        80: lambda number: damage.start_at_once(),
    }
    yield lambda number: rare[number % 100](number) if number % 100 in rare else damage.flip_bit(soak.random(number))


@dataclass(frozen=True, slots=True)
class _Answer:
    """The output of one llmrun process: the probability of every token at every position, and its notes."""

    body: str
    notes: tuple[str, ...]


class Damage:
    """A tiny model, the cache from its first run and its answer. Every case works on a copy of that cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = tiny_llama(folder / "model.gguf", weight_type="Q4_1")
        self._cache = folder / "sound"
        self.right = self._answer(self._cache).body
        self.entries = {path.name: path.read_bytes() for path in (self._cache / "kernels").iterdir()}
        with _cache_at(self._cache), Engine.open(self._model, OpenOptions(backend="cpu")):
            loaded = {f"{kernel_store._key(name, target)}.o": name for name, target in kernel_store._loaded}
        self._names = {entry_name: loaded[entry_name] for entry_name in self.entries}
        with _cache_at(folder / "foreign"):
            self._foreign = _foreign_entries()

    # --- damage -------------------------------------------------------------------------------------------------------

    def flip_bit(self, chance: random.Random, *, in_process: bool = True) -> str:
        """Flip one bit of one entry. This process's store, or a new process, must compile the entry again."""
        entry_name = chance.choice(sorted(self.entries))
        bit = chance.randrange(8 * len(self.entries[entry_name]))
        cache = self._copy()
        entry = bytearray(self.entries[entry_name])
        entry[bit // 8] ^= 1 << bit % 8
        (cache / "kernels" / entry_name).write_bytes(entry)
        if in_process:
            self._expect_mended(cache, entry_name)
        else:
            self._expect_healed(cache)
        return "flipped bits" if in_process else "flipped bits with a new process"

    def harm(self, number: int, chance: random.Random) -> str:
        """Damage an entry in another way, then run the model in a new process."""
        kind = _DAMAGES[number % len(_DAMAGES)]
        cache = self._copy()
        victim, other = (cache / "kernels" / name for name in chance.sample(sorted(self.entries), 2))
        sound = victim.read_bytes()
        if kind == "foreign":  # for another processor, with a valid checksum
            victim.write_bytes(chance.choice(self._foreign))
        elif kind == "exchanged":
            victim.write_bytes(other.read_bytes())
            other.write_bytes(sound)
        else:
            victim.unlink()
            (victim.parent / f".{victim.stem}").write_bytes(sound[:1000])  # left behind by a killed process
            (victim.parent / "core").write_bytes(chance.randbytes(1000))
        self._expect_healed(cache)
        return f"entries {kind}"

    # --- first runs ---------------------------------------------------------------------------------------------------

    def start_at_once(self, processes: int = _AT_ONCE) -> str:
        """Start several first runs on a missing cache at once."""
        cache = self._no_cache()
        started = [self._start(cache) for _ in range(processes)]
        try:
            for process in started:
                self._expect(_finished(process), most_notes=0)
        finally:
            for process in started:
                process.kill()
        self._expect_sound(cache)
        return "first runs at once"

    def kill_first_run(self, chance: random.Random) -> str:
        """Kill a first run at a random moment. The next run must complete the cache."""
        cache = self._no_cache()
        process = self._start(cache)
        time.sleep(chance.uniform(0.5, 6))
        process.kill()
        process.communicate()
        self._expect(self._answer(cache), most_notes=0)
        self._expect_sound(cache)
        return "killed first runs"

    def leave_no_room(self) -> str:
        """Remove one entry while the disk is full. The run prints a note and leaves no part of an entry."""
        cache = self._copy()
        missing = min((cache / "kernels").iterdir())
        missing.unlink()
        self._expect(self._answer(cache, _no_room), least_notes=1, most_notes=1)
        if list((cache / "kernels").glob(".*")) or missing.exists():
            raise Broken("a part of an entry was left behind")
        return "full disks"

    # --- checks -------------------------------------------------------------------------------------------------------

    def _expect_mended(self, cache: Path, entry_name: str) -> None:
        """Run the store with a fake compiler, because real compilation would take a second per case."""
        name, image = self._names[entry_name], self.entries[entry_name][32:]
        compiler = mock.patch.object(kernel_store._Children, "compile", return_value=image)
        with _cache_at(cache), compiler as compiled, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            images = object_images([name], host_target())
            linked = kernel_store._link(images, host_target())[name]
        kernel_store._libraries.pop()
        if compiled.call_count != 1:
            raise Broken("the damage was not seen")
        if images[name] != image or not linked:
            raise Broken("another object was loaded")
        if len(told) != 1:
            raise Broken(f"{len(told)} warnings")
        self._expect_sound(cache)

    def _expect_healed(self, cache: Path) -> None:
        self._expect(self._answer(cache), most_notes=1)
        self._expect_sound(cache, litter=("core",))
        self._expect(self._answer(cache), most_notes=0)

    def _expect(self, answer: _Answer, *, most_notes: int, least_notes: int = 0) -> None:
        if answer.body != self.right:
            raise Broken(f"another answer: {answer.body[:300]}")
        if not least_notes <= len(answer.notes) <= most_notes:
            raise Broken(f"{len(answer.notes)} notes: {' / '.join(answer.notes)}")

    def _expect_sound(self, cache: Path, litter: tuple[str, ...] = ()) -> None:
        """Check that the cache holds exactly the original entries, bit for bit."""
        found = {path.name: path.read_bytes() for path in (cache / "kernels").iterdir() if path.name not in litter}
        if found != self.entries:
            different = sorted({name for name, _ in set(found.items()) ^ set(self.entries.items())})
            raise Broken(f"the cache differs in {', '.join(different)}")

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start(self, cache: Path, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
        words = ["generate", "--raw", "-m", str(self._model), "--backend", "cpu", "-p", "Hello world"]
        words += ["-n", "3", "--seed", "1", "--json", "--logprobs", str(_VOCABULARY)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LLMRUN_")}
        return subprocess.Popen(
            [*LLMRUN, *words],
            cwd=ROOT,
            env=environment | {"LLMRUN_CACHE_DIR": str(cache)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=before,
        )

    def _answer(self, cache: Path, before: Callable[[], None] | None = None) -> _Answer:
        return _finished(self._start(cache, before))

    def _no_cache(self) -> Path:
        cache = self._folder / "new"
        shutil.rmtree(cache, ignore_errors=True)
        return cache

    def _copy(self) -> Path:
        return shutil.copytree(self._cache, self._no_cache())


def _finished(process: subprocess.Popen[str]) -> _Answer:
    output, errors = process.communicate(timeout=_TIMEOUT_S)
    if process.returncode != 0:
        raise Broken(f"exit code {process.returncode}: {errors[-500:]}")
    lines = errors.splitlines()
    expected = ("note: ", "compiling kernels ", "loading weights ", "model cpu")
    if strange := [line for line in lines if not line.startswith(expected)]:
        raise Broken(f"on stderr: {' / '.join(strange)[:500]}")
    choice = json.loads(output)["choices"][0]
    notes = tuple(line for line in lines if line.startswith("note: "))
    return _Answer(json.dumps([choice["message"], choice["logprobs"]]), notes)


def _no_room() -> None:
    """Forbid writing to files in a child process. Pipes are not affected."""
    if sys.platform == "win32":
        raise NotImplementedError("needs resource limits")
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _foreign_entries() -> list[bytes]:
    """Return entries compiled for a processor with only the portable instructions."""
    target = target_for(PORTABLE, host_levels()[0])
    object_images(TEAM_KERNELS, target)
    folder = cache_folder() / "kernels"
    return [(folder / f"{kernel_store._key(name, target)}.o").read_bytes() for name in TEAM_KERNELS]


def _cache_at(folder: Path) -> AbstractContextManager[object]:
    return mock.patch.dict(os.environ, {"LLMRUN_CACHE_DIR": str(folder)})
