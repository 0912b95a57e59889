"""Test that answers stay correct if the kernel cache is damaged, shared by concurrent first runs, or unwritable."""

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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from llmrun.backends.base import OpenOptions
from llmrun.backends.cpu.team import TEAM_KERNELS
from llmrun.compiled import store
from llmrun.compiled.levels import PORTABLE, host_levels, host_target, target_for
from llmrun.compiled.store import object_images
from llmrun.engine.engine import Engine
from llmrun.folders import cache_folder
from tests.support.cli.commands import ROOT
from tests.support.gguf.gguf_files import tiny_llama

_TIMEOUT_S = 300  # for eight simultaneous first runs on a slow machine
_VOCABULARY = 297  # tiny_llama's vocabulary size
_DAMAGES = ("truncated", "emptied", "grown", "overwritten", "exchanged", "foreign", "folder", "litter")


class Finding(Exception):
    """An unexpected outcome."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The output of one llmrun process: the probability of every token at every position, and its notes."""

    body: str
    notes: tuple[str, ...]


@dataclass
class Tally:
    """How often each kind of case succeeded, and a sentence for each failure."""

    done: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def judge(self, what: str, case: str, check: Callable[[], None]) -> None:
        try:
            check()
        except Finding as finding:
            self.findings.append(f"{what}, {case}: {finding}")
        else:
            self.done[what] = self.done.get(what, 0) + 1


