"""Headers of published models: the sizes and the metadata of their files, without weights.

The sizes come from the models' configs. A header is that of a tiny model with other sizes, so the names of its tensors
are those of llama.cpp's loader. The number of parameters shows that the sizes are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmrun.formats.gguf.reader import GGUFFile
from tests.support.gguf.gguf_files import UNUSED, header_of_a_large_file, tiny_vocabulary
from tests.support.models.tiny_architecture import TinyArchitecture
from tests.support.models.tiny_architectures import TINY_ARCHITECTURES


@dataclass(frozen=True)
class PublishedModel:
    """A published model, described by what differs from a tiny model of the same form.

    form        name of the tiny model
    parameters  number of parameters in billions, according to the model card or the checkpoint
    sizes       fields of the tiny model
    keys        metadata; None removes a key
    dense       number of layers at the beginning that look like layer 0 of the tiny model
    ahead       whether the last layer looks like that of the tiny model, a layer for multi-token prediction
    like        layer number -> number of the layer of the tiny model that it looks like, for other layers
    """

    form: str
    parameters: float
    vocabulary: int
    sizes: Mapping[str, Any]
    keys: Mapping[str, Any] = field(default_factory=dict)
    dense: int = 0
    ahead: bool = False
    like: Mapping[int, int] = field(default_factory=dict)
    tied: bool = False

    @property
    def row(self) -> TinyArchitecture:
        tiny, keys = TINY_ARCHITECTURES[self.form], dict(self.keys)
        others = {layer: tiny.names_of(model) for layer, model in self.like.items()}
        if self.dense:
            keys["leading_dense_block_count"] = self.dense
            others |= dict.fromkeys(range(self.dense), tiny.names_of(0))
        if self.ahead:
            others[self.sizes["layers"] - 1] = tiny.names_of(tiny.layers - 1)
        once = tiny.once.replace("output:v,w", "") + ("" if self.tied else " output:v,w")
        sizes = {"head_size": 128} | dict(self.sizes)
        keys = {key: value for key, value in (dict(tiny.keys) | keys).items() if value is not None}
        return replace(tiny, keys=keys, once=once, others=others, **sizes)

    def header(self, path: Path) -> GGUFFile:
        """Write the header to `path` and open it, with weights in BF16."""
        row, metadata = self.row, tiny_vocabulary().metadata()
        tokens = metadata["tokenizer.ggml.tokens"]
        more = self.vocabulary - len(tokens)
        metadata["tokenizer.ggml.tokens"] = (*tokens, *(f"[PAD{number}]" for number in range(more)))
        metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"].tolist(), *[UNUSED] * more]
        shapes = {row.full_name(name): shape for name, shape in row.shapes(self.vocabulary).items()}
        return header_of_a_large_file(path, row.metadata() | metadata, shapes, "BF16")


def _sizes(layers: int, width: int, heads: tuple[int, int], feed_forward: int, **more: int) -> dict[str, Any]:
    return dict(layers=layers, width=width, heads=heads[0], kv_heads=heads[1], feed_forward=feed_forward, **more)


def _experts(count: int, used: int, **more: Any) -> dict[str, Any]:
    return {"expert_count": count, "expert_used_count": used} | more


_GROUPS = {"expert_group_count": 8, "expert_group_used_count": 4}
_LATENT = {"head_size": 192, "latent": (512, 128)}
_LATENT_KEYS = {"rope.dimension_count": 64, "attention.q_lora_rank": 1536}
_BAILING = {"rope.dimension_count": 64, "nextn_predict_layers": 0, "expert_weights_scale": 2.5}
_GLM = {"rope.dimension_count": 64, "rope.dimension_sections": None}
_XIELU = {"alpha_n": 0.8, "alpha_p": 0.8, "beta": 0.5, "eps": -1e-6}
_QWEN3VL = {"rope.dimension_sections": np.array([24, 20, 20, 0], np.int32), "n_deepstack_layers": 3}

_SPARSE = np.array([1.6448533535003662] * 10 + [-np.inf] * 25, np.float32)

PUBLISHED_MODELS = {
    "GLM-4.5-Air": PublishedModel(
        "glm4moe GLM-4.5V, text",
        106.8,
        151552,
        _sizes(46, 4096, (96, 8), 10944, experts=128, expert_size=1408),
        _experts(128, 8) | _GLM | {"expert_weights_norm": True, "expert_weights_scale": 1.0},
        dense=1,
    ),
    "GLM-4.5V": PublishedModel(
        "glm4moe GLM-4.5V, text",
        106.8,
        151552,
        _sizes(46, 4096, (96, 8), 10944, experts=128, expert_size=1408),
        _experts(128, 8) | {"rope.dimension_count": 64, "rope.dimension_sections": np.array([8, 12, 12, 0], np.int32)},
        dense=1,
    ),
    "GLM-4.6": PublishedModel(
        "glm4moe",
        356.8,
        151552,
        _sizes(93, 5120, (96, 8), 12288, experts=160, expert_size=1536),
        _experts(160, 8) | {"rope.dimension_count": 64, "expert_weights_scale": 2.5},
        dense=3,
        ahead=True,
    ),
    "Solar Open 100B": PublishedModel(
        "glm4moe Solar Open",
        102.6,
        196608,
        _sizes(48, 4096, (64, 8), 10240, experts=128, expert_size=1280),
        _experts(128, 8),
    ),
    "dots.llm1": PublishedModel(
        "dots1",
        142.8,
        152064,
        _sizes(62, 4096, (32, 32), 10944, experts=128, expert_size=1408),
        _experts(128, 6, expert_shared_count=2),
        dense=1,
    ),
    "Ling-mini-2.0": PublishedModel(
        "bailingmoe2",
        16.26,
        157184,
        _sizes(20, 2048, (16, 4), 5120, experts=256, expert_size=512),
        _experts(256, 8) | _GROUPS | _BAILING | {"expert_shared_feed_forward_length": 512},
        dense=1,
    ),
    "Ling-1T": PublishedModel(
        "bailingmoe2",
        1000,
        157184,
        _sizes(80, 8192, (64, 8), 18432, experts=256, expert_size=2048),
        _experts(256, 8) | _GROUPS | _BAILING | {"expert_shared_feed_forward_length": 2048},
        dense=4,
    ),
    "ERNIE-4.5-21B-A3B": PublishedModel(
        "ernie4_5-moe",
        21.8,
        103424,
        _sizes(28, 2560, (20, 4), 12288, experts=64, expert_size=1536),
        _experts(64, 6, expert_shared_count=2, expert_shared_feed_forward_length=3072),
        dense=1,
        tied=True,
    ),
    "ERNIE-4.5-300B-A47B": PublishedModel(
        "ernie4_5-moe 300B",
        299.9,
        103424,
        _sizes(54, 8192, (64, 8), 28672, experts=64, expert_size=3584),
        _experts(64, 8, expert_shared_count=0),
        dense=3,
    ),
    "MiniMax-M2": PublishedModel(
        "minimax-m2",
        228.7,
        200064,
        _sizes(62, 3072, (48, 8), 1536, experts=256, expert_size=1536),
        _experts(256, 8) | {"rope.dimension_count": 64},
    ),
    "DeepSeek-V3": PublishedModel(
        "deepseek2 V3",
        671,
        129280,
        _sizes(61, 7168, (128, 1), 18432, experts=256, expert_size=2048) | _LATENT,
        _experts(256, 8) | _GROUPS | _LATENT_KEYS | {"rope.scaling.factor": 40.0},
        dense=3,
    ),
    "Kimi-K2": PublishedModel(
        "deepseek2 V3",
        1026,
        163840,
        _sizes(61, 7168, (64, 1), 18432, experts=384, expert_size=2048) | _LATENT,
        _experts(384, 8) | _LATENT_KEYS | {"expert_group_count": 1, "expert_group_used_count": 1},
        dense=1,
    ),
    "Mistral-Large-3": PublishedModel(
        "deepseek2 Mistral Large 3",
        673,
        131072,
        _sizes(61, 7168, (128, 1), 16384, experts=128, expert_size=4096) | _LATENT,
        _experts(128, 4) | _LATENT_KEYS | {"attention.temperature_length": 8192, "expert_weights_scale": 1.0},
        dense=3,
    ),
    "Mistral-Small-4": PublishedModel(
        "mistral4",
        119,
        131072,
        _sizes(36, 4096, (32, 1), 12288, experts=128, expert_size=2048) | {"head_size": 128, "latent": (256, 128)},
        _experts(128, 4) | {"rope.dimension_count": 64, "attention.q_lora_rank": 1024},
    ),
    "AFM-4.5B": PublishedModel("arcee", 4.62, 128004, _sizes(36, 2560, (20, 4), 18432)),
    "Apertus-8B": PublishedModel(
        "apertus",
        8.05,
        131072,
        _sizes(32, 4096, (32, 8), 21504),
        {f"xielu.{name}": np.full(32, value, np.float32) for name, value in _XIELU.items()},
    ),
    "SmallThinker-21B-A3B": PublishedModel(
        "smallthinker",
        21.5,
        151936,
        _sizes(52, 2560, (28, 4), 768, experts=64, expert_size=768),
        _experts(64, 6),
    ),
    "SmallThinker-4B-A0.6B": PublishedModel(
        "smallthinker without window",
        4.27,
        151936,
        _sizes(32, 1536, (12, 2), 768, experts=32, expert_size=768),
        _experts(32, 4),
    ),
    "Hunyuan-7B": PublishedModel("hunyuan-dense", 7.5, 128167, _sizes(32, 4096, (32, 8), 14336), tied=True),
    "Hunyuan-A13B": PublishedModel(
        "hunyuan-moe",
        80.4,
        128167,
        _sizes(32, 4096, (32, 8), 3072, experts=64, expert_size=3072),
        _experts(64, 8, expert_shared_count=1, expert_shared_feed_forward_length=3072),
        tied=True,
    ),
    "Jamba-Mini-1.7": PublishedModel(
        "jamba",
        51.6,
        65536,
        _sizes(32, 4096, (32, 8), 14336, experts=16, expert_size=14336),
        _experts(16, 2) | {"ssm.inner_size": 8192, "ssm.time_step_rank": 256},
        like=dict.fromkeys(range(4, 32, 8), 2) | dict.fromkeys(range(1, 32, 2), 1),
    ),
    "Jamba-Reasoning-3B": PublishedModel(
        "jamba dense",
        3.03,
        65536,
        _sizes(28, 2560, (20, 1), 8192),
        _experts(1, 1) | {"ssm.inner_size": 5120, "ssm.time_step_rank": 160, "ssm.state_size": 16},
        like={7: 1, 21: 1},
        tied=True,
    ),
    "Gemma-3n-E4B": PublishedModel(
        "gemma3n",
        6.87,
        262400,
        _sizes(35, 2048, (8, 2), 16384, head_size=256),
        {
            "attention.sliding_window": 512,
            "attention.sliding_window_pattern": np.arange(35) % 5 < 4,
            "attention.shared_kv_layers": 15,
            "activation_sparsity_scale": _SPARSE,
            "feed_forward_length": np.full(35, 16384, np.int32),
            "final_logit_softcapping": 30.0,
        },
        tied=True,
    ),
    "Qwen2.5-VL-7B": PublishedModel(
        "qwen2vl",
        7.6,
        152064,
        _sizes(28, 3584, (28, 4), 18944),
        {"rope.dimension_sections": np.array([16, 24, 24, 0], np.int32)},
    ),
    "Qwen3-VL-8B": PublishedModel("qwen3vl", 8.2, 151936, _sizes(36, 4096, (32, 8), 12288), _QWEN3VL),
    "Qwen3-VL-30B-A3B": PublishedModel(
        "qwen3vlmoe",
        30.5,
        151936,
        _sizes(48, 2048, (32, 4), 6144, experts=128, expert_size=768),
        _experts(128, 8) | _QWEN3VL,
    ),
}
