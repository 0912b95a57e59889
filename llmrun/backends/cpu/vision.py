"""Encodes images on the CPU engine, with a plan of stages, packed weights, and a team of threads for each image."""

from __future__ import annotations

import math
import time
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np

from llmrun.backends.cpu.lower import kv_shapes, lower
from llmrun.backends.cpu.team import TEAM_KERNELS, StagedTeam
from llmrun.backends.cpu.vision_costs import AssumedSpeeds, EncoderMemory, EncoderTimes, kv_type_of, most_patches
from llmrun.backends.cpu.weights import filling, packing_kernels, reserve
from llmrun.base.compiled.host import load_kernels
from llmrun.base.errors import Cancelled, LlmrunError, ModelFileError, shown
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.layouts.arena import allocate, give_back
from llmrun.formats.layouts.kv import BLOCK
from llmrun.model.plan.elementary import rotations_of
from llmrun.model.vision.encoder import TILE_ROWS, Geometry, encoding
from llmrun.model.vision.encoders.registry import encoder_of
from llmrun.model.vision.layout import Rows
from llmrun.model.vision.projector import identity_of

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from llmrun.backends.cpu.speeds.machine import Speeds
    from llmrun.base.compiled.kernel import KernelName
    from llmrun.model.plan.builder import Stage
    from llmrun.model.vision.layout import ImageLayout
    from llmrun.model.vision.projector import ProjectorFile


