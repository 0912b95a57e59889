"""Tiny checkpoints of all forms and methods, in the layout of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmrun.formats.quants.floats import quantize_bf16
from tests.support.converting.packing import Quantized, Tensors
from tests.support.gguf.gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    Vocabulary,
    tiny_spm_vocabulary,
    tiny_vocabulary,
)

WIDTH, FEATURES, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
HEAD_SIZES = {"LlamaForCausalLM": 16, "MistralForCausalLM": 16, "Qwen2ForCausalLM": 16, "Qwen3ForCausalLM": 32}
FORMS = tuple(HEAD_SIZES)

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS_APART = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]}


@dataclass
class TinyCheckpoint:
    """A checkpoint that has not been written yet. Tests may change its parts.

    weights  module -> its exact weights, float32[outputs, inputs], for modules that are quantized
    files    name -> text of the other files
    """

    config: dict[str, Any]
    tensors: Tensors
    weights: dict[str, NDArray[np.float32]]
    tokenizer: dict[str, Any]
    tokenizer_config: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write all files into a new folder, and return it."""
        folder.mkdir()
        save_safetensors(folder / "model.safetensors", self.tensors)
        parts = {
            "config.json": self.config,
            "tokenizer.json": self.tokenizer,
            "tokenizer_config.json": self.tokenizer_config,
        }
        for name, text in {**{name: json.dumps(part) for name, part in parts.items()}, **self.files}.items():
            (folder / name).write_text(text, encoding="utf-8")
        return folder


def tiny_checkpoint(
    form: str = "LlamaForCausalLM",
    method: str = "awq",
    *,
    group: int = 32,
    zero: int | None = 8,
    tied: bool = False,
    stored: str = "F16",
    seed: int = 0,
    **config: Any,
) -> TinyCheckpoint:
    """Return a checkpoint with random weights.

    method  "awq", "gptq", "gptq_v2", or "" for weights that are not quantized
    group   inputs that share a scale, or -1 for all
    zero    the zero point of all groups, or None for random ones
    stored  the type of the matrices that are not quantized
    config  is added to config.json
    """
    random = np.random.default_rng(seed)
    vocabulary = tiny_vocabulary()
    tensors: Tensors = {}
    weights: dict[str, NDArray[np.float32]] = {}

    def plain(name: str, *shape: int) -> None:
        values = (
            random.standard_normal(shape) / np.sqrt(shape[-1]) if len(shape) > 1 else random.uniform(0.9, 1.1, shape)
        )
        tensors[name] = (stored, encoded(stored, values.astype(np.float32)))

    def linear(module: str, outputs: int, inputs: int) -> None:
        if not method:
            plain(f"{module}.weight", outputs, inputs)
            return
        quantized = Quantized.random(random, outputs, inputs, inputs if group == -1 else group, zero=zero)
        packed = quantized.awq(module) if method == "awq" else quantized.gptq(module, version=1 + (method == "gptq_v2"))
        tensors.update(packed)
        weights[module] = quantized.weights()

    size = HEAD_SIZES[form]
    plain("model.embed_tokens.weight", len(vocabulary.tokens), WIDTH)
    for layer in (f"model.layers.{index}" for index in range(LAYERS)):
        plain(f"{layer}.input_layernorm.weight", WIDTH)
        plain(f"{layer}.post_attention_layernorm.weight", WIDTH)
        for name, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            linear(f"{layer}.self_attn.{name}", heads * size, WIDTH)
            if form == "Qwen2ForCausalLM":
                plain(f"{layer}.self_attn.{name}.bias", heads * size)
        if form == "Qwen3ForCausalLM":
            plain(f"{layer}.self_attn.q_norm.weight", size)
            plain(f"{layer}.self_attn.k_norm.weight", size)
        linear(f"{layer}.self_attn.o_proj", WIDTH, HEADS * size)
        linear(f"{layer}.mlp.gate_proj", FEATURES, WIDTH)
        linear(f"{layer}.mlp.up_proj", FEATURES, WIDTH)
        linear(f"{layer}.mlp.down_proj", WIDTH, FEATURES)
    plain("model.norm.weight", WIDTH)
    if not tied:
        plain("lm_head.weight", len(vocabulary.tokens), WIDTH)
    made = _config(form, len(vocabulary.tokens), tied) | _quantization(method, group) | config
    return TinyCheckpoint(made, tensors, weights, byte_level_tokenizer(vocabulary), _tokenizer_config(vocabulary))


def _config(form: str, vocabulary: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": [form],
        "model_type": form.removesuffix("ForCausalLM").lower(),
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": FEATURES,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZES[form],
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float16",
    }


