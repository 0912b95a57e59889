"""Tiny projector files with random weights, one row per family, and text models that their rows of embeddings fit.

libmtmd loads and encodes with all of them. Image sizes, patch sizes and limits are those of published models, because
they decide the layout; only the widths and the number of layers are tiny. The vision width differs from the text width,
so that a swapped matrix is noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gguf.gguf_files import CONTROL, RandomWeights, Tensor, Vocabulary, tiny_vocabulary, write_gguf
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES

WIDTH, TEXT_WIDTH, FEED_FORWARD, HEADS = 64, 96, 160, 4

_NORMS = "ln1:w ln1.bias:w ln2:w ln2.bias:w "
_RMS_NORMS = "ln1:w ln2:w "
_ATTENTION = "attn_q:w,w attn_k:w,w attn_v:w,w attn_out:w,w "
_FUSED = "attn_qkv:q,w attn_qkv.bias:q attn_out:w,w attn_out.bias:w "
_BIASES = "attn_q.bias:w attn_k.bias:w attn_v.bias:w attn_out.bias:w "
_MLP = "ffn_up:f,w ffn_up.bias:f ffn_down:w,f ffn_down.bias:w "
_SWAPPED_MLP = "ffn_up:w,f ffn_up.bias:w ffn_down:f,w ffn_down.bias:f "
_GATED = "ffn_gate:f,w ffn_up:f,w ffn_down:w,f "
_GATED_BIASES = "ffn_gate.bias:f ffn_up.bias:f ffn_down.bias:w "
_SIGLIP = _NORMS + _ATTENTION + _BIASES + _MLP
_SIGLIP_ONCE = "v.patch_embd:w,3,p,p v.patch_embd.bias:w v.position_embd:n,w v.post_ln:w v.post_ln.bias:w "
_MERGER = "mm.0:m,m mm.0.bias:m mm.2:t,m mm.2.bias:t "
_DEEPSTACK = "norm:m norm.bias:m fc1:m,m fc1.bias:m fc2:t,m fc2.bias:t"
_QWEN3VL_ONCE = "v.patch_embd:w,3,p,p v.patch_embd.weight.1:w,3,p,p v.patch_embd.bias:w v.position_embd:n,w "
_QWEN3VL_ONCE += "v.post_ln:w v.post_ln.bias:w " + _MERGER
_QWEN2VL_ONCE = "v.patch_embd:w,3,p,p v.patch_embd.weight.1:w,3,p,p v.post_ln:w " + _MERGER
_CLAMPS = "attn_q.input_max:o attn_q.input_min:o attn_q.output_max:o attn_q.output_min:o "

_TEMPLATE = (
    "{%% for message in messages %%}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}"
    "{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'image' %%}%s{%% elif part['type'] == 'text' %%}{{ part['text'] }}{%% endif %%}"
    "{%% endfor %%}{%% endif %%}{{ '<|im_end|>\\n' }}{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '<|im_start|>assistant\\n' }}{%% endif %%}"
)


@dataclass(frozen=True)
class TinyProjector:
    """A row of the table.

    family      the value of `clip.projector_type`
    image_size, patch_size, merge  as in published models; `merge` is the key's value if `merge_key` is not ""
    layer       tensors of a layer, "name:rows,columns" as in tiny_architectures.py; `others` are those of single layers
    once        the other tensors, with their whole names but without `.weight`
    placeholder what the model's chat template writes for an image
    markers     control tokens that the text around rows needs
    text        a row of TINY_ARCHITECTURES; `text_sizes` override its fields
    more_texts  other rows of TINY_ARCHITECTURES, for the text models that the family's published files fit
    """

    family: str
    image_size: int
    patch_size: int
    merge: int
    layer: str
    once: str
    placeholder: str
    markers: tuple[str, ...]
    text: str
    merge_key: str = "projector.scale_factor"
    layers: int = 2
    others: Mapping[int, str] = field(default_factory=dict)
    deepstack: tuple[int, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)
    gelu: bool = False
    silu: bool = False
    epsilon: float = 1e-6
    text_sizes: Mapping[str, Any] = field(default_factory=dict)
    more_texts: tuple[str, ...] = ()
    width: int = WIDTH
    feed_forward: int = FEED_FORWARD
    heads: int = HEADS

    def metadata(self, text_width: int) -> dict[str, Any]:
        keys: dict[str, Any] = {
            "image_size": self.image_size,
            "patch_size": self.patch_size,
            "embedding_length": self.width,
            "feed_forward_length": self.feed_forward,
            "projection_dim": text_width,
            "block_count": self.layers,
            "attention.head_count": self.heads,
            "attention.layer_norm_epsilon": self.epsilon,
            # Means and deviations that differ by channel, so that swapped channels are noticed.
            "image_mean": [0.45, 0.51, 0.38],
            "image_std": [0.27, 0.31, 0.24],
        }
        if self.merge_key:
            keys[self.merge_key] = self.merge
        if self.deepstack:
            keys["is_deepstack_layers"] = np.array([layer in self.deepstack for layer in range(self.layers)])
        metadata: dict[str, Any] = {
            "general.architecture": "clip",
            "general.type": "mmproj",
            "general.name": f"tiny {self.family}",
            "clip.has_vision_encoder": True,
            "clip.projector_type": self.family,
        }
        if self.gelu or self.silu:
            metadata |= {"clip.use_gelu": True} if self.gelu else {"clip.use_silu": True}
        return metadata | {f"clip.vision.{key}": value for key, value in (keys | dict(self.keys)).items()}

    def shapes(self, text_width: int) -> dict[str, list[int]]:
        """Return the shape of each tensor in NumPy's order."""
        side = self.image_size // self.patch_size
        sizes = {
            "w": self.width,
            "q": 3 * self.width,
            "f": self.feed_forward,
            "t": text_width,
            "p": self.patch_size,
            "n": side * side,
            "N": side * side + 1,
            "m": self.width * self.merge**2,
            "h": self.width // self.heads if self.heads else 0,
            "o": 1,
            "u": 3 * (self.patch_size * self.merge) ** 2,  # the numbers of a large patch
        }
        names = self.once.split()
        for layer in range(self.layers):
            names += [f"v.blk.{layer}.{name}" for name in (self.layer + self.others.get(layer, "")).split()]
        for layer in self.deepstack:
            names += [f"v.deepstack.{layer}.{name}" for name in _DEEPSTACK.split()]
        return {
            _full_name(name): [int(size) if size.isdigit() else sizes[size] for size in letters.split(",")]
            for name, _, letters in (name.partition(":") for name in names)
        }

    def tensors(self, weight_type: str, text_width: int, seed: int = 0) -> dict[str, Tensor]:
        random = np.random.default_rng(seed)
        weights = RandomWeights(random, weight_type)
        made: dict[str, Tensor] = {}
        for name, shape in self.shapes(text_width).items():
            if name.endswith(("_max", "_min")):
                size = 2.0 if "input" in name else 1.5
                made[name] = ("F32", np.array([size if name.endswith("_max") else -size], np.float32))
            elif "patch_embd.weight" in name:
                # Convolutions need floats, and libmtmd rounds them to float16.
                values = (random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float16)
                made[name] = ("F32" if weight_type == "F32" else "F16", values.astype(np.float32))
            elif name == "mm.input_projection.weight" and self.family == "gemma3" and weight_type == "Q8_0":
                # Converters leave this matrix in float16. libmtmd transposes it, and writes out of bounds if it is not.
                made[name] = ("F16", (random.standard_normal(shape) / 8).astype(np.float32))
            elif "embd" in name:
                made[name] = ("F32", (0.3 * random.standard_normal(shape)).astype(np.float32))
            elif name.endswith((".bias", "std_bias")):
                made[name] = ("F32", (0.2 * random.standard_normal(shape)).astype(np.float32))
            else:
                made[name] = weights.matrix(*shape) if len(shape) > 1 else weights.norm(*shape)
        return made


