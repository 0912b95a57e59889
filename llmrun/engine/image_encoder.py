"""Decodes and encodes the images of requests during or between steps, and keeps the embeddings of recent images.

Some encoders have a process of their own, which works during the steps. Others encode an image in the engine's thread,
in slices of at least one tile of rows, which take turns with the steps (`Scheduler.encoding_seconds`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from msgspec import structs

from llmrun.base.errors import Cancelled, LlmrunError
from llmrun.engine.costs import MOST_ROWS
from llmrun.engine.requests import ImageProgress

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmrun.backends.base import Encoding, Vision
    from llmrun.engine.answer import Answer
    from llmrun.engine.image_rows import PromptImage, PromptImages
    from llmrun.engine.slots import Slot
    from llmrun.formats.images.decoding import ImageDecoder
    from llmrun.model.vision.layout import Projector

_MOST_BYTES: Final = 256 << 20  # an image of 280 rows of 2,560 numbers takes 2.9 MB
_LEARNT: Final = 0.3  # the weight of the last image in the time per row
_LOOK_S: Final = 0.01  # interval between the attempts of `close` to stop the decoder
_LONG_S: Final = 5.0  # reading images of a prompt for this long is worth a forecast
_MOST_SHARE: Final = 0.99  # of an image until its rows are known
_TELLING: Final = 0.05  # from this fraction of an image on, the time so far predicts the rest


Key = tuple[str, bytes]  # the scope of a request's prefixes, and `PromptImage.key`


class RecentRows:
    """The embeddings of recent images. The least recently used ones are forgotten first.

    The scope of a request's prefixes is part of the key, because the time to the first token would reveal whether
    somebody else sent the same image.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._rows: OrderedDict[Key, NDArray[np.float32]] = OrderedDict()

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


class _Need(NamedTuple):
    """An image that a running request lacks.

    rank     the number of images that the request needs before this one; low ranks are encoded first, so that a request
             with many images does not hold up the others
    number   the index of the image in the prompt
    is_near  True if the next large step could reach the image, so that it should be encoded
    """

    rank: int
    key: Key
    answer: Answer
    number: int
    is_near: bool

    @property
    def images(self) -> PromptImages:
        assert self.answer.images is not None, "the request has images"
        return self.answer.images

    @property
    def image(self) -> PromptImage:
        return self.images.images[self.number]


class _Job:
    """An image on its way from its file to its rows. A decoder decodes one image while another one is encoded.

    tiles     the decoded tiles
    encoding  the work of the encoder, or None while it does not work on this image
    decode_s  how long decoding took
    sliced_s  how long the engine's thread has worked on the encoding
    """

    def __init__(self, image: PromptImage, decoder: ImageDecoder, threads: Executor) -> None:
        self.image = image
        self.tiles: Future[list[NDArray[np.uint8]]] = threads.submit(self._decoded, decoder)
        self.encoding: Encoding | None = None
        self.decode_s = self.sliced_s = self._began = 0.0

    def _decoded(self, decoder: ImageDecoder) -> list[NDArray[np.uint8]]:
        began = time.perf_counter()
        tiles = decoder.tiles(self.image.data, self.image.layout.scaled, self.image.name).tiles
        self.decode_s = time.perf_counter() - began
        return tiles

    def begin(self, vision: Vision) -> Encoding:
        """Encode the decoded image, unless that has begun. Raises LlmrunError if the image cannot be decoded."""
        if self.encoding is None:
            self._began = time.perf_counter()
            self.encoding = vision.begin(self.tiles.result(), self.image.layout)
        return self.encoding

    @property
    def elapsed_s(self) -> float:
        """The seconds since the encoding began."""
        return time.perf_counter() - self._began

    def encode_s(self, vision: Vision) -> float:
        """Return how long the image has been encoded, not counting steps between slices."""
        return self.elapsed_s if vision.runs_apart else self.sliced_s

    def stop(self, decoder: ImageDecoder, vision: Vision) -> None:
        """Stop decoding or encoding soon."""
        if self.encoding is not None:
            self.encoding.cancel()
            if not vision.runs_apart:
                with suppress(Cancelled):
                    self.encoding.advance(0.0)  # ends its threads and frees its memory
        elif not (self.tiles.done() or self.tiles.cancel()):
            decoder.kill()


