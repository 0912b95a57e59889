"""The child process that encodes images: `python -m llmrun.backends.llama.encoder_worker HANDLE HANDLE`.

Each open model that reads images has a process of its own for the encoder, so that images are encoded while the model
runs, and a crash of libmtmd ends neither the model nor its answers. libmtmd needs the text model's header and
vocabulary, so the process opens this model without its weights. The protocol is that of worker.py.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from llmrun.backends.llama.mtmd import Encoder
from llmrun.backends.llama.rpc_devices import usable_gpus
from llmrun.backends.llama.worker import Worker, main

if TYPE_CHECKING:
    from llmrun.backends.llama.memory_transfers import MemoryReceiver
    from llmrun.backends.llama.messages import SharedMemory


class EncoderWorker(Worker):
    """Encodes images with one projector."""

    def __init__(self, memory: SharedMemory, transfers: MemoryReceiver, answers: int) -> None:
        super().__init__(memory, transfers, answers)
        self._encoder = Encoder(self._llama, self._log, lambda: self._flag[0] != 0)

    def do_open(self, model: str, path: str, threads: int, gpu_bytes: int | None, most_rows: int) -> dict[str, Any]:
        """Open a projector for a text model. If this fails, the answer's `failed` is the error message of llama.cpp.

        gpu_bytes  the GPU memory that the encoder needs, or None to use only the CPU
        most_rows  maximum number of rows of a tile
        """
        self._lines.clear()
        parameters = self._llama.llama_model_default_params()
        self._without_devices(parameters)
        parameters.no_alloc, parameters.load_mode = True, self._llama.LLAMA_LOAD_MODE_NONE  # no_alloc excludes mmap
        text_model = self._llama.llama_model_load_from_file(os.fsencode(model), parameters)
        if not text_model:
            return self._failure("no reason given")
        free = [device["free"] for device in usable_gpus(self._llama._lib)] if gpu_bytes is not None else []
        use_gpu = gpu_bytes is not None and bool(free) and free[0] >= gpu_bytes
        facts = self._encoder.open(path, text_model, threads, use_gpu, most_rows)
        return facts or self._failure("no reason given")

    def do_encode(self, memory: str, n_bytes: int, width: int, height: int, rows: int) -> dict[str, Any]:
        """Replace the pixels of a tile in the memory, uint8[height, width, 3], with its rows, float32[rows, row width].

        The status is 0 on success, 2 if the encoder was stopped, and -1 for other errors.
        """
        self._lines.clear()
        status, error = self._encoder.encode(self._transferred(memory, n_bytes), width, height, rows)
        return {"status": status, "error": error or self._last_error()} if status else {"status": 0}


if __name__ == "__main__":
    main(EncoderWorker)