def _full_name(name: str) -> str:
    """Return the name of a tensor in the file, with the suffix `.weight` unless it has none."""
    without = (".bias", "_max", "_min", ".weight.1", "class_embd", "img_break", "std_bias", "std_scale")
    return name if name.endswith(without) else f"{name}.weight"


def _rows_and_columns(start: str, end: str, count: int) -> tuple[str, ...]:
    return tuple(f"{start}row_{row}_col_{column}{end}" for row in range(1, count + 1) for column in range(1, count + 1))


_QWEN = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
_QWEN_TEXT = "<|vision_start|><|image_pad|><|vision_end|>"
_IDEFICS3_MARKERS = ("<fake_token_around_image>", "<global-img>", "<image>", *_rows_and_columns("<", ">", 6))
_LFM2_MARKERS = (
    *("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", "<image>"),
    *_rows_and_columns("<|img_", "|>", 10),
)

TINY_PROJECTORS: dict[str, TinyProjector] = {
    "gemma3": TinyProjector(
        "gemma3",
        896,
        14,
        4,
        _SIGLIP,
        _SIGLIP_ONCE + "mm.input_projection:w,t mm.soft_emb_norm:w",
        "<start_of_image>",
        ("<start_of_image>", "<end_of_image>"),
        "gemma3 without window",
        merge_key="",
        gelu=True,
        more_texts=("gemma3", "gemma3 pattern"),
    ),
    "gemma4uv": TinyProjector(
        "gemma4uv",
        224,
        16,
        3,
        "",
        "v.patch_embd:w,u v.patch_embd.bias:w v.patch_norm.1:u v.patch_norm.1.bias:u v.patch_norm.2:w "
        "v.patch_norm.2.bias:w v.patch_norm.3:w v.patch_norm.3.bias:w v.position_embd:2,1120,w mm.input_projection:t,w",
        "<|image|>",
        ("<|image>", "<image|>", "<|image|>"),
        "gemma4",
        layers=0,
        heads=0,
        feed_forward=0,
    ),
    "gemma4v": TinyProjector(
        "gemma4v",
        224,
        16,
        3,
        _RMS_NORMS + _ATTENTION + "attn_q_norm:h attn_k_norm:h attn_post_norm:w ffn_post_norm:w " + _GATED,
        "v.patch_embd:w,3,p,p v.position_embd:2,10240,w v.std_bias:w v.std_scale:w mm.input_projection:t,w",
        "<|image|>",
        ("<|image>", "<image|>", "<|image|>"),
        "gemma4",
        others={0: _CLAMPS},
        gelu=True,
        more_texts=("gemma4 E2B", "gemma4 26B", "gemma4 fused"),
    ),
    "qwen3vl_merger": TinyProjector(
        "qwen3vl_merger",
        768,
        16,
        2,
        _NORMS + _FUSED + _MLP,
        _QWEN3VL_ONCE,
        _QWEN_TEXT,
        _QWEN,
        "qwen3vl",
        merge_key="spatial_merge_size",
        layers=4,
        deepstack=(1,),
        gelu=True,
        more_texts=("qwen3vlmoe",),
    ),
    "qwen3vl_merger qwen35": TinyProjector(
        "qwen3vl_merger",
        768,
        16,
        2,
        _NORMS + _FUSED + _MLP,
        _QWEN3VL_ONCE,
        _QWEN_TEXT,
        _QWEN,
        "qwen35",
        merge_key="spatial_merge_size",
        gelu=True,
        more_texts=("qwen35moe",),
    ),
    "qwen2.5vl_merger": TinyProjector(
        "qwen2.5vl_merger",
        560,
        14,
        2,
        _RMS_NORMS + _ATTENTION + _BIASES + _GATED + _GATED_BIASES,
        _QWEN2VL_ONCE,
        _QWEN_TEXT,
        _QWEN,
        "qwen2vl",
        merge_key="",
        layers=4,
        silu=True,
        keys={"n_wa_pattern": 2},
        text_sizes={"heads": 3, "kv_heads": 1},
    ),
    "qwen2vl_merger": TinyProjector(
        "qwen2vl_merger",
        560,
        14,
        2,
        _NORMS + _ATTENTION + _BIASES + _SWAPPED_MLP,
        _QWEN2VL_ONCE + "v.post_ln.bias:w",
        _QWEN_TEXT,
        _QWEN,
        "qwen2vl",
        merge_key="",
        keys={"feed_forward_length": TEXT_WIDTH},  # as llama.cpp's converter writes it
        text_sizes={"heads": 3, "kv_heads": 1},
    ),
    "idefics3": TinyProjector(
        "idefics3",
        512,
        16,
        4,
        _NORMS + _ATTENTION + _BIASES + _SWAPPED_MLP,
        _SIGLIP_ONCE + "mm.model.fc:t,m",
        "<image>",
        _IDEFICS3_MARKERS,
        "smollm3",
        gelu=True,
        keys={"preproc_image_size": 2048},
        more_texts=("llama biases", "granite"),
    ),
    "lfm2": TinyProjector(
        "lfm2",
        256,
        16,
        2,
        _SIGLIP,
        _SIGLIP_ONCE + "mm.input_norm:m mm.input_norm.bias:m mm.1:f,m mm.1.bias:f mm.2:t,f mm.2.bias:t",
        "<image>",
        _LFM2_MARKERS,
        "lfm2",
        gelu=True,
        text_sizes={"heads": 6},
        more_texts=("lfm2 window", "lfm2moe"),
    ),
    "pixtral": TinyProjector(
        "pixtral",
        1540,
        14,
        2,
        _RMS_NORMS + _ATTENTION + _GATED,
        "v.patch_embd:w,3,p,p v.pre_ln:w v.token_embd.img_break:t mm.input_norm:w mm.patch_merger:w,m mm.1:t,w "
        "mm.1.bias:t mm.2:t,t mm.2.bias:t",
        "[IMG]",
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        "mistral3",
        merge_key="spatial_merge_size",
        silu=True,
        epsilon=1e-5,
        more_texts=("mistral3 temperature", "llama Mistral Nemo", "deepseek2 Mistral Large 3", "mistral4"),
    ),
    "internvl": TinyProjector(
        "internvl",
        448,
        14,
        2,
        _SIGLIP + "ls1:w ls2:w",
        "v.patch_embd:w,3,p,p v.patch_embd.bias:w v.class_embd:w v.position_embd:N,w mm.model.mlp.0:m "
        "mm.model.mlp.0.bias:m mm.model.mlp.1:t,m mm.model.mlp.1.bias:t mm.model.mlp.3:t,t mm.model.mlp.3.bias:t",
        "<IMG_CONTEXT>",
        ("<img>", "</img>", "<IMG_CONTEXT>"),
        "qwen3",
        gelu=True,
        more_texts=("qwen2", "qwen3moe", "internlm2", "gpt-oss"),
    ),
}


