"""Encodes images with llama.cpp's libmtmd, in a process of its own (encoder_worker.py).

libmtmd's own preprocessing is not used: llmrun scales images as the models' processors do, and libmtmd does not resize
an image that already has its target size. Each tile is an image of its own for libmtmd, and the token limits allow
every tile. The text that libmtmd adds around images is ignored, because our tokenizer writes all text.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from llmrun.backends.llama.probe import LIBRARY_FOLDER

_STOPPED, _FAILED = 2, -1
_LIBRARY_VARIABLE = "MTMD_CPP_LIB"  # llama-cpp-python's variable for the folder of libmtmd
# Nodes of the graph between two checks of the stop flag. Each check waits until the nodes are computed, and a layer has
# about 25 nodes.
_NODES_BETWEEN_LOOKS = 16


class Encoder:
    """An open projector."""

    def __init__(self, llama: Any, log: Any, stopping: Callable[[], bool]) -> None:
        """Load libmtmd.

        llama     llama-cpp-python's declarations of llama.cpp
        log       the callback that takes llama.cpp's log, which the caller keeps alive
        stopping  returns whether the encoder should stop
        """
        self._llama, self._stopping = llama, stopping
        self._mtmd = _declarations()
        self._mtmd.mtmd_log_set(log, ctypes.c_void_p(0))
        self._context: Any = None
        self._open_on_cpu: Callable[[], dict[str, Any]] | None = None  # for encoders on a GPU
        self._row_width = 0
        self._nodes = 0
        self._stopped = False
        self._callback = llama.ggml_backend_sched_eval_callback(self._watch)  # kept alive while libmtmd may call it

    def open(self, path: str, model: Any, threads: int, use_gpu: bool, most_rows: int) -> dict[str, Any]:
        """Load a projector, and return what libmtmd knows about it, or {} if loading fails.

        most_rows  maximum number of rows of a tile
        """
        self._open_on_cpu = partial(self.open, path, model, threads, False, most_rows) if use_gpu else None
        parameters = self._mtmd.mtmd_context_params_default()
        parameters.use_gpu = use_gpu
        parameters.n_threads = threads
        parameters.print_timings = False
        # The limits keep the size of each tile, including tiles of Idefics3, which libmtmd would enlarge otherwise.
        parameters.image_min_tokens, parameters.image_max_tokens = 1, most_rows
        parameters.cb_eval = self._callback
        self._context = self._mtmd.mtmd_init_from_file(os.fsencode(path), model, parameters)
        if not self._context:
            return {}
        self._row_width = self._llama.llama_model_n_embd_inp(model)
        return {
            "row_width": self._row_width,
            "is_causal": not self._mtmd.mtmd_decode_use_non_causal(self._context, None),
            "sees_images": self._mtmd.mtmd_support_vision(self._context),
            "on_gpu": use_gpu,
        }

    def close(self) -> None:
        if self._context:
            self._mtmd.mtmd_free(self._context)
            self._context = None

    def encode(self, memory: Any, width: int, height: int, rows: int) -> tuple[int, str]:
        """Replace the pixels of a tile, uint8[height, width, 3], with its rows, float32[rows, row width].

        Returns the status (0, 2 if the encoder was stopped, or -1 for other errors), and the error if it is not in the
        log.
        """
        mtmd = self._mtmd
        bitmap = mtmd.mtmd_bitmap_init(width, height, ctypes.cast(memory, ctypes.POINTER(ctypes.c_uint8)))
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            part = mtmd.mtmd_input_part(None, bitmap)
            parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
            if mtmd.mtmd_tokenize_from_parts(self._context, chunks, parts, 1, False):
                return _FAILED, ""
            tile, found = self._tile(chunks)
            if found != rows:
                return _FAILED, f"a tile of {width}x{height} pixels has {found} rows, expected {rows}"
            self._nodes, self._stopped = 0, False
            if mtmd.mtmd_encode_chunk(self._context, tile) and not self._encodes_on_cpu(tile):
                return _FAILED, ""
            if self._stopped or self._stopping():
                return _STOPPED, ""
            ctypes.memmove(memory, mtmd.mtmd_get_output_embd(self._context), 4 * rows * self._row_width)
            return 0, ""
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _encodes_on_cpu(self, tile: Any) -> bool:
        """Move the encoder from the GPU to the CPU, and encode a tile there. Returns False if that is impossible.

        The work buffers grow with the tile, so the GPU's memory may be too small only for later tiles.
        """
        if self._open_on_cpu is None:
            return False
        self.close()
        return bool(self._open_on_cpu()) and not self._mtmd.mtmd_encode_chunk(self._context, tile)

    def _tile(self, chunks: Any) -> tuple[Any, int]:
        """Return the chunk of the tile and its number of rows.

        Families with tiles also get an overview of the tile, which has the same size and pixels.
        """
        mtmd = self._mtmd
        every = [mtmd.mtmd_input_chunks_get(chunks, index) for index in range(mtmd.mtmd_input_chunks_size(chunks))]
        images = [each for each in every if mtmd.mtmd_input_chunk_get_type(each) == mtmd.MTMD_INPUT_CHUNK_TYPE_IMAGE]
        return (images[0], mtmd.mtmd_input_chunk_get_n_tokens(images[0])) if images else (None, 0)

    def _watch(self, node: Any, ask: bool, data: Any) -> bool:
        """Answer whether to stop after this node (`ask`), or whether to go on after its computation.

        Returning False skips the rest of a part of the graph, not the whole graph, so the parts after it are skipped
        in the same way.
        """
        if ask:
            self._nodes += 1
            return self._stopped or self._nodes % _NODES_BETWEEN_LOOKS == 0
        self._stopped = self._stopped or self._stopping()
        return not self._stopped


def _declarations() -> Any:
    """Import llama-cpp-python's declarations of libmtmd, which belong to the imported llama.cpp.

    Raises WrongLibrary if LLAMA_CPP_LIB_PATH names libraries that do not match the declarations.
    """
    folder = os.environ.get(LIBRARY_FOLDER)
    if folder is None:
        return importlib.import_module("llama_cpp.mtmd_cpp")
    from llmrun.backends.llama.named_libraries import checked_mtmd

    os.environ.setdefault(_LIBRARY_VARIABLE, folder)
    return checked_mtmd(folder)
