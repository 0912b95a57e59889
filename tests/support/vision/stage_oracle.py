"""The tensors of libmtmd's graph for one tile, by name, in a process of its own, because libmtmd aborts on some errors.

`cb_eval` shows each node after its computation. Names are those of libmtmd's `cb` calls, such as `attn_out-0`,
`layer_out-1`, `pos_embed`, or `projected`, and `inp_raw` for the pixels. Flash attention is off, because it rounds keys
and values.

    python -m tests.support.vision.stage_oracle MODEL PROJECTOR IMAGE RESULTS MOST_ROWS
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tests.support.vision.mtmd_oracle import GgmlTensor, chunk_of_tile

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS = "rows"  # the name of the embeddings, which libmtmd returns
_TYPES = {0: (ctypes.c_float, 4), 1: (ctypes.c_uint16, 2)}  # f32 and f16


def tensors_of_libmtmd(
    model: Path, projector: Path, tile: NDArray[np.uint8], most_rows: int
) -> dict[str, NDArray[np.float32]]:
    """Encode a tile, uint8[height, width, 3]. Returns the named tensors, usually float32[rows, width], and `rows`."""
    image, results = projector.with_suffix(".tile.npy"), projector.with_suffix(".npz")
    np.save(image, tile)
    arguments = [*map(str, (model, projector, image, results, most_rows))]
    run = subprocess.run([sys.executable, "-m", __name__, *arguments], check=False, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"libmtmd ended with status {run.returncode}: {run.stderr[-1000:]}")
    with np.load(results) as found:
        return dict(found)


def _values(tensor: GgmlTensor) -> NDArray[np.float32]:
    """Copy a tensor of floats, which may be a view, without the leading dimensions of size 1."""
    kind, size = _TYPES[tensor.type]
    shape, strides = tensor.ne[::-1], tensor.nb[::-1]
    count = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) // size + 1
    flat = np.ctypeslib.as_array((kind * count).from_address(tensor.data))
    if size == 2:
        flat = flat.view(np.float16)
    found = np.lib.stride_tricks.as_strided(flat, shape, strides).astype(np.float32)
    while found.ndim > 1 and found.shape[0] == 1:
        found = found[0]
    return found


def _main(model: str, projector: str, image: str, results: str, most_rows: str) -> None:
    from llmrun.backends.llama.mtmd import Encoder
    from llmrun.backends.llama.worker import declarations

    llama = declarations()
    tensors: dict[str, NDArray[np.float32]] = {}

    class Spy(Encoder):
        def _watch(self, node: Any, ask: bool, data: Any) -> bool:
            tensor = GgmlTensor.from_address(node)
            for address in tensor.src:
                source = GgmlTensor.from_address(address) if address else None
                if source and source.name.startswith(b"inp_raw") and "inp_raw" not in tensors and source.data:
                    tensors["inp_raw"] = _values(source)
            name = tensor.name.decode()
            is_named = not name.startswith(("node_", "leaf_")) and " (" not in name and tensor.type in _TYPES
            if not ask and is_named:
                tensors[name] = _values(tensor)
            return is_named or not ask

    log = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(log, None)
    llama.llama_backend_init()
    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers = 0
    loaded = llama.llama_model_load_from_file(model.encode(), parameters)
    encoder = Spy(llama, log, lambda: False)
    mtmd = encoder._mtmd
    defaults = mtmd.mtmd_context_params_default

    def without_flash_attention() -> Any:
        made = defaults()
        made.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        made.warmup = False
        return made

    mtmd.mtmd_context_params_default = without_flash_attention
    if not encoder.open(projector, loaded, 1, False, int(most_rows)):
        raise RuntimeError("libmtmd cannot open the projector")
    chunk, count = chunk_of_tile(encoder, np.load(image))
    assert mtmd.mtmd_encode_chunk(encoder._context, chunk) == 0
    width = llama.llama_model_n_embd_inp(loaded)
    tensors[ROWS] = np.ctypeslib.as_array(mtmd.mtmd_get_output_embd(encoder._context), (count, width)).copy()
    np.savez(results, **cast(dict[str, Any], tensors))


if __name__ == "__main__":
    _main(*sys.argv[1:])
