#!/usr/bin/env python3
"""Create models for benchmarks: popular shapes with random weights, one file for each weight type.

    scripts/make_models.py FOLDER [TYPE ...]                   Llama 3.2 1B: Q4_0 Q4_K_M Q8_0 Q5_K_M Q6_K IQ4_XS MXFP4
    scripts/make_models.py FOLDER Q4_K_M --shape gemma3-1b     another shape (see SHAPES); takes a few minutes
    scripts/make_models.py FOLDER Q4_K_M --shape qwen3.5-0.8b-mtp --accepted 0.75     a draft head that is often right

llama.cpp quantizes the files from a Q8_0 file. gguf-py quantizes MXFP4, which llama.cpp writes only for experts. The
vocabularies come from the source distribution of llama-cpp-python, which pip downloads.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from llmrun.formats.gguf.reader import open_gguf  # noqa: E402
from llmrun.model.archs.parts.draft_head import DRAFTED_TOKENS  # noqa: E402
from tests.support.gguf.gguf_files import CHATML, Tensor, write_gguf  # noqa: E402
from tests.support.models.downloads import LLAMA_CPP_FOLDER, llama_cpp_source  # noqa: E402
from tests.support.models.exact_head import ADDED  # noqa: E402
from tests.support.models.llama_cpp_oracle import requantize  # noqa: E402
from tests.support.models.tiny_architecture import TinyArchitecture  # noqa: E402
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES  # noqa: E402
from tests.support.models.tiny_encoders import TINY_ENCODERS  # noqa: E402

TYPES = ("Q4_0", "Q4_K_M", "Q8_0", "Q5_K_M", "Q6_K", "IQ4_XS", "MXFP4")
SOURCE = "Q8_0"
WRITTEN_HERE = (SOURCE, "MXFP4")
# Vocabulary sizes of real models for which the vocabulary files in llama.cpp's source have fewer tokens.
PADDED_TO = {"qwen35": 248_320}
UNUSED_TOKEN = 5  # the type of a token that is never generated or read


def _shape(row: str, keys: dict[str, Any], **sizes: int) -> TinyArchitecture:
    """Return a tiny test architecture scaled up to real sizes."""
    tiny = TINY_ARCHITECTURES[row]
    return replace(tiny, keys={**tiny.keys, **keys}, **sizes)  # type: ignore[arg-type]


def _qwen35(*, ahead: int = 0, **sizes: int) -> TinyArchitecture:
    """Return a Qwen3.5 model of 24 layers. Every fourth is an attention layer, and the others are gated delta nets.

    ahead  1 to add the layer for multi-token prediction
    """
    tiny, layers = TINY_ARCHITECTURES["qwen35"], 24
    attention = tiny.others[2]
    keys = {
        "context_length": 262_144,
        "full_attention_interval": 4,
        "rope.dimension_count": 64,
        "rope.dimension_sections": np.array([11, 11, 10, 0], np.int32),
        "rope.freq_base": 1e7,
        "ssm.state_size": 128,
        "ssm.inner_size": 2048,
        "ssm.group_count": 16,
        "ssm.time_step_rank": 16,
    }
    others = dict.fromkeys(range(3, layers, 4), attention)
    if ahead:
        keys["nextn_predict_layers"] = ahead
        others[layers] = TINY_ARCHITECTURES["qwen35 layers by name, with a layer ahead"].others[3]
    shape = {"layers": layers + ahead, "heads": 8, "kv_heads": 2, "head_size": 256}
    return replace(_shape("qwen35", keys, **shape, **sizes), others=others, once="")


def _bert(**sizes: int) -> TinyArchitecture:
    """Return a BERT model whose heads all have keys and values of their own."""
    return replace(TINY_ENCODERS["bert"], kv_heads=sizes["heads"], **sizes)  # type: ignore[arg-type]


# Each shape consists of a vocabulary and the sizes of a model.
SHAPES: dict[str, tuple[str, TinyArchitecture]] = {
    "1b": (
        "llama-bpe",
        replace(
            _shape("qwen3", {"rope.freq_base": 500_000.0, "context_length": 8192}, layers=16, width=2048, heads=32),
            architecture="llama",
            kv_heads=8,
            head_size=64,
            feed_forward=8192,
            layer=TINY_ARCHITECTURES["smollm3"].layer,
        ),
    ),
    "qwen3-0.6b": (
        "qwen2",
        _shape(
            "qwen3",
            {"context_length": 40960},
            layers=28,
            width=1024,
            heads=16,
            kv_heads=8,
            head_size=128,
            feed_forward=3072,
        ),
    ),
    "gemma3-1b": (
        "gemma-4",
        _shape(
            "gemma3",
            {"context_length": 32768, "attention.sliding_window": 512},
            layers=26,
            width=1152,
            heads=4,
            kv_heads=1,
            head_size=256,
            feed_forward=6912,
        ),
    ),
    "phi3-mini": (
        "phi-3",
        _shape(
            "phi3",
            {"context_length": 4096, "attention.sliding_window": 2047},
            layers=32,
            width=3072,
            heads=32,
            kv_heads=32,
            head_size=96,
            feed_forward=8192,
        ),
    ),
    "moe-1b": (
        "llama-bpe",
        _shape(
            "qwen3moe",
            {"context_length": 8192, "expert_count": 32, "expert_used_count": 4, "expert_feed_forward_length": 512},
            layers=16,
            width=1024,
            heads=16,
            kv_heads=4,
            head_size=64,
            feed_forward=3072,
            experts=32,
            expert_size=512,
        ),
    ),
    "moe-128": (
        "llama-bpe",
        _shape(
            "qwen3moe",
            {"context_length": 8192, "expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 512},
            layers=24,
            width=1024,
            heads=16,
            kv_heads=4,
            head_size=64,
            feed_forward=3072,
            experts=128,
            expert_size=512,
        ),
    ),
    # Encoders, for scripts/measure_embeddings.py
    "bge-small": ("bert-bge", _bert(layers=12, width=384, heads=12, head_size=32, feed_forward=1536)),
    "bge-base": ("bert-bge", _bert(layers=12, width=768, heads=12, head_size=64, feed_forward=3072)),
    "qwen3.5-0.8b": ("qwen35", _qwen35(width=1024, feed_forward=3584)),
    "qwen3.5-2b": ("qwen35", _qwen35(width=2048, feed_forward=6144)),
    "qwen3.5-0.8b-mtp": ("qwen35", _qwen35(width=1024, feed_forward=3584, ahead=1)),
    "qwen3.5-2b-mtp": ("qwen35", _qwen35(width=2048, feed_forward=6144, ahead=1)),
}


def vocabulary_of(name: str) -> dict[str, Any]:
    """Return the metadata of one of llama.cpp's tokenizers."""
    with open_gguf(llama_cpp_source() / LLAMA_CPP_FOLDER / f"ggml-vocab-{name}.gguf") as file:
        found = {
            key: value if isinstance(value, str | bool | int | float | np.ndarray) else list(value)
            for key, value in file.metadata.items()
            if key.startswith("tokenizer.ggml.")
        }
        tokens, types = file.strings("tokenizer.ggml.tokens"), file.integers("tokenizer.ggml.token_type")
    missing = max(0, PADDED_TO.get(name, 0) - len(tokens))
    unused = [f"[unused {number}]" for number in range(missing)]
    return found | {
        "tokenizer.ggml.tokens": [*tokens, *unused],
        "tokenizer.ggml.token_type": np.append(types, np.full(missing, UNUSED_TOKEN, types.dtype)),
    }


