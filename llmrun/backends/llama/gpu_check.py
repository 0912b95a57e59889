"""Whether llama.cpp works on this machine: it is loaded, told to say what it was built with, and multiplies.

A build can start, load a model, and die at the first product (one for AMX by a compiler that loses the tiles' setting:
SIGSEGV), so nothing less is a trial. All of it is done in its own process, which may die or hang.
"""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from llmrun.backends.llama.gpu_check_model import VOCABULARY, trial_model
from llmrun.backends.llama.probe import is_installed
from llmrun.backends.llama.process import LlamaProcess
from llmrun.backends.llama.shared_layout import Layout
from llmrun.errors import BackendCrashed, LlmrunError
from llmrun.gguf.problems import shown
from llmrun.machine.cpu_count import default_threads

PATIENCE_S = 20.0  # in all; a GPU driver that wakes eight GPUs takes seconds
_ROWS = 32  # a prompt, which is multiplied by other kernels than a single row
_CACHE = 256
_ALL_LAYERS = -1


@dataclass(frozen=True, slots=True)
class LlamaTrial:
    """What was found. `gpus`: `description`, and bytes `free` and `total` of each that it can use.

    failure  how the trial ended, empty where llama.cpp works
    crashed  it died or hung, as against an installation that is not whole
    """

    version: str | None
    system: str = ""  # llama.cpp's own account of its build
    offloads: bool = False
    gpus: tuple[dict[str, Any], ...] = ()
    failure: str = ""
    crashed: bool = False


def try_llama(patience: float = PATIENCE_S) -> LlamaTrial | None:
    """The trial, or None where llama-cpp-python is not installed. Never raises for what llama.cpp does."""
    if not is_installed():
        return None
    found = LlamaTrial(_version())
    try:
        process = LlamaProcess()
    except LlmrunError as error:
        return LlamaTrial(found.version, failure=str(error))
    late = threading.Event()

    def give_up() -> None:
        late.set()
        process.kill()

    timer = threading.Timer(patience, give_up)
    timer.start()
    doing = "starting"
    try:
        built = _answer(process, "describe", doing)
        found = LlamaTrial(found.version, built["system"], built["offloads"], tuple(built["devices"]))
        with tempfile.TemporaryDirectory(prefix="llmrun-") as folder:
            path = Path(folder) / "trial.gguf"
            path.write_bytes(trial_model())
            doing = "multiplying"
            _multiply(process, path, 0, doing)
            if found.gpus:
                doing = "multiplying on a GPU"
                _multiply(process, path, _ALL_LAYERS, doing)
    except (LlmrunError, OSError) as error:
        words = f"llama.cpp gave no answer within {patience:g} s while {doing}" if late.is_set() else str(error)
        crashed = isinstance(error, BackendCrashed)
        return LlamaTrial(found.version, found.system, found.offloads, found.gpus, words, crashed)
    except BaseException:
        process.kill()  # nobody waits for one that may hang
        raise
    finally:
        timer.cancel()
        process.close()
    return found


def _answer(process: LlamaProcess, operation: str, doing: str, **fields: Any) -> dict[str, Any]:
    """Not `ask`, which after Ctrl-C waits for the work to come to rest."""
    return process.answer(process.tell(operation, **fields), doing)


def _multiply(process: LlamaProcess, path: Path, gpu_layers: int, doing: str) -> None:
    """Run a prompt and a token after it. Raises LlmrunError, also for logits that are none."""
    layout = Layout(_ROWS, VOCABULARY, 1)
    memory = process.memory.map(layout.n_bytes)
    answer = _answer(
        process,
        "open",
        f"loading a model before {doing}",
        path=str(path),
        gpu_layers=gpu_layers,
        cache_tokens=_CACHE,
        max_sequences=1,
        threads=default_threads(),
        kv_type="f16",
        rows=_ROWS,
        vocabulary_size=VOCABULARY,
    )
    if "failed" in answer:
        raise LlmrunError(f"llama.cpp does not load a model of a few kilobytes: {shown(answer['failed'], 200)}")
    tokens = np.frombuffer(memory, np.int32, _ROWS, layout.tokens)
    positions = np.frombuffer(memory, np.int32, _ROWS, layout.positions)
    wanted = np.frombuffer(memory, np.int8, _ROWS, layout.wanted)
    logits = np.frombuffer(memory, np.float32, VOCABULARY, layout.logits)
    for first, count in ((0, _ROWS), (_ROWS, 1)):
        tokens[:count] = np.arange(first, first + count) % VOCABULARY
        positions[:count] = np.arange(first, first + count)
        wanted[:count] = 0
        wanted[count - 1] = 1
        status = _answer(process, "forward", doing, rows=count, wanted=1)["status"]
        if status:
            raise LlmrunError(f"llama.cpp failed while {doing}: status {status}")
        if not np.isfinite(logits).all() or not logits.any():
            raise LlmrunError(f"llama.cpp failed while {doing}: its results are no numbers")


def _version() -> str | None:
    try:
        return version("llama-cpp-python")
    except PackageNotFoundError:
        return None
