"""Reads and checks the file with a model's vision encoder and projector, which is called mmproj in llama.cpp.

Importing this module is quick. Reading a file imports NumPy.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from llmrun.base.errors import BadGGUF, ModelFileError, UnsupportedModel, shown
from llmrun.model.vision.family import Family, Limits, Sizes
from llmrun.model.vision.tiled import Idefics3, InternVL, Lfm2VL
from llmrun.model.vision.whole import Gemma3, Gemma4, Pixtral, Qwen3VL, QwenVL

if TYPE_CHECKING:
    from pathlib import Path

    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.vision.layout import ImageLayout

_CLASSES: Final = (Gemma3, Gemma4, Qwen3VL, QwenVL, Idefics3, Lfm2VL, Pixtral, InternVL)
FAMILIES: Final[dict[str, type[Family]]] = {name: family for family in _CLASSES for name in family.names}
FAMILY_NAMES: Final = tuple(sorted(FAMILIES))

_ARCHITECTURE: Final = "clip"
_TYPE_KEYS: Final = ("clip.projector_type", "clip.vision.projector_type")
_OWN_FILE: Final = "Use the projector from the model's repository."
# Gemma 4 E2B and E4B, by the width of their embeddings. Unlike larger models, they read images causally.
_CAUSAL_GEMMA4: Final = (1536, 2560)

UNIFIED: Final = "gemma4uv"
_WITH_WINDOWS: Final = "qwen2.5vl_merger"
# Vectors of the encoder's width per patch, apart from the feed-forward network. With encoders of 768 and 1152 features
# and 256 to 1639 rows, libmtmd needed 0.6 to 1.0 times as much memory as `working_bytes` says.
_ACTIVATIONS: Final = 6
USUAL_IMAGE: Final = 1120  # rows; only requests for high detail make larger tiles, which few families have

# libmtmd aborts if one of these keys has another type. The names of counts follow "clip.vision.".
_COUNTS: Final = (
    "image_size patch_size embedding_length feed_forward_length block_count projection_dim attention.head_count "
    "attention.head_count_kv attention.head_dim projector.scale_factor spatial_merge_size n_wa_pattern "
    "preproc_image_size preproc_min_tiles preproc_max_tiles image_min_pixels image_max_pixels"
)
_KEY_TYPES: Final = {
    **{f"clip.vision.{name}": "u32" for name in _COUNTS.split()},
    "clip.vision.attention.layer_norm_epsilon": "f32",
    "clip.vision.image_mean": "arr[f32]",
    "clip.vision.image_std": "arr[f32]",
    **{f"clip.{name}": "bool" for name in ["has_vision_encoder", "has_audio_encoder", "use_gelu", "use_silu"]},
    **dict.fromkeys(("general.name", "general.description", *_TYPE_KEYS), "str"),
}

# Limits that libmtmd checks, too
_MOST_SIDE, _MOST_MERGE, _MOST_LAYERS = 8192, 16, 512

_MOST_NORMAL = 1e6  # the largest mean or deviation of pixels; real ones are below 1


class ProjectorFile(Struct, frozen=True):
    """A projector's file that was read and checked, but is no longer open. See `Projector` for the other fields.

    path           the file
    image_size     the side of a square image or tile, in pixels, or the size for which the positions were trained
    unit           the side of the square that becomes one row, in pixels
    markers        control tokens that the text model must have
    uses_mrope     True if the text model must have M-RoPE
    deepstack      number of the text model's layers to which a part of each row is added
    weight_bytes   the size of all tensors. libmtmd also loads an encoder for audio, if the file has one
    patches_per_row, patch_bytes  patches of the encoder that become one row, and roughly the memory that each needs
    layouts        the family, with its limits
    """

    path: Path
    family: str
    row_width: int
    placeholders: tuple[str, ...]
    is_causal: bool
    most_rows: int
    identity: str
    image_size: int
    unit: int
    markers: tuple[str, ...]
    uses_mrope: bool
    deepstack: int
    weight_bytes: int
    patches_per_row: int
    patch_bytes: int
    layouts: Family

    def layout(self, width: int, height: int, detail: str = "auto") -> ImageLayout:
        return self.layouts.layout(width, height, detail)

    @property
    def memory_bytes(self) -> int:
        """The memory that libmtmd needs for the weights, and for its activations with images of the usual detail."""
        return self.weight_bytes + self.working_bytes(min(self.most_rows, USUAL_IMAGE))

    def working_bytes(self, most: int) -> int:
        """Return roughly how much memory libmtmd needs for its activations, for tiles of at most `most` rows."""
        patches = most * self.patches_per_row
        # Windows need a mask of patches by patches, in float32 and in float16.
        mask = 6 * patches**2 if self.family == _WITH_WINDOWS else 0
        return patches * self.patch_bytes + mask


def is_projector_file(file: GGUFFile) -> bool:
    """Return whether a file has a vision or audio encoder for a model, by its header."""
    return file.string("general.architecture", "") == _ARCHITECTURE


def read_projector(path: Path, *, least: int | None = None, most: int | None = None) -> ProjectorFile:
    """Read the header of a projector's file and check it.

    least, most  how many tokens an image should have; None for the family's values
    Raises ModelNotFound, ModelFileError, BadGGUF, UnsupportedModel, and UsageError for limits that cannot be met.
    """
    from llmrun.formats.gguf.reader import open_gguf

    with open_gguf(path) as file:
        return structs.replace(projector_in(file, least=least, most=most), identity=identity_of(file))


def identity_of(file: GGUFFile) -> str:
    """Return a digest of a projector's file. Raises ModelFileError."""
    from llmrun.formats.gguf.reader import sampled_digest

    return hashlib.sha256(f"{sampled_digest(file)} {file.path.stat().st_mtime_ns}".encode()).hexdigest()