def _quantization(method: str, group: int) -> dict[str, Any]:
    if not method:
        return {}
    settings: dict[str, Any] = {"bits": 4, "group_size": group, "quant_method": method.removesuffix("_v2")}
    if method == "awq":
        settings |= {"version": "gemm", "zero_point": True, "modules_to_not_convert": None}
    else:
        settings |= {"desc_act": False, "sym": True, "checkpoint_format": method}
    return {"quantization_config": settings}


def byte_level_tokenizer(vocabulary: Vocabulary, pre_tokenizer: dict[str, Any] = DIGITS_APART) -> dict[str, Any]:
    """Return the tokenizer.json of a byte-level BPE vocabulary. Its default is SmolLM2's pre-tokenizer."""
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(vocabulary.tokens)},
            "merges": [merge.split(" ") for merge in vocabulary.merges],
        },
    }


def sentencepiece_vocabulary(pieces: Sequence[str]) -> Vocabulary:
    """Return a vocabulary in Llama 2's order, with pieces from the best to the worst, and all their characters."""
    tiny = tiny_spm_vocabulary()
    all_pieces = tuple(dict.fromkeys([*pieces, *"".join(pieces)]))
    return Vocabulary(
        (*tiny.tokens[:259], *all_pieces),
        (*tiny.types[:259], *(NORMAL,) * len(all_pieces)),
        model="llama",
        scores=(*(0.0,) * 259, *(-float(rank) for rank in range(len(all_pieces)))),
        bos=1,
        eos=2,
        unknown=0,
    )


PIECES = ("▁t", "he", "▁the", "▁w", "or", "ld", "▁wor", "▁world", "▁H", "▁He", "ll", "▁Hell", "▁Hello", "▁▁", "▁▁▁▁")


def sentencepiece_tokenizer(vocabulary: Vocabulary | None = None) -> dict[str, Any]:
    """Return the tokenizer.json that transformers makes of a SentencePiece vocabulary, in Llama 2's form."""
    vocabulary = vocabulary or sentencepiece_vocabulary(PIECES)
    bos = vocabulary.tokens[1]
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {bos: {"id": bos, "ids": [1], "tokens": [bos]}},
        },
        "decoder": None,
        "model": {
            "type": "BPE",
            "unk_token": vocabulary.tokens[0],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {token: index for index, token in enumerate(vocabulary.tokens)},
            "merges": [list(merge) for merge in sentencepiece_merges(vocabulary)],
        },
    }


def sentencepiece_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, by the score of the result, as transformers lists them."""
    scores = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    pieces = [
        token
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if kind not in (CONTROL, UNKNOWN, BYTE)
    ]
    known = set(pieces)
    pairs = [(piece[:cut], piece[cut:]) for piece in pieces for cut in range(1, len(piece))]
    return sorted(
        [pair for pair in pairs if pair[0] in known and pair[1] in known], key=lambda pair: -scores["".join(pair)]
    )


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": index, "content": token, **flags, "special": True}
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (CONTROL, UNKNOWN)
    ]


def _tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    ids = {"bos": vocabulary.bos, "eos": vocabulary.eos, "unk": vocabulary.unknown, "pad": vocabulary.padding}
    return {f"{role}_token": vocabulary.tokens[index] for role, index in ids.items() if index is not None}


def encoded(dtype: str, values: NDArray[np.float32]) -> NDArray[np.generic]:
    """Encode float32 values as F32, F16 or BF16."""
    if dtype == "BF16":
        return quantize_bf16(values).view(np.uint16).reshape(values.shape)
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype])


def save_safetensors(path: Path, tensors: Mapping[str, tuple[str, NDArray[np.generic]]]) -> Path:
    """Write a safetensors file, with the tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, (dtype, values) in tensors.items():
        begin = len(data)
        data += np.ascontiguousarray(values).tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [begin, len(data)]}
    return write_safetensors(path, json.dumps(header), bytes(data))


def write_safetensors(path: Path, header: str, data: bytes) -> Path:
    """Write a file with any header."""
    encoded_header = header.encode()
    path.write_bytes(len(encoded_header).to_bytes(8, "little") + encoded_header + data)
    return path


def save_shards(folder: Path, tensors: Tensors, place: Callable[[str], str]) -> None:
    """Replace the safetensors file of a folder with several, and an index. `place` returns a tensor's file."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    placed = {name: place(name) for name in tensors}
    for name in sorted(set(placed.values())):
        save_safetensors(folder / name, {tensor: tensors[tensor] for tensor in tensors if placed[tensor] == name})
    index = {"metadata": {"total_size": 0}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def changed(values: Mapping[str, Any], keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a copy of nested objects with another value at the end of a path of keys."""
    first, *rest = keys
    return {**values, first: changed(values.get(first) or {}, rest, value) if rest else value}
