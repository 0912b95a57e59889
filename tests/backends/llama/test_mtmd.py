"""Tests of the encoder that runs libmtmd, with a stand-in for the library."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmrun.backends.llama import encoder_worker, mtmd, worker
from llmrun.backends.llama.encoder_worker import EncoderWorker
from llmrun.backends.llama.memory_transfers import MemoryReceiver
from llmrun.backends.llama.messages import SharedMemory
from llmrun.backends.llama.mtmd import Encoder

ROWS, WIDTH = 2, 3


class Part(ctypes.Structure):
    _fields_ = (("text", ctypes.c_void_p), ("bitmap", ctypes.c_void_p))


class StandIn:
    """libmtmd with one image of ROWS rows. `works` says whether it can encode on the GPU and on the CPU."""

    MTMD_INPUT_CHUNK_TYPE_IMAGE = 1
    mtmd_input_part = Part

    def __init__(self, *works: bool) -> None:
        self.works = works
        self.opened: list[bool] = []
        self.open = 0
        self.rows = (ctypes.c_float * (ROWS * WIDTH))(*range(ROWS * WIDTH))

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 0

    def mtmd_context_params_default(self) -> Any:
        return SimpleNamespace()

    def mtmd_init_from_file(self, path: bytes, model: Any, parameters: Any) -> str:
        self.opened.append(parameters.use_gpu)
        self.open += 1
        return "context"

    def mtmd_free(self, context: Any) -> None:
        self.open -= 1

    def mtmd_input_chunks_size(self, chunks: Any) -> int:
        return 1

    def mtmd_input_chunk_get_type(self, chunk: Any) -> int:
        return self.MTMD_INPUT_CHUNK_TYPE_IMAGE

    def mtmd_input_chunk_get_n_tokens(self, chunk: Any) -> int:
        return ROWS

    def mtmd_encode_chunk(self, context: Any, chunk: Any) -> int:
        return 0 if self.works[not self.opened[-1]] else 1

    def mtmd_get_output_embd(self, context: Any) -> Any:
        return self.rows


def encoder_with(library: StandIn, monkeypatch: pytest.MonkeyPatch, *, use_gpu: bool) -> Encoder:
    monkeypatch.setattr(mtmd, "_declarations", lambda: library)
    llama = SimpleNamespace(
        ggml_backend_sched_eval_callback=lambda function: function, llama_model_n_embd_inp=lambda model: WIDTH
    )
    encoder = Encoder(llama, None, lambda: False)
    assert encoder.open("mmproj.gguf", None, 1, use_gpu, ROWS)["row_width"] == WIDTH
    return encoder


def encode(encoder: Encoder) -> tuple[tuple[int, str], list[float]]:
    memory = (ctypes.c_uint8 * (4 * ROWS * WIDTH))()
    status = encoder.encode(memory, 1, 1, ROWS)
    return status, list((ctypes.c_float * (ROWS * WIDTH)).from_buffer(memory))


def test_encoders_move_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    library = StandIn(False, True)
    encoder = encoder_with(library, monkeypatch, use_gpu=True)
    for _ in range(2):
        assert encode(encoder) == ((0, ""), list(range(ROWS * WIDTH)))
    assert library.opened == [True, False]
    encoder.close()
    assert library.open == 0


@pytest.mark.parametrize("use_gpu", [False, True])
def test_other_failures_are_reported(monkeypatch: pytest.MonkeyPatch, use_gpu: bool) -> None:
    library = StandIn(False, False)
    encoder = encoder_with(library, monkeypatch, use_gpu=use_gpu)
    assert encode(encoder)[0] == (-1, "")
    assert library.opened == ([True, False] if use_gpu else [False])


def test_a_wrong_number_of_rows_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = encoder_with(StandIn(True, True), monkeypatch, use_gpu=False)
    assert encoder.encode((ctypes.c_uint8 * 3)(), 1, 1, 5) == (-1, "a tile of 1x1 pixels has 2 rows, expected 5")


@pytest.mark.parametrize(
    ("gpu_bytes", "free", "expected"),
    [(None, [9], False), (5, [], False), (5, [4, 9], False), (5, [5], True), (5, [6, 0], True)],
)
def test_encoders_use_the_first_gpu_with_room(
    monkeypatch: pytest.MonkeyPatch, gpu_bytes: int | None, free: list[int], expected: bool
) -> None:
    """An encoder on the CPU does not look for GPUs, because this would take hundreds of megabytes of memory."""
    looked: list[object] = []

    def gpus(library: object) -> list[dict[str, int]]:
        looked.append(library)
        return [{"free": n} for n in free]

    library, parameters = StandIn(True, True), SimpleNamespace()
    llama = SimpleNamespace(
        _lib=None,
        LLAMA_LOAD_MODE_NONE=0,
        llama_log_callback=lambda function: function,
        llama_log_set=lambda *arguments: None,
        llama_backend_init=lambda: None,
        ggml_backend_sched_eval_callback=lambda function: function,
        llama_model_default_params=lambda: parameters,
        llama_model_load_from_file=lambda path, given: "model",
        llama_model_n_embd_inp=lambda model: WIDTH,
    )
    monkeypatch.setattr(mtmd, "_declarations", lambda: library)
    monkeypatch.setattr(worker, "declarations", lambda: llama)
    monkeypatch.setattr(encoder_worker, "usable_gpus", gpus)
    opened = EncoderWorker(SharedMemory.create(), cast(MemoryReceiver, None), 0)
    facts = opened.do_open("m.gguf", "mmproj.gguf", 1, gpu_bytes, ROWS)
    assert facts["on_gpu"] == expected
    assert library.opened == [expected]
    assert bool(looked) == (gpu_bytes is not None)
    assert parameters.no_alloc
    assert parameters.n_gpu_layers == 0
