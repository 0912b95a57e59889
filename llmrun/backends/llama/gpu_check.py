"""A trial run that checks whether llama.cpp works on this machine.

The trial loads llama.cpp, asks for its build information and multiplies matrices. The multiplication is necessary
because a broken build may start and load a model, and crash only when it computes. We saw a segmentation fault in an
AMX build whose compiler had dropped the tile configuration. The trial runs in a child process because llama.cpp may
crash or hang.
"""

from __future__ import annotations

import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmrun.backends.llama.gpu_check_model import VOCABULARY, WIDTH, trial_model
from llmrun.backends.llama.probe import installed_version, is_installed
from llmrun.backends.llama.process import LlamaProcess
from llmrun.backends.llama.shared_layout import Layout
from llmrun.base.errors import BackendCrashed, LlmrunError
from llmrun.base.machine.cpu_count import default_threads
from llmrun.formats.gguf.problems import shown

PATIENCE_S = 20.0  # time limit of the trial; a GPU driver may need several seconds to wake eight GPUs
_SHADERS = 3  # the GPU may take this many times longer, because Vulkan compiles shaders on first use
_ROWS = 32  # rows in the prompt; llama.cpp uses different kernels for many rows than for a single row
_CACHE = 256
_ALL_LAYERS = -1


@dataclass(frozen=True, slots=True)
class LlamaTrial:
    """The result of a trial run of llama.cpp.

    version   the installed version of llama-cpp-python
    system    build information from llama.cpp
    offloads  whether this build supports GPUs
    rpc       whether this build can use RPC servers
    gpus      the usable GPUs, each with its `description` and its `free` and `total` bytes
    why_none  why a build that supports GPUs found none, or "" if unknown
    failure   why the trial failed, or "" if llama.cpp works
    crashed   whether llama.cpp crashed or hung; false if the installation is merely incomplete
    """

    version: str | None
    system: str = ""
    offloads: bool = False
    gpus: tuple[dict[str, Any], ...] = ()
    failure: str = ""
    crashed: bool = False
    rpc: bool = False
    why_none: str = ""


def try_llama(patience: float = PATIENCE_S) -> LlamaTrial | None:
    """Run the trial, or return None if llama-cpp-python is not installed. Failures of llama.cpp are not raised."""
    if not is_installed():
        return None
    found = LlamaTrial(installed_version())
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
        devices = tuple(built["devices"])
        found = LlamaTrial(
            found.version, built["system"], built["offloads"], devices, rpc=built["rpc"], why_none=built["why_none"]
        )
        with tempfile.TemporaryDirectory(prefix="llmrun-") as folder:
            path = Path(folder) / "trial.gguf"
            path.write_bytes(trial_model())
            doing = "multiplying"
            _multiply(process, path, 0, doing)
            if found.gpus:
                doing = "multiplying on a GPU"
                timer.cancel()
                patience *= _SHADERS
                timer = threading.Timer(patience, give_up)
                timer.start()
                _multiply(process, path, _ALL_LAYERS, doing)
    except (LlmrunError, OSError) as error:
        words = f"llama.cpp did not answer within {patience:g} s while {doing}" if late.is_set() else str(error)
        crashed = isinstance(error, BackendCrashed)
        return LlamaTrial(found.version, found.system, found.offloads, found.gpus, words, crashed)
    except BaseException:
        process.kill()  # The process may hang, so do not wait for it to finish.
        raise
    finally:
        timer.cancel()
        process.close()
    return found


def _answer(process: LlamaProcess, operation: str, doing: str, **fields: Any) -> dict[str, Any]:
    """Send a request and return its answer. Unlike `ask`, it does not wait for the work to stop after Ctrl-C."""
    return process.answer(process.tell(operation, **fields), doing)


def _multiply(process: LlamaProcess, path: Path, gpu_layers: int, doing: str) -> None:
    """Run a prompt and then one token. Raises LlmrunError if that fails or the logits are not finite or all zero."""
    layout = Layout(_ROWS, VOCABULARY, 1, WIDTH)
    memory = process.memory.map(layout.n_bytes)
    answer = _answer(
        process,
        "open",
        f"loading a test model for {doing}",
        path=str(path),
        gpu_layers=gpu_layers,
        cache_tokens=_CACHE,
        max_sequences=1,
        threads=default_threads(),
        kv_type="f16",
        rows=_ROWS,
        vocabulary_size=VOCABULARY,
        hidden_size=WIDTH,
    )
    if "failed" in answer:
        raise LlmrunError(f"llama.cpp cannot load a test model: {shown(answer['failed'], 200)}")
    tokens = np.frombuffer(memory, np.int32, _ROWS, layout.tokens)
    positions = np.frombuffer(memory, np.int32, _ROWS, layout.positions)
    wanted = np.frombuffer(memory, np.int8, _ROWS, layout.wanted)
    logits = np.frombuffer(memory, np.float32, VOCABULARY, layout.logits)
    for first, count in ((0, _ROWS), (_ROWS, 1)):
        tokens[:count] = np.arange(first, first + count) % VOCABULARY
        positions[:count] = np.arange(first, first + count)
        wanted[:count] = 0
        wanted[count - 1] = 1
        status = _answer(process, "forward", doing, rows=count, wanted=1, hidden=0)["status"]
        if status:
            raise LlmrunError(f"llama.cpp failed while {doing}: status {status}")
        if not np.isfinite(logits).all() or not logits.any():
            raise LlmrunError(f"llama.cpp failed while {doing}: the results are invalid")
