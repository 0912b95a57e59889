"""Encodes the images of requests between steps, and keeps the embeddings of recent images."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from threading import Thread
from typing import TYPE_CHECKING, Final

from llmrun.base.errors import Cancelled
from llmrun.engine.costs import MOST_ROWS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.backends.base import Vision
    from llmrun.engine.answer import Answer
    from llmrun.engine.image_rows import PromptImage
    from llmrun.engine.slots import Slot
    from llmrun.formats.images.decoding import ImageDecoder
    from llmrun.model.vision.layout import Projector

_MOST_BYTES: Final = 256 << 20  # an image of 280 rows of 2,560 numbers takes 2.9 MB
_LEARNT: Final = 0.3  # the weight of the last image in the time per row
# At most so many rows of text take as long as encoding a row of an image. Gemma 3's rows take 21 GFLOP each, so with a
# smaller number, an encoding on a slow processor would be taken for a hang, which ends all requests.
_TEXT_ROWS: Final = 64


class RecentRows:
    """The embeddings of recent images. The least recently used ones are forgotten first.

    The scope of a request's prefixes is part of the key, because the time to the first token would reveal whether
    somebody else sent the same image.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._rows: OrderedDict[tuple[str, bytes], NDArray[np.float32]] = OrderedDict()

    def find(self, scope: str, image: PromptImage) -> NDArray[np.float32] | None:
        """Return the embeddings of an image, or None if they are not known."""
        if (rows := self._rows.get((scope, image.key))) is not None:
            self._rows.move_to_end((scope, image.key))
        return rows

    def knows(self, scope: str, image: PromptImage) -> bool:
        """Return whether the embeddings of an image are known. Thread-safe."""
        return (scope, image.key) in self._rows

    def add(self, scope: str, image: PromptImage, rows: NDArray[np.float32]) -> None:
        """Keep the embeddings of an image. If all of them take too much memory, forget the least recently used ones."""
        self._rows[scope, image.key] = rows
        while sum(each.nbytes for each in self._rows.values()) > self._most_bytes:
            self._rows.popitem(last=False)

    def forget(self) -> None:
        """Forget all embeddings."""
        self._rows.clear()


class _Decoding(Thread):
    """Decodes an image while steps run, because an image of 64 megapixels takes ten seconds.

    seconds  how long decoding took
    """

    def __init__(self, decoder: ImageDecoder, image: PromptImage) -> None:
        super().__init__(name="decoding", daemon=True)
        self.image, self.seconds = image, 0.0
        self._decoder = decoder
        self._tiles: list[NDArray[np.uint8]] = []
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        began = time.perf_counter()
        try:
            self._tiles = self._decoder.tiles(self.image.data, self.image.layout.scaled, self.image.name).tiles
        except BaseException as error:  # noqa: BLE001 - `tiles` raises it
            self._error = error
        self.seconds = time.perf_counter() - began

    @property
    def tiles(self) -> list[NDArray[np.uint8]]:
        """The tiles of the decoded image. Raises the errors of `ImageDecoder.tiles`."""
        if self._error is not None:
            raise self._error
        return self._tiles

    def stop(self) -> None:
        """Stop decoding soon."""
        if self.is_alive():
            self._decoder.kill()


