"""Tiny models of every architecture that computes embeddings: one row each, by name. See tiny_architectures.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from llmrun.base.types import Pooling
from tests.support.gguf.gguf_files import tiny_vocabulary, write_gguf
from tests.support.models.tiny_architecture import TinyArchitecture
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES
from tests.support.tokenizers.vocabulary_models import FillVocabulary, tokenizer_keys

_LAYER_NORM = "attention.layer_norm_epsilon"
_ENCODER = {"attention.causal": False}  # as in all such files; without the key, they still have no causal mask
_ATTENTION = "attn_q:q,w attn_k:k,w attn_v:k,w attn_output:w,q "
_BIASES = "attn_q.bias:q attn_k.bias:k attn_v.bias:k attn_output.bias:w ffn_up.bias:f ffn_down.bias:w "
_NORMS = "attn_output_norm:w attn_output_norm.bias:w layer_output_norm:w layer_output_norm.bias:w "
_BERT = _ATTENTION + _BIASES + _NORMS + "ffn_up:f,w ffn_down:w,f"
_NOMIC = "attn_qkv:a,w attn_output:w,q " + _NORMS + "ffn_gate:f,w ffn_up:f,w ffn_down:w,f"
_EMBEDDING = "token_types:2,w position_embd:512,w token_embd_norm.bias:w"
_HEAD = " cls:w,w cls.bias:w cls.output:1,w cls.output.bias:1"
_GEMMA = "attn_norm:w ffn_norm:w attn_q_norm:h attn_k_norm:h post_attention_norm:w post_ffw_norm:w "
_GEMMA += _ATTENTION + "ffn_gate:f,w ffn_up:f,w ffn_down:w,f"
_WINDOW = {"attention.sliding_window": 16, "rope.freq_base": 1e6}
_DENSE = {"dense_2_feat_in": 64, "dense_2_feat_out": 96, "dense_3_feat_in": 96, "dense_3_feat_out": 64}

_T5_LAYER = "attn_norm:w attn_q:w,w attn_k:w,w attn_v:w,w attn_o:w,w attn_rel_b:32,n ffn_norm:w ffn_up:f,w ffn_down:w,f"
_T5 = " ".join(f"enc.blk.0.{tensor}" for tensor in _T5_LAYER.split())

TINY_ENCODERS: dict[str, TinyArchitecture] = {
    "bert": TinyArchitecture(
        "bert",
        _BERT,
        _ENCODER | {"pooling_type": Pooling.CLS},
        once=_EMBEDDING,
        kv_heads=4,
        epsilon=_LAYER_NORM,
        last_norm="token_embd_norm",
        unseen=("pooling_type", *_ENCODER),
    ),
    "bert unused head": TinyArchitecture(
        "bert",
        _BERT,
        _ENCODER,
        once=_EMBEDDING + _HEAD,
        kv_heads=4,
        epsilon=_LAYER_NORM,
        last_norm="token_embd_norm",
        unseen=(*_ENCODER,),
        tokens=300,
    ),
    "nomic-bert": TinyArchitecture(
        "nomic-bert",
        _NOMIC,
        _ENCODER | {"rope.freq_base": 1000.0},
        once="token_types:2,w token_embd_norm.bias:w",
        kv_heads=4,
        epsilon=_LAYER_NORM,
        last_norm="token_embd_norm",
        unseen=(*_ENCODER,),
    ),
    "gemma-embedding": TinyArchitecture("gemma-embedding", _GEMMA, _WINDOW, layers=7, head_size=32, tokens=200),
    "gemma-embedding dense": TinyArchitecture(
        "gemma-embedding",
        _GEMMA,
        _WINDOW | {"rope.freq_base_swa": 3e4} | _DENSE,
        once="dense_2:f,w dense_3:w,f",
        layers=7,
        head_size=32,
        unseen=tuple(set(_DENSE) - {"dense_2_feat_out"}),
    ),
}
# Architectures that only llama.cpp runs.
LLAMA_ENCODERS: dict[str, TinyArchitecture] = {
    "jina-bert-v2": TinyArchitecture(
        "jina-bert-v2",
        _ATTENTION + _BIASES + _NORMS + "ffn_gate:f,w ffn_up:f,w ffn_down:w,f",
        _ENCODER | {"attention.max_alibi_bias": 8.0},
        once="token_types:2,w token_embd_norm.bias:w",
        kv_heads=4,
        epsilon=_LAYER_NORM,
        last_norm="token_embd_norm",
    ),
    "modern-bert": TinyArchitecture(
        "modern-bert",
        "attn_norm:w attn_qkv:i,w attn_output:w,w ffn_up:g,w ffn_down:w,f ffn_norm:w",
        _ENCODER | {"attention.sliding_window": 16, "rope.freq_base_swa": 1e4, "pooling_type": Pooling.CLS},
        once="token_embd_norm:w",
        layers=4,
        kv_heads=4,
        epsilon=_LAYER_NORM,
    ),
    "t5encoder": TinyArchitecture(
        "t5encoder",
        "",
        {"attention.relative_buckets_count": 32},
        once=_T5,
        layers=1,
        kv_heads=4,
        last_norm="enc.output_norm",
    ),
    # Its files have the key, and llama.cpp gives it a cache.
    "llama-embed": TinyArchitecture(
        "llama-embed",
        "attn_norm:w ffn_norm:w " + _ATTENTION + "ffn_gate:f,w ffn_up:f,w ffn_down:w,f",
        _ENCODER | {"rope.dimension_count": 16},
        once="output:v,w",
    ),
}
_T5_DECODER = f"{_T5_LAYER} cross_attn_norm:w cross_attn_q:w,w cross_attn_k:w,w cross_attn_v:w,w cross_attn_o:w,w"
# Models that llama.cpp opens but llmrun cannot run.
REFUSED: dict[str, TinyArchitecture] = {
    "t5": replace(
        LLAMA_ENCODERS["t5encoder"],
        architecture="t5",
        once=" ".join([_T5, *(f"dec.blk.0.{tensor}" for tensor in _T5_DECODER.split()), "dec.output_norm:w"]),
    ),
    "dream": replace(TINY_ARCHITECTURES["qwen2"], architecture="dream"),
}
# Models that score a document for a query. Their hidden state is the score.
TINY_RERANKERS: dict[str, TinyArchitecture] = {
    "bert": replace(
        TINY_ENCODERS["bert"],
        keys=_ENCODER | {"pooling_type": Pooling.RANK},
        once=_EMBEDDING + _HEAD,
    ),
    "bert one layer": replace(
        TINY_ENCODERS["bert"],
        keys=_ENCODER | {"pooling_type": Pooling.RANK},
        once=_EMBEDDING + " cls.output:1,w cls.output.bias:1",
    ),
    "qwen3": TinyArchitecture(
        "qwen3",
        "attn_norm:w ffn_norm:w attn_q_norm:h attn_k_norm:h " + _ATTENTION + "ffn_gate:f,w ffn_up:f,w ffn_down:w,f",
        {"pooling_type": Pooling.RANK, "classifier.output_labels": ("yes", "no")},
        once="cls.output:2,w",
        head_size=32,
    ),
}


def tiny_encoder(
    folder: Path,
    row: TinyArchitecture,
    weight_type: str = "F32",
    *,
    without: str = "",
    vocabulary: str = "",
    **sizes: Any,
) -> Path:
    """Write a model and return its path.

    without     a key to omit
    vocabulary  the name of one of llama.cpp's vocabularies, or "" for the tiny one
    sizes       override the row's fields
    """
    row = replace(row, **sizes)
    keys = tokenizer_keys(FillVocabulary(vocabulary)) if vocabulary else tiny_vocabulary().metadata()
    metadata = row.metadata() | keys | {"tokenizer.ggml.token_type_count": 2}
    metadata.pop(f"{row.architecture}.{without}", None)
    tensors = row.tensors(weight_type, len(keys["tokenizer.ggml.tokens"]))
    return write_gguf(folder / f"{row.architecture}.gguf", metadata, tensors)


def some_tokens(row: TinyArchitecture) -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(3, 290, row.tokens)]
