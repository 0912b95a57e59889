"""Runs an image through libmtmd's own helpers, in a process of its own, because libmtmd aborts on some errors.

The image is decoded by `mtmd_helper_eval_chunk_single`, which chooses positions and attention masks itself.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.llama.mtmd import Encoder

ROWS = 2048  # of a batch and a micro-batch
CONTEXT = 2048


@dataclass(frozen=True)
class Seen:
    """What libmtmd made of an image between two texts.

    pixels  float32[3, height, width], the encoder's input
    rows    float32[rows, row width]
    logits  float32[tokens after the image, vocabulary]
    end     the position after the image
    """

    pixels: NDArray[np.float32]
    rows: NDArray[np.float32]
    logits: NDArray[np.float32]
    end: int


def seen_by_libmtmd(
    model: Path,
    projector: Path,
    tile: NDArray[np.uint8],
    most_rows: int,
    *,
    before: Sequence[int] = (1,),
    after: Sequence[int] = (2,),
) -> Seen:
    """Encode and decode a tile between tokens."""
    image, results = model.with_suffix(".tile.npy"), model.with_suffix(".npz")
    np.save(image, tile)
    texts = [",".join(map(str, tokens)) for tokens in (before, after)]
    arguments = [*map(str, (model, projector, image, results, most_rows)), *texts]
    subprocess.run([sys.executable, "-m", __name__, *arguments], check=True, capture_output=True)
    with np.load(results) as found:
        return Seen(found["pixels"], found["rows"], found["logits"], int(found["end"]))


class GgmlTensor(ctypes.Structure):
    """The beginning of ggml's `struct ggml_tensor`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )


def chunk_of_tile(encoder: Encoder, tile: NDArray[np.uint8]) -> tuple[Any, int]:
    """Return libmtmd's chunk for a tile, uint8[height, width, 3], and the number of its rows."""
    mtmd = encoder._mtmd
    data = tile.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    bitmap = mtmd.mtmd_bitmap_init(tile.shape[1], tile.shape[0], data)  # copies the pixels
    chunks = mtmd.mtmd_input_chunks_init()
    part = mtmd.mtmd_input_part(None, bitmap)
    parts = (ctypes.POINTER(mtmd.mtmd_input_part) * 1)(ctypes.pointer(part))
    assert mtmd.mtmd_tokenize_from_parts(encoder._context, chunks, parts, 1, False) == 0
    chunk, count = encoder._tile(chunks)
    return chunk, int(count)


def _main(model: str, projector: str, image: str, results: str, most_rows: str, *texts: str) -> None:
    from llmrun.backends.llama.mtmd import Encoder
    from llmrun.backends.llama.worker import declarations

    llama = declarations()
    pixels: list[NDArray[np.float32]] = []

    class Spy(Encoder):
        def _watch(self, node: Any, ask: bool, data: Any) -> bool:
            for address in GgmlTensor.from_address(node).src if not pixels else ():
                source = GgmlTensor.from_address(address) if address else None
                if source and source.name.startswith(b"inp_raw") and source.data:
                    numbers = (ctypes.c_float * int(np.prod(source.ne))).from_address(source.data)
                    pixels.append(np.ctypeslib.as_array(numbers).reshape(source.ne[2], source.ne[1], -1).copy())
            return True

    log = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(log, None)
    llama.llama_backend_init()
    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers = 0
    loaded = llama.llama_model_load_from_file(model.encode(), parameters)
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = CONTEXT, ROWS, ROWS
    settings.n_threads = settings.n_threads_batch = 1
    settings.n_outputs_max = ROWS
    context = llama.llama_init_from_model(loaded, settings)
    encoder = Spy(llama, log, lambda: False)
    assert encoder.open(projector, loaded, 1, False, int(most_rows))
    mtmd = encoder._mtmd
    chunk, count = chunk_of_tile(encoder, np.load(image))
    before, after = ([int(token) for token in text.split(",")] for text in texts)
    _decode(llama, context, before, 0)
    end = ctypes.c_int32(0)
    assert (
        mtmd.mtmd_helper_eval_chunk_single(
            encoder._context, context, chunk, len(before), 0, ROWS, False, ctypes.byref(end)
        )
        == 0
    )
    width = llama.llama_model_n_embd_inp(loaded)
    rows = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(encoder._context), (count, width)).copy()
    _decode(llama, context, after, end.value)
    vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(loaded))
    logits = np.ctypeslib.as_array(llama.llama_get_logits(context), (len(after), vocabulary)).copy()
    np.savez(results, pixels=pixels[0], rows=rows, logits=logits, end=end.value)


def _decode(llama: Any, context: Any, tokens: Sequence[int], position: int) -> None:
    """Decode tokens, all of which get logits."""
    batch = llama.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for row, token in enumerate(tokens):
        batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position + row, 1
        batch.seq_id[row][0], batch.logits[row] = 0, 1
    assert llama.llama_decode(context, batch) == 0


if __name__ == "__main__":
    _main(*sys.argv[1:])
