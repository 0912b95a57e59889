"""Encodes images on the CPU engine, with a plan of stages, packed weights, and a team of threads."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from llmrun.backends.cpu.lower import kv_shapes, lower
from llmrun.backends.cpu.team import TEAM_KERNELS, StagedTeam
from llmrun.backends.cpu.weights import filling, packing_kernels, reserve
from llmrun.base.compiled.host import load_kernels
from llmrun.base.errors import Cancelled
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.layouts.arena import allocate
from llmrun.formats.layouts.kv import BLOCK
from llmrun.model.plan.elementary import rotations_of
from llmrun.model.vision.encoder import TILE_ROWS, Geometry, encoding
from llmrun.model.vision.encoders.registry import encoder_of
from llmrun.model.vision.layout import Rows

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from numpy.typing import NDArray

    from llmrun.model.plan.builder import Stage
    from llmrun.model.vision.encoder import VisionEncoder
    from llmrun.model.vision.layout import ImageLayout
    from llmrun.model.vision.projector import ProjectorFile


class CpuVision:
    """The Vision that runs llmrun's own kernels. Images are encoded in the thread that calls `Encoding.advance`."""

    def __init__(self, projector: ProjectorFile, n_threads: int) -> None:
        """Load the encoder. Raises ModelFileError, UnsupportedModel and DoesNotFit."""
        self.projector = projector
        with open_gguf(projector.path) as file:
            self.encoder = encoder_of(file, projector)
            plan = self.encoder.plan
            packed = reserve(plan.matrices)
            # Layers overwrite each other's keys and values, and layers with windows have heads of the same size.
            blocks = [-(-_most_patches(projector) // BLOCK)] * len(plan.windows)
            shapes = kv_shapes(plan, blocks, kv_type_of(self.encoder))
            scratch = [allocate(math.prod(shapes[0]), "keys and values").reshape(shapes[0])] if shapes else []
            self._lowered = lower(
                plan,
                packed,
                scratch * len(shapes),
                kv_type=kv_type_of(self.encoder),
                max_rows=TILE_ROWS,
                n_threads=n_threads,
            )
            matrices = [part.matrix for part in packed.values()]
            load_kernels([*self._lowered.kernels, *packing_kernels(matrices), *TEAM_KERNELS])
            self._lowered.link()
            with filling(packed, n_threads) as weights:
                weights.finish()
        self._stages = {stage.name: made for stage, made in zip(plan.stages, self._lowered.stages, strict=True)}
        self._table = np.arange(blocks[0] if blocks else 0, dtype=np.int32)
        self._rotated: tuple[Geometry, NDArray[np.float32], NDArray[np.int32]] | None = None
        self._team = StagedTeam(self._lowered, n_threads)

    def begin(self, tiles: Sequence[NDArray[np.uint8]], layout: ImageLayout) -> CpuEncoding:
        if not all(tile.ndim == 3 and tile.shape[2] == 3 and tile.dtype == np.uint8 for tile in tiles):
            raise ValueError("a tile must have three bytes for each pixel")
        return CpuEncoding(self, [tiles[piece.tile] for piece in layout.pieces if isinstance(piece, Rows)])

    def encode(self, tiles: Sequence[NDArray[np.uint8]]) -> Generator[None, None, NDArray[np.float32]]:
        """Encode the tiles of an image. Yields after each tile of rows, which takes 10 to 200 ms."""
        rows: list[NDArray[np.float32]] = []
        for tile in tiles:
            of_tile = yield from encoding(self.encoder, tile, self._run)
            rows.append(of_tile)
        return np.concatenate(rows)

    def _run(self, stage: Stage, rows: NDArray[np.float32], tile: slice, geometry: Geometry) -> NDArray[np.float32]:
        of_stage, count = self._stages[stage.name], len(rows)
        if self._rotated is None or self._rotated[0] is not geometry:
            positions = np.zeros((geometry.rows, 3), np.int32) if geometry.positions is None else geometry.positions
            reaches = self.encoder.plan.reaches
            seen = [geometry.seen_in(reach) for reach in reaches] or [np.zeros((geometry.rows, 2), np.int32)]
            self._rotated = geometry, rotations_of(self.encoder.plan.ropes, positions), np.stack(seen)
        _, rotations, seen_by_rows = self._rotated
        if stage.takes is not self.encoder.x:
            rotations, seen_by_rows = np.zeros((count, 0, 2), np.float32), np.zeros((1, count, 2), np.int32)
        else:
            rotations, seen_by_rows = np.ascontiguousarray(rotations[tile]), seen_by_rows[:, tile]
        numbers = np.arange(tile.start, tile.stop, dtype=np.int32)
        return self._team.run_stage(of_stage, rows, numbers, rotations, self._table, seen_by_rows)

    def cancel(self) -> None:
        """Stop the running stage. Thread-safe."""
        self._team.cancel()

    def clear_cancel(self) -> None:
        """Forget a `cancel` that came after the last stage."""
        self._team.clear_cancel()

    def close(self) -> None:
        self._team.close()


class CpuEncoding:
    """An image that CpuVision is encoding."""

    def __init__(self, vision: CpuVision, tiles: Sequence[NDArray[np.uint8]]) -> None:
        self._vision = vision
        self._steps = vision.encode(tiles)
        self._cancelled = False
        vision.clear_cancel()

    def advance(self, seconds: float) -> NDArray[np.float32] | None:
        end = time.perf_counter() + seconds
        while True:
            if self._cancelled:
                raise Cancelled("the image is not needed any more")
            try:
                next(self._steps)
            except StopIteration as stop:
                rows: NDArray[np.float32] = stop.value
                return rows
            if time.perf_counter() >= end:
                return None

    def cancel(self) -> None:
        self._cancelled = True
        self._vision.cancel()


def kv_type_of(encoder: VisionEncoder) -> str:
    """Return the type of keys and values: q8_0 if the weights are integers, which multiplies keys and values faster."""
    return "q8_0" if any(matrix.is_integer for matrix in encoder.plan.matrices) else "f16"


def _most_patches(projector: ProjectorFile) -> int:
    """Return the most rows of a layer. A class token takes a row, too."""
    return projector.most_rows * projector.patches_per_row + 1
