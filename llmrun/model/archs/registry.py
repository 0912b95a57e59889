"""The supported architectures, by their `general.architecture` name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmrun.base.errors import UnsupportedModel, shown
from llmrun.model.archs import (
    apertus,
    arcee,
    bailingmoe2,
    bert,
    cohere2,
    command_r,
    deepseek,
    deepseek2,
    dots1,
    ernie4_5,
    ernie4_5_moe,
    exaone4,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma3n,
    gemma4,
    gemma_embedding,
    glm4,
    glm4moe,
    gpt_oss,
    granite,
    granitehybrid,
    granitemoe,
    hunyuan_dense,
    hunyuan_moe,
    internlm2,
    jamba,
    lfm2,
    lfm2moe,
    llama,
    minimax_m2,
    mistral3,
    mistral4,
    nemotron_h,
    nemotron_h_moe,
    nomic_bert,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2moe,
    qwen2vl,
    qwen3,
    qwen3moe,
    qwen3next,
    qwen3vl,
    qwen3vlmoe,
    qwen35,
    qwen35moe,
    seed_oss,
    smallthinker,
    smollm3,
    stablelm,
    starcoder2,
)

if TYPE_CHECKING:
    from llmrun.formats.gguf.reader import GGUFFile
    from llmrun.model.plan.plan import Plan


def _no_head(file: GGUFFile, config: Any) -> Plan | None:
    return None


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture that llmrun supports.

    read_config  reads the config from a file
    plan         builds the plan, and checks every tensor against the config
    models       the common names of its models
    notes        its unusual features
    draft_plan   builds the plan of the draft head, or returns None if the file has none
    """

    read_config: Callable[[GGUFFile], Any]
    plan: Callable[[GGUFFile, Any], Plan]
    models: str
    notes: str = ""
    draft_plan: Callable[[GGUFFile, Any], Plan | None] = _no_head


