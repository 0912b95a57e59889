"""Architectures by the string of `general.architecture`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrun.archs import (
    cohere2,
    command_r,
    deepseek,
    deepseek2,
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    gpt_oss,
    granite,
    granitemoe,
    internlm2,
    lfm2,
    lfm2moe,
    llama,
    mistral3,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2moe,
    qwen3,
    qwen3moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from llmrun.errors import UnsupportedModel
from llmrun.gguf.problems import shown

if TYPE_CHECKING:
    from llmrun.gguf.reader import GGUFFile
    from llmrun.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Architecture:
    """`check` reads the config; `plan` writes the model down, and holds every tensor against the config.

    models  what its users know it as
    notes   what is uncommon about it
    """

    check: Callable[[GGUFFile], Any]
    plan: Callable[[GGUFFile, Any], Plan]
    models: str
    notes: str = ""


ARCHITECTURES = {
    "llama": Architecture(
        llama.check, llama.plan, "Llama 1 to 3.3, SmolLM 1 and 2, TinyLlama, Mistral, Mixtral, Falcon 3"
    ),
    "qwen2": Architecture(qwen2.check, qwen2.plan, "Qwen2, Qwen2.5"),
    "qwen3": Architecture(qwen3.check, qwen3.plan, "Qwen3, dense"),
    "smollm3": Architecture(smollm3.check, smollm3.plan, "SmolLM3", "every fourth layer without positions"),
    "mistral3": Architecture(mistral3.check, mistral3.plan, "Ministral 3"),
    "gemma": Architecture(gemma.check, gemma.plan, "Gemma"),
    "gemma2": Architecture(gemma2.check, gemma2.plan, "Gemma 2", "sliding window, soft caps"),
    "gemma3": Architecture(gemma3.check, gemma3.plan, "Gemma 3, text", "sliding window"),
    "gemma4": Architecture(gemma4.check, gemma4.plan, "Gemma 4, text", "sliding window, experts in 26B-A4B"),
    "phi3": Architecture(phi3.check, phi3.plan, "Phi-3, Phi-3.5, Phi-4, dense", "LongRoPE"),
    "granite": Architecture(granite.check, granite.plan, "Granite 3 and 4, dense"),
    "olmo2": Architecture(olmo2.check, olmo2.plan, "OLMo 2, OLMo 3", "sliding window in OLMo 3"),
    "exaone4": Architecture(exaone4.check, exaone4.plan, "EXAONE 4.0", "sliding window in 32B"),
    "starcoder2": Architecture(starcoder2.check, starcoder2.plan, "StarCoder2"),
    "command-r": Architecture(command_r.check, command_r.plan, "Command R, Aya 23"),
    "cohere2": Architecture(cohere2.check, cohere2.plan, "Command R7B, Command A", "sliding window"),
    "glm4": Architecture(glm4.check, glm4.plan, "GLM-4 0414, 9B and 32B"),
    "stablelm": Architecture(stablelm.check, stablelm.plan, "StableLM 3B, StableLM 2 1.6B"),
    "seed_oss": Architecture(seed_oss.check, seed_oss.plan, "Seed-OSS"),
    "ernie4_5": Architecture(ernie4_5.check, ernie4_5.plan, "ERNIE 4.5, dense"),
    "internlm2": Architecture(internlm2.check, internlm2.plan, "InternLM 2 and 2.5"),
    "qwen2moe": Architecture(qwen2moe.check, qwen2moe.plan, "Qwen1.5 MoE, Qwen2 57B", "experts, one shared"),
    "qwen3moe": Architecture(qwen3moe.check, qwen3moe.plan, "Qwen3 30B and 235B, Qwen3-Coder", "experts"),
    "gpt-oss": Architecture(gpt_oss.check, gpt_oss.plan, "gpt-oss", "experts, sliding window, sinks"),
    "granitemoe": Architecture(granitemoe.check, granitemoe.plan, "Granite 3 MoE", "experts"),
    "olmoe": Architecture(olmoe.check, olmoe.plan, "OLMoE", "experts"),
    "deepseek": Architecture(deepseek.check, deepseek.plan, "DeepSeek MoE 16B, the first", "experts, one shared"),
    "deepseek2": Architecture(
        deepseek2.check,
        deepseek2.plan,
        "DeepSeek V2 Lite, GLM-4.7-Flash, GigaChat 3, Kanana 2",
        "latent attention, experts, one shared",
    ),
    "lfm2": Architecture(lfm2.check, lfm2.plan, "LFM2, LFM2.5", "short convolutions"),
    "lfm2moe": Architecture(lfm2moe.check, lfm2moe.plan, "LFM2 8B and 24B", "short convolutions, experts"),
}

# Named in messages, where all would be too many.
_KNOWN_BEST = ("llama", "qwen3", "gemma3", "phi3")


def architecture_of(file: GGUFFile) -> Architecture:
    """Raises UnsupportedModel for an architecture without a file here."""
    name = file.string("general.architecture")
    found = ARCHITECTURES.get(name)
    if found is None:
        raise UnsupportedModel(
            f"architecture not supported: {shown(str(file.path), 300)}: '{shown(name)}', the CPU engine runs "
            f"{len(ARCHITECTURES)} others, such as {', '.join(_KNOWN_BEST)}",
            hint="This model may run with --backend llama. The README lists all architectures.",
        )
    return found


def table() -> str:
    """All architectures as the Markdown table of the README: name, models, what is uncommon."""
    rows = [("`general.architecture`", "models", "notes"), ("---", "---", "---")]
    rows += [(f"`{name}`", found.models, found.notes) for name, found in ARCHITECTURES.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def plan_of_header(file: GGUFFile) -> Plan:
    """The plan of a model, no weight of which is read: for arithmetic about it. Raises BadGGUF and UnsupportedModel."""
    architecture = architecture_of(file)
    made_up = file.with_made_up_weights()
    return architecture.plan(made_up, architecture.check(made_up))
