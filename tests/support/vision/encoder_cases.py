"""Tiny projectors for tests of encoders, one or more cases per family. Each case has tiles that a test can encode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from llmrun.formats.gguf.reader import open_gguf
from llmrun.model.plan.ops import activations
from llmrun.model.plan.ops.activations import Activation
from llmrun.model.vision.encoders.registry import encoder_of
from llmrun.model.vision.projector import read_projector
from llmrun.model.vision.reference import encode_exactly
from tests.support.models.tiny_models import Change, changed_copy
from tests.support.vision.projectors import tiny_projector, tiny_text_model
from tests.support.vision.stage_oracle import ROWS, tensors_of_libmtmd

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llmrun.model.vision.encoder import Geometry, VisionEncoder
    from tests.support.gguf.gguf_files import Tensor

TYPES = ("F32", "F16", "Q8_0")


def _in_raster_order(encoder: VisionEncoder, geometry: Geometry) -> NDArray[np.intp]:
    """Return libmtmd's row for each row of an encoder whose patches libmtmd keeps in order, after leading rows."""
    return np.concatenate([np.arange(geometry.leading), geometry.leading + geometry.patches])


def _in_the_same_order(encoder: VisionEncoder, geometry: Geometry) -> NDArray[np.intp]:
    """Return libmtmd's row for each row of an encoder whose patches libmtmd orders in the same way."""
    return np.arange(geometry.rows)


@dataclass(frozen=True)
class EncoderCase:
    """A tiny projector, and the tiles of the tests.

    projector  a row of TINY_PROJECTORS
    sizes      widths and heights of tiles, in pixels
    fields     override the row's; `width` and `heads` set the size of heads
    start      libmtmd's name for the features before the first layer, or "" to compare none
    stages     maps stages to libmtmd's names; by default, stages named `layer N` are `layer_out-N`
    order      returns libmtmd's row for each of the encoder's rows
    convolves  whether libmtmd embeds patches by a convolution, which rounds pixels to float16
    tanh       True if libmtmd uses the tanh GELU where the model uses the erf GELU
    for_libmtmd  changes the metadata and tensors of the file that libmtmd reads
    """

    projector: str
    sizes: Sequence[tuple[int, int]]
    fields: Mapping[str, Any] = field(default_factory=dict)
    start: str = "pos_embed"
    stages: Mapping[str, str] = field(default_factory=dict)
    order: Callable[[VisionEncoder, Geometry], NDArray[np.intp]] = _in_raster_order
    convolves: bool = True
    tanh: bool = False
    for_libmtmd: Change | None = None

    def write(self, folder: Path, weight_type: str) -> Path:
        return tiny_projector(folder, self.projector, weight_type, **self.fields)

    def pictures(self) -> list[NDArray[np.uint8]]:
        return [picture(*size, seed) for seed, size in enumerate(self.sizes)]


def _class_token_last(encoder: VisionEncoder, geometry: Geometry) -> NDArray[np.intp]:
    return np.roll(np.arange(geometry.rows), 1)