def tiny_projector(
    folder: Path,
    name: str,
    weight_type: str = "F32",
    *,
    text_width: int = TEXT_WIDTH,
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
    replaced: Mapping[str, Tensor] | None = None,
    **fields: Any,
) -> Path:
    """Write the projector of a row and return its path.

    extra     metadata to add or replace
    without   metadata and tensors to leave out
    replaced  tensors to replace
    fields    override the row's; a small `image_size` makes the encoding of families with a fixed size fast
    """
    row = replace(TINY_PROJECTORS[name], **fields)
    metadata = row.metadata(text_width) | dict(extra or {})
    tensors = row.tensors(weight_type, text_width, seed) | dict(replaced or {})
    for left_out in without:
        (metadata if left_out in metadata else tensors).pop(left_out)
    path = folder / f"mmproj-tiny-{name.replace(' ', '-')}-{weight_type}.gguf"
    return write_gguf(path, metadata, tensors)


def vision_vocabulary(name: str) -> Vocabulary:
    """Return the tiny vocabulary with the row's markers at its end."""
    vocabulary, markers = tiny_vocabulary(), TINY_PROJECTORS[name].markers
    tokens, types = (*vocabulary.tokens, *markers), (*vocabulary.types, *(CONTROL,) * len(markers))
    return replace(vocabulary, tokens=tokens, types=types)


def tiny_text_model(
    folder: Path, name: str, weight_type: str = "F32", *, text: str = "", text_width: int = TEXT_WIDTH, **sizes: Any
) -> Path:
    """Write a text model that the rows of this projector fit, with a chat template that takes images.

    text  a row of TINY_ARCHITECTURES; by default, the projector's
    """
    projector, vocabulary = TINY_PROJECTORS[name], vision_vocabulary(name)
    row = TINY_ARCHITECTURES[text or projector.text]
    text_model = replace(row, **({"width": text_width} | dict(projector.text_sizes) | sizes))
    metadata = text_model.metadata() | vocabulary.metadata()
    metadata[f"{text_model.architecture}.context_length"] = 8192
    metadata["tokenizer.chat_template"] = _TEMPLATE % projector.placeholder
    tensors = text_model.tensors(weight_type, len(vocabulary.tokens))
    return write_gguf(folder / f"tiny-{name.replace(' ', '-')}-{weight_type}.gguf", metadata, tensors)
