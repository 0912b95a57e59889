"""The tensors of a projector's file, which are checked by name and shape.

libmtmd reports only some missing tensors, one at a time, and ends the process if a tensor has a wrong shape.
"""

from __future__ import annotations

from math import isqrt
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from llmrun.base.errors import BadGGUF, UnsupportedModel, shown
from llmrun.formats.gguf.tensors import dimensions, trimmed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from llmrun.formats.gguf.reader import GGUFFile

# Tensors are "name:sizes", with the row length first as in GGUF files. A letter is a size: those that `check_tensors`
# knows, and others that must only be the same everywhere in a file. Optional tensors have a question mark, and names
# without a suffix are weights.
_NORMS = "ln1:w ln1.bias?:w ln2:w ln2.bias?:w "
_ATTENTION = "attn_q:w,q attn_q.bias?:q attn_k:w,k attn_k.bias?:k attn_v:w,k attn_v.bias?:k "
_OUT = "attn_out:q,w attn_out.bias?:w "
_BIASES = "attn_q.bias:q attn_k.bias:k attn_v.bias:k "
_FUSED = "attn_qkv:w,a attn_qkv.bias:a "
_FEED_FORWARD = "ffn_up:w,f ffn_up.bias?:f ffn_down:f,w ffn_down.bias?:w "
_GATE = "ffn_gate:w,f ffn_gate.bias?:f "
_LAYER = _NORMS + _ATTENTION + _OUT + _FEED_FORWARD
_SIGLIP = "v.patch_embd:p,p,3,w v.patch_embd.bias?:w v.post_ln?:w v.post_ln.bias?:w "
_FRAMES = "v.patch_embd:p,p,3,w v.patch_embd.weight.1:p,p,3,w v.post_ln:w v.post_ln.bias?:w "
_MERGER = "mm.0:m,x mm.0.bias:x mm.2:x,t mm.2.bias:t "
_DEEPSTACK = "norm:m norm.bias?:m fc1:m,y fc1.bias:y fc2:y,t fc2.bias:t "

_LAYERS: Final = {
    "gemma3": _LAYER,
    "gemma4uv": "",
    "gemma4v": _LAYER + _GATE + "attn_q_norm:h attn_k_norm:h attn_post_norm:w ffn_post_norm:w ",
    "qwen3vl_merger": _NORMS + _FUSED + _OUT + _FEED_FORWARD,
    "qwen2vl_merger": _LAYER + _BIASES,
    "qwen2.5vl_merger": _LAYER + _BIASES + _GATE,
    "idefics3": _LAYER,
    "lfm2": _LAYER,
    "pixtral": _LAYER + _GATE,
    "internvl": _LAYER + "attn_q_norm?:q attn_k_norm?:k ls1?:w ls2?:w ",
}
_OTHERS: Final = {
    "gemma3": _SIGLIP + "v.position_embd:w,n mm.soft_emb_norm:w mm.input_projection:t,w",
    "gemma4uv": "v.patch_embd:u,w v.patch_embd.bias:w v.patch_norm.1:u v.patch_norm.1.bias:u v.patch_norm.2:w "
    "v.patch_norm.2.bias:w v.patch_norm.3:w v.patch_norm.3.bias:w v.position_embd:w,P,2 mm.input_projection:w,t",
    "gemma4v": "v.patch_embd:p,p,3,w v.position_embd:w,P,2 mm.input_projection:w,t",
    "qwen3vl_merger": _FRAMES + "v.patch_embd.bias:w v.position_embd:w,P " + _MERGER,
    "qwen2vl_merger": _FRAMES + _MERGER,
    "qwen2.5vl_merger": _FRAMES + _MERGER,
    "idefics3": _SIGLIP + "v.position_embd:w,n mm.model.fc:m,t",
    "lfm2": _SIGLIP
    + "v.position_embd:w,P mm.input_norm?:m mm.input_norm.bias?:m mm.1:m,x mm.1.bias:x mm.2:x,t mm.2.bias:t",
    "pixtral": "v.patch_embd:p,p,3,w v.pre_ln?:w v.token_embd.img_break:t mm.input_norm?:w mm.patch_merger?:m,w "
    "mm.1:w,x mm.1.bias?:x mm.2:x,t mm.2.bias?:t",
    "internvl": "v.patch_embd:p,p,3,w v.patch_embd.bias?:w v.class_embd:w v.position_embd:w,N mm.model.mlp.0:m "
    "mm.model.mlp.0.bias:m mm.model.mlp.1:m,x mm.model.mlp.1.bias:x mm.model.mlp.3:x,t mm.model.mlp.3.bias:t",
}
OF_AUDIO: Final = ("a.", "mm.a.")  # the names of tensors that an encoder for audio has begin with these
# Older converters exchanged the names of the two matrices.
_EXCHANGED: Final = ("gemma3", "qwen2vl_merger", "qwen2.5vl_merger", "idefics3")
_WITHOUT_SUFFIX: Final = (".bias", ".weight.1", "class_embd", "img_break")
# Matrices that stay floats: Gemma 3's is stored transposed, which libmtmd undoes only for floats. llama.cpp's converter
# never quantizes the others, which are small.
_NEVER_QUANTIZED: Final = {
    "gemma3": ("mm.input_projection",),
    "pixtral": ("mm.patch_merger",),
    "gemma4uv": ("v.patch_embd",),
}
# Tensors that libmtmd needs only if several patches become one row
_MERGED: Final = {"pixtral": "mm.input_norm:w mm.patch_merger:m,w"}
_CONVOLVED, _ADDED, _TRANSPOSED = ("F32", "F16"), ("F32",), ("F32", "F16", "BF16")


