"""The token embedding on the CPU, and the rows of images."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmrun.backends.cpu.lowering import FLOAT, REPLICATED_OUTPUT, Needed, Needs, StepShape, float_word
from llmrun.backends.cpu.ops.base import CpuOp
from llmrun.backends.cpu.weights import PackedLayout
from llmrun.base.compiled.kernel import KernelName
from llmrun.formats.layouts import records
from llmrun.formats.quants.weight_type import GROUP_ROWS
from llmrun.model.plan.ops.embedding import AddImages, Embed, EmbedWords, ImageWords, PlaceImages

if TYPE_CHECKING:
    from llmrun.backends.cpu.lowering import Lowering
    from llmrun.backends.cpu.speeds.measured import SpeedTable
    from llmrun.model.plan.ops.base import Op
    from llmrun.model.plan.twin import Value


def _embed(work: Lowering, op: Embed) -> None:
    private = work.is_private_sum(op.out)
    out = work.place(op.out, private=private)
    table = work.packed[op.table.name]
    words = EmbedWords(
        table=table.address,
        group_bytes=table.layout.group_bytes,
        width=op.table.columns,
        out=out.address,
        out_stride=out.stride,
        scale=float_word(op.scale),
        indices=records.STEP_POSITIONS if op.by_position else records.STEP_TOKENS,
    )
    kernel = KernelName.of("linear.embed", "embed", weight=op.table.packed)
    work.emit(kernel, op.out, REPLICATED_OUTPUT if private else 0, words)


def _place_images(work: Lowering, op: PlaceImages) -> None:
    _emit_images(work, "place_images", op.out, 0, op.scale)


def _add_images(work: Lowering, op: AddImages) -> None:
    _emit_images(work, "add_images", op.out, op.part, 1.0)


def _emit_images(work: Lowering, kernel: str, value: Value, part: int, scale: float) -> None:
    out = work.buffers[value]
    words = ImageWords(
        out=out.address,
        out_stride=out.stride,
        width=value.width,
        first=part * value.width * FLOAT,
        scale=float_word(scale),
    )
    flags = REPLICATED_OUTPUT if out.private else 0
    work.emit(KernelName.of("rows.images", kernel), value, flags, words, needed=Needed.IMAGES)


def _no_needs(op: PlaceImages | AddImages, kv_type: str, step: StepShape) -> Needs:
    """Return nothing, because steps of text leave the op out."""
    return Needs()


def _needs(op: Embed, kv_type: str, step: StepShape) -> Needs:
    row_bytes = PackedLayout.of(op.table).group_bytes // GROUP_ROWS
    return Needs(step.rows * row_bytes, activation_bytes=step.float_bytes(op.out))


def _seconds(op: Op, speeds: SpeedTable, kv_type: str, step: StepShape) -> float:
    """Return 0, because the measured overhead per step already includes the embedding."""
    return 0.0


OPS: dict[type[Op], CpuOp] = {
    Embed: CpuOp("embed", _embed, _needs, _seconds),
    PlaceImages: CpuOp("images", _place_images, _no_needs, _seconds),
    AddImages: CpuOp("images", _add_images, _no_needs, _seconds),
}