def projector_in(file: GGUFFile, *, least: int | None = None, most: int | None = None) -> ProjectorFile:
    """Check a projector's header, which may be all that is known of the file. The `identity` of the result is empty.

    Raises the errors of `read_projector`.
    """
    name, family = _family(file)
    layouts = family(_sizes(file, family), Limits(least, most))
    return _read(file, name, layouts, _known_sizes(file, name, layouts))


def check_projector(projector: ProjectorFile, model: GGUFFile) -> None:
    """Raise ModelFileError unless the projector's rows fit the model, and the model's vocabulary has the markers."""
    architecture = model.string("general.architecture")
    width = model.integer(f"{architecture}.embedding_length", minimum=1)
    parts = 1 + model.integer(f"{architecture}.n_deepstack_layers", 0, minimum=0)
    if projector.row_width != width * parts:
        raise _wrong_model(
            projector,
            model,
            f"its embeddings have {projector.row_width:,} numbers, but the model's have {width * parts:,}",
        )
    tokens = model.strings("tokenizer.ggml.tokens").positions()
    for marker in projector.markers:
        if marker.encode() not in tokens:
            raise _wrong_model(projector, model, f"the vocabulary of the model lacks {marker}")
    has_mrope = model.has(f"{architecture}.rope.dimension_sections")
    if has_mrope != projector.uses_mrope:
        words = ("with M-RoPE, but the model has none", "without M-RoPE, but the model has it")[has_mrope]
        raise _wrong_model(projector, model, f"{projector.family} is for models {words}")


def _wrong_model(projector: ProjectorFile, model: GGUFFile, why: str) -> ModelFileError:
    path, model_path = shown(str(projector.path), 300), shown(str(model.path), 300)
    return ModelFileError(f"the projector {path} does not fit the model {model_path}: {why}", hint=_OWN_FILE)


def _family(file: GGUFFile) -> tuple[str, type[Family]]:
    """Return the name of the file's family and its class."""
    path = shown(str(file.path), 300)
    architecture = file.string("general.architecture", "")
    if architecture != _ARCHITECTURE:
        if any(name.startswith(("v.", "mm.")) for name in file.tensors):
            raise UnsupportedModel(
                f"vision encoders inside a model's file are not supported: {path}",
                hint="Get the model from a repository that has the projector (mmproj) as a file of its own.",
            )
        raise ModelFileError(
            f"not a projector: {path}: the architecture is {shown(architecture or 'missing')}, not {_ARCHITECTURE}",
            hint="Name a vision projector, whose file name usually contains mmproj.",
        )
    if not file.boolean("clip.has_vision_encoder", False):
        raise UnsupportedModel(f"the projector has no encoder for images: {path}", hint="Audio is not supported.")
    name = next((name for key in _TYPE_KEYS if (name := file.string(key, ""))), "")
    if not name:
        raise file.bad(_TYPE_KEYS[0], "the key is missing")
    if name not in FAMILIES:
        raise UnsupportedModel(
            f"projector not supported: {path}: {shown(name)}", hint=f"Supported: {', '.join(FAMILY_NAMES)}."
        )
    return name, FAMILIES[name]


