"""A tiny model of an architecture: converts its row in tiny_architectures.py to metadata and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np

from tests.support.gguf.gguf_files import Random, RandomWeights, Tensor

# Tensors that llama.cpp never quantizes, or that would have little effect with weights near 1.
_ALWAYS_FLOAT = (
    "ffn_gate_inp",
    "ffn_gate_inp_shexp",
    "attn_sinks",
    "shortconv.conv",
    "ssm_conv1d",
    "token_types",
    "position_embd",
)
# Architectures whose files have KV heads, or features of the feed-forward, only for the layers that use them.
_KV_HEADS_BY_LAYER = ("lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe", "jamba")
_FEED_FORWARD_BY_LAYER = ("nemotron_h", "nemotron_h_moe")
_RMS = "attention.layer_norm_rms_epsilon"
EXPERT_SIZE = "expert_feed_forward_length"
LENGTHS = ("attention.key_length", "attention.value_length")


@dataclass(frozen=True)
class TinyArchitecture:
    """A row of the table. `keys` are relative to the architecture's name; `once` lists the tensors outside layers.

    tokens    length of the test prompt; exceeds the window if there is one
    window_*  KV heads and head size of layers with a window, if they differ from the others; otherwise 0
    others    tensors of layers that differ from `layer`, by layer number
    experts   number of experts, with `expert_size` features each
    latent    (features of the latent for keys and values, features of a head's value)
    unseen    keys that have no effect, in llama.cpp too
    seed      seed of the weights, chosen so that no position is close to being routed to other experts, and no head of
              a recurrent layer has an output near 0, because its norm would enlarge the rounding error
    """

    architecture: str
    layer: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    once: str = ""
    layers: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 16
    window_kv_heads: int = 0
    window_head_size: int = 0
    feed_forward: int = 96
    epsilon: str = _RMS
    tokens: int = 80
    others: Mapping[int, str] = field(default_factory=dict)
    experts: int = 0
    expert_size: int = 32
    latent: tuple[int, int] = (0, 0)
    last_norm: str = "output_norm"
    unseen: tuple[str, ...] = ()
    seed: int = 0

    def metadata(self) -> dict[str, Any]:
        keys: dict[str, Any] = {
            "context_length": 512,
            "embedding_length": self.width,
            "block_count": self.layers,
            "feed_forward_length": self.feed_forward,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            self.epsilon: 1e-5,
        }
        if self.head_size * self.heads != self.width:
            keys |= {"attention.key_length": self.head_size, "attention.value_length": self.head_size}
        keys |= self.keys
        if EXPERT_SIZE in keys:
            keys[EXPERT_SIZE] = self.expert_size
        keys |= self._lengths_of_latent(keys)
        if self.window_head_size:
            keys |= {"attention.key_length_swa": self.window_head_size}
            keys |= {"attention.value_length_swa": self.window_head_size}
        if self.window_kv_heads:
            pattern = self.keys["attention.sliding_window_pattern"].tolist()
            counts = [self.window_kv_heads if window else self.kv_heads for window in pattern]
            keys["attention.head_count_kv"] = np.array(counts, np.int32)
        if any(":F" in self.names_of(layer) for layer in range(self.layers)):
            sizes = [self.feed_forward * (2 if ":F" in self.names_of(layer) else 1) for layer in range(self.layers)]
            keys["feed_forward_length"] = np.array(sizes, np.int32)
        if self.architecture in _KV_HEADS_BY_LAYER:
            keys["attention.head_count_kv"] = self._where("attn_k:", self.kv_heads)
        if self.architecture in _FEED_FORWARD_BY_LAYER:
            keys["feed_forward_length"] = self._where("ffn_", self.feed_forward)
        metadata = {
            "general.architecture": self.architecture,
            "general.name": "tiny",  # if the name is Phi-3, llama.cpp changes tokens that this vocabulary lacks
            "general.quantization_version": gguf.GGML_QUANT_VERSION,
        }
        return metadata | {self.full_key(key): value for key, value in keys.items()}

    def full_key(self, key: str) -> str:
        return key if key.startswith("xielu.") else f"{self.architecture}.{key}"

    def _lengths_of_latent(self, keys: Mapping[str, Any]) -> dict[str, int]:
        latent, value = self.latent
        if not latent:
            return {}
        lengths = {"attention.kv_lora_rank": latent} | dict(zip(LENGTHS, (self.head_size, value), strict=True))
        if f"{LENGTHS[0]}_mla" not in keys:
            return lengths
        of_heads = {f"{name}_mla": lengths[name] for name in LENGTHS}
        return lengths | of_heads | {LENGTHS[0]: keys["rope.dimension_count"] + latent, LENGTHS[1]: latent}

    def _where(self, name: str, value: int) -> list[int]:
        """Return a number per layer: `value` for layers that have a tensor of this name, 0 for the others."""
        return [value if name in self.names_of(layer) else 0 for layer in range(self.layers)]

    def names_of(self, layer: int) -> str:
        return self.others.get(layer, self.layer)

    def tensors(self, weight_type: str, vocabulary_size: int) -> dict[str, Tensor]:
        random = np.random.default_rng(self.seed)
        return self.tensors_of(random, RandomWeights(random, weight_type), vocabulary_size)

    def tensors_of(self, random: Random, weights: RandomWeights, vocabulary_size: int) -> dict[str, Tensor]:
        """Return the tensors. `weights` makes the matrices and norms, and `random` everything else."""
        made: dict[str, Tensor] = {}
        for name, shape in self.shapes(vocabulary_size).items():
            if name.endswith(("ssm_a", "ssm_d")):
                # With these rates, and steps near softplus(0), a head's decay is 0.2 to 0.99.
                rates = -np.exp(random.uniform(np.log(0.02), np.log(2), shape))
                skips = 1 + 0.3 * random.standard_normal(shape)
                made[name] = ("F32", (rates if name.endswith("ssm_a") else skips).astype(np.float32))
            elif self.architecture == "falcon-h1" and name.endswith("ffn_norm"):
                made[name] = weights.norm(*shape)  # without the suffix `.weight`
            elif name.endswith("ssm_norm") and len(shape) > 1:
                made[f"{name}.weight"] = ("F32", (1 + 0.1 * random.standard_normal(shape)).astype(np.float32))
            elif name.endswith(".bias"):
                size = 2.0 if "_exps" in name else 0.3  # gpt-oss clamps values above 7
                made[name] = ("F32", (size * random.standard_normal(shape)).astype(np.float32))
            elif name.startswith("rope"):
                factors = random.uniform(1.0, 8.0, shape).astype(np.float32)
                if self.architecture == "gemma4":
                    factors[len(factors) // 4 :] = 1e30  # its converter marks unrotated pairs like this
                made[f"{name}.weight"] = ("F32", factors)
            elif self.architecture in ("gemma3n", "gemma4") and name.endswith(("attn_q_norm", "attn_k_norm")):
                # These models do not divide scores by sqrt(head size); trained weights compensate.
                values = shape[0] ** -0.25 * (1 + 0.1 * random.standard_normal(shape))
                made[f"{name}.weight"] = ("F32", values.astype(np.float32))
            elif self.architecture == "gemma3n" and name.endswith(("post_ffw_norm", "post_norm")):
                # What a layer adds is small, so that the errors of ggml's GELU do not add up over many layers.
                made[f"{name}.weight"] = ("F32", random.uniform(0.05, 0.15, shape).astype(np.float32))
            elif name.endswith(".scale"):
                size = shape[-1] ** 0.5 if "inp" in name else 1.0  # routers: cancels their division
                made[name] = ("F32", (size * random.uniform(0.5, 2.0, shape)).astype(np.float32))
            elif name.endswith(_ALWAYS_FLOAT):
                size = shape[-1] ** -0.5 if "inp" in name else 1.0  # routers: like other matrices
                made[f"{name}.weight"] = ("F32", (size * random.standard_normal(shape)).astype(np.float32))
            else:
                made[f"{name}.weight"] = weights.matrix(*shape) if len(shape) > 1 else weights.norm(*shape)
        return made

    def shapes(self, vocabulary_size: int) -> dict[str, list[int]]:
        """Return the shape of each tensor, in NumPy's order. Names lack the suffix `.weight`."""
        sizes = self._sizes(vocabulary_size)
        names = f"token_embd:v,w {self.last_norm}:w {self.once}".split()
        for layer in range(self.layers):
            names += [f"blk.{layer}.{name}" for name in self.names_of(layer).split()]
        return {
            name: [int(size) if size.isdigit() else sizes[size] for size in letters.split(",")]
            for name, _, letters in (name.partition(":") for name in names)
        }

    def full_name(self, name: str) -> str:
        """Return the name of a tensor in the file, with the suffix `.weight` unless it has none."""
        without = name.endswith(("ssm_a", "ssm_d", ".bias", ".scale"))
        without |= self.architecture == "falcon-h1" and name.endswith("ffn_norm")
        return name if without else f"{name}.weight"

    def _sizes(self, vocabulary_size: int) -> dict[str, int]:
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        (latent, value), turned = self.latent, self.keys.get("rope.dimension_count", self.head_size)
        window_size = self.window_head_size or self.head_size
        window_query = self.heads * window_size
        window_key = (self.window_kv_heads or self.kv_heads) * window_size
        table_width = self.keys.get("embedding_length_per_layer_input", 0)
        return {
            "w": self.width,
            "f": self.feed_forward,
            "g": 2 * self.feed_forward,  # gate and up
            "h": self.head_size,
            "q": query,
            "k": key,
            "a": query + 2 * key,  # queries, keys and values together
            "r": turned // 2,
            # The same sizes for layers with a window.
            "H": window_size,
            "Q": window_query,
            "K": window_key,
            "A": window_query + 2 * window_key,
            "F": 2 * self.feed_forward,
            "p": table_width,
            "P": table_width * self.layers,
            "o": 1,
            "v": vocabulary_size,
            "n": self.heads,
            "e": self.experts,
            "x": self.expert_size,
            "s": self.keys.get("expert_shared_feed_forward_length", self.feed_forward),
            "S": self.keys.get("expert_shared_count", 0) * self.expert_size,
            "l": latent,
            "L": self.keys.get("attention.q_lora_rank", 0),
            "M": latent + turned,
            "d": value,
            "z": self.heads * value,
            "y": self.head_size - turned,
            "Y": self.heads * (self.head_size - turned + value),
            "G": 2 * self.expert_size,  # gate and up
            "W": 2 * self.width,
            "Z": 2 * query,  # queries and gates
            "m": self.keys.get("moe_latent_size", 0),
            "i": 3 * self.width,  # the inputs of a short convolution
            "t": self.keys.get("shortconv.l_cache", 0) or self.keys.get("ssm.conv_kernel", 0),
            **{number: int(number) for number in ("3", "4", "16", "64")},  # the fixed sizes of gemma3n
            **self._recurrent_sizes(),
        }

    def _recurrent_sizes(self) -> dict[str, int]:
        heads, groups, state, inner = (
            self.keys.get(f"ssm.{key}", 1) for key in ("time_step_rank", "group_count", "state_size", "inner_size")
        )
        convolved = inner + 2 * groups * state
        return {
            "N": heads,
            "b": 2 * heads,  # beta and gate
            "u": state,
            "I": inner,
            "C": convolved,
            "D": inner + convolved,  # with z
            "J": inner + convolved + heads,  # with z and dt
            "c": groups,
            "j": inner // groups,
            "B": 2 * inner,  # with z
            "U": heads + 2 * state,  # the step sizes, B and C of Mamba-1, where "heads" is their rank
        }