class CpuVision:
    """The Vision that runs llmrun's own kernels. Images are encoded in the thread that calls `Encoding.advance`.

    packed   the reserved memory of all matrices, by name
    lowered  the lowered plan of the encoder
    memory   the memory that the encoder needs
    """

    runs_apart = False

    def __init__(self, projector: ProjectorFile, n_threads: int) -> None:
        """Prepare an encoder. The caller loads `kernels`, links `lowered`, fills `packed`, and then calls `finish`.

        Raises ModelFileError, UnsupportedModel and DoesNotFit.
        """
        self.projector, self.n_threads = projector, n_threads
        self._current: CpuEncoding | None = None
        # The time that recent images have taken, and the time in `times`. Both are 0 if nothing is known. Other threads
        # read them together.
        self._known_s = 0.0, 0.0
        self._has_learnt = False  # whether an image was encoded
        self._assumed: Speeds | None = None  # where the speed of images is kept if no other speeds are known
        self._closed = False
        self._file = open_gguf(projector.path)
        try:
            self.encoder = encoder_of(self._file, projector)
            self.memory = EncoderMemory.of(self._file, self.encoder, n_threads)
            self._lower()
        except BaseException:
            self.close()
            raise

    @classmethod
    def loaded(cls, projector: ProjectorFile, n_threads: int) -> Self:
        """Load an encoder by itself. Raises the same errors."""
        vision = cls(projector, n_threads)
        try:
            load_kernels(vision.kernels)
            vision.lowered.link()
            with filling(vision.packed, n_threads) as weights:
                weights.finish()
            vision.finish()
        except BaseException:
            vision.close()
            raise
        return vision

    def _lower(self) -> None:
        plan, kv_type = self.encoder.plan, kv_type_of(self.encoder)
        self.packed = reserve(plan.matrices)
        # Layers overwrite each other's keys and values, and layers with windows have heads of the same size.
        blocks = [-(-most_patches(self.projector) // BLOCK)] * len(plan.windows)
        shapes = kv_shapes(plan, blocks, kv_type)
        self._scratch = [allocate(math.prod(shapes[0]), "keys and values").reshape(shapes[0])] if shapes else []
        kv = self._scratch * len(shapes)
        self.lowered = lower(plan, self.packed, kv, kv_type=kv_type, max_rows=TILE_ROWS, n_threads=self.n_threads)
        self.stages = {stage.name: made for stage, made in zip(plan.stages, self.lowered.stages, strict=True)}
        self.table = np.arange(blocks[0] if blocks else 0, dtype=np.int32)

    @property
    def kernels(self) -> list[KernelName]:
        """All kernels that loading and encoding need."""
        return [*self.lowered.kernels, *packing_kernels(self.encoder.plan.matrices), *TEAM_KERNELS]

    def finish(self) -> None:
        """Check that the weights come from the file that was read first. Raises ModelFileError."""
        self._file.check_in_place()
        if identity_of(self._file) != self.projector.identity:  # caches hold rows under the identity
            raise ModelFileError(f"the projector changed while it was opened: {shown(str(self._file.path), 300)}")
        self._file.close()

    @cached_property
    def times(self) -> EncoderTimes:
        """The times that tiles of rows take relative to each other, in seconds if the machine was measured earlier."""
        from llmrun.backends.cpu.speeds.machine import Speeds

        speeds = Speeds.of_this_machine(self.n_threads)
        try:
            with speeds.only_known():
                found = EncoderTimes(self.encoder, speeds)
        except LookupError:
            self._assumed = speeds
            self._known_s = speeds.image_factor, 1.0
            return EncoderTimes(self.encoder, AssumedSpeeds())
        self._known_s = 1.0, 1.0
        return found

    def expected_seconds(self, layout: ImageLayout) -> float | None:
        expected = self.times.layout(layout)
        spent, predicted = self._known_s
        return expected * spent / predicted if spent else None

    def learn(self, spent: float, predicted: float) -> None:
        """Correct later expectations by the time that an image took. Later images and larger images count more."""
        if self._has_learnt:
            earlier_spent, earlier_predicted = self._known_s
            spent, predicted = earlier_spent / 2 + spent, earlier_predicted / 2 + predicted
        self._has_learnt = True
        self._known_s = spent, predicted
        if self._assumed is not None:
            self._assumed.keep_image_factor(spent / predicted)

    def give_back_memory(self) -> None:
        """Return the memory of keys and values to the system. The next image gets it back within milliseconds."""
        for memory in self._scratch:
            give_back(memory)

    def begin(self, tiles: Sequence[NDArray[np.uint8]], layout: ImageLayout) -> CpuEncoding:
        if not all(tile.ndim == 3 and tile.shape[2] == 3 and tile.dtype == np.uint8 for tile in tiles):
            raise ValueError("a tile must have three bytes for each pixel")
        if self._closed:
            raise LlmrunError("the engine is closed", hint="Open the model again.")
        if self._current is not None:  # the old image would overwrite the keys and values of the new one
            self._current.close()
        self._current = CpuEncoding(self, [tiles[piece.tile] for piece in layout.pieces if isinstance(piece, Rows)])
        return self._current

    def close(self) -> None:
        self._closed = True
        if self._current is not None:
            self._current.close()
        self._file.close()


class CpuEncoding:
    """An image that CpuVision is encoding, with a team of threads of its own.

    Starting the threads takes about a millisecond. No thread exists while no image is encoded, and `cancel` can only
    stop this image.
    """

    def __init__(self, vision: CpuVision, tiles: Sequence[NDArray[np.uint8]]) -> None:
        self._vision, self._tiles = vision, tiles
        self._total = sum(vision.times.image(tile.shape[1], tile.shape[0]) for tile in tiles)
        self._done = self._spent = 0.0  # the expected time of the work that is done, and the real time
        self._team = StagedTeam(vision.lowered, vision.n_threads)
        self._steps = self._encode()
        self._rotated: tuple[Geometry, NDArray[np.float32], NDArray[np.int32]] | None = None
        self._is_cancelled = self._is_closed = False

    def _encode(self) -> Generator[None, None, NDArray[np.float32]]:
        """Encode the tiles of the image. Yields after each tile of rows, which takes 10 to 200 ms."""
        rows: list[NDArray[np.float32]] = []
        for tile in self._tiles:
            of_tile = yield from encoding(self._vision.encoder, tile, self._run)
            rows.append(of_tile)
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _run(self, stage: Stage, rows: NDArray[np.float32], tile: slice, geometry: Geometry) -> NDArray[np.float32]:
        encoder, count = self._vision.encoder, len(rows)
        if self._rotated is None or self._rotated[0] is not geometry:
            positions = np.zeros((geometry.rows, 3), np.int32) if geometry.positions is None else geometry.positions
            reaches = encoder.plan.reaches
            seen = [geometry.seen_in(reach) for reach in reaches] or [np.zeros((geometry.rows, 2), np.int32)]
            self._rotated = geometry, rotations_of(encoder.plan.ropes, positions), np.stack(seen)
        _, rotations, seen_by_rows = self._rotated
        if stage.takes is not encoder.x:
            rotations, seen_by_rows = np.zeros((count, 0, 2), np.float32), np.zeros((1, count, 2), np.int32)
        else:
            rotations, seen_by_rows = np.ascontiguousarray(rotations[tile]), seen_by_rows[:, tile]
        numbers = np.arange(tile.start, tile.stop, dtype=np.int32)
        vision = self._vision
        made = self._team.run_stage(vision.stages[stage.name], rows, numbers, rotations, vision.table, seen_by_rows)
        self._done += vision.times.tile(stage, tile, geometry)
        return made

    @property
    def progress(self) -> float:
        return min(1.0, self._done / self._total)

    def advance(self, seconds: float) -> NDArray[np.float32] | None:
        began = time.perf_counter()
        try:
            while not self._is_cancelled:
                with np.errstate(over="ignore", invalid="ignore"):  # damaged files have numbers that are not finite
                    next(self._steps)
                if time.perf_counter() - began >= seconds:
                    self._spent += time.perf_counter() - began
                    return None
            raise Cancelled("the image is not needed any more")
        except StopIteration as stop:
            self.close()
            self._vision.learn(self._spent + time.perf_counter() - began, self._total)
            rows: NDArray[np.float32] = stop.value
            return rows
        except BaseException:  # the steps cannot continue after an error
            self.close()
            raise

    def cancel(self) -> None:
        self._is_cancelled = True
        self._team.cancel()

    def close(self) -> None:
        """End the threads, and free the memory. The encoding counts as cancelled unless it is complete. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = self._is_cancelled = True
        self._team.close()
        self._steps.close()
        self._tiles, self._rotated = (), None
        self._vision.give_back_memory()