class Slice(NamedTuple):
    """How long an encoding may occupy the engine's thread before the next step, or wait for another process.

    seconds     returns the time for encoding in this thread. Longer slices shorten later ones
    wait_s      the time to wait for the decoder and for an encoder with a process of its own
    is_awaited  returns whether the engine has something else to do, so that the slice must end after its current tile
    on_begin    called before an encoding occupies this thread, with the requests that need the image
    """

    seconds: Callable[[], float] = lambda: 0.0
    wait_s: float = 0.0
    is_awaited: Callable[[], bool] = lambda: True
    on_begin: Callable[[Sequence[Answer]], None] = lambda answers: None


class ImageEncoder:
    """Encodes the images of the running requests.

    waiting   the running requests whose next row belongs to an image that is not encoded yet
    sliced_s  how long the last call of `advance` encoded in this thread
    """

    def __init__(self, vision: Vision) -> None:
        self._vision = vision
        self._jobs: dict[Key, _Job] = {}
        self._looked = 0.0  # since when the requests in `waiting` wait, not counting earlier calls of `advance`
        self._owed_s = 0.0  # how much longer than allowed the last slices were
        self._row_seconds = 0.0  # how long a row of an image takes, or 0 until an image was encoded
        self.recent = RecentRows()
        self.waiting: list[Answer] = []
        self.sliced_s = 0.0

    @property
    def projector(self) -> Projector:
        """The projector of the model."""
        return self._vision.projector

    @cached_property
    def _decoder(self) -> ImageDecoder:
        from llmrun.formats.images.decoding import ImageDecoder

        return ImageDecoder()

    @cached_property
    def _threads(self) -> Executor:
        return ThreadPoolExecutor(1, "decoding")  # an image of 64 megapixels takes ten seconds

    def advance(self, running: Mapping[Answer, Slot], within: Slice) -> list[tuple[Answer, LlmrunError]]:
        """Decode the next images, encode one of them, supply its rows if they are complete, and begin the next one.

        Work on images that no request needs any more is stopped.

        Returns the requests whose image cannot be decoded or encoded, and the errors.
        """
        self._count_waits()
        self.sliced_s = 0.0
        needs = sorted(self._needs(running), key=lambda need: (not need.is_near, need.rank))
        self._stop_all_but({need.key for need in needs})
        self._decode(needs)
        failed: list[tuple[Answer, LlmrunError]] = []
        if self._current(needs) is None and within.wait_s:
            wait(self._decoding, within.wait_s)
        is_idle = False  # True once the encoder has completed an image
        while (key := self._current(needs)) is not None:
            job = self._jobs[key]
            asking = [need for need in needs if need.key == key]
            try:
                if is_idle:
                    if self._vision.runs_apart:
                        job.begin(self._vision)
                    break
                if (rows := self._encoded(job, asking, within)) is None:
                    break
                self._supply(key, rows, asking)
                is_idle = True
            except Cancelled:
                job.encoding = None
                break
            except LlmrunError as error:  # it names the image as in the prompt of the first request
                del self._jobs[key]
                failed = [(need.answer, error) for need in asking if need.image.name == job.image.name]
                break
        self._count_waits()
        over = [answer for answer, _ in failed]
        if over:  # there may be no further call
            self._stop_all_but({need.key for need in needs if need.answer not in over})
        self.waiting = [
            answer for answer, slot in running.items() if answer.lacks_image(len(slot.tokens)) and answer not in over
        ]
        return failed

    def _encoded(self, job: _Job, asking: Sequence[_Need], within: Slice) -> NDArray[np.float32] | None:
        """Encode the next tiles of an image, or look for its rows. Returns the rows if they are complete."""
        if self._vision.runs_apart:
            return job.begin(self._vision).advance(within.wait_s)
        allowed_s = within.seconds() - self._owed_s
        self._owed_s = max(-allowed_s, 0.0)
        if allowed_s <= 0:
            return None
        answers = list(dict.fromkeys(need.answer for need in asking))  # an answer may need the same image twice
        within.on_begin(answers)
        began, before_s = time.perf_counter(), job.sliced_s
        try:
            encoding = job.begin(self._vision)
            while True:
                tile_began = time.perf_counter()
                rows = encoding.advance(0.0)
                ended = time.perf_counter()
                job.sliced_s = before_s + ended - began  # other threads predict the rest
                next_end = ended + (ended - tile_began)
                if rows is not None or next_end - began > allowed_s or within.is_awaited():
                    return rows
        finally:
            self.sliced_s = time.perf_counter() - began
            self._owed_s = max(self.sliced_s - allowed_s, 0.0)
            job.sliced_s = before_s + self.sliced_s
            for answer in answers:
                if answer not in self.waiting and answer.prefill_started is not None:
                    answer.image_wait_s += self.sliced_s

    def _count_waits(self) -> None:
        """Count the time since the last call for the requests that have waited since then."""
        now = time.perf_counter()
        for answer in self.waiting:
            answer.image_wait_s += now - self._looked
        self._looked = now

    def _needs(self, running: Mapping[Answer, Slot]) -> Iterator[_Need]:
        """Supply the known rows of images that the next large step could reach, and yield the next two other images."""
        for answer, slot in running.items():
            if (images := answer.images) is None:
                continue
            depth, scope = len(slot.tokens), answer.prefix_scope
            near = images.missing(depth, depth + MOST_ROWS)
            for index in near:
                if (rows := self.recent.find(scope, images.images[index])) is not None:
                    images.rows[index] = rows
            missing = images.missing(depth)
            unknown = (index for index in missing if not self.recent.knows(scope, images.images[index]))
            for rank, index in enumerate(islice(unknown, 2), answer.encoded_images):
                yield _Need(rank, (scope, images.images[index].key), answer, index, index in near)

    def _stop_all_but(self, needed: set[Key]) -> None:
        for key, job in list(self._jobs.items()):
            if key not in needed:
                job.stop(self._decoder, self._vision)
                # A separate encoder that still works on the image is not ready for another one.
                if job.encoding is None or not self._vision.runs_apart:
                    del self._jobs[key]

    @property
    def is_working(self) -> bool:
        """True if an image is being decoded or encoded during steps, which slows them down."""
        encodes = self._vision.runs_apart and any(job.encoding is not None for job in self._jobs.values())
        return encodes or bool(self._decoding)

    @property
    def _decoding(self) -> list[Future[list[NDArray[np.uint8]]]]:
        """The image that is being decoded, if any."""
        return [job.tiles for job in self._jobs.values() if not job.tiles.done()]

    def _decode(self, needs: Sequence[_Need]) -> None:
        """Begin to decode the first or the second image that is needed, unless an image is being decoded."""
        images = {need.key: need.image for need in needs}
        for key in islice(images, 2):
            if key not in self._jobs and not self._decoding:
                self._jobs[key] = _Job(images[key], self._decoder, self._threads)

    def _current(self, needs: Sequence[_Need]) -> Key | None:
        """Return the image that is being encoded, or else the next one to encode if it is decoded, or None."""
        encoding = [key for key, job in self._jobs.items() if job.encoding is not None]
        near = [need.key for need in needs if need.is_near and need.key in self._jobs]
        return next(iter([*encoding, *(key for key in near if self._jobs[key].tiles.done())]), None)

    def _supply(self, key: Key, rows: NDArray[np.float32], asking: Sequence[_Need]) -> None:
        """Give the rows of an image to the requests that need it. The first of them is said to have encoded it."""
        job = self._jobs.pop(key)
        seconds = job.encode_s(self._vision)
        for need in asking:
            need.images.rows[need.number] = rows
        if asking:
            asking[0].answer.encode_s += job.decode_s + seconds
            asking[0].answer.encoded_images += 1
        self.recent.add(key[0], job.image, rows)
        weight = _LEARNT if self._row_seconds else 1.0
        self._row_seconds += weight * (seconds / job.image.layout.rows - self._row_seconds)

    def _expected_s(self, image: PromptImage) -> float:
        """Return how long encoding an image will probably take, or 0 if unknown."""
        return self._vision.expected_seconds(image.layout) or image.layout.rows * self._seconds_per_row

    @property
    def _seconds_per_row(self) -> float:
        """The time per row of earlier images, or else of the image that is being encoded, or 0 if unknown."""
        for job in [] if self._row_seconds else [*self._jobs.values()]:
            if (encoding := job.encoding) is not None and (share := encoding.progress) >= _TELLING:
                return job.encode_s(self._vision) / share / job.image.layout.rows
        return self._row_seconds

    def _left_s(self, job: _Job, spent_s: float) -> tuple[float, float]:
        """Return the fraction of an image that is encoded, and how long the rest takes, or 0 if unknown.

        spent_s  how long the image has been encoded, with or without the time of steps between slices
        """
        expected = self._expected_s(job.image)
        if (encoding := job.encoding) is None:
            return 0.0, expected
        if share := min(encoding.progress, _MOST_SHARE):
            whole = spent_s / share if share >= _TELLING else expected
            return share, whole * (1 - share)
        return (min(spent_s / expected, _MOST_SHARE), max(expected - spent_s, 0.0)) if expected else (0.0, 0.0)

    def progress(self, answer: Answer, depth: int) -> ImageProgress | None:
        """Return the progress of the next image of a prompt, or None if no image is being read. Thread-safe.

        depth  the number of tokens in the request's slot
        """
        if (images := answer.images) is None or not (unknown := self._unknown(answer, depth)):
            return None
        needed = {(answer.prefix_scope, image.key): image for image in (images.images[index] for index in unknown)}
        jobs = dict(self._jobs)
        first = jobs.get(next(iter(needed)))
        if (first is None or first.encoding is None) and not answer.lacks_image(depth):
            return None  # The text before the image is more interesting.
        now = ImageProgress(unknown[0] + 1, len(images.images))
        # Images of other requests that are being encoded come first.
        others = [job for key, job in jobs.items() if job.encoding is not None and key not in needed]
        own = [
            self._left_s(jobs[key], jobs[key].elapsed_s) if key in jobs else (0.0, self._expected_s(image))
            for key, image in needed.items()
        ]
        left = [seconds for _, seconds in own] + [self._left_s(job, job.elapsed_s)[1] for job in others]
        elapsed = sum(jobs[key].elapsed_s for key in needed if key in jobs and jobs[key].encoding is not None)
        if not all(left) or sum(left) + elapsed <= _LONG_S:
            return now
        return structs.replace(now, share=own[0][0], left_s=sum(left))

    def _unknown(self, answer: Answer, depth: int) -> list[int]:
        """Return the indexes of the images after a position of a prompt whose rows are not known. Thread-safe."""
        if (images := answer.images) is None:
            return []
        scope, missing = answer.prefix_scope, images.missing(depth)
        return [index for index in missing if not self.recent.knows(scope, images.images[index])]

    def expected_seconds(self, answer: Answer, depth: int) -> Mapping[Hashable, float]:
        """Return how long encoding each image after a position of a prompt will probably take. Thread-safe."""
        if (images := answer.images) is None:
            return {}
        found: dict[Hashable, float] = {}
        for image in (images.images[index] for index in self._unknown(answer, depth)):
            job = self._jobs.get(key := (answer.prefix_scope, image.key))
            left = self._expected_s(image) if job is None else self._left_s(job, job.encode_s(self._vision))[1]
            if left:
                found[key] = left
        return found

    def close(self) -> None:
        """Stop all work, and end the process that decodes images. Idempotent."""
        self._stop_all_but(set())
        self._jobs.clear()
        if (threads := vars(self).pop("_threads", None)) is not None:
            ended = threads.submit(lambda: None)
            while wait([ended], _LOOK_S).not_done:
                self._decoder.kill()
            threads.shutdown()
            self._decoder.close()
