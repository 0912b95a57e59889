"""How libmtmd, the vision library of llama.cpp, lays out images, without pixels. libmtmd runs in a child process.

    python -m tests.support.vision.libmtmd PROJECTOR MODEL LEAST MOST < sizes

The limits are in tokens; 0 leaves the family's values. The sizes are a JSON list of [width, height]. The answer has an
entry for each size: null if libmtmd reports an error, or a list of chunks, each of which is the IDs of text tokens, or
the number of rows.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Chunk = list[int] | int

_IMAGE = 1  # the type of chunks with rows


def libmtmd_chunks(
    projector: Path, model: Path, sizes: Sequence[tuple[int, int]], *, least: int = 0, most: int = 0
) -> list[list[Chunk] | None]:
    """Return the chunks of an image of each size, or None where libmtmd reports an error."""
    command = [sys.executable, "-m", "tests.support.vision.libmtmd", str(projector), str(model), str(least), str(most)]
    run = subprocess.run(command, input=json.dumps(sizes), capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"libmtmd ended with status {run.returncode}: {run.stderr[-1000:]}")
    answer: list[list[Chunk] | None] = json.loads(run.stdout)
    return answer


class _Libmtmd:
    """An open projector, without a GPU."""

    def __init__(self, projector: Path, model: Path, least: int, most: int) -> None:
        import llama_cpp
        from llama_cpp import mtmd_cpp

        from tests.support.models import llama_cpp_oracle

        self._mtmd: Any = mtmd_cpp
        mtmd_cpp.mtmd_log_set(llama_cpp_oracle._silent, None)
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(model).encode(), parameters)
        options = mtmd_cpp.mtmd_context_params_default()
        options.use_gpu = options.warmup = options.print_timings = False
        options.n_threads = 1
        options.image_min_tokens, options.image_max_tokens = least, most
        self._context = mtmd_cpp.mtmd_init_from_file(str(projector).encode(), self._model, options)
        if not self._context:
            raise RuntimeError(f"libmtmd cannot open {projector}")

    def chunks(self, width: int, height: int) -> list[Chunk] | None:
        import ctypes

        mtmd = self._mtmd
        bitmap = mtmd.mtmd_bitmap_init(width, height, None)
        chunks = mtmd.mtmd_input_chunks_init()
        marker = mtmd.mtmd_default_marker()
        text = mtmd.mtmd_input_text(marker, len(marker), False, True)
        bitmaps = (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap)
        try:
            if mtmd.mtmd_tokenize(self._context, chunks, ctypes.byref(text), bitmaps, 1):
                return None
            count = mtmd.mtmd_input_chunks_size(chunks)
            return [self._chunk(mtmd.mtmd_input_chunks_get(chunks, index)) for index in range(count)]
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def _chunk(self, chunk: Any) -> Chunk:
        import ctypes

        count: int = self._mtmd.mtmd_input_chunk_get_n_tokens(chunk)
        if self._mtmd.mtmd_input_chunk_get_type(chunk) == _IMAGE:
            return count
        number = ctypes.c_size_t()
        tokens = self._mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(number))
        return list(tokens[: number.value])


def main() -> None:
    projector, model, least, most = sys.argv[1:]
    libmtmd = _Libmtmd(Path(projector), Path(model), int(least), int(most))
    json.dump([libmtmd.chunks(*size) for size in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
