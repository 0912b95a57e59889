"""Damages the cache of compiled kernels, and checks that no bit of any answer changes.

tests/base/compiled/test_compiling.py damages entries in more ways, within one process.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.soak.driver import Broken, Case, Soak
from tests.support.cli.commands import LLMRUN, ROOT
from tests.support.gguf.gguf_files import tiny_llama

_TIMEOUT_S = 300  # for simultaneous first runs on a slow machine
_VOCABULARY = 297  # tiny_llama's vocabulary size
_AT_ONCE = 4
_ON_STDERR = ("note: ", "model: compiling kernels ", "loading model ", "3 tokens in ")


def store(soak: Soak) -> Iterator[Case]:
    """Flip a bit in a copy of the cache, kill a first run, or start several at once."""
    damage = Damage(soak.folder)
    acts = (damage.flip_bit, damage.kill_first_run, damage.flip_bit, damage.start_at_once)

    def case(number: int) -> str:
        act = acts[number % len(acts)]
        act(soak.random(number))
        return act.__name__.replace("_", " ")

    yield case


class Damage:
    """A tiny model, the cache from its first run and its answer. Every case works on a copy of that cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model = tiny_llama(folder / "model.gguf", weight_type="Q4_1")
        self._cache = folder / "sound"
        self.right, _ = _finished(self._start(self._cache))
        self.entries = {path.name: path.read_bytes() for path in (self._cache / "kernels").iterdir()}

    def flip_bit(self, chance: random.Random) -> None:
        """Flip one bit of one entry. The next run must replace the entry, and may print one note."""
        cache = shutil.copytree(self._cache, self._no_cache())
        victim = cache / "kernels" / chance.choice(sorted(self.entries))
        entry, bit = bytearray(victim.read_bytes()), chance.randrange(8 * victim.stat().st_size)
        entry[bit // 8] ^= 1 << bit % 8
        victim.write_bytes(entry)
        self._expect(self._start(cache), 0, 1)
        self._expect_sound(cache)
        self._expect(self._start(cache), 0)

    def start_at_once(self, _: random.Random) -> None:
        """Start several first runs on a missing cache at once."""
        cache = self._no_cache()
        started = [self._start(cache) for _ in range(_AT_ONCE)]
        try:
            for process in started:
                self._expect(process, 0)
        finally:
            for process in started:
                process.kill()
        self._expect_sound(cache)

    def kill_first_run(self, chance: random.Random) -> None:
        """Kill a first run at a random moment. The next run must complete the cache."""
        cache = self._no_cache()
        process = self._start(cache)
        time.sleep(chance.uniform(0.5, 6))
        process.kill()
        process.communicate()
        self._expect(self._start(cache), 0)
        self._expect_sound(cache)

    def _expect(self, process: subprocess.Popen[str], *counts: int) -> None:
        """Check the answer of a run, and that the number of its notes is one of `counts`."""
        answer, notes = _finished(process)
        if answer != self.right:
            raise Broken(f"another answer: {answer[:300]}")
        if len(notes) not in counts:
            raise Broken(f"{len(notes)} notes: {' / '.join(notes)}")

    def _expect_sound(self, cache: Path) -> None:
        """Check that the cache holds exactly the original entries, bit for bit."""
        found = {path.name: path.read_bytes() for path in (cache / "kernels").iterdir()}
        if found != self.entries:
            different = sorted({name for name, _ in set(found.items()) ^ set(self.entries.items())})
            raise Broken(f"the cache differs in {', '.join(different)}")

    def _no_cache(self) -> Path:
        """Return the path of a cache that does not exist."""
        cache = self._folder / "new"
        shutil.rmtree(cache, ignore_errors=True)
        return cache

    def _start(self, cache: Path) -> subprocess.Popen[str]:
        words = ["generate", "--raw", "-m", str(self._model), "--backend", "cpu", "-p", "Hello world", "-n", "3"]
        words += ["--seed", "1", "--json", "--logprobs", str(_VOCABULARY)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LLMRUN_")}
        environment, pipe = {**kept, "LLMRUN_CACHE_DIR": str(cache), "LLMRUN_WARM": "0"}, subprocess.PIPE
        return subprocess.Popen([*LLMRUN, *words], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def _finished(process: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """Return the probability of every token at every position, and the notes on stderr."""
    output, errors = process.communicate(timeout=_TIMEOUT_S)
    lines = errors.splitlines()
    if process.returncode != 0 or any(not line.startswith(_ON_STDERR) for line in lines):
        raise Broken(f"exit code {process.returncode}: {errors[-500:]}")
    choice = json.loads(output)["choices"][0]
    return json.dumps([choice["message"], choice["logprobs"]]), [line for line in lines if line.startswith("note: ")]
