"""Computes the memory and the time that the CPU engine needs to encode images, from an encoder's plan alone."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from msgspec import Struct

from llmrun.backends.cpu.lower import scratch_needed
from llmrun.backends.cpu.lowering import FLOAT, StepShape, kv_position_bytes
from llmrun.backends.cpu.ops.attention import attention_shape, attention_speed
from llmrun.backends.cpu.ops.base import row_seconds
from llmrun.backends.cpu.ops.registry import cpu_op
from llmrun.backends.cpu.speeds.measured import AttentionSpeed, LinearSpeed, RowSpeed
from llmrun.backends.cpu.weights import packed_bytes
from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.ops.linear import Product
from llmrun.model.plan.shapes import ALL
from llmrun.model.vision.encoder import TILE_ROWS, Geometry, VisionEncoder, rows_of_stage
from llmrun.model.vision.encoders.registry import encoder_of
from llmrun.model.vision.projector import USUAL_IMAGE
from llmrun.model.vision.tensors import OF_AUDIO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llmrun.backends.cpu.speeds.measured import SpeedTable
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.builder import Stage
    from llmrun.model.plan.shapes import AttentionShape
    from llmrun.model.plan.twin import Value
    from llmrun.model.vision.layout import ImageLayout
    from llmrun.model.vision.projector import ProjectorFile


def kv_type_of(encoder: VisionEncoder) -> str:
    """Return the type of keys and values: q8_0 if the weights are integers, which multiplies keys and values faster."""
    return "q8_0" if any(matrix.is_integer for matrix in encoder.plan.matrices) else "f16"


def most_patches(projector: ProjectorFile) -> int:
    """Return the most rows of a layer. A class token takes a row, too."""
    return projector.most_rows * projector.patches_per_row + 1


def encoder_of_header(file: GGUFFile, projector: ProjectorFile) -> VisionEncoder:
    """Return an encoder for computing sizes and times, without reading weights. Raises BadGGUF and UnsupportedModel."""
    made_up = file.with_placeholder_weights()
    # The placeholder 1.0 is no valid lower limit of a clamp (Gemma 4), which may have only an upper limit, though.
    made_up.tensors = {name: one for name, one in file.tensors.items() if not name.endswith("_min")}
    return encoder_of(made_up, projector)


# --- memory ----------------------------------------------------------------------------------------------------------


class EncoderMemory(Struct, frozen=True):
    """The bytes that an encoder's weights need, and those that it needs besides while it encodes an image."""

    weights: int
    scratch: int

    @classmethod
    def in_header(cls, projector: ProjectorFile, n_threads: int) -> Self:
        """Compute the memory without reading weights. Raises ModelFileError and UnsupportedModel."""
        with open_gguf(projector.path) as file:
            return cls.of(file, encoder_of_header(file, projector), n_threads)

    @classmethod
    def of(cls, file: GGUFFile, encoder: VisionEncoder, n_threads: int) -> Self:
        """Compute the memory for images of the usual detail. `file` is the projector's."""
        plan, projector = encoder.plan, encoder.projector
        packed = {matrix.name.partition("[")[0] for matrix in plan.matrices}
        tables = sum(
            FLOAT * math.prod(tensor.shape)
            for name, tensor in file.tensors.items()
            if name not in packed and not name.startswith(OF_AUDIO)
        )
        rows = min(projector.most_rows, USUAL_IMAGE)
        patches = rows * projector.patches_per_row
        kv_type = kv_type_of(encoder)
        blocks = [1] * len(plan.windows)
        of_layer = max((kv_position_bytes(group.shape, kv_type) for group in plan.groups), default=0)
        pixels = 2 * encoder.patches.width  # uint8, and a second time while patches are cut out
        features = 2 * FLOAT * encoder.x.width  # the second time for positions that are resized to the image
        return cls(
            weights=packed_bytes(plan.matrices) + tables,
            scratch=scratch_needed(plan, blocks, kv_type=kv_type, max_rows=TILE_ROWS, n_threads=n_threads)
            + patches * (of_layer + pixels + features)
            + rows * FLOAT * projector.row_width,
        )


# --- time ------------------------------------------------------------------------------------------------------------

_TILE_PYTHON: Final = 300e-6  # seconds that Python spends on each tile of rows, besides copying the rows
_COPIED: Final = 6e9  # bytes per second at which Python gathers pixels and copies features