def _with_right_drafts(tensors: dict[str, Tensor], head: str, accepted: float) -> dict[str, Tensor]:
    """Return the tensors of a model that computes the next token from the current token alone, as its head does.

    The layers add nothing, and the output matrix contains the embedding of each token in the row of the next one. The
    head has a copy of this matrix, in which a share of 1 - `accepted` of the rows are exchanged.

    head  the prefix of the head's tensors
    """
    random = np.random.default_rng(1)
    kind, embedding = tensors["token_embd.weight"][:2]
    assert isinstance(embedding, np.ndarray)
    n, width = min(len(embedding), DRAFTED_TOKENS // 2), embedding.shape[1]  # the others may be control tokens
    output = embedding.copy()
    output[random.permutation(n)] = embedding[:n]
    drafted, wrong = output.copy(), random.permutation(n)[: round((1 - accepted) * n)]
    drafted[wrong] = output[np.roll(wrong, 1)]
    token_only = np.concatenate([np.eye(width), np.zeros((width, width))], axis=1).astype(np.float32)
    return {
        **{name: (one[0], np.zeros_like(one[1])) if name.endswith(ADDED) else one for name, one in tensors.items()},
        "output.weight": (kind, output),
        f"{head}.shared_head_head.weight": (kind, drafted),
        f"{head}.eh_proj.weight": (kind, token_only),
    }


def write(path: Path, shape: str, weight_type: str, accepted: float | None = None) -> Path:
    """Write a model file and return its path.

    accepted  the share of right draft tokens of a model with a draft head; None for random drafts

    All layers of a kind have the same weights. That does not affect measurements, and writing the file takes little
    memory.
    """
    vocabulary, row = SHAPES[shape]
    first = {row.names_of(layer): layer for layer in reversed(range(row.layers))}  # the first layer of each kind
    tokenizer = vocabulary_of(vocabulary)
    tensors: dict[str, Tensor] = {}
    few = replace(row, layers=max(first.values()) + 1)
    made = few.tensors(weight_type, len(tokenizer["tokenizer.ggml.tokens"]))
    if accepted is not None:
        made = _with_right_drafts(made, f"blk.{row.layers - 1}.nextn", accepted)
    for name, tensor in made.items():
        if name.startswith("blk.") and int(name.split(".")[1]) not in first.values():
            continue
        kind, values = tensor[0], tensor[1]
        assert isinstance(values, np.ndarray)
        raw = gguf.quants.quantize(np.ascontiguousarray(values), gguf.GGMLQuantizationType[kind]).tobytes()
        for layer in range(row.layers):
            names = name.replace(f"blk.{first[row.names_of(layer)]}.", f"blk.{layer}.")
            tensors[names] = (kind, raw, values.shape)
    if accepted is not None:
        tokenizer["tokenizer.chat_template"] = CHATML  # `bench --prompts` needs one
    return write_gguf(path, row.metadata() | tokenizer, tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--accepted", type=float, metavar="SHARE")
    options = parser.parse_args()
    name = options.shape if options.accepted is None else f"{options.shape}-{options.accepted}"
    for weight_type in dict.fromkeys((SOURCE, *(options.types or TYPES))):
        target = options.folder / f"{name}-{weight_type}.gguf"
        if not target.exists():
            part = target.with_suffix(".part")
            if weight_type in WRITTEN_HERE:
                write(part, options.shape, weight_type, options.accepted)
            else:
                requantize(options.folder / f"{name}-{SOURCE}.gguf", part, weight_type)
            part.rename(target)
        print(target, flush=True)


if __name__ == "__main__":
    main()