class Soak:
    """A tiny model, the cache from its first run and its answer. Every case works on a copy of that cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = tiny_llama(folder / "model.gguf", weight_type="Q4_1")
        self._cache = folder / "sound"
        self._right = self._answer(self._cache).body
        self._entries = {path.name: path.read_bytes() for path in (self._cache / "kernels").iterdir()}
        with _cache_at(self._cache), Engine.open(self._model, OpenOptions(backend="cpu")):
            loaded = {f"{store._key(name, target)}.o": name for name, target in store._loaded}
        self._names = {entry_name: loaded[entry_name] for entry_name in self._entries}
        with _cache_at(folder / "foreign"):
            self._foreign = _foreign_entries()
        self.tally = Tally()

    # --- damage -------------------------------------------------------------------------------------------------------

    def flip_in_process(self, seed: int, case: int) -> None:
        """Flip one bit of one entry. This process's store must recompile the entry, link it and warn once."""
        with self._flipped(seed, case) as (cache, entry_name, where):
            self.tally.judge("bit flips in this process", where, lambda: self._expect_mended(cache, entry_name))

    def flip_with_process(self, seed: int, case: int) -> None:
        """Flip one bit of one entry, then run the model in a new process."""
        with self._flipped(seed, case) as (cache, _, where):
            self.tally.judge("bit flips, with a new process", where, lambda: self._expect_healed(cache))

    @contextmanager
    def _flipped(self, seed: int, case: int) -> Iterator[tuple[Path, str, str]]:
        """Yield (a cache with one flipped bit, the name of the damaged entry, a description of the bit's position)."""
        choice = random.Random(f"{seed} {case}")
        entry_name = choice.choice(sorted(self._entries))
        bit = choice.randrange(8 * len(self._entries[entry_name]))
        with self._copy() as cache:
            _flip(cache / "kernels" / entry_name, bit)
            yield cache, entry_name, f"case {case}: bit {bit} of {entry_name}"

    def other_damage(self, seed: int, case: int) -> None:
        """Damage a cache entry in some other way, then run the model in a new process."""
        choice = random.Random(f"{seed} other {case}")
        kind = _DAMAGES[case % len(_DAMAGES)]
        with self._copy() as cache:
            folder = cache / "kernels"
            victim, other = (folder / name for name in choice.sample(sorted(self._entries), 2))
            self._damage(kind, victim, other, choice)
            check = self._expect_kept_out if kind == "folder" else self._expect_healed
            self.tally.judge(f"entries {kind}", f"case {case}", lambda: check(cache))

    def _damage(self, kind: str, victim: Path, other: Path, choice: random.Random) -> None:
        sound = victim.read_bytes()
        if kind == "truncated":
            victim.write_bytes(sound[: choice.randrange(len(sound))])
        elif kind == "emptied":
            victim.write_bytes(b"")
        elif kind == "grown":
            victim.write_bytes(sound + choice.randbytes(choice.randrange(1, 100)))
        elif kind == "overwritten":
            start = choice.randrange(len(sound))
            victim.write_bytes(sound[:start] + choice.randbytes(len(sound) - start))
        elif kind == "exchanged":
            victim.write_bytes(other.read_bytes())
            other.write_bytes(sound)
        elif kind == "foreign":  # for another processor, with a valid checksum
            victim.write_bytes(choice.choice(self._foreign))
        elif kind == "folder":
            victim.unlink()
            victim.mkdir()
        else:
            victim.unlink()
            (victim.parent / f".{victim.stem}").write_bytes(sound[:1000])  # left behind by a killed process
            (victim.parent / "core").write_bytes(choice.randbytes(1000))

    def _expect_mended(self, cache: Path, entry_name: str) -> None:
        """Run the store with a fake compiler, because real compilation would take a second per case."""
        name, image = self._names[entry_name], self._entries[entry_name][32:]
        compiler = mock.patch.object(store._Children, "compile", return_value=image)
        with _cache_at(cache), compiler as compiled, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            images = object_images([name], host_target())
            linked = store._link(images, host_target())[name]
        store._libraries.pop()
        if compiled.call_count != 1:
            raise Finding("the damage was not seen")
        if images[name] != image or not linked:
            raise Finding("another object was loaded")
        if len(told) != 1:
            raise Finding(f"{len(told)} warnings")
        self._expect_sound(cache)

    def _expect_healed(self, cache: Path) -> None:
        self._expect(self._answer(cache), most_notes=1)
        self._expect_sound(cache, litter=("core",))
        self._expect(self._answer(cache), most_notes=0)

    def _expect_kept_out(self, cache: Path) -> None:
        for _ in range(2):
            self._expect(self._answer(cache), least_notes=1, most_notes=1)

    # --- concurrent first runs and killed first runs ------------------------------------------------------------------

    def start_at_once(self, round_number: int, processes: int = 8) -> None:
        """Start several first runs on a missing cache at once."""
        cache = self._folder / "shared"

        def check() -> None:
            started = [self._start(cache) for _ in range(processes)]
            try:
                for process in started:
                    self._expect(_finished(process), most_notes=0)
            finally:
                _end(started)
            self._expect_sound(cache)

        self.tally.judge(f"first runs of {processes} processes at once", f"round {round_number}", check)
        shutil.rmtree(cache, ignore_errors=True)

    def kill(self, seed: int, case: int) -> None:
        """Kill a first run at a random moment. The next run must complete the cache."""
        cache = self._folder / "killed"

        def check() -> None:
            process = self._start(cache)
            time.sleep(random.Random(f"{seed} kill {case}").uniform(0.5, 6))
            _end([process])
            self._expect(self._answer(cache), most_notes=0)
            self._expect_sound(cache)

        self.tally.judge("first runs killed", f"case {case}", check)
        shutil.rmtree(cache, ignore_errors=True)

    # --- unwritable caches --------------------------------------------------------------------------------------------

    def cannot_write(self) -> None:
        """Run with a cache that cannot be written. Each start compiles everything and prints one note."""
        blocked = self._folder / "a file"
        blocked.write_text("")
        for where, cache, before in (
            ("a file in its place", blocked, None),
            ("a folder that takes no files", Path("/proc/llmrun"), None),
            ("no room for a byte", self._folder / "full", _no_room),
        ):

            def check(cache: Path = cache, before: Callable[[], None] | None = before) -> None:
                self._expect(self._answer(cache, before), least_notes=1, most_notes=1)

            self.tally.judge(f"caches that cannot be written: {where}", "first run", check)
        self.cannot_write_one_more()

    def cannot_write_one_more(self) -> None:
        """Remove one entry while the disk is full."""
        with self._copy() as cache:
            missing = sorted((cache / "kernels").iterdir())[0]
            missing.unlink()

            def check() -> None:
                self._expect(self._answer(cache, _no_room), least_notes=1, most_notes=1)
                if list((cache / "kernels").glob(".*")) or missing.exists():
                    raise Finding("a part of an entry was left behind")

            self.tally.judge("caches that cannot be written: no room for one more", missing.name, check)

    # --- checks -------------------------------------------------------------------------------------------------------

    def _expect(self, answer: Answer, *, most_notes: int, least_notes: int = 0) -> None:
        if answer.body != self._right:
            raise Finding(f"another answer: {answer.body[:300]}")
        if not least_notes <= len(answer.notes) <= most_notes:
            raise Finding(f"{len(answer.notes)} notes: {' / '.join(answer.notes)}")

    def _expect_sound(self, cache: Path, litter: tuple[str, ...] = ()) -> None:
        """Check that the cache holds exactly the original entries, bit for bit."""
        found = {path.name: path.read_bytes() for path in (cache / "kernels").iterdir() if path.name not in litter}
        if found != self._entries:
            different = sorted(set(found.items()) ^ set(self._entries.items()))
            raise Finding(f"the cache differs in {', '.join(sorted({name for name, _ in different}))}")

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start(self, cache: Path, before: Callable[[], None] | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "llmrun", "generate", "--raw", "-m", str(self._model), "--backend", "cpu"]
        command += ["-p", "Hello world", "-n", "3", "--seed", "1", "--json", "--logprobs", str(_VOCABULARY)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LLMRUN_")}
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | {"LLMRUN_CACHE_DIR": str(cache)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=before,
        )

    def _answer(self, cache: Path, before: Callable[[], None] | None = None) -> Answer:
        return _finished(self._start(cache, before))

    @contextmanager
    def _copy(self) -> Iterator[Path]:
        copy = self._folder / "copy"
        shutil.copytree(self._cache, copy)
        try:
            yield copy
        finally:
            shutil.rmtree(copy)


def _finished(process: subprocess.Popen[str]) -> Answer:
    output, errors = process.communicate(timeout=_TIMEOUT_S)
    if process.returncode != 0:
        raise Finding(f"exit code {process.returncode}: {errors[-500:]}")
    lines = errors.splitlines()
    expected = ("note: ", "compiling kernels ", "loading weights ", "model cpu")
    strange = [line for line in lines if not line.startswith(expected)]
    if strange:
        raise Finding(f"on stderr: {' / '.join(strange)[:500]}")
    notes = [line for line in lines if line.startswith("note: ")]
    choice = json.loads(output)["choices"][0]
    return Answer(json.dumps([choice["message"], choice["logprobs"]]), tuple(notes))


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def _no_room() -> None:
    """Forbid writing to files in a child process. Pipes are not affected."""
    if sys.platform == "win32":
        raise NotImplementedError("needs resource limits")
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def _flip(path: Path, bit: int) -> None:
    entry = bytearray(path.read_bytes())
    entry[bit // 8] ^= 1 << bit % 8
    path.write_bytes(entry)


def _foreign_entries() -> list[bytes]:
    """Return entries compiled for a processor with only the portable instructions."""
    target = target_for(PORTABLE, host_levels()[0])
    object_images(TEAM_KERNELS, target)
    folder = cache_folder() / "kernels"
    return [(folder / f"{store._key(name, target)}.o").read_bytes() for name in TEAM_KERNELS]


def _cache_at(folder: Path) -> AbstractContextManager[object]:
    return mock.patch.dict(os.environ, {"LLMRUN_CACHE_DIR": str(folder)})
