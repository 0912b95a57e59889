"""The vision encoder, which runs libmtmd in a process of its own, and the order in which llama.cpp runs image rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import numpy as np

from llmrun.backends.llama.messages import CAUSAL_IMAGES, TOKENS, WHOLE_IMAGE
from llmrun.backends.llama.process import CPU_ADVICE, LlamaProcess
from llmrun.base.errors import BackendCrashed, Cancelled, LlmrunError, ModelFileError, shown
from llmrun.base.types import HIDDEN, IMAGE_ROW
from llmrun.formats.gguf.source import FileSource
from llmrun.model.vision.layout import Rows

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from llmrun.base.types import Batch
    from llmrun.model.vision.layout import ImageLayout
    from llmrun.model.vision.projector import ProjectorFile

_WORKER = "backends.llama.encoder_worker"
_WITHOUT = "the projector may be damaged, or llama.cpp may not support it: use another --mmproj, or --no-mmproj"
_STOP_S = 20.0  # seconds that the next image waits for a cancelled one; large nodes of libmtmd's graph take seconds


class LlamaVision:
    """A Vision that runs libmtmd in a process of its own, for any backend.

    If the process dies, only the image that is being encoded fails. The next image starts another process.

    on_gpu  whether the encoder was opened on a GPU; it may have moved to the CPU since then
    """

    on_gpu = False
    runs_apart = True

    def __init__(self, model: Path, projector: ProjectorFile, threads: int) -> None:
        """Start the process, which does not load the projector yet. Raises LlmrunError.

        model  the file of the text model
        """
        self.projector = projector
        self._path = shown(str(projector.path), 300)
        self._request = {
            "model": str(model.absolute()),
            "path": str(projector.path.absolute()),
            "threads": threads,
            "gpu_bytes": None,
            "most_rows": projector.most_rows,
        }
        self._asked: int | None = None  # the number of the request to load the projector, if one was sent
        self._loaded = self._closed = False
        self._starting = Lock()
        self._encoding: LlamaEncoding | None = None
        self._file = FileSource(projector.path)
        try:
            self._process = LlamaProcess(_WORKER)
        except LlmrunError:
            self._file.close()
            raise

    def load(self, gpu_bytes: int | None = None) -> None:
        """Begin to load the projector. Returns immediately.

        gpu_bytes  the GPU memory that must be free for the encoder, or None to use only the CPU
        """
        self._request["gpu_bytes"] = gpu_bytes
        self._asked = self._process.tell("open", **self._request)

    def wait(self) -> None:
        """Wait until the projector is loaded. Raises ModelFileError, and BackendCrashed if the file crashes libmtmd."""
        if self._loaded:
            return
        try:
            number = self._process.tell("open", **self._request) if self._asked is None else self._asked
            with self._explained():
                self._check(self._process.answer(number, f"loading {self._path}"))
            self._file.check_in_place()  # Caches must never hold rows of another file for this projector.
        except BaseException:
            self._process.close()
            raise
        self._loaded = True

    def _check(self, answer: dict[str, Any]) -> None:
        """Raise ModelFileError if libmtmd has not loaded the projector, or has read it differently."""
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

    def begin(self, tiles: Sequence[NDArray[np.uint8]], layout: ImageLayout) -> LlamaEncoding:
        """Begin to encode an image, as specified by `Vision.begin`."""
        if not all(tile.ndim == 3 and tile.shape[2] == 3 and tile.dtype == np.uint8 for tile in tiles):
            raise ValueError("a tile must have three bytes for each pixel")
        self._encoding = LlamaEncoding(self, tiles, layout, self._encoding)
        return self._encoding

    def expected_seconds(self, layout: ImageLayout) -> None:
        """Return None, because libmtmd's speed is unknown until it has encoded an image."""

    def encode(self, tile: NDArray[np.uint8], rows: int, is_cancelled: Callable[[], bool]) -> NDArray[np.float32]:
        """Return the rows of one tile, float32[rows, row width]. Only one thread at a time may call this method.

        Raises Cancelled, BackendCrashed, and ModelFileError if libmtmd cannot encode the tile.
        """
        self._restart()
        height, width, _ = tile.shape
        n_bytes = max(tile.nbytes, 4 * rows * self.projector.row_width)
        while True:
            self._process.clear_stop()  # the flag may be set because of an earlier image
            if is_cancelled():
                raise Cancelled("generation stopped")
            memory, name = self._process.transfers.map(n_bytes)
            memory[: tile.nbytes] = tile.tobytes()
            size = {"n_bytes": n_bytes, "width": width, "height": height, "rows": rows}
            with self._explained():
                answer = self._process.ask("encode", f"encoding an image with {self._path}", memory=name, **size)
            if answer["status"] == 0:
                return np.frombuffer(memory, np.float32, rows * self.projector.row_width).reshape(rows, -1)
            if answer["status"] < 0:
                why = shown(answer["error"].strip(), 200) or "no reason given"
                raise ModelFileError(f"llama.cpp cannot encode an image with {self._path}: {why}", hint=_WITHOUT)

    def stop(self) -> None:
        """Stop the tile that is being encoded. Other threads and signal handlers can call this method."""
        self._process.stop()

    def kill(self) -> None:
        """Kill the process. The next image starts another one."""
        self._process.kill()

    def close(self) -> None:
        """End the process for good. Idempotent."""
        with self._starting:
            self._closed = True
            self.kill()
        if self._encoding is not None:
            self._encoding.join()
        self._process.close()
        self._file.close()

    def _restart(self) -> None:
        """Start the process again if it has died, and load the projector if it is not loaded."""
        with self._starting:
            if self._closed:
                raise Cancelled("the model was closed")
            if self._process.has_ended:
                self._process.close()
                self._process = LlamaProcess(_WORKER)
                self._loaded, self._asked = False, None
        self.wait()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Give crashes of the process a hint about the projector."""
        try:
            yield
        except BackendCrashed as error:
            raise BackendCrashed(str(error), hint=_WITHOUT if error.hint == CPU_ADVICE else error.hint) from error


class LlamaEncoding(Thread):
    """An Encoding. The thread sends one tile after the other to the encoder's process."""

    progress = 0.0  # libmtmd does not report its progress

    def __init__(
        self,
        vision: LlamaVision,
        tiles: Sequence[NDArray[np.uint8]],
        layout: ImageLayout,
        before: LlamaEncoding | None,
    ) -> None:
        """Begin to encode as soon as the encoding before this one, which is complete or cancelled, has stopped."""
        super().__init__(name="encoding", daemon=True)
        self._vision, self._tiles, self._before = vision, tiles, before
        self._pieces = [piece for piece in layout.pieces if isinstance(piece, Rows)]
        self._rows: NDArray[np.float32] | None = None
        self._error: BaseException | None = None
        self._is_cancelled = False
        self.start()

    def run(self) -> None:
        if self._before is not None:
            self._before.join(_STOP_S)
            if self._before.is_alive():  # libmtmd may hang, so this image starts another process
                self._vision.kill()
                self._before.join()
            self._before = None
        try:
            self._rows = np.concatenate([self._encode(piece) for piece in self._pieces])
        except BackendCrashed as error:  # the model's own process is still alive
            self._error = ModelFileError(str(error), hint=error.hint)
        except BaseException as error:  # noqa: BLE001 - `advance` raises it
            self._error = error
        self._tiles = ()

    def _encode(self, piece: Rows) -> NDArray[np.float32]:
        return self._vision.encode(self._tiles[piece.tile], piece.count, lambda: self._is_cancelled)

    def advance(self, seconds: float) -> NDArray[np.float32] | None:
        """Wait for the embeddings, as specified by `Encoding.advance`."""
        self.join(seconds)
        if self._is_cancelled:
            raise Cancelled("generation stopped")
        if self._error is not None:
            raise self._error
        return self._rows

    def cancel(self) -> None:
        """Stop encoding soon. Other threads and signal handlers can call this method. Idempotent."""
        self._is_cancelled = True
        self._vision.stop()


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
