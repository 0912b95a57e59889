"""Tiny models of every architecture our engine runs, and of their variants: one row each, by name.

Tensors are listed as llama.cpp's loader expects them, not as our engine reads them: "name:rows,columns", with letters
for sizes (`TinyArchitecture._sizes`). Names without `.bias` are weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.gguf.gguf_files import tiny_vocabulary, write_gguf
from tests.support.models.tiny_architecture import EXPERT_SIZE, LENGTHS, TinyArchitecture

_NORMS = "attn_norm:w ffn_norm:w "
_ATTENTION = "attn_q:q,w attn_k:k,w attn_v:k,w attn_output:w,q "
_FUSED_ATTENTION = "attn_qkv:a,w attn_output:w,q "
_BIASES = "attn_q.bias:q attn_k.bias:k attn_v.bias:k "
_HEAD_NORMS = "attn_q_norm:h attn_k_norm:h "
_POST_NORMS = "post_attention_norm:w post_ffw_norm:w "
_GATED = "ffn_gate:f,w ffn_up:f,w ffn_down:w,f "
_UNGATED = "ffn_up:f,w ffn_down:w,f "
_FUSED_GATED = "ffn_up:g,w ffn_down:w,f "
_LLAMA = _NORMS + _ATTENTION + _GATED
_LAYER_NORM_BIASES = "attn_norm.bias:w ffn_norm.bias:w "

_ROUTER = "ffn_gate_inp:e,w "
_EXPERTS = _ROUTER + "ffn_gate_exps:e,x,w ffn_up_exps:e,x,w ffn_down_exps:e,w,x "
_FUSED_EXPERTS = _ROUTER + "ffn_gate_up_exps:e,G,w ffn_down_exps:e,w,x "
_EXPERT_BIASES = "ffn_gate_inp.bias:e ffn_gate_exps.bias:e,x ffn_up_exps.bias:e,x ffn_down_exps.bias:e,w "
_SHARED = "ffn_gate_shexp:s,w ffn_up_shexp:s,w ffn_down_shexp:w,s "
_EXPERTS_BY_BIAS = _EXPERTS + "exp_probs_b.bias:e "
_SHARED_BY_COUNT = "ffn_gate_shexp:S,w ffn_up_shexp:S,w ffn_down_shexp:w,S "
_LATENT = "attn_kv_a_mqa:M,w attn_kv_a_norm:l attn_output:w,z "
_LATENT_QUERIES = "attn_q_a:L,w attn_q_a_norm:L attn_q_b:q,L "
_ABSORBED_ATTENTION = _LATENT + _LATENT_QUERIES + "attn_k_b:n,l,y attn_v_b:n,d,l "
_FULL_KEYS = "attn_kv_b:Y,l "
_FULL_ATTENTION = _LATENT + "attn_q:q,w " + _FULL_KEYS
_CONVOLUTION = "shortconv.conv:w,t shortconv.in_proj:i,w shortconv.out_proj:w,w "


# The inputs of gated delta nets are separate matrices (Qwen3.5), or one matrix grouped by key head (Qwen3-Next).
_DELTA_NET = "ssm_conv1d:C,t ssm_dt.bias:N ssm_a:N ssm_norm:u ssm_out:w,I "
_DELTA_INPUTS = "attn_qkv:C,w attn_gate:I,w ssm_beta:N,w ssm_alpha:N,w "
_DELTA_INPUTS_BY_KEY_HEAD = "ssm_ba:b,w "
_GATED_ATTENTION = "attn_q:Z,w attn_k:k,w attn_v:k,w attn_output:w,q " + _HEAD_NORMS
_POST = "attn_norm:w post_attention_norm:w "
_AHEAD = "nextn.eh_proj:w,W nextn.enorm:w nextn.hnorm:w nextn.shared_head_norm:w "
_MAMBA = "ssm_in:J,w ssm_conv1d:C,t ssm_conv1d.bias:C ssm_dt.bias:N ssm_a:N,o ssm_d:N,o ssm_out:w,I "
_GATED_SHARED = _SHARED + "ffn_gate_inp_shexp:w "
_UNGATED_EXPERTS = _ROUTER + "exp_probs_b.bias:e ffn_up_exps:e,x,w ffn_down_exps:e,w,x "
_LATENT_EXPERTS = _ROUTER + "exp_probs_b.bias:e ffn_up_exps:e,x,m ffn_down_exps:e,m,x "
_LATENT_EXPERTS += "ffn_latent_down:m,w ffn_latent_up:w,m "
_UNGATED_SHARED = "ffn_up_shexp:s,w ffn_down_shexp:w,s "
_MAMBA_1 = "ssm_in:B,w ssm_conv1d:I,t ssm_conv1d.bias:I ssm_x:U,I ssm_dt_norm:N ssm_b_norm:u ssm_c_norm:u "
_MAMBA_1 += "ssm_dt:I,N ssm_dt.bias:I ssm_a:I,u ssm_d:I ssm_out:w,I "
_MAMBA_NORM = "ssm_norm:c,j "


_LAYER_NORM, _RMS_EPSILON = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"


_GEMMA4 = _NORMS + _POST_NORMS + "layer_output_scale:o "
_OF_WINDOW = _GEMMA4 + "attn_q:Q,w attn_output:w,Q attn_q_norm:H "
_OF_ALL = _GEMMA4 + "attn_q:q,w attn_output:w,q attn_q_norm:h "
_WINDOW_KEYS, _WINDOW_VALUES = "attn_k:K,w attn_k_norm:H ", "attn_v:K,w "
_KEYS, _VALUES = "attn_k:k,w attn_k_norm:h ", "attn_v:k,w "
_OF_TABLE = "inp_gate:p,w proj:w,p post_norm:w "
_WIDER = "ffn_gate:F,w ffn_up:F,w ffn_down:w,F "
_BESIDE = "ffn_gate_inp.scale:w pre_ffw_norm_2:w post_ffw_norm_1:w post_ffw_norm_2:w " + _GATED
_SCALED_EXPERTS = _FUSED_EXPERTS + "ffn_down_exps.scale:e "
_GEMMA4_KEYS = {"attention.sliding_window": 16, "rope.freq_base": 1e6, "embedding_length_per_layer_input": 0}


_GEMMA3N = _LLAMA + _HEAD_NORMS + _POST_NORMS + _OF_TABLE
_GEMMA3N += "laurel_l:64,w laurel_r:w,64 laurel_post_norm:w altup_router:4,w altup_router_norm:w "
_GEMMA3N += "altup_predict_coef:16,4 altup_correct_coef:4,4 altup_correct_scale:w "
_GEMMA3N_ONCE = "per_layer_token_embd:v,P per_layer_model_proj:P,w per_layer_proj_norm:p altup_proj:3,w,w "
_GEMMA3N_ONCE += "altup_unembd_proj:3,w,w "
# llama.cpp does not read these keys.
_GEMMA3N_FIXED = {"embedding_length_per_layer_input": 256, "altup.num_inputs": 4, "altup.active_idx": 0}


def _pattern(layers: str) -> dict[str, Any]:
    """Return the metadata for a string of layers in which W is a layer with a window."""
    return {"attention.sliding_window_pattern": np.array([layer == "W" for layer in layers])}


_YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 128,
    "rope.freq_base": 1e6,
}
# Converters write these keys, but llama.cpp reads them for few architectures. Kimi K2 has these values.
_TURNS = {"rope.scaling.yarn_beta_fast": 1.0, "rope.scaling.yarn_beta_slow": 1.0}
_LOG_YARN = _YARN | {"rope.scaling.yarn_log_multiplier": 0.0707}
# The zeros are placeholders for the row's own sizes.
_OF_LATENT = {"attention.kv_lora_rank": 0} | dict.fromkeys(LENGTHS, 0) | {"rope.dimension_count": 32}
_ABSORBED = _OF_LATENT | {f"{name}_mla": 0 for name in LENGTHS} | {"attention.q_lora_rank": 64}
_OF_EXPERTS = {"expert_count": 8, "expert_used_count": 3, EXPERT_SIZE: 0}
_BY_SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 1.8}
_IN_GROUPS = {"expert_group_count": 4, "expert_group_used_count": 2}
_ONE_GROUP = {"expert_group_count": 1, "expert_group_used_count": 1}
_ONE_EXPERT = {"expert_count": 1, "expert_used_count": 1}
_NTK = {
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.original_context_length": 262144,
}
_STATES = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
    "ssm.inner_size": 64,
}
_MAMBA_STATES = _STATES | {"ssm.inner_size": 128}  # twice the width
_MAMBA_1_STATES = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 32,
    "ssm.inner_size": 128,
}
_SECTIONS = {"rope.dimension_count": 16, "rope.dimension_sections": np.array([3, 3, 2, 0], np.int32)}
_LONG = "rope_factors_long:r rope_factors_short:r"

TINY_ARCHITECTURES: dict[str, TinyArchitecture] = {
    "llama biases": TinyArchitecture(
        "llama", _LLAMA + _BIASES + "attn_output.bias:w ffn_gate.bias:f ffn_up.bias:f ffn_down.bias:w"
    ),
    "llama yarn": TinyArchitecture("llama", _LLAMA, _YARN, tokens=300),
    "llama longrope, short": TinyArchitecture(
        "llama",
        _LLAMA,
        {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.2},
        once=_LONG,
        unseen=("rope.scaling.type",),
    ),
    "llama Mistral Nemo": TinyArchitecture(
        "llama", _LLAMA, once="output:v,w", heads=2, kv_heads=1, head_size=32, width=72
    ),
    "qwen2": TinyArchitecture("qwen2", _LLAMA + _BIASES, {"rope.freq_base": 1e6}),
    "qwen2 yarn": TinyArchitecture("qwen2", _LLAMA + _BIASES, _YARN, once="output:v,w", tokens=300),
    "qwen3": TinyArchitecture("qwen3", _LLAMA + _HEAD_NORMS, {"rope.freq_base": 1e6}, head_size=32),
    "qwen2vl": TinyArchitecture(
        "qwen2vl",
        _LLAMA + _BIASES,
        # llama.cpp ignores the file's epsilon here.
        {"rope.dimension_sections": np.array([4, 6, 6, 0], np.int32), "rope.freq_base": 1e6, _RMS_EPSILON: 1e-12},
        head_size=32,
        width=128,
        unseen=("rope.dimension_sections",),
    ),
    "qwen3vl": TinyArchitecture(
        "qwen3vl",
        _LLAMA + _HEAD_NORMS,
        {"rope.dimension_sections": np.array([6, 5, 5, 0], np.int32), "rope.freq_base": 5e6, "n_deepstack_layers": 1},
        head_size=32,
        unseen=("n_deepstack_layers",),
    ),
    "qwen3vlmoe": TinyArchitecture(
        "qwen3vlmoe",
        _NORMS + _ATTENTION + _HEAD_NORMS + _EXPERTS,
        _OF_EXPERTS
        | {"rope.dimension_sections": np.array([12, 10, 10, 0], np.int32), "rope.freq_base": 5e6}
        | {"n_deepstack_layers": 2},
        once="output:v,w",
        head_size=64,
        feed_forward=144,
        experts=8,
        unseen=("n_deepstack_layers",),
    ),
    "mistral3": TinyArchitecture(
        "mistral3",
        _LLAMA,
        _YARN
        | {
            "rope.scaling.yarn_beta_fast": 2.0,
            "rope.scaling.yarn_beta_slow": 0.1,
            "rope.scaling.yarn_log_multiplier": 0.5,
        },
        tokens=300,
    ),
    "mistral3 temperature": TinyArchitecture(
        "mistral3",
        _LLAMA,
        _YARN | {"attention.temperature_scale": 0.5, "rope.scaling.original_context_length": 16},
    ),
    "smollm3": TinyArchitecture("smollm3", _LLAMA, layers=5),
    "gemma": TinyArchitecture("gemma", _LLAMA, width=72, heads=2, kv_heads=1, head_size=64),
    "gemma2": TinyArchitecture(
        "gemma2",
        _LLAMA + _POST_NORMS,
        {
            "attention.sliding_window": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
        },
        layers=3,
        head_size=32,
        tokens=200,
    ),
    "gemma2 27B": TinyArchitecture(
        "gemma2", _LLAMA + _POST_NORMS, {"attention.sliding_window": 24}, layers=46, head_size=32
    ),
    "gemma3": TinyArchitecture(
        "gemma3",
        _LLAMA + _POST_NORMS + _HEAD_NORMS,
        {
            "attention.sliding_window": 16,
            "rope.freq_base": 1e6,
            "rope.scaling.factor": 8.0,
        },
        layers=7,
        head_size=32,
        tokens=200,
    ),
    "gemma3 without window": TinyArchitecture(
        "gemma3", _LLAMA + _POST_NORMS + _HEAD_NORMS, {"final_logit_softcapping": 2.0}, once="output:v,w"
    ),
    "gemma3 27B": TinyArchitecture(
        "gemma3", _LLAMA + _POST_NORMS + _HEAD_NORMS, {"attention.sliding_window": 16}, layers=62, head_size=32
    ),
    "gemma3 pattern": TinyArchitecture(
        "gemma3",
        _LLAMA + _POST_NORMS + _HEAD_NORMS,
        {
            "attention.sliding_window": 16,
            "attention.sliding_window_pattern": np.array([True, False, False]),
            "rope.freq_base_swa": 3e4,
            "rope.freq_base": 1e6,
        },
        layers=3,
    ),
    "gemma3n": TinyArchitecture(
        "gemma3n",
        _GEMMA3N,
        {"attention.sliding_window": 16, "rope.freq_base": 1e6, "rope.scaling.factor": 4.0}
        | {"feed_forward_length": np.full(12, 512, np.int32), "final_logit_softcapping": 30.0}
        | _GEMMA3N_FIXED,
        once=_GEMMA3N_ONCE,
        layers=12,
        head_size=32,
        feed_forward=512,
        unseen=("final_logit_softcapping", *_GEMMA3N_FIXED),
    ),
    "gemma3n reused caches": TinyArchitecture(
        "gemma3n",
        _GEMMA3N,
        {"attention.sliding_window": 24, "rope.freq_base": 1e6, "rope.freq_base_swa": 3e4}
        | _pattern("WWWAWWWAWWWAWWWAWWWAWA")
        | _GEMMA3N_FIXED
        | {
            "attention.shared_kv_layers": 2,
            "activation_sparsity_scale": np.array([1.6448533535003662] * 10 + [-np.inf] * 12, np.float32),
        },
        once=_GEMMA3N_ONCE + "output:v,w",
        layers=22,
        feed_forward=512,
        unseen=(*_GEMMA3N_FIXED, "attention.shared_kv_layers", "activation_sparsity_scale"),
    ),
    "gemma4": TinyArchitecture(
        "gemma4",
        _OF_WINDOW + _WINDOW_KEYS + _WINDOW_VALUES + _GATED,
        _GEMMA4_KEYS
        | _pattern("WWAW")
        | {"rope.freq_base_swa": 3e4, "rope.dimension_count_swa": 12, "final_logit_softcapping": 8.0},
        once="rope_freqs:r",
        layers=4,
        head_size=32,
        window_kv_heads=4,
        window_head_size=16,
        feed_forward=48,
        tokens=200,
        others={2: _OF_ALL + _KEYS + _GATED},
    ),
    "gemma4 E2B": TinyArchitecture(
        "gemma4",
        _OF_WINDOW + _WINDOW_KEYS + _WINDOW_VALUES + _OF_TABLE + _GATED,
        _GEMMA4_KEYS
        | _pattern("WAWA")
        | {"embedding_length_per_layer_input": 64, "attention.shared_kv_layers": 2, "rope.dimension_count_swa": 16},
        once="rope_freqs:r per_layer_token_embd:v,P per_layer_model_proj:P,w per_layer_proj_norm:p",
        layers=4,
        head_size=32,
        window_head_size=16,
        feed_forward=48,
        tokens=200,
        others={
            1: _OF_ALL + _KEYS + _VALUES + _OF_TABLE + _GATED,
            2: _OF_WINDOW + _OF_TABLE + _WIDER,
            3: _OF_ALL + _KEYS + _VALUES + _OF_TABLE + _WIDER,  # nothing uses these keys
        },
    ),
    "gemma4 26B": TinyArchitecture(
        "gemma4",
        _OF_WINDOW + _WINDOW_KEYS + _WINDOW_VALUES + _SCALED_EXPERTS + _BESIDE,
        _GEMMA4_KEYS | _pattern("WWA") | _OF_EXPERTS | {"rope.dimension_count_swa": 16},
        once="rope_freqs:r",
        layers=3,
        head_size=32,
        window_kv_heads=4,
        window_head_size=16,
        experts=8,
        seed=7,
        others={2: _OF_ALL + _KEYS + _SCALED_EXPERTS + _BESIDE},
    ),
    "gemma4 experts of two matrices, one dense layer": TinyArchitecture(
        "gemma4",
        _OF_WINDOW + _WINDOW_KEYS + _WINDOW_VALUES + _EXPERTS + _BESIDE,
        _GEMMA4_KEYS | _pattern("WA") | _OF_EXPERTS,
        once="output:v,w rope_freqs:r",
        window_head_size=16,
        experts=8,
        others={1: _OF_ALL + _KEYS + _VALUES + _GATED},
    ),
    "gemma4 fused": TinyArchitecture(
        "gemma4",
        _GEMMA4 + "attn_qkv:A,w attn_output:w,Q attn_q_norm:H attn_k_norm:H " + _GATED,
        _GEMMA4_KEYS | _pattern("WWAWA") | {"attention.shared_kv_layers": 2, "rope.dimension_count_swa": 16},
        once="rope_freqs:r",
        layers=5,
        head_size=32,
        window_head_size=16,
        others=dict.fromkeys((2, 4), _GEMMA4 + "attn_qkv:a,w attn_output:w,q attn_q_norm:h attn_k_norm:h " + _GATED),
    ),
    "phi3": TinyArchitecture(
        "phi3",
        _NORMS + _FUSED_ATTENTION + _FUSED_GATED,
        {"attention.sliding_window": 8},
        once="output:v,w",
        unseen=("attention.sliding_window",),
    ),
    "phi3 longrope, short": TinyArchitecture(
        "phi3",
        _NORMS + _FUSED_ATTENTION + _FUSED_GATED,
        {"rope.dimension_count": 12, "rope.scaling.attn_factor": 1.19},
        once=_LONG,
    ),
    "phi3 longrope, long": TinyArchitecture(
        "phi3",
        _NORMS + _FUSED_ATTENTION + _FUSED_GATED,
        {"rope.scaling.original_context_length": 64, "rope.scaling.attn_factor": 1.19},
        once=_LONG,
    ),
    "phi3 separate, biases": TinyArchitecture("phi3", _NORMS + _ATTENTION + _BIASES + _FUSED_GATED),
    "fused with one bias": TinyArchitecture("qwen2", _NORMS + _FUSED_ATTENTION + "attn_qkv.bias:a " + _GATED),
    "fused with three biases": TinyArchitecture("qwen2", _NORMS + _FUSED_ATTENTION + _BIASES + _GATED),
    "granite": TinyArchitecture(
        "granite",
        _LLAMA,
        {"logit_scale": 8.0, "residual_scale": 0.7, "embedding_scale": 3.0, "attention.scale": 0.5},
    ),
    "granite plain, no rope": TinyArchitecture(
        "granite", _LLAMA, {"logit_scale": 4.0, "rope.scaling.finetuned": False}, once="rope_freqs:r"
    ),
    "olmo2": TinyArchitecture(
        "olmo2", _ATTENTION + "attn_q_norm:q attn_k_norm:k " + _POST_NORMS + _GATED, once="output:v,w"
    ),
    "olmo2 OLMo 3": TinyArchitecture(
        "olmo2",
        _ATTENTION + "attn_q_norm:q attn_k_norm:k " + _POST_NORMS + _GATED,
        _YARN | {"attention.sliding_window": 24, "rope.scaling.attn_factor": 1.2},
        once="output:v,w",
        layers=5,
        tokens=300,
    ),
    "exaone4": TinyArchitecture(
        "exaone4", _ATTENTION + _HEAD_NORMS + _POST_NORMS + _GATED, {"rope.freq_base": 1e6}, once="rope_freqs:r"
    ),
    "exaone4 32B": TinyArchitecture(
        "exaone4", _ATTENTION + _HEAD_NORMS + _POST_NORMS + _GATED, {"attention.sliding_window": 24}, layers=64
    ),
    "starcoder2": TinyArchitecture(
        "starcoder2",
        _NORMS
        + _LAYER_NORM_BIASES
        + _ATTENTION
        + _BIASES
        + "attn_output.bias:w "
        + _UNGATED
        + "ffn_up.bias:f ffn_down.bias:w",
        once="output_norm.bias:w",
        epsilon=_LAYER_NORM,
    ),
    "command-r": TinyArchitecture(
        "command-r", "attn_norm:w " + _ATTENTION + _GATED, {"logit_scale": 0.0625}, epsilon=_LAYER_NORM
    ),
    "cohere2": TinyArchitecture(
        "cohere2",
        "attn_norm:w " + _ATTENTION + _GATED,
        {"logit_scale": 0.25, "attention.sliding_window": 24},
        epsilon=_LAYER_NORM,
        layers=5,
        tokens=200,
    ),
    "glm4": TinyArchitecture(
        "glm4", _NORMS + _ATTENTION + _BIASES + _POST_NORMS + _FUSED_GATED, {"rope.dimension_count": 8}
    ),
    "glm4 GLM-OCR, text, with a layer ahead": TinyArchitecture(
        "glm4",
        _NORMS + _ATTENTION + _POST_NORMS + _FUSED_GATED,
        {
            "nextn_predict_layers": 1,
            "rope.dimension_count": 8,
            "rope.dimension_sections": np.array([2, 1, 1, 0], np.int32),
        },
        once="output:v,w",
        layers=3,
        others={2: _NORMS + _ATTENTION + _POST_NORMS + _FUSED_GATED + _AHEAD},
    ),
    "stablelm": TinyArchitecture(
        "stablelm",
        _LLAMA + _LAYER_NORM_BIASES + _BIASES,
        {"rope.dimension_count": 4},
        once="output:v,w output_norm.bias:w",
        epsilon=_LAYER_NORM,
    ),
    "stablelm parallel": TinyArchitecture(
        "stablelm",
        "attn_norm:w attn_norm.bias:w " + _ATTENTION + _GATED,
        {"rope.dimension_count": 4},
        once="output:v,w output_norm.bias:w",
        epsilon=_LAYER_NORM,
    ),
    "seed_oss": TinyArchitecture(
        "seed_oss", "attn_norm:w post_attention_norm:w " + _ATTENTION + _BIASES + _GATED, head_size=32
    ),
    "ernie4_5": TinyArchitecture("ernie4_5", _LLAMA, {"rope.freq_base": 5e5}, head_size=32),
    "internlm2": TinyArchitecture("internlm2", _LLAMA, {"rope.freq_base": 1e6}, once="output:v,w"),
    "arcee": TinyArchitecture(
        "arcee",
        _NORMS + _ATTENTION + _UNGATED,
        _YARN | _TURNS,
        once="output:v,w",
        head_size=32,
        tokens=300,
        unseen=tuple(_TURNS),
    ),
    "apertus": TinyArchitecture(
        "apertus",
        _NORMS + _ATTENTION + _HEAD_NORMS + _UNGATED,
        {
            "rope.freq_base": 1e6,
            "xielu.alpha_n": np.array([0.6, -1.5], np.float32),
            "xielu.alpha_p": np.array([-0.4, 1.1], np.float32),
            "xielu.beta": np.array([0.5, 0.3], np.float32),
            "xielu.eps": np.array([-1e-6, -1e-5], np.float32),
        },
        once="output:v,w rope_freqs:r",
    ),
    "apertus one curve": TinyArchitecture(
        "apertus",
        _NORMS + _ATTENTION + _HEAD_NORMS + _UNGATED + "attn_output.bias:w",
        {"xielu.alpha_n": 0.8, "xielu.alpha_p": 0.8, "xielu.beta": 0.5, "xielu.eps": -1e-6},
        once="output:v,w",
    ),
    "hunyuan-dense": TinyArchitecture(
        "hunyuan-dense",
        _LLAMA + _HEAD_NORMS,
        {"rope.freq_base": 1e6, "rope.scaling.type": "none", "rope.scaling.factor": 4.0},
        head_size=32,
        unseen=("rope.scaling.factor",),
    ),
    "hunyuan-dense one expert": TinyArchitecture(
        "hunyuan-dense",
        _LLAMA + _HEAD_NORMS,
        _ONE_EXPERT,
        once="output:v,w",
        unseen=tuple(_ONE_EXPERT),
    ),
    "hunyuan-moe": TinyArchitecture(
        "hunyuan-moe",
        _NORMS + _ATTENTION + _HEAD_NORMS + _EXPERTS + _SHARED,
        _OF_EXPERTS
        | _NTK
        | {"expert_shared_count": 1, "expert_shared_feed_forward_length": 64, "rope.freq_base": 1.1e7},
        head_size=32,
        feed_forward=32,
        experts=8,
        unseen=(EXPERT_SIZE, "expert_shared_count", *_NTK),
    ),
    "hunyuan-moe sizes by feed-forward": TinyArchitecture(
        "hunyuan-moe",
        _NORMS + _ATTENTION + _HEAD_NORMS + _EXPERTS + _SHARED,
        _OF_EXPERTS,
        once="output:v,w",
        feed_forward=32,
        experts=8,
        unseen=(EXPERT_SIZE,),
    ),
    "smallthinker": TinyArchitecture(
        "smallthinker",
        _NORMS + _ATTENTION + _EXPERTS,
        _OF_EXPERTS | {"expert_gating_func": 2, "attention.sliding_window": 4096, "rope.freq_base": 1e6},
        once="output:v,w",
        head_size=32,
        feed_forward=32,
        experts=8,
        seed=7,
    ),
    "smallthinker five layers": TinyArchitecture(
        "smallthinker",
        _NORMS + _ATTENTION + _EXPERTS,
        _OF_EXPERTS | {"expert_gating_func": 2, "attention.sliding_window": 4096},
        layers=5,
        feed_forward=32,
        experts=8,
        seed=23,
    ),
    "smallthinker without window": TinyArchitecture(
        "smallthinker",
        _NORMS + _ATTENTION + _EXPERTS,
        _OF_EXPERTS | {"expert_gating_func": 1},
        feed_forward=32,
        experts=8,
        seed=55,
        unseen=(EXPERT_SIZE,),
    ),
    "llama Mixtral": TinyArchitecture(
        "llama",
        _NORMS + _ATTENTION + _EXPERTS,
        {"expert_count": 4, "expert_used_count": 2},
        once="output:v,w",
        feed_forward=32,
        experts=4,
    ),
    "qwen3moe": TinyArchitecture(
        "qwen3moe",
        _NORMS + _ATTENTION + _HEAD_NORMS + _EXPERTS,
        _OF_EXPERTS | {"rope.freq_base": 1e6},
        once="output:v,w",
        head_size=32,
        feed_forward=144,
        experts=8,
    ),
    "qwen2moe": TinyArchitecture(
        "qwen2moe",
        _NORMS + _ATTENTION + _BIASES + _EXPERTS + _SHARED + "ffn_gate_inp_shexp:w",
        _OF_EXPERTS | {"expert_shared_feed_forward_length": 64, "rope.freq_base": 1e6},
        once="output:v,w",
        feed_forward=144,
        experts=8,
        seed=1,
    ),
    "qwen2moe sizes by feed-forward": TinyArchitecture(
        "qwen2moe",
        _NORMS + _ATTENTION + _BIASES + _EXPERTS + _SHARED + "ffn_gate_inp_shexp:w",
        {"expert_count": 8, "expert_used_count": 3},
        once="output:v,w",
        experts=8,
        seed=8,
    ),
    "granitemoe": TinyArchitecture(
        "granitemoe",
        _NORMS + _ATTENTION + _EXPERTS,
        {
            "expert_count": 8,
            "expert_used_count": 3,
            "logit_scale": 8.0,
            "residual_scale": 0.22,
            "embedding_scale": 12.0,
            "attention.scale": 0.015625,
        },
        feed_forward=32,
        experts=8,
    ),
    "granitemoe shared": TinyArchitecture(
        "granitemoe",
        _NORMS + _ATTENTION + _EXPERTS + _SHARED,
        {
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_shared_feed_forward_length": 64,
            "logit_scale": 4.0,
            "residual_scale": 0.5,
        },
        feed_forward=32,
        experts=8,
    ),
    "gpt-oss": TinyArchitecture(
        "gpt-oss",
        "attn_norm:w post_attention_norm:w attn_output.bias:w attn_sinks:n "
        + _ATTENTION
        + _BIASES
        + _EXPERTS
        + _EXPERT_BIASES,
        _OF_EXPERTS | _YARN | {"attention.sliding_window": 24},
        once="output:v,w",
        layers=4,
        head_size=32,
        tokens=300,
        experts=8,
        seed=10,
    ),
    "olmoe": TinyArchitecture(
        "olmoe",
        _NORMS + _ATTENTION + "attn_q_norm:q attn_k_norm:k " + _EXPERTS,
        {"expert_count": 8, "expert_used_count": 3},
        once="output:v,w",
        kv_heads=4,
        feed_forward=32,
        experts=8,
    ),
    "deepseek": TinyArchitecture(
        "deepseek",
        _NORMS + _ATTENTION + _EXPERTS + _SHARED_BY_COUNT,
        _OF_EXPERTS | {"expert_shared_count": 2, "leading_dense_block_count": 1, "expert_weights_scale": 1.5},
        once="output:v,w",
        layers=3,
        kv_heads=4,
        experts=8,
        seed=11,
        others={0: _LLAMA},
    ),
    "deepseek2": TinyArchitecture(
        "deepseek2",
        _NORMS + _ABSORBED_ATTENTION + _EXPERTS + _SHARED_BY_COUNT + "exp_probs_b.bias:e",
        _OF_EXPERTS
        | _ABSORBED
        | _LOG_YARN
        | {
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "expert_weights_norm": True,
            "expert_weights_scale": 1.8,
        },
        once="output:v,w",
        layers=3,
        kv_heads=1,
        head_size=96,
        latent=(32, 32),
        tokens=300,
        experts=8,
        seed=6,
        others={0: _NORMS + _ABSORBED_ATTENTION + _GATED},
    ),
    "deepseek2 V2 Lite, older": TinyArchitecture(
        "deepseek2",
        _NORMS + _FULL_ATTENTION + _EXPERTS + _SHARED_BY_COUNT,
        _OF_EXPERTS
        | _OF_LATENT
        | _LOG_YARN
        | {"expert_shared_count": 2, "leading_dense_block_count": 1, "attention.q_lora_rank": 0},
        once="output:v,w",
        layers=3,
        kv_heads=4,
        head_size=64,
        latent=(32, 32),
        tokens=300,
        experts=8,
        others={0: _NORMS + _FULL_ATTENTION + _GATED},
        unseen=("attention.q_lora_rank",),
    ),
    "deepseek2 GLM-4.7-Flash, fused, with a layer ahead": TinyArchitecture(
        "deepseek2",
        _NORMS + _ABSORBED_ATTENTION + _FUSED_EXPERTS + _SHARED_BY_COUNT + "exp_probs_b.bias:e",
        _OF_EXPERTS
        | _ABSORBED
        | {
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
            "nextn_predict_layers": 1,
            "rope.scaling.factor": 4.0,
        },
        once="output:v,w",
        layers=3,
        kv_heads=1,
        head_size=96,
        latent=(32, 32),
        experts=8,
        seed=4,
        others={
            0: _NORMS + _ABSORBED_ATTENTION + _GATED,
            2: _NORMS
            + _ABSORBED_ATTENTION
            + _FUSED_EXPERTS
            + _SHARED_BY_COUNT
            + "exp_probs_b.bias:e nextn.eh_proj:w,W nextn.enorm:w nextn.hnorm:w nextn.shared_head_norm:w",
        },
    ),
    "deepseek2 dense, YaRN of the paper": TinyArchitecture(
        "deepseek2",
        _NORMS + _ABSORBED_ATTENTION + _GATED,
        _ABSORBED
        | _YARN
        | {"leading_dense_block_count": 2, "expert_shared_count": 0, "expert_feed_forward_length": 96},
        kv_heads=1,
        head_size=96,
        latent=(32, 32),
        tokens=300,
        unseen=("leading_dense_block_count", "expert_shared_count", "expert_feed_forward_length"),
    ),
    "deepseek2 V3": TinyArchitecture(
        "deepseek2",
        _NORMS + _ABSORBED_ATTENTION + _EXPERTS_BY_BIAS + _SHARED_BY_COUNT,
        _OF_EXPERTS
        | _ABSORBED
        | _LOG_YARN
        | _TURNS
        | _BY_SIGMOID
        | _IN_GROUPS
        | {"expert_shared_count": 1, "leading_dense_block_count": 1},
        once="output:v,w",
        layers=3,
        kv_heads=1,
        head_size=96,
        latent=(32, 32),
        tokens=300,
        experts=8,
        seed=7,
        unseen=tuple(_TURNS),
        others={0: _NORMS + _ABSORBED_ATTENTION + _GATED},
    ),
    "deepseek2 Mistral Large 3": TinyArchitecture(
        "deepseek2",
        _NORMS + _ABSORBED_ATTENTION + _EXPERTS + _SHARED_BY_COUNT,
        _OF_EXPERTS
        | _ABSORBED
        | _LOG_YARN
        | {
            "rope.scaling.yarn_log_multiplier": 0.1,
            "attention.temperature_scale": 0.5,
            "attention.temperature_length": 16,
            "expert_gating_func": 1,
            "expert_weights_norm": True,
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
        },
        once="output:v,w",
        kv_heads=1,
        head_size=96,
        latent=(32, 32),
        experts=8,
        unseen=("expert_gating_func",),
        others={0: _NORMS + _ABSORBED_ATTENTION + _GATED},
    ),
    "mistral4": TinyArchitecture(
        "mistral4",
        _NORMS + _ABSORBED_ATTENTION + _FUSED_EXPERTS + _SHARED_BY_COUNT,
        _OF_EXPERTS
        | _ABSORBED
        | _LOG_YARN
        | {"expert_weights_norm": True, "expert_shared_count": 1, "expert_weights_scale": 1.5},
        once="output:v,w",
        kv_heads=1,
        head_size=96,
        latent=(32, 32),
        tokens=300,
        experts=8,
        seed=1,
    ),
    "deepseek2 V3, older": TinyArchitecture(
        "deepseek2",
        _NORMS + _LATENT + _LATENT_QUERIES + _FULL_KEYS + _EXPERTS_BY_BIAS + _SHARED_BY_COUNT,
        _OF_EXPERTS
        | _OF_LATENT
        | _LOG_YARN
        | _BY_SIGMOID
        | {"expert_shared_count": 1, "leading_dense_block_count": 1, "attention.q_lora_rank": 64},
        once="output:v,w",
        layers=3,
        kv_heads=4,
        head_size=64,
        latent=(32, 32),
        tokens=300,
        experts=8,
        seed=31,
        others={0: _NORMS + _LATENT + _LATENT_QUERIES + _FULL_KEYS + _GATED},
    ),
    "glm4moe": TinyArchitecture(
        "glm4moe",
        _POST + _ATTENTION + _BIASES + _HEAD_NORMS + _EXPERTS_BY_BIAS + _SHARED_BY_COUNT,
        _OF_EXPERTS
        | _BY_SIGMOID
        | _ONE_GROUP
        | {
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "nextn_predict_layers": 1,
            "rope.dimension_count": 16,
            "rope.freq_base": 1e6,
        },
        once="output:v,w",
        layers=4,
        head_size=32,
        experts=8,
        seed=1,
        others={
            0: _POST + _ATTENTION + _BIASES + _HEAD_NORMS + _GATED,
            3: _POST + _ATTENTION + _BIASES + _HEAD_NORMS + _EXPERTS_BY_BIAS + _SHARED_BY_COUNT + _AHEAD,
        },
        unseen=("expert_gating_func", *_ONE_GROUP),
    ),
    "glm4moe GLM-4.5V, text": TinyArchitecture(
        "glm4moe",
        _POST + _ATTENTION + _BIASES + _EXPERTS_BY_BIAS + _SHARED_BY_COUNT,
        _OF_EXPERTS
        | {
            "expert_shared_count": 1,
            "leading_dense_block_count": 1,
            "rope.dimension_count": 8,
            "rope.dimension_sections": np.array([2, 1, 1, 0], np.int32),
        },
        experts=8,
        seed=2,
        others={0: _POST + _ATTENTION + _BIASES + _GATED},
        unseen=("rope.dimension_sections",),
    ),
    "glm4moe Solar Open": TinyArchitecture(
        "glm4moe",
        _POST + _ATTENTION + _EXPERTS_BY_BIAS + _SHARED_BY_COUNT,
        _OF_EXPERTS | _BY_SIGMOID | _YARN | _TURNS | {"expert_shared_count": 1},
        once="output:v,w",
        tokens=300,
        experts=8,
        unseen=("expert_gating_func", *_TURNS),
    ),
    "dots1": TinyArchitecture(
        "dots1",
        _NORMS + _ATTENTION + _HEAD_NORMS + _EXPERTS_BY_BIAS + _SHARED_BY_COUNT,
        _OF_EXPERTS
        | _BY_SIGMOID
        | _ONE_GROUP
        | {"expert_shared_count": 2, "leading_dense_block_count": 1, "rope.freq_base": 1e6},
        once="output:v,w",
        layers=3,
        kv_heads=4,
        experts=8,
        seed=3,
        unseen=tuple(_ONE_GROUP),
        others={0: _LLAMA + _HEAD_NORMS},
    ),
    "bailingmoe2": TinyArchitecture(
        "bailingmoe2",
        _NORMS + _FUSED_ATTENTION + _HEAD_NORMS + _EXPERTS_BY_BIAS + _SHARED,
        _OF_EXPERTS
        | _BY_SIGMOID
        | _IN_GROUPS
        | {
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": 64,
            "leading_dense_block_count": 1,
            "nextn_predict_layers": 1,
            "rope.dimension_count": 8,
        },
        once="output:v,w",
        layers=4,
        experts=8,
        seed=1,
        others={
            0: _NORMS + _FUSED_ATTENTION + _HEAD_NORMS + _GATED,
            3: _NORMS + _FUSED_ATTENTION + _HEAD_NORMS + _EXPERTS_BY_BIAS + _SHARED + _AHEAD + "layer_output_norm:w",
        },
    ),
    "ernie4_5-moe": TinyArchitecture(
        "ernie4_5-moe",
        _NORMS + _ATTENTION + _EXPERTS_BY_BIAS + _SHARED,
        _OF_EXPERTS
        | {
            "expert_shared_feed_forward_length": 64,
            "leading_dense_block_count": 1,
            "interleave_moe_layer_step": 1,
            "rope.freq_base": 5e5,
        },
        layers=3,
        head_size=32,
        experts=8,
        others={0: _LLAMA},
    ),
    "ernie4_5-moe 300B": TinyArchitecture(
        "ernie4_5-moe",
        _NORMS + _ATTENTION + _EXPERTS_BY_BIAS,
        _OF_EXPERTS | {"leading_dense_block_count": 1, "interleave_moe_layer_step": 1, "expert_shared_count": 0},
        once="output:v,w",
        experts=8,
        others={0: _LLAMA},
        unseen=("expert_shared_count",),
    ),
    "minimax-m2": TinyArchitecture(
        "minimax-m2",
        _NORMS + _ATTENTION + "attn_q_norm:q attn_k_norm:k " + _EXPERTS_BY_BIAS,
        _OF_EXPERTS | {"expert_gating_func": 2, "rope.dimension_count": 16, "rope.freq_base": 5e6},
        once="output:v,w",
        head_size=32,
        feed_forward=32,
        experts=8,
        unseen=(EXPERT_SIZE,),
    ),
    "lfm2": TinyArchitecture(
        "lfm2",
        _NORMS + _CONVOLUTION + _GATED,
        {"shortconv.l_cache": 3, "rope.freq_base": 1e6},
        layers=5,
        others=dict.fromkeys((2, 4), _LLAMA + _HEAD_NORMS),
        last_norm="token_embd_norm",
    ),
    "lfm2 window": TinyArchitecture(
        "lfm2",
        _NORMS + _CONVOLUTION + _GATED,
        {"shortconv.l_cache": 4, "attention.sliding_window": 24},
        layers=4,
        tokens=200,
        others=dict.fromkeys((1, 3), _LLAMA + _HEAD_NORMS),
        last_norm="token_embd_norm",
    ),
    "lfm2moe": TinyArchitecture(
        "lfm2moe",
        _NORMS + _CONVOLUTION + _EXPERTS + "exp_probs_b.bias:e",
        _OF_EXPERTS
        | {
            "shortconv.l_cache": 3,
            "leading_dense_block_count": 1,
            "expert_gating_func": 2,
        },
        layers=4,
        experts=8,
        seed=10,
        others={
            0: _NORMS + _CONVOLUTION + _GATED,
            2: _NORMS + _ATTENTION + _HEAD_NORMS + _EXPERTS + "exp_probs_b.bias:e",
        },
        last_norm="token_embd_norm",
    ),
    "qwen35": TinyArchitecture(
        "qwen35",
        _POST + _DELTA_INPUTS + _DELTA_NET + _GATED,
        _STATES | _SECTIONS | {"full_attention_interval": 3, "rope.freq_base": 1e6},
        once="output:v,w",
        layers=4,
        head_size=32,
        seed=2,
        others={2: _POST + _GATED_ATTENTION + _GATED},
    ),
    "qwen35 layers by name, with a layer ahead": TinyArchitecture(
        "qwen35",
        _POST + _DELTA_INPUTS + _DELTA_NET + _GATED,
        _STATES
        | _SECTIONS
        | {
            "ssm.state_size": 32,
            "ssm.inner_size": 128,
            "attention.recurrent_layers": np.array([True, False, True, False]),
            "nextn_predict_layers": 1,
        },
        layers=4,
        head_size=32,
        seed=2,
        others={
            1: _POST + _GATED_ATTENTION + _GATED,
            3: _POST + _GATED_ATTENTION + _GATED + _AHEAD,
        },
    ),
    "granitehybrid": TinyArchitecture(
        "granitehybrid",
        _NORMS + _MAMBA + _MAMBA_NORM + _GATED,
        _MAMBA_STATES
        | {
            "logit_scale": 8.0,
            "residual_scale": 0.7,
            "embedding_scale": 3.0,
            "attention.scale": 0.5,
            "rope.scaling.finetuned": False,
        },
        layers=4,
        others={2: _LLAMA},
    ),
    "granitehybrid experts, rope": TinyArchitecture(
        "granitehybrid",
        _NORMS + _MAMBA + _MAMBA_NORM + _EXPERTS + _SHARED,
        _MAMBA_STATES
        | {
            "expert_count": 8,
            "expert_used_count": 3,
            "expert_shared_feed_forward_length": 64,
            "residual_scale": 0.5,
        },
        layers=4,
        feed_forward=32,
        experts=8,
        seed=3,
        others={1: _NORMS + _ATTENTION + _EXPERTS + _SHARED},
    ),
    "qwen35moe": TinyArchitecture(
        "qwen35moe",
        _POST + _DELTA_INPUTS + _DELTA_NET + _EXPERTS + _GATED_SHARED,
        _STATES | _SECTIONS | _OF_EXPERTS | {"expert_shared_feed_forward_length": 64, "full_attention_interval": 2},
        once="output:v,w",
        layers=4,
        head_size=32,
        feed_forward=144,
        experts=8,
        seed=20,
        others={
            1: _POST + _GATED_ATTENTION + _EXPERTS + _GATED_SHARED,
            3: _POST + _GATED_ATTENTION + _EXPERTS + _GATED_SHARED,
        },
    ),
    "qwen35moe fused, with a layer ahead": TinyArchitecture(
        "qwen35moe",
        _POST + _DELTA_INPUTS + _DELTA_NET + _FUSED_EXPERTS + _GATED_SHARED,
        _STATES
        | _SECTIONS
        | _OF_EXPERTS
        | {"expert_shared_feed_forward_length": 64, "full_attention_interval": 2, "nextn_predict_layers": 1},
        once="output:v,w",
        layers=3,
        head_size=32,
        feed_forward=144,
        experts=8,
        seed=12,
        others={
            1: _POST + _GATED_ATTENTION + _FUSED_EXPERTS + _GATED_SHARED,
            2: _POST + _GATED_ATTENTION + _FUSED_EXPERTS + _GATED_SHARED + _AHEAD,
        },
    ),
    "qwen3next": TinyArchitecture(
        "qwen3next",
        _POST + "attn_qkv:C,w attn_gate:I,w " + _DELTA_INPUTS_BY_KEY_HEAD + _DELTA_NET + _EXPERTS + _GATED_SHARED,
        _STATES | _OF_EXPERTS | {"expert_shared_feed_forward_length": 64, "rope.dimension_count": 8},
        once="output:v,w",
        layers=5,
        head_size=32,
        feed_forward=144,
        experts=8,
        seed=16,
        others={3: _POST + _GATED_ATTENTION + _EXPERTS + _GATED_SHARED},
    ),
    "qwen3next older": TinyArchitecture(
        "qwen3next",
        _POST + "ssm_in:D,w " + _DELTA_INPUTS_BY_KEY_HEAD + _DELTA_NET + _EXPERTS + _GATED_SHARED,
        _STATES | _OF_EXPERTS | {"full_attention_interval": 3, "rope.dimension_count": 8},
        once="output:v,w",
        layers=3,
        head_size=32,
        feed_forward=144,
        experts=8,
        seed=20,
        others={2: _POST + _GATED_ATTENTION + _EXPERTS + _GATED_SHARED},
    ),
    "nemotron_h": TinyArchitecture(
        "nemotron_h",
        "attn_norm:w " + _MAMBA + _MAMBA_NORM,
        _MAMBA_STATES,
        once="output:v,w",
        layers=5,
        head_size=32,
        epsilon=_LAYER_NORM,
        others={
            1: "attn_norm:w " + _UNGATED,
            2: "attn_norm:w " + _ATTENTION,
            4: "attn_norm:w " + _UNGATED,
        },
    ),
    "nemotron_h_moe": TinyArchitecture(
        "nemotron_h_moe",
        "attn_norm:w " + _MAMBA + _MAMBA_NORM,
        _STATES
        | _OF_EXPERTS
        | {
            "expert_shared_feed_forward_length": 64,
            "expert_weights_norm": True,
            "expert_weights_scale": 2.5,
            "attention.layer_norm_epsilon": 1e-5,
        },
        once="output:v,w",
        layers=5,
        feed_forward=32,
        experts=8,
        seed=22,
        others={
            1: "attn_norm:w " + _UNGATED_EXPERTS + _UNGATED_SHARED,
            3: "attn_norm:w " + _ATTENTION,
            4: "attn_norm:w " + _UNGATED_EXPERTS + _UNGATED_SHARED,
        },
        unseen=("attention.layer_norm_epsilon",),
    ),
    "nemotron_h_moe Super, with a layer ahead": TinyArchitecture(
        "nemotron_h_moe",
        "attn_norm:w " + _MAMBA + _MAMBA_NORM,
        _STATES
        | _OF_EXPERTS
        | {
            "expert_shared_feed_forward_length": 64,
            "moe_latent_size": 32,
            "nextn_predict_layers": 1,
            "attention.layer_norm_epsilon": 1e-5,
        },
        once="output:v,w",
        layers=4,
        feed_forward=32,
        experts=8,
        seed=22,
        others={
            1: "attn_norm:w " + _LATENT_EXPERTS + _UNGATED_SHARED,
            2: "attn_norm:w " + _ATTENTION,
            3: _POST + _ATTENTION + _LATENT_EXPERTS + _UNGATED_SHARED + _AHEAD,
        },
        unseen=("attention.layer_norm_epsilon",),
    ),
    "jamba": TinyArchitecture(
        "jamba",
        _NORMS + _MAMBA_1 + _GATED,
        _MAMBA_1_STATES | {"expert_count": 4, "expert_used_count": 2},
        once="output:v,w",
        layers=4,
        feed_forward=32,
        experts=4,
        others={
            1: _NORMS + _MAMBA_1 + _EXPERTS,
            2: _LLAMA,
            3: _NORMS + _ATTENTION + _EXPERTS,
        },
    ),
    "jamba dense": TinyArchitecture(
        "jamba",
        _NORMS + _MAMBA_1 + _GATED,
        _MAMBA_1_STATES | {"ssm.time_step_rank": 12, "ssm.state_size": 32} | _ONE_EXPERT,
        layers=3,
        others={1: _LLAMA},
        unseen=tuple(_ONE_EXPERT),
    ),
    "falcon-h1": TinyArchitecture(
        "falcon-h1",
        _NORMS + _MAMBA + _ATTENTION + _GATED,
        _STATES | {"rope.freq_base": 1e8},
        head_size=32,
    ),
    "falcon-h1 norm": TinyArchitecture(
        "falcon-h1",
        _NORMS + _MAMBA + _MAMBA_NORM + _ATTENTION + _GATED,
        _STATES | {"ssm.state_size": 32, "ssm.inner_size": 128},
        once="output:v,w",
    ),
}


def tiny_architecture(
    folder: Path, name: str, weight_type: str = "F32", *, without: str | None = None, **sizes: Any
) -> Path:
    """Write the named model and return its path. `without` is a key to omit; `sizes` override the row's fields."""
    row, vocabulary = replace(TINY_ARCHITECTURES[name], **sizes), tiny_vocabulary()
    metadata = row.metadata() | vocabulary.metadata()
    if without is not None:
        del metadata[row.full_key(without)]
    tensors = row.tensors(weight_type, len(vocabulary.tokens))
    return write_gguf(folder / f"{name.replace(' ', '-').replace(',', '')}.gguf", metadata, tensors)