class Widths(Struct, frozen=True):
    """Numbers that follow from tensors.

    row           the width of a row of embeddings, without deepstack
    feed_forward  the numbers per patch that a feed-forward network has in memory at the same time
    """

    row: int
    feed_forward: int


def check_tensors(file: GGUFFile, family: str, known: Mapping[str, int]) -> Widths:
    """Check the tensors of the vision encoder, and return the widths that they determine.

    known  the sizes that the metadata implies: w (width), q, k and h (queries, keys, one head), p (side of a patch),
           n (patches of a fixed size), g (patches per row, in each direction), positions (how many a table for each
           axis must have), layers
    Raises BadGGUF for missing tensors and wrong shapes, and UnsupportedModel for weight types that libmtmd cannot use.
    """
    width, merge = known["w"], known["g"]
    sizes = dict(known) | {
        "a": known["q"] + 2 * known["k"],
        "m": width * merge**2,
        "u": 3 * (known["p"] * merge) ** 2,
        "N": known["n"] + 1,
    }
    wanted = list(_wanted(file, family, known["layers"], merge))
    missing = [name for name, _, optional in wanted if not optional and name not in file.tensors]
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadGGUF(
            f"the projector is incomplete: {shown(str(file.path), 300)}: the tensor {missing[0]} is missing{more}",
            hint="Download the file again, or convert it with a current version of llama.cpp.",
        )
    for name, letters, _ in wanted:
        if name in file.tensors:
            _check(file, name, letters, sizes)
    return Widths(sizes["t"], sizes.get("f", 0) * (3 if _GATE in _LAYERS[family] else 2))


def deepstack_layers(file: GGUFFile) -> int:
    """Return the number of layers whose output becomes an additional part of the rows."""
    return sum(name.startswith("v.deepstack.") and name.endswith(".fc1.weight") for name in file.tensors)


def quantizable(file: GGUFFile, family: str, merge: int) -> Iterator[str]:
    """Yield the names of the matrices that may have a quantized type, because they are only multiplied by vectors."""
    floats = [f"{name}.weight" for name in ("v.position_embd", *_NEVER_QUANTIZED.get(family, ()))]
    for name, letters, _ in _wanted(file, family, file.integer("clip.vision.block_count", minimum=0), merge):
        if name in file.tensors and len(letters) == 2 and name not in floats:
            yield name


def _wanted(file: GGUFFile, family: str, layers: int, merge: int) -> Iterator[tuple[str, list[str], bool]]:
    """Yield names, the letters of sizes, and whether the tensor is optional."""
    others = f"{_OTHERS[family]} {_MERGED.get(family, '') if merge > 1 else ''}"
    texts = [("", others)]
    for layer in range(layers):
        prefix, text = f"v.blk.{layer}.", _LAYERS[family]
        if family in _EXCHANGED and is_exchanged(file, prefix[:-1]):
            text = text.replace("ffn_up", "ffn_?").replace("ffn_down", "ffn_up").replace("ffn_?", "ffn_down")
        texts.append((prefix, text))
        if family == "qwen3vl_merger" and f"v.deepstack.{layer}.fc1.weight" in file.tensors:
            texts.append((f"v.deepstack.{layer}.", _DEEPSTACK))
    for prefix, text in texts:
        for part in text.split():
            name, letters = part.split(":")
            bare = name.removesuffix("?")
            full = prefix + (bare if bare.endswith(_WITHOUT_SUFFIX) else f"{bare}.weight")
            yield full, letters.split(","), name != bare


def is_exchanged(file: GGUFFile, block: str) -> bool:
    """Return True if the matrix that is called "up" is the one that goes back to the width of the encoder."""
    up, norm = file.tensors.get(f"{block}.ffn_up.weight"), file.tensors.get(f"{block}.ln1.weight")
    return up is not None and norm is not None and up.shape[0] != norm.shape[0]


def _check(file: GGUFFile, name: str, letters: list[str], sizes: dict[str, int]) -> None:
    tensor = file.tensors[name]
    found, wanted = trimmed(tensor.shape), []
    for position, letter in enumerate(letters):
        # If the metadata does not imply a size, the first tensor with this size determines it.
        seen = found[position] if position < len(found) else 1
        wanted.append(int(letter) if letter.isdigit() else sizes.setdefault(letter, seen))
    if found != trimmed(tuple(wanted)):
        raise file.bad(name, f"the shape must be {dimensions(tuple(wanted))}, not {dimensions(found)}")
    if "P" in letters:
        _check_positions(file, name, sizes, by_axis=len(letters) == 3)
    # libmtmd ends the process if it adds, multiplies or convolves other types, or writes out of bounds.
    added = len(letters) == 1 or (len(letters) == 2 and "position_embd" in name)
    types = _CONVOLVED if len(letters) == 4 else _ADDED if added else _TRANSPOSED if letters == ["t", "w"] else ()
    if types and tensor.type.name not in types:
        path, kinds = shown(str(file.path), 300), " or ".join(types)
        raise UnsupportedModel(f"weight type not supported: {path}: {name} must be {kinds}, not {tensor.type.name}")


def _check_positions(file: GGUFFile, name: str, sizes: Mapping[str, int], *, by_axis: bool) -> None:
    """Check the number of positions, which must be enough for each axis, or fill a square that is resized."""
    found = sizes["P"]
    if by_axis and found < sizes["positions"]:
        raise file.bad(name, f"must have at least {sizes['positions']} positions, not {found}")
    if not by_axis and isqrt(found) ** 2 != found:
        raise file.bad(name, f"the number of positions must be a square, not {found}")
