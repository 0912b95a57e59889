"""A trial run with a tiny model that checks whether llama.cpp works on this machine.

The trial loads llama.cpp, requests its build information and multiplies matrices. The multiplication is necessary
because a broken build may start and load a model, and crash only when it computes. We saw a segmentation fault in an
AMX build whose compiler had dropped the tile configuration. The trial runs in a child process because llama.cpp may
crash or hang.

The model has one layer, no vocabulary and random weights, and uses the same llama.cpp kernels as a real model. The
matrices are Q8_0, with 64 to 128 rows of 64 or 128 weights. All of llama.cpp's kernels accept these sizes, even the
AMX kernels, which need whole tiles of 32 rows.
"""

from __future__ import annotations

import tempfile
from contextlib import closing
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from llmrun.backends.llama.messages import TOKENS, Layout
from llmrun.backends.llama.probe import installed_version, is_installed
from llmrun.backends.llama.process import LlamaProcess
from llmrun.base.errors import BackendCrashed, LlmrunError, shown
from llmrun.base.machine.cpu_count import default_threads
from llmrun.formats.gguf.writer import NewTensor, NewValue, write_gguf
from llmrun.formats.quants.registry import BY_NAME

VOCABULARY = 64
WIDTH, _HEADS, _FEED_FORWARD, _CONTEXT = 64, 2, 128, 256

_METADATA: dict[str, NewValue] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": _CONTEXT,
    "llama.embedding_length": WIDTH,
    "llama.feed_forward_length": _FEED_FORWARD,
    "llama.attention.head_count": _HEADS,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": VOCABULARY,
    "tokenizer.ggml.model": "none",
}
# Shapes are in GGUF order: the row length comes first, then the number of rows.
_MATRICES = {
    "token_embd.weight": (WIDTH, VOCABULARY),
    "output.weight": (WIDTH, VOCABULARY),
    "blk.0.attn_q.weight": (WIDTH, WIDTH),
    "blk.0.attn_k.weight": (WIDTH, WIDTH),
    "blk.0.attn_v.weight": (WIDTH, WIDTH),
    "blk.0.attn_output.weight": (WIDTH, WIDTH),
    "blk.0.ffn_gate.weight": (WIDTH, _FEED_FORWARD),
    "blk.0.ffn_up.weight": (WIDTH, _FEED_FORWARD),
    "blk.0.ffn_down.weight": (_FEED_FORWARD, WIDTH),
}
_NORMS = ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")


def trial_model() -> bytes:
    """Return the contents of a complete GGUF file."""
    random = np.random.default_rng(1)
    tensors = [_matrix(name, shape, random) for name, shape in _MATRICES.items()]
    tensors += [NewTensor(name, BY_NAME["F32"], (WIDTH,), lambda: [np.ones(WIDTH, np.float32)]) for name in _NORMS]
    file = BytesIO()
    write_gguf(file, _METADATA, tensors)
    return file.getvalue()


def _matrix(name: str, shape: tuple[int, int], random: np.random.Generator) -> NewTensor:
    """Return a matrix with small random weights."""
    kind = BY_NAME["Q8_0"]
    assert kind.quantize is not None
    data = kind.quantize(random.uniform(-1 / 8, 1 / 8, shape[::-1]).astype(np.float32))
    return NewTensor(name, kind, shape, lambda: [data])


PATIENCE_S = 20.0  # time limit of the trial; a GPU driver may need several seconds to wake eight GPUs
_SHADERS = 3  # a GPU may take this many times longer, because Vulkan compiles shaders on first use
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
    why_none  why a build with GPU support found no GPU, or "" if unknown
    advice    what to do if no GPU was found, or ""
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
    advice: str = ""


def try_llama(patience: float = PATIENCE_S) -> LlamaTrial | None:
    """Run the trial, or return None if llama-cpp-python is not installed. Failures of llama.cpp do not raise errors."""
    if not is_installed():
        return None
    trial = LlamaTrial(installed_version())
    try:
        process = LlamaProcess()
    except LlmrunError as error:
        return replace(trial, failure=str(error))
    doing = "starting"
    with closing(process):
        try:
            with tempfile.TemporaryDirectory(prefix="llmrun-") as folder:
                path = Path(folder) / "trial.gguf"
                path.write_bytes(trial_model())
                with process.limited(patience) as late:
                    built = _answer(process, "describe", doing)
                    trial = LlamaTrial(
                        trial.version,
                        built["system"],
                        built["offloads"],
                        tuple(built["devices"]),
                        rpc=built["rpc"],
                        why_none=built["why_none"],
                        advice=built["advice"],
                    )
                    doing = "multiplying"
                    _multiply(process, path, 0, doing)
                if trial.gpus:
                    doing, patience = "multiplying on a GPU", patience * _SHADERS
                    with process.limited(patience) as late:
                        _multiply(process, path, _ALL_LAYERS, doing)
        except (LlmrunError, OSError) as error:
            words = f"llama.cpp did not answer within {patience:g} s while {doing}" if late.is_set() else str(error)
            return replace(trial, failure=words, crashed=isinstance(error, BackendCrashed))
        except BaseException:
            process.kill()  # The process may hang, so do not wait for it to finish.
            raise
    return trial


def _answer(process: LlamaProcess, operation: str, doing: str, **fields: Any) -> dict[str, Any]:
    """Send a request and return its answer. Unlike `ask`, `_answer` does not wait for the work to stop after Ctrl-C."""
    return process.answer(process.tell(operation, **fields), doing)


def _multiply(process: LlamaProcess, path: Path, gpu_layers: int, doing: str) -> None:
    """Run a prompt and then one token. Raises LlmrunError on failure or if the logits are not finite or all zero."""
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
        status = _answer(process, "forward", doing, rows=count, wanted=1, hidden=0, images=TOKENS)["status"]
        if status:
            raise LlmrunError(f"llama.cpp failed while {doing}: status {status}")
        if not np.isfinite(logits).all() or not logits.any():
            raise LlmrunError(f"llama.cpp failed while {doing}: the results are invalid")
