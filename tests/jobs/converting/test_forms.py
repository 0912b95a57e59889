"""Tests that config.json is read as transformers reads it, and that other kinds of models are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from llmrun.base.errors import ModelFileError, UnsupportedModel
from llmrun.jobs.converting.checkpoint import Checkpoint
from llmrun.jobs.converting.convert import Conversion, plan_conversion
from llmrun.jobs.converting.forms import FORMS, modules_of, read_shape
from tests.support.converting import checkpoints
from tests.support.converting.checkpoints import TinyCheckpoint, tiny_checkpoint
from tests.support.gguf.gguf_files import llama3_rope_factors

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def planned(checkpoint: TinyCheckpoint, folder: Path) -> Conversion:
    with Checkpoint(checkpoint.write(folder / "model")) as opened:
        return plan_conversion(opened)


def keys_of(folder: Path, form: str = "LlamaForCausalLM", **config: Any) -> dict[str, Any]:
    """Return the metadata of the architecture. A config value of None removes the key."""
    checkpoint = tiny_checkpoint(form, "")
    checkpoint.config = {key: value for key, value in (checkpoint.config | config).items() if value is not None}
    metadata = planned(checkpoint, folder).metadata
    prefix = f"{FORMS[form].architecture}."
    return {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}


@pytest.mark.parametrize("form", FORMS)
def test_names_are_those_of_gguf_py(form: str, tmp_path: Path) -> None:
    with Checkpoint(tiny_checkpoint(form).write(tmp_path / "model")) as opened:
        shape = read_shape(opened.config, FORMS[form])
    architecture = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[FORMS[form].architecture]
    names = gguf.get_tensor_name_map(architecture, shape.layers)
    modules = modules_of(FORMS[form], shape)
    assert len(modules) == 3 + 9 * shape.layers + 2 * shape.layers * FORMS[form].head_norms
    for module in modules:
        assert names.get_name(module.hf_name) == module.name


def test_linear_scaling_is_kept(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, rope_scaling={"type": "linear", "factor": 4.0})
    assert (keys["rope.scaling.type"], keys["rope.scaling.factor"]) == ("linear", 4.0)


def test_yarn_is_kept(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0}
    keys = keys_of(tmp_path, rope_scaling=scaling)
    assert keys["rope.scaling.type"] == "yarn"
    assert keys["rope.scaling.original_context_length"] == 128
    assert "rope.scaling.attn_factor" not in keys


def test_llama3_scaling_becomes_factors(tmp_path: Path) -> None:
    conversion = planned(tiny_checkpoint(rope_scaling=LLAMA3, rope_theta=500_000.0), tmp_path)
    assert conversion.tensors[0].name == "rope_freqs.weight"
    factors = np.concatenate([np.asarray(piece) for piece in conversion.tensors[0].data()])
    assert factors == pytest.approx(llama3_rope_factors(16, 500_000.0), rel=1e-6)
    assert not any("rope.scaling" in key for key in conversion.metadata)


@pytest.mark.parametrize(
    ("form", "config", "context"),
    [
        ("MistralForCausalLM", {"sliding_window": 128}, 128),
        ("MistralForCausalLM", {"sliding_window": None, "max_position_embeddings": 8192}, 4096),
        ("MistralForCausalLM", {"sliding_window": 1024}, 512),
        ("LlamaForCausalLM", {"sliding_window": 128}, 512),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": False}, 512),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}, 128),
        ("Qwen3ForCausalLM", {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}, 512),
    ],
)
def test_sliding_windows_limit_the_context(form: str, config: dict[str, Any], context: int, tmp_path: Path) -> None:
    assert keys_of(tmp_path, form, **config)["context_length"] == context


def test_limited_contexts_get_a_note(tmp_path: Path) -> None:
    assert planned(tiny_checkpoint("MistralForCausalLM", sliding_window=128), tmp_path).notes == [
        "the context is limited to 128 of 512 tokens, because the model has a sliding window, which GGUF files of "
        "llama cannot express"
    ]


def test_a_null_window_is_none(tmp_path: Path) -> None:
    assert planned(tiny_checkpoint("MistralForCausalLM", sliding_window=None), tmp_path).notes == []


def test_missing_keys_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, head_dim=None, rope_theta=None, num_key_value_heads=2)
    assert (keys["attention.key_length"], keys["rope.freq_base"]) == (16, 10_000.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "architectures is GemmaForCausalLM, but only LlamaForCausal",
        ),
        ({"architectures": []}, "architectures is missing"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "architectures is LlamaForCausalLM, X"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu, but only silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, but only 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type is 'dynamic', but only default"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 16}}, "rope_scaling.beta_fast is 16"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "rope_scaling.truncate is False"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}}, "rope_scaling.mscale cannot be converted"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
    ],
)
def test_other_models_are_refused_by_name(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        planned(tiny_checkpoint(**config), tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most 512"),
        ({"vocab_size": 2**31 - 1}, "vocab_size must be at most 1,048,576, not 2,147,483,647"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ({"num_key_value_heads": 3}, "num_attention_heads of 4 does not fit 3 KV heads"),
        ({"head_dim": 15}, "num_attention_heads of 4 does not fit 2 KV heads of size 15"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number, not '0'"),
        ({"rms_norm_eps": 1e99}, "rms_norm_eps must be a positive number"),
        ({"vocab_size": 10}, "has the ID 10, but the model has only 10 tokens"),
        ({"vocab_size": 310}, "model.embed_tokens.weight must have the shape (310, 64)"),
        ({"intermediate_size": 128}, "must have the shape"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor must be below high_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, not 'linear'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_broken_configs_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError) as caught:
        planned(tiny_checkpoint(**config), tmp_path)
    assert message in str(caught.value)


def with_tensor(name: str, dtype: str, *shape: int, form: str = "LlamaForCausalLM", value: float = 1) -> TinyCheckpoint:
    checkpoint = tiny_checkpoint(form)
    checkpoint.tensors[name] = (dtype, np.full(shape, value, checkpoints.encoded("F16", np.ones(1, np.float32)).dtype))
    return checkpoint


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        (with_tensor("model.extra.weight", "F16", 3), "model.extra.weight is not a tensor of this kind of model"),
        (with_tensor("model.layers.2.mlp.up_proj.weight", "F16", 3), "model.layers.2.mlp.up_proj.weight is not a"),
        (
            with_tensor("model.layers.0.mlp.up_proj.bias", "F16", 96, form="Qwen3ForCausalLM"),
            "model.layers.0.mlp.up_proj.bias is a bias, which models of this form do not have",
        ),
        (with_tensor("model.norm.weight", "I16", 64), "model.norm.weight is I16, but only F32, F16, BF16"),
    ],
)
def test_other_tensors_are_refused_by_name(checkpoint: TinyCheckpoint, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        planned(checkpoint, tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "lm_head.weight", "model.layers.1.self_attn.q_proj.bias", "model.embed_tokens.weight"]
)
def test_missing_tensors_are_named(name: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("Qwen2ForCausalLM")
    del checkpoint.tensors[name]
    with pytest.raises(ModelFileError, match=f"{name} is missing"):
        planned(checkpoint, tmp_path)


def test_biases_of_zero_are_left_out(tmp_path: Path) -> None:
    """AutoGPTQ adds them to all matrices, and llama.cpp refuses a bias that an architecture does not have."""
    checkpoint = with_tensor("model.layers.0.mlp.up_proj.bias", "F16", 96, form="Qwen2ForCausalLM", value=0)
    assert "blk.0.ffn_up.bias" not in [tensor.name for tensor in planned(checkpoint, tmp_path).tensors]


def test_biases_of_llama_are_reordered_with_their_rows(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    values = np.arange(64, dtype=np.float16)
    checkpoint.tensors["model.layers.0.self_attn.q_proj.bias"] = ("F16", values)
    bias = next(tensor for tensor in planned(checkpoint, tmp_path).tensors if tensor.name == "blk.0.attn_q.bias")
    with Checkpoint(tmp_path / "model") as opened:
        bias = next(tensor for tensor in plan_conversion(opened).tensors if tensor.name == "blk.0.attn_q.bias")
        found = np.concatenate([np.asarray(piece) for piece in bias.data()])
    assert (found == values.reshape(4, 2, 8).swapaxes(1, 2).reshape(-1)).all()


def test_constants_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    checkpoint = with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", "F16", 8)
    assert len(planned(checkpoint, tmp_path).tensors) == 21


def test_modules_may_have_plain_weights(tmp_path: Path) -> None:
    """AWQ's `modules_to_not_convert` names them."""
    checkpoint = tiny_checkpoint()
    name = "model.layers.1.mlp.up_proj"
    for part in ("qweight", "qzeros", "scales"):
        del checkpoint.tensors[f"{name}.{part}"]
    checkpoint.tensors[f"{name}.weight"] = ("F16", np.ones((96, 64), np.float16))
    conversion = planned(checkpoint, tmp_path)
    types = {tensor.name: tensor.type.name for tensor in conversion.tensors}
    assert (types["blk.0.ffn_up.weight"], types["blk.1.ffn_up.weight"]) == ("Q4_0", "F16")
    assert conversion.type_counts == {"Q4_0": 13, "F32": 5, "F16": 3}


def test_modules_with_two_weights_are_refused(tmp_path: Path) -> None:
    checkpoint = with_tensor("model.layers.1.mlp.up_proj.weight", "F16", 96, 64)
    with pytest.raises(UnsupportedModel, match=r"up_proj\.weight is not a tensor"):
        planned(checkpoint, tmp_path)


def test_quantized_weights_need_settings(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"q_proj\.qweight is quantized, but no config\.json describes it"):
        planned(tiny_checkpoint(quantization_config=None), tmp_path)