ARCHITECTURES = {
    "llama": Architecture(
        llama.read_config, llama.plan, "Llama 1 to 3.3, SmolLM 1 and 2, TinyLlama, Mistral, Mixtral, Falcon 3"
    ),
    "qwen2": Architecture(qwen2.read_config, qwen2.plan, "Qwen2, Qwen2.5"),
    "qwen3": Architecture(qwen3.read_config, qwen3.plan, "Qwen3, dense, Qwen3-Embedding, Qwen3-Reranker"),
    "qwen2vl": Architecture(qwen2vl.read_config, qwen2vl.plan, "Qwen2-VL, Qwen2.5-VL, Qwen2.5-Omni, text"),
    "qwen3vl": Architecture(qwen3vl.read_config, qwen3vl.plan, "Qwen3-VL, dense, text"),
    "smollm3": Architecture(smollm3.read_config, smollm3.plan, "SmolLM3", "no position encoding in every fourth layer"),
    "mistral3": Architecture(mistral3.read_config, mistral3.plan, "Ministral 3"),
    "gemma": Architecture(gemma.read_config, gemma.plan, "Gemma"),
    "gemma2": Architecture(gemma2.read_config, gemma2.plan, "Gemma 2", "sliding window, soft-capped logits"),
    "gemma3": Architecture(gemma3.read_config, gemma3.plan, "Gemma 3, text", "sliding window"),
    "gemma3n": Architecture(gemma3n.read_config, gemma3n.plan, "Gemma 3n, text", "sliding window, AltUp, LAuReL"),
    "gemma4": Architecture(
        gemma4.read_config, gemma4.plan, "Gemma 4, text", "sliding window, mixture of experts in 26B-A4B"
    ),
    "phi3": Architecture(phi3.read_config, phi3.plan, "Phi-3, Phi-3.5, Phi-4, dense", "LongRoPE"),
    "granite": Architecture(granite.read_config, granite.plan, "Granite 3 and 4, dense"),
    "olmo2": Architecture(olmo2.read_config, olmo2.plan, "OLMo 2, OLMo 3", "sliding window in OLMo 3"),
    "exaone4": Architecture(exaone4.read_config, exaone4.plan, "EXAONE 4.0", "sliding window in 32B"),
    "starcoder2": Architecture(starcoder2.read_config, starcoder2.plan, "StarCoder2"),
    "command-r": Architecture(command_r.read_config, command_r.plan, "Command R, Aya 23"),
    "cohere2": Architecture(cohere2.read_config, cohere2.plan, "Command R7B, Command A", "sliding window"),
    "glm4": Architecture(
        glm4.read_config, glm4.plan, "GLM-4 0414, 9B and 32B; GLM-4.1V, GLM-4.6V-Flash and GLM-OCR, text"
    ),
    "stablelm": Architecture(stablelm.read_config, stablelm.plan, "StableLM 3B, StableLM 2 1.6B"),
    "seed_oss": Architecture(seed_oss.read_config, seed_oss.plan, "Seed-OSS"),
    "ernie4_5": Architecture(ernie4_5.read_config, ernie4_5.plan, "ERNIE 4.5, dense"),
    "internlm2": Architecture(internlm2.read_config, internlm2.plan, "InternLM 2 and 2.5"),
    "arcee": Architecture(arcee.read_config, arcee.plan, "AFM 4.5B", "no gate in the feed-forward"),
    "apertus": Architecture(apertus.read_config, apertus.plan, "Apertus", "no gate in the feed-forward, xIELU"),
    "hunyuan-dense": Architecture(hunyuan_dense.read_config, hunyuan_dense.plan, "Hunyuan 0.5B to 7B"),
    "hunyuan-moe": Architecture(
        hunyuan_moe.read_config, hunyuan_moe.plan, "Hunyuan A13B", "mixture of experts, one shared"
    ),
    "smallthinker": Architecture(
        smallthinker.read_config, smallthinker.plan, "SmallThinker", "mixture of experts, sliding window in 21B"
    ),
    "qwen2moe": Architecture(
        qwen2moe.read_config, qwen2moe.plan, "Qwen1.5 MoE, Qwen2 57B", "mixture of experts, one shared"
    ),
    "qwen3moe": Architecture(
        qwen3moe.read_config, qwen3moe.plan, "Qwen3 30B and 235B, Qwen3-Coder", "mixture of experts"
    ),
    "qwen3vlmoe": Architecture(
        qwen3vlmoe.read_config, qwen3vlmoe.plan, "Qwen3-VL 30B and 235B, text", "mixture of experts"
    ),
    "gpt-oss": Architecture(
        gpt_oss.read_config, gpt_oss.plan, "gpt-oss", "mixture of experts, sliding window, attention sinks"
    ),
    "granitemoe": Architecture(granitemoe.read_config, granitemoe.plan, "Granite 3 MoE", "mixture of experts"),
    "olmoe": Architecture(olmoe.read_config, olmoe.plan, "OLMoE", "mixture of experts"),
    "deepseek": Architecture(
        deepseek.read_config, deepseek.plan, "DeepSeek MoE 16B (first generation)", "mixture of experts, one shared"
    ),
    "deepseek2": Architecture(
        deepseek2.read_config,
        deepseek2.plan,
        "DeepSeek V2 Lite, V3 and R1, Kimi K2, GLM-4.7-Flash, GigaChat 3, Kanana 2, Mistral Large 3, text",
        "latent attention, mixture of experts, one shared",
        deepseek2.draft_plan,
    ),
    "mistral4": Architecture(
        mistral4.read_config,
        mistral4.plan,
        "Mistral Small 4, text",
        "latent attention, mixture of experts, one shared",
    ),
    "glm4moe": Architecture(
        glm4moe.read_config,
        glm4moe.plan,
        "GLM-4.5 to 4.7; GLM-4.5V and 4.6V, text; Solar Open",
        "mixture of experts, one shared",
        glm4moe.draft_plan,
    ),
    "dots1": Architecture(dots1.read_config, dots1.plan, "dots.llm1", "mixture of experts, one shared"),
    "bailingmoe2": Architecture(
        bailingmoe2.read_config, bailingmoe2.plan, "Ling 2.0, Ring 2.0", "mixture of experts in groups, one shared"
    ),
    "ernie4_5-moe": Architecture(
        ernie4_5_moe.read_config, ernie4_5_moe.plan, "ERNIE 4.5 21B and 300B", "mixture of experts, one shared"
    ),
    "minimax-m2": Architecture(minimax_m2.read_config, minimax_m2.plan, "MiniMax-M2 to M2.7", "mixture of experts"),
    "qwen35": Architecture(
        qwen35.read_config, qwen35.plan, "Qwen3.5 and Qwen3.6, dense, text", "gated delta nets", qwen35.draft_plan
    ),
    "qwen35moe": Architecture(
        qwen35moe.read_config,
        qwen35moe.plan,
        "Qwen3.5 and Qwen3.6 MoE, text",
        "gated delta nets, mixture of experts, one shared",
        qwen35moe.draft_plan,
    ),
    "qwen3next": Architecture(
        qwen3next.read_config,
        qwen3next.plan,
        "Qwen3-Next, Qwen3-Coder-Next",
        "gated delta nets, mixture of experts, one shared",
        qwen35moe.draft_plan,
    ),
    "granitehybrid": Architecture(
        granitehybrid.read_config,
        granitehybrid.plan,
        "Granite 4.0 H",
        "Mamba-2, mixture of experts in Tiny and Small",
    ),
    "nemotron_h": Architecture(nemotron_h.read_config, nemotron_h.plan, "Nemotron-H, Nemotron Nano 2", "Mamba-2"),
    "nemotron_h_moe": Architecture(
        nemotron_h_moe.read_config,
        nemotron_h_moe.plan,
        "Nemotron 3 Nano and Super",
        "Mamba-2, mixture of experts, one shared",
    ),
    "jamba": Architecture(jamba.read_config, jamba.plan, "Jamba 1.5 and Reasoning", "Mamba-1, mixture of experts"),
    "falcon-h1": Architecture(falcon_h1.read_config, falcon_h1.plan, "Falcon-H1", "Mamba-2"),
    "lfm2": Architecture(lfm2.read_config, lfm2.plan, "LFM2, LFM2.5", "short convolutions"),
    "lfm2moe": Architecture(
        lfm2moe.read_config, lfm2moe.plan, "LFM2 8B and 24B", "short convolutions, mixture of experts"
    ),
    "bert": Architecture(bert.read_config, bert.plan, "BGE 1.5 and M3, E5, GTE, MiniLM, Arctic Embed", "embeddings"),
    "nomic-bert": Architecture(nomic_bert.read_config, nomic_bert.plan, "Nomic Embed 1 and 1.5", "embeddings"),
    "gemma-embedding": Architecture(
        gemma_embedding.read_config, gemma_embedding.plan, "EmbeddingGemma", "embeddings, sliding window both ways"
    ),
}