def _sizes(file: GGUFFile, family: type[Family]) -> Sizes:
    side = file.integer("clip.vision.image_size", minimum=1, maximum=_MOST_SIDE)
    patch = file.integer("clip.vision.patch_size", minimum=1, maximum=_MOST_SIDE)
    merge = file.integer(family.merge_key, family.usual_merge, minimum=1, maximum=_MOST_MERGE)
    sizes = Sizes(
        side,
        patch,
        merge,
        file.integer("clip.vision.preproc_image_size", 0, minimum=1, maximum=_MOST_SIDE),
        file.integer("clip.vision.preproc_min_tiles", 0, minimum=1, maximum=64),
        file.integer("clip.vision.preproc_max_tiles", 0, minimum=1, maximum=64),
    )
    if fault := family.fault(sizes):
        raise file.bad(family.merge_key, fault)
    return sizes


def _known_sizes(file: GGUFFile, name: str, layouts: Family) -> dict[str, int]:
    """Return the sizes that the metadata implies, as `check_tensors` needs them."""
    sizes = layouts.sizes
    heads = _integer(file, "attention.head_count", 0)
    width = _integer(file, "embedding_length", 1)
    head = file.integer("clip.vision.attention.head_dim", width // heads if heads else 0, minimum=1)
    if heads and not file.has("clip.vision.attention.head_dim") and width % heads:
        raise file.bad("clip.vision.attention.head_count", f"must divide {width}, not be {heads}")
    kv_heads = file.integer("clip.vision.attention.head_count_kv", heads, minimum=1, maximum=max(1, heads))
    return {
        "w": width,
        "q": heads * head,
        "k": kv_heads * head,
        "h": head,
        "p": sizes.patch_size,
        "n": (sizes.image_size // sizes.patch_size) ** 2,
        "g": sizes.merge,
        "positions": layouts.most_rows * (1 if name == UNIFIED else sizes.merge),
        "layers": file.integer("clip.vision.block_count", minimum=0, maximum=_MOST_LAYERS),
    }


def _integer(file: GGUFFile, name: str, minimum: int) -> int:
    return file.integer(f"clip.vision.{name}", minimum=minimum, maximum=2**20)


def _read(file: GGUFFile, name: str, layouts: Family, known: dict[str, int]) -> ProjectorFile:
    from llmrun.model.vision.tensors import check_tensors, deepstack_layers

    _check_numbers(file)
    widths = check_tensors(file, name, known)
    if name == _WITH_WINDOWS:
        _integer(file, "n_wa_pattern", 1)
        if (found := _integer(file, "projection_dim", 0)) != widths.row:
            raise file.bad("clip.vision.projection_dim", f"must be {widths.row}, the width of the rows, not {found}")
    deepstack = deepstack_layers(file)
    # The unified encoder of Gemma 4 has large patches instead of merging small ones.
    patch, per_row = (known["p"] * known["g"], 1) if name == UNIFIED else (known["p"], known["g"] ** 2)
    return ProjectorFile(
        path=file.path,
        family=name,
        row_width=widths.row * (1 + deepstack),
        placeholders=layouts.placeholders,
        is_causal=layouts.is_causal or (name == "gemma4v" and widths.row in _CAUSAL_GEMMA4),
        most_rows=layouts.most_rows,
        identity="",
        image_size=layouts.sizes.image_size,
        unit=layouts.sizes.unit,
        markers=layouts.markers,
        uses_mrope=layouts.uses_mrope,
        deepstack=deepstack,
        weight_bytes=sum(tensor.nbytes for tensor in file.tensors.values()),
        layouts=layouts,
        patches_per_row=per_row,
        patch_bytes=4 * (widths.feed_forward + _ACTIVATIONS * known["w"] + 3 * patch**2),
    )


def _check_numbers(file: GGUFFile) -> None:
    """Check the types of the keys that libmtmd reads, and the values of those that it needs but does not always use."""
    for key, wanted in _KEY_TYPES.items():
        if (found := file.types.get(key, wanted)) != wanted:
            raise file.bad(key, f"must be {wanted}, not {found}")
    for name in ("feed_forward_length", "projection_dim"):
        _integer(file, name, 0)
    key = "clip.vision.attention.layer_norm_epsilon"
    if (epsilon := file.number(key)) < 0:
        raise file.bad(key, f"must be 0 or more, not {epsilon}")
    for key, least in (("clip.vision.image_mean", 0.0), ("clip.vision.image_std", 1 / _MOST_NORMAL)):
        if len(numbers := file.numbers(key)[:3]) < 3:
            raise file.bad(key, "must have 3 numbers")
        for number in numbers:
            if not least <= abs(number) <= _MOST_NORMAL:
                raise file.bad(key, f"must have magnitudes from {least:g} to {_MOST_NORMAL:g}, not {number:g}")
    if file.boolean("clip.use_gelu", False) and file.boolean("clip.use_silu", False):
        raise BadGGUF(f"clip.use_gelu and clip.use_silu are both true: {shown(str(file.path), 300)}")
