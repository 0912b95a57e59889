"""The checkpoints whose logits are compared with those of transformers."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.converting.checkpoints import TinyCheckpoint, tiny_checkpoint

PROMPT = [(7 * index * index + 3 * index) % 290 + 3 for index in range(90)]

_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# Version 5 of transformers keeps the base with the other settings of RoPE.
_NEW_ROPE = {"rope_type": "default", "rope_theta": 500.0}

VARIANTS: dict[str, Callable[[], TinyCheckpoint]] = {
    "llama awq": lambda: tiny_checkpoint("LlamaForCausalLM", "awq"),
    "llama gptq llama3": lambda: tiny_checkpoint("LlamaForCausalLM", "gptq", zero=None, rope_scaling=_LLAMA3),
    "llama gptq linear": lambda: tiny_checkpoint(
        "LlamaForCausalLM", "gptq", group=-1, rope_scaling={"type": "linear", "factor": 4.0}
    ),
    "llama bf16 tied": lambda: tiny_checkpoint("LlamaForCausalLM", "", stored="BF16", tied=True),
    "mistral awq": lambda: tiny_checkpoint("MistralForCausalLM", "awq", zero=None),
    "mistral gptq_v2": lambda: tiny_checkpoint("MistralForCausalLM", "gptq_v2", rope_theta=1_000_000.0),
    "qwen2 awq yarn": lambda: tiny_checkpoint("Qwen2ForCausalLM", "awq", rope_scaling=_YARN),
    "qwen2 gptq yarn magnitude": lambda: tiny_checkpoint(
        "Qwen2ForCausalLM", "gptq", rope_scaling=_YARN | {"attention_factor": 0.9}
    ),
    "qwen3 awq": lambda: tiny_checkpoint("Qwen3ForCausalLM", "awq", zero=None, tied=True),
    "qwen3 gptq new rope": lambda: tiny_checkpoint(
        "Qwen3ForCausalLM", "gptq", rope_parameters=_NEW_ROPE, rope_theta=None
    ),
}