# Error messages list only these architectures, because the full list would be too long.
_KNOWN_BEST = ("llama", "qwen3", "gemma3", "phi3")


def architecture_of(file: GGUFFile) -> Architecture:
    """Return the architecture of a file. Raises UnsupportedModel if it is not registered."""
    name = file.string("general.architecture")
    found = ARCHITECTURES.get(name)
    if found is None:
        raise UnsupportedModel(
            f"architecture not supported: {shown(str(file.path), 300)}: '{shown(name)}'; the CPU engine supports "
            f"{len(ARCHITECTURES)} architectures, such as {', '.join(_KNOWN_BEST)}",
            hint="This model may run with --backend llama. docs/models.md lists all architectures.",
        )
    return found


def table() -> str:
    """Return the table of architectures for docs/models.md, with the columns name, models and notes."""
    rows = [("`general.architecture`", "models", "notes"), ("---", "---", "---")]
    rows += [(f"`{name}`", found.models, found.notes) for name, found in ARCHITECTURES.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def plan_of_header(file: GGUFFile) -> Plan:
    """Return the plan of a model for computing sizes, without reading weights. Raises BadGGUF and UnsupportedModel."""
    architecture = architecture_of(file)
    made_up = file.with_placeholder_weights()
    return architecture.plan(made_up, architecture.read_config(made_up))


def draft_plan_of_header(file: GGUFFile) -> Plan | None:
    """Return the plan of a model's draft head like `plan_of_header`, or None if it has none."""
    architecture = architecture_of(file)
    made_up = file.with_placeholder_weights()
    return architecture.draft_plan(made_up, architecture.read_config(made_up))
