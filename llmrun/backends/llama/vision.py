"""The vision encoder in llama.cpp, as the engine sees it, and the order in which image rows are run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llmrun.backends.llama.messages import CAUSAL_IMAGES, TOKENS, WHOLE_IMAGE
from llmrun.backends.llama.process import CPU_ADVICE
from llmrun.base.errors import BackendCrashed, Cancelled, LlmrunError, ModelFileError, shown
from llmrun.base.types import HIDDEN, IMAGE_ROW
from llmrun.model.vision.layout import Rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.backends.base import OpenOptions
    from llmrun.backends.llama.process import LlamaProcess
    from llmrun.base.types import Batch
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.layout import ImageLayout
    from llmrun.model.vision.projector import ProjectorFile

_WITHOUT = "the projector may be damaged, or llama.cpp may not support it: use another --mmproj, or --no-mmproj"


def opened_projector(options: OpenOptions, file: GGUFFile) -> ProjectorFile | None:
    """Return the projector in the options, which fits the model, or None if the options have none.

    Raises ModelFileError and UnsupportedModel.
    """
    if not options.mmproj:
        return None
    from llmrun.model.vision.projector import check_projector, read_projector

    projector = read_projector(Path(options.mmproj), least=options.image_min_tokens, most=options.image_max_tokens)
    check_projector(projector, file)
    return projector


class LlamaVision:
    """A Vision that runs libmtmd in the child process.

    on_gpu  whether the encoder was opened on a GPU; it may have moved to the CPU since then
    """

    on_gpu = False

    def __init__(self, process: LlamaProcess, projector: ProjectorFile) -> None:
        """Wrap the process, in which the text model is open."""
        self._process, self.projector = process, projector
        self._path = shown(str(projector.path), 300)

    def open(self, threads: int, gpu_bytes: int | None) -> None:
        """Load the projector. Raises ModelFileError, and BackendCrashed if the file crashes libmtmd.

        gpu_bytes  the GPU memory that the encoder needs, or None to use only the CPU
        """
        answer = self._ask(
            "open_encoder",
            f"loading {self._path}",
            path=str(self.projector.path.absolute()),
            threads=threads,
            gpu_bytes=gpu_bytes,
            most_rows=self.projector.most_rows,
        )
        if "failed" in answer:
            raise ModelFileError(
                f"llama.cpp cannot load this projector: {self._path}: {shown(answer['failed'].strip(), 200)}",
                hint=_WITHOUT,
            )
        expected = {"row_width": self.projector.row_width, "is_causal": self.projector.is_causal, "sees_images": True}
        for name, value in expected.items():
            if answer[name] != value:
                raise ModelFileError(
                    f"llama.cpp reads this projector differently: {self._path}: {name} is {answer[name]}, not {value}"
                )
        self.on_gpu = answer["on_gpu"]

    def encode(self, tiles: Sequence[NDArray[np.uint8]], layout: ImageLayout) -> NDArray[np.float32]:
        """Return the embeddings of an image, as specified by Vision.encode."""
        try:
            pieces = [piece for piece in layout.pieces if isinstance(piece, Rows)]
            return np.concatenate([self._encode(tiles[piece.tile], piece.count) for piece in pieces])
        finally:
            self._process.clear_stop()

    def _encode(self, tile: NDArray[np.uint8], rows: int) -> NDArray[np.float32]:
        """Return the rows of one tile, float32[rows, row width]."""
        if self._process.stopping:
            raise Cancelled("generation stopped")
        height, width, channels = tile.shape
        if channels != 3 or tile.dtype != np.uint8:
            raise ValueError("a tile must have three bytes for each pixel")
        row_bytes = 4 * self.projector.row_width
        n_bytes = max(tile.nbytes, rows * row_bytes)
        memory, name = self._process.transfers.map(n_bytes)
        memory[: tile.nbytes] = tile.tobytes()
        answer = self._ask(
            *("encode", f"encoding an image with {self._path}"),
            memory=name,
            n_bytes=n_bytes,
            width=width,
            height=height,
            rows=rows,
        )
        if answer["status"] > 0:
            raise Cancelled("generation stopped")
        if answer["status"]:
            why = shown(answer["error"].strip(), 200) or "no reason given"
            raise LlmrunError(f"llama.cpp cannot encode an image with {self._path}: {why}")
        return np.frombuffer(memory, np.float32, rows * self.projector.row_width).reshape(rows, -1)

    def _ask(self, operation: str, doing: str, **fields: Any) -> dict[str, Any]:
        try:
            return self._process.ask(operation, doing, **fields)
        except BackendCrashed as error:
            raise BackendCrashed(str(error), hint=_WITHOUT if error.hint == CPU_ADVICE else error.hint) from error


def image_groups(batch: Batch, most_rows: int) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Yield the rows that run at the same time, in order, with their kind (messages.py).

    Each image whose rows attend to each other in both directions is a group of its own. The rows of a sequence stay in
    order, because the levels of its rows never decrease. Text has even levels, and images have odd ones.

    most_rows  maximum number of rows of an image whose rows attend to each other
    """
    if batch.embeds is None:
        yield TOKENS, np.arange(len(batch.tokens))
        return
    if (batch.want & HIDDEN).any():
        raise ValueError("hidden states cannot be combined with images")
    whole = batch.ahead is not None and bool(batch.ahead.any())
    ahead = batch.ahead.tolist() if batch.ahead is not None else [0] * len(batch.tokens)
    levels: dict[int, int] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    start = 0  # the first row of the current image
    for row, (token, seq) in enumerate(zip(batch.tokens.tolist(), batch.seq.tolist(), strict=True)):
        is_image = token == IMAGE_ROW
        level = levels.get(seq, 0)
        levels[seq] = level + (level % 2 != is_image)
        if row == 0 or not ahead[row - 1]:
            start = row
        groups.setdefault((levels[seq], start if is_image and whole else -1), []).append(row)
    for (level, _), rows in sorted(groups.items()):
        kind = TOKENS if level % 2 == 0 else WHOLE_IMAGE if whole else CAUSAL_IMAGES
        if kind == WHOLE_IMAGE and len(rows) > most_rows:
            raise ValueError(f"an image of {len(rows)} rows, the limit is {most_rows}")
        yield kind, np.array(rows)
