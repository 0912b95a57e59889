"""The setup that the steps of scripts/check-gpu share: model, programs, sizes of measurements, and time limit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmrun.backends.llama.probe import LIBRARY_FOLDER
from llmrun.base.machine.cpu_count import default_threads
from llmrun.formats.gguf.reader import open_gguf
from tests.support.gpu_report.table import Clock, StepFailed

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Setup:
    """The model and the programs to measure, and how.

    layers       number of the model's layers, including the output layer
    llama_bench  llama.cpp's benchmark, or None if there is none
    seconds      how long `llmrun bench` may measure each configuration
    rounds       how often llmrun and llama-bench take turns
    """

    model: Path
    layers: int
    folder: Path
    clock: Clock
    llama_bench: Path | None
    seconds: float = 10.0
    rounds: int = 5
    prompt: int = 512
    tokens: int = 128

    @classmethod
    def of(cls, model: Path, folder: Path, clock: Clock, llama_bench: Path | None, **sizes: Any) -> Setup:
        with open_gguf(model) as file:
            layers = file.integer(f"{file.string('general.architecture')}.block_count") + 1
        return cls(model, layers, folder, clock, llama_bench, **sizes)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "llmrun", *arguments]

    def environment(self) -> dict[str, str]:
        """Return the environment of llmrun, which need not be installed."""
        return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}

    def llmrun(self, *arguments: str, most: float = 180) -> str:
        """Run llmrun and return its output. Raises StepFailed."""
        return self._run(self.command(*arguments), self.environment(), most)

    def generate(self, model: Path, gpu_layers: str, tokens: int, *arguments: str) -> dict[str, Any]:
        """Run `llmrun generate` on the llama backend and return its JSON. Raises StepFailed."""
        found: dict[str, Any] = json.loads(self.llmrun(*self.generating(model, gpu_layers, tokens), *arguments))
        return found

    def generating(self, model: Path, gpu_layers: str, tokens: int) -> list[str]:
        return [
            *("generate", "-m", str(model), "--backend", "llama", "--gpu-layers", gpu_layers, "-n", str(tokens)),
            *("-c", "2048", "--temp", "0", "--json", "-q", "--raw", "Once upon a time"),
        ]

    def bench(self, gpu_layers: str, *arguments: str) -> list[dict[str, Any]]:
        """Run `llmrun bench` and return its rows."""
        sizes = ("-p", str(self.prompt), "-n", str(self.tokens))
        words = ("bench", "-m", str(self.model), "--backend", "llama", "--gpu-layers", gpu_layers, *sizes)
        found: list[dict[str, Any]] = json.loads(self.llmrun(*words, "--json", "-q", *arguments, most=600))
        return found

    def llama_bench_speed(self, *, prompt: int, tokens: int, depth: int) -> float:
        """Return what llama-bench measures, in tokens per second, with the libraries that llmrun uses."""
        if self.llama_bench is None:
            raise StepFailed("there is no llama-bench; name it with --llama-bench, or build it with --source")
        words = [str(self.llama_bench), "-m", str(self.model), "-ngl", str(self.layers), "-t", str(default_threads())]
        sizes = ["-p", str(prompt), "-n", str(tokens), "-d", str(depth), "-r", "3", "-o", "json"]
        environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join([str(libraries()), *_library_path()])}
        rows = json.loads(self._run([*words, *sizes], environment, 300))
        return float(rows[0]["avg_ts"])

    def _run(self, command: list[str], environment: dict[str, str], most: float) -> str:
        limit = self.clock.limit(most)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=limit, env=environment, cwd=self.folder
            )
        except subprocess.TimeoutExpired:
            raise StepFailed(f"{command[0]} did not end within {limit:.0f} s") from None
        return checked(done.stdout, done.stderr, done.returncode)


def checked(output: str, errors: str, code: int) -> str:
    """Return the output of a command. Raises StepFailed with its first error message if it failed."""
    if code:
        said = errors.strip().splitlines() or ["no message"]
        raise StepFailed(f"{next((line for line in said if 'error' in line), said[-1])} (exit code {code})")
    return output


def libraries() -> Path:
    """Return the folder of llama.cpp's libraries, which llama-cpp-python loads."""
    if folder := os.environ.get(LIBRARY_FOLDER):
        return Path(folder)
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        raise StepFailed("llama-cpp-python is not installed")
    return Path(found.origin).parent / "lib"


def _library_path() -> list[str]:
    return list(filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)))