def _positions_for_class_token_last(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Give each of libmtmd's rows the position that the model's code gives it. libmtmd has the class token last."""
    weight_type, values, *shape = tensors["v.position_embd.weight"]
    positions = np.frombuffer(values, np.float32).reshape(shape[0])
    tensors["v.position_embd.weight"] = (weight_type, np.roll(positions, -1, axis=0))


def _clamped(names: str) -> str:
    """Return all limits of these products, as tensors of a TinyProjector."""
    limits = ("input_max", "input_min", "output_max", "output_min")
    return " ".join(f"{name}.{limit}:o" for name in names.split() for limit in limits)


_IDEFICS3 = {"image_size": 128, "keys": {"preproc_image_size": 512}}

ENCODER_CASES: dict[str, EncoderCase] = {
    "gemma3": EncoderCase("gemma3", [(112, 112)] * 2, {"image_size": 112}),
    "gemma3 heads of 72": EncoderCase(
        "gemma3", [(112, 112)], {"image_size": 112, "width": 288, "feed_forward": 320, "gelu": False, "epsilon": 1e-3}
    ),
    "idefics3": EncoderCase("idefics3", [(128, 128)] * 3, _IDEFICS3),
    "gemma4uv": EncoderCase("gemma4uv", [(240, 144), (48, 192)], start="pos_embd", convolves=False),
    "lfm2": EncoderCase("lfm2", [(512, 160), (64, 64)], tanh=True),
    "lfm2 reduced positions": EncoderCase("lfm2", [(96, 224)], {"image_size": 512}, tanh=True),
    "idefics3 heads of 24": EncoderCase("idefics3", [(320, 320)], _IDEFICS3 | {"image_size": 320, "width": 96}),
    "gemma4v": EncoderCase("gemma4v", [(240, 144), (96, 288), (48, 48)], start="pos_embd"),
    "gemma4v heads of 72": EncoderCase(
        "gemma4v",
        [(144, 192)],
        {
            "width": 288,
            "feed_forward": 320,
            "others": {1: _clamped("attn_q attn_k attn_v attn_out ffn_gate ffn_up ffn_down")},
        },
        start="pos_embd",
    ),
    "pixtral": EncoderCase("pixtral", [(140, 84), (56, 280), (28, 28)], start="pre_ln", tanh=True),
    "pixtral heads of 24": EncoderCase(
        "pixtral",
        [(70, 42)],
        {"width": 96, "merge": 1, "without": ["mm.input_norm.weight", "mm.patch_merger.weight", "mm.1.bias"]},
        start="pre_ln",
        tanh=True,
    ),
    "qwen3vl": EncoderCase(
        "qwen3vl_merger", [(160, 96), (32, 192), (64, 32)], start="inp_pos_emb", order=_in_the_same_order, tanh=True
    ),
    "qwen3vl without deepstack": EncoderCase(
        "qwen3vl_merger qwen35", [(96, 64)], {"width": 96}, start="inp_pos_emb", order=_in_the_same_order, tanh=True
    ),
    "qwen2.5vl": EncoderCase(
        "qwen2.5vl_merger",
        [(280, 168), (28, 280), (140, 28), (112, 112)],
        start="",
        order=_in_the_same_order,
        tanh=True,
    ),
    "qwen2.5vl heads of 80": EncoderCase(
        "qwen2.5vl_merger",
        [(196, 140)],
        {"width": 160, "heads": 2, "feed_forward": 192},
        start="",
        order=_in_the_same_order,
        tanh=True,
    ),
    "qwen2vl": EncoderCase("qwen2vl_merger", [(140, 84), (28, 56)], start="", order=_in_the_same_order, tanh=True),
    "internvl": EncoderCase(
        "internvl",
        [(112, 112)] * 2,
        {"image_size": 112},
        order=_class_token_last,
        tanh=True,
        for_libmtmd=_positions_for_class_token_last,
    ),
    "internvl heads of 24": EncoderCase(
        "internvl",
        [(280, 280)],
        {"image_size": 280, "width": 96, "without": [f"v.blk.{layer}.ls1.weight" for layer in range(2)]},
        order=_class_token_last,
        tanh=True,
        for_libmtmd=_positions_for_class_token_last,
    ),
}


def picture(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return an asymmetric picture, uint8[height, width, 3]: gradients, a few bars as in the letter F, and noise."""
    y, x = np.mgrid[:height, :width]
    made = np.stack([x * 255 // width, y * 255 // height, (x * y // (7 + seed)) % 251], -1).astype(np.uint8)
    u, v = 8 * x // width, 8 * y // height
    made[((u == 1) & (v > 0)) | ((v == 1) & (u > 0) & (u < 6)) | ((v == 4) & (u > 0) & (u < 4))] = (250, 20, 90 + seed)
    made[height // 2 :, width // 2 :] ^= np.random.default_rng(seed).integers(0, 32, 3, np.uint8)
    return made


@contextmanager
def encoder_in(path: Path) -> Iterator[VisionEncoder]:
    """Yield the encoder of a projector's file, which stays open, because twins read weights from it."""
    with open_gguf(path) as file:
        yield encoder_of(file, read_projector(path))


# --- against libmtmd ---


@contextmanager
def rounding_as_libmtmd(case: EncoderCase, encoder: VisionEncoder) -> Iterator[None]:
    """Round pixels to float16, and look up the tanh and quick GELUs in a table of float16, as libmtmd does."""
    exact = activations.activation_reference

    def rounded(x: NDArray[np.float32], activation: Activation) -> NDArray[np.float32]:
        if case.tanh and activation is Activation.GELU_ERF:
            activation = Activation.GELU
        if activation not in (Activation.GELU, Activation.GELU_QUICK):
            return exact(x, activation)
        found = exact(x.astype(np.float16).astype(np.float32), activation)
        return found.astype(np.float16).astype(np.float32)

    pixels = encoder._normalized.astype(np.float16 if case.convolves else np.float32).astype(np.float32)
    with (
        mock.patch.object(encoder, "_normalized", pixels),
        mock.patch.object(activations, "activation_reference", rounded),
    ):
        yield


def compared(
    case: EncoderCase, folder: Path, weight_type: str
) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Encode the first picture of a case. Returns the twin's and libmtmd's values, float32[rows, width], by stage."""
    path, tile = case.write(folder, weight_type), case.pictures()[0]
    stages: dict[str, NDArray[np.float32]] = {}
    with encoder_in(path) as encoder, rounding_as_libmtmd(case, encoder):
        rows = encode_exactly(encoder, tile, stages)
        geometry = encoder.geometry(tile.shape[1] // encoder.patch, tile.shape[0] // encoder.patch)
        order = case.order(encoder, geometry)
    model = tiny_text_model(folder, case.projector)
    if case.for_libmtmd is not None:
        path = changed_copy(path, folder / "libmtmd.gguf", case.for_libmtmd)
    theirs = tensors_of_libmtmd(model, path, tile, encoder.projector.most_rows)
    found = {ROWS: (rows, theirs[ROWS])}
    if case.start:
        found["start"] = _started(geometry, stages["patches"]), theirs[case.start][order]
    for stage in encoder.plan.stages:
        if stage.name in case.stages or stage.name.startswith("layer "):
            node = case.stages.get(stage.name, f"layer_out-{stage.name.removeprefix('layer ')}")
            of_features = stage.takes is encoder.x
            found[stage.name] = stages[stage.name], theirs[node][order] if of_features else theirs[node]
    return found


def _started(geometry: Geometry, patches: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the features before the first layer, for the embedded patches."""
    started = np.concatenate([np.zeros((geometry.leading, patches.shape[1]), np.float32), patches])
    return started if geometry.added is None else started + geometry.added(slice(None))


# --- numbers ---


def difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the norm of the difference, relative to the norm of what is expected."""
    assert found.shape == expected.shape
    return float(np.linalg.norm(found.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))


def least_cosine(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Return the smallest cosine of the angle between a row and the expected row."""
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(1) / norms).min())