class AssumedSpeeds:
    """The speeds of a machine that has not been measured. Only their ratios are plausible."""

    def linear(self, packed: str) -> LinearSpeed:
        floats = packed in ("f32", "f16", "bf16")
        return LinearSpeed(15e9, 2e-5, (50e9,) * 3 if floats else (150e9,) * 3)

    def rows(self, name: str) -> RowSpeed:
        return RowSpeed((1e-7, 4e-7, 1.6e-6), (1.5e-7, 5e-7, 4e-6))

    def attention(self, shape: AttentionShape, kv_type: str) -> AttentionSpeed:
        return AttentionSpeed(1e-5, 15e9, 100e9 if kv_type == "q8_0" else 50e9, 1e-9, 3e-9, 6e-5)

    def read_bandwidth(self) -> float:
        return 15e9


class _Unmasked:
    """The speeds of a machine with attention to thousands of rows without a mask, which is faster than with a mask."""

    def __init__(self, speeds: SpeedTable) -> None:
        self._speeds = speeds
        self.linear, self.rows, self.read_bandwidth = speeds.linear, speeds.rows, speeds.read_bandwidth

    def attention(self, shape: AttentionShape, kv_type: str) -> AttentionSpeed:
        return self._speeds.attention(replace(shape, around=ALL), kv_type)


class EncoderTimes:
    """The expected times of an encoder, in seconds."""

    def __init__(self, encoder: VisionEncoder, speeds: SpeedTable) -> None:
        """Raises LookupError if `speeds` neither knows nor measures a speed."""
        self._encoder, self._speeds, self._kv_type = encoder, _Unmasked(speeds), kv_type_of(encoder)
        self._of_rows = {
            (stage.name, TILE_ROWS): self._without_attention(stage, TILE_ROWS) for stage in encoder.plan.stages
        }
        for stage in encoder.plan.stages:
            for op in self._attentions(stage):
                attention_speed(op.kv, self._speeds, self._kv_type)
        self._of_images: dict[tuple[int, int], float] = {}

    def layout(self, layout: ImageLayout) -> float:
        """Return the time for all tiles of an image."""
        sizes = [(box.right - box.left, box.bottom - box.top) for scaled in layout.scaled for box in scaled.boxes]
        return sum(self.image(width, height) for width, height in sizes)

    def image(self, width: int, height: int) -> float:
        """Return the time for a tile of an image, whose sides are given in pixels."""
        columns, rows = width // self._encoder.patch, height // self._encoder.patch
        if (columns, rows) not in self._of_images:
            geometry = self._encoder.geometry(columns, rows)
            self._of_images[columns, rows] = sum(
                self.tile(stage, slice(first, min(first + TILE_ROWS, count)), geometry)
                for stage in self._encoder.plan.stages
                for count in [rows_of_stage(self._encoder, stage, geometry)]
                for first in range(0, count, TILE_ROWS)
            )
        return self._of_images[columns, rows]

    def tile(self, stage: Stage, tile: slice, geometry: Geometry) -> float:
        """Return the time for a tile of rows of a stage."""
        count = tile.stop - tile.start
        key = stage.name, count
        if key not in self._of_rows:
            self._of_rows[key] = self._without_attention(stage, count)
        return self._of_rows[key] + sum(self._attending(op, tile, geometry) for op in self._attentions(stage))

    def _attentions(self, stage: Stage) -> Iterator[Attention]:
        return (op for op in self._encoder.plan.ops[stage.first : stage.end] if isinstance(op, Attention))

    def _attending(self, op: Attention, tile: slice, geometry: Geometry) -> float:
        shape, speed = attention_shape(op.kv), attention_speed(op.kv, self._speeds, self._kv_type)
        seen = geometry.seen_in(shape.reach)[tile]
        attended = int((seen[:, 1] - seen[:, 0]).sum(dtype=np.int64))
        return speed.op + shape.heads * (shape.head_size + shape.value_size) * attended / speed.multiply

    def _without_attention(self, stage: Stage, count: int) -> float:
        """Return the expected time in seconds of a stage for `count` rows, apart from attention."""
        speeds, step = self._speeds, StepShape(count, wanted=0)
        moved = stage.takes.width + (0 if stage.gives is None else stage.gives.width)
        total = _TILE_PYTHON + 2 * FLOAT * count * moved / _COPIED
        quantized: set[Value] = set()
        for op in self._encoder.plan.ops[stage.first : stage.end]:
            if isinstance(op, Product) and op.weight.is_integer and op.x not in quantized:
                quantized.add(op.x)
                total += row_seconds("quantize", op.x, speeds, step)
            if not isinstance(op, Attention):
                total += cpu_op(type(op)).seconds(op, speeds, self._kv_type, step)
            if op.changes is not None:
                quantized.discard(op.changes)
        return total