class ImageEncoder:
    """Encodes the next image of the running requests.

    on_encode    called before an image is encoded, with the maximum number of rows of text that take as long
    encoding     the id of the request whose image is being encoded, or None
    row_seconds  how long a row of an image takes, or 0 until an image was encoded
    wait_s       how many seconds a step waits for the decoding of an image; small images take less
    """

    wait_s = 0.05

    def __init__(self, vision: Vision) -> None:
        self._vision = vision
        self._decoding: _Decoding | None = None
        self.recent = RecentRows()
        self.on_encode: Callable[[int], None] = lambda rows: None
        self.encoding: int | None = None
        self.row_seconds = 0.0

    @property
    def projector(self) -> Projector:
        """The projector of the model."""
        return self._vision.projector

    @cached_property
    def _decoder(self) -> ImageDecoder:
        from llmrun.formats.images.decoding import ImageDecoder

        return ImageDecoder()

    def next_of(self, running: Mapping[Answer, Slot]) -> Answer | None:
        """Supply the embeddings that are known already, and return the request whose image is to be encoded next.

        An image is needed if the next large step could reach it. The request whose image is being decoded is next, or
        else the one with the fewest encoded images, so that a request with many images does not hold up the others. The
        decoding of an image that no request needs any more is stopped.
        """
        waiting = []
        decoding: Answer | None = None
        for answer, slot in running.items():
            if answer.images is None:
                continue
            depth = len(slot.tokens)
            while (index := answer.images.needed(depth, depth + MOST_ROWS)) is not None:
                image = answer.images.images[index]
                rows = self.recent.find(answer.prefix_scope, image)
                if rows is None:
                    if self._decoding is not None and self._decoding.image is image:
                        decoding = answer
                    waiting.append((answer.encoded_images, index, answer))
                    break
                answer.images.rows[index] = rows
        if self._decoding is not None and decoding is None:
            self._decoding.stop()
            self._decoding = None
        return decoding or (min(waiting, key=lambda each: each[0])[2] if waiting else None)

    def has_decoded(self, answer: Answer, depth: int) -> bool:
        """Begin to decode the next image of a request, unless this has begun, and return whether it is decoded."""
        if self._decoding is None:
            self._decoding = _Decoding(self._decoder, self._next_image(answer, depth)[1])
            self.wait()
        return not self._decoding.is_alive()

    def wait(self) -> None:
        """Wait a moment for the image that is being decoded, if any."""
        if self._decoding is not None:
            self._decoding.join(self.wait_s)

    def _next_image(self, answer: Answer, depth: int) -> tuple[int, PromptImage]:
        assert answer.images is not None, "the request has images"
        index = answer.images.needed(depth, depth + MOST_ROWS)
        assert index is not None, "`next_of` has chosen this request"
        return index, answer.images.images[index]

    def encode(self, answer: Answer, depth: int) -> None:
        """Encode the next image of a request that has `depth` tokens in the cache. The image has been decoded.

        Raises Cancelled, BackendCrashed, and LlmrunError if the image or the encoder fails.
        """
        assert answer.images is not None, "the request has images"
        assert self._decoding is not None, "the image has been decoded"
        index, image = self._next_image(answer, depth)
        decoded, self._decoding = self._decoding, None
        began, seconds = time.perf_counter(), decoded.seconds
        self.on_encode(_TEXT_ROWS * image.layout.rows)
        self.encoding = answer.request_id
        try:
            rows = self._vision.encode(decoded.tiles, image.layout)
        except Cancelled:  # perhaps because of another request
            self._decoding, seconds = decoded, 0.0
            raise
        finally:
            self.encoding = None
            seconds += time.perf_counter() - began
            answer.encode_s += seconds
        answer.images.rows[index] = rows
        answer.encoded_images += 1
        self.recent.add(answer.prefix_scope, image, rows)
        weight = _LEARNT if self.row_seconds else 1.0
        self.row_seconds += weight * (seconds / image.layout.rows - self.row_seconds)

    def expected_seconds(self, answer: Answer, depth: int) -> float:
        """Return how long encoding the images after a position of a prompt will probably take. Thread-safe."""
        if answer.images is None:
            return 0.0
        unknown = [
            image.layout.rows
            for image in answer.images.after(depth)
            if not self.recent.knows(answer.prefix_scope, image)
        ]
        return self.row_seconds * sum(unknown)

    def close(self) -> None:
        """End the process that decodes images. Idempotent."""
        if self._decoding is not None:
            while self._decoding.is_alive():
                self._decoding.stop()
                self._decoding.join(self.wait_s)
            self._decoding = None
        if "_decoder" in vars(self):
            self._decoder.close()
