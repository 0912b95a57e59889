"""Tests that converted files hold exactly the weights of their checkpoints, and compute what transformers computes."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from llmrun.base.errors import ModelFileError
from llmrun.formats.gguf.reader import GGUFFile, open_gguf
from llmrun.formats.quants.registry import BY_NAME
from tests.support.converting.checkpoints import FORMS, HEADS, KV_HEADS, save_shards, tiny_checkpoint
from tests.support.converting.converting import convert, converted
from tests.support.converting.packing import Quantized
from tests.support.converting.variants import PROMPT, VARIANTS
from tests.support.gguf.gguf_files import tiny_vocabulary
from tests.support.models.fidelity import exact_twin, plan_of
from tests.support.models.llama_cpp_oracle import LlamaCppModel, requantize

LOGITS = json.loads((Path(__file__).parent / "transformers_logits.json").read_text())
METHODS = ("awq", "gptq", "gptq_v2")


def weights(file: GGUFFile, name: str) -> NDArray[np.float32]:
    """Dequantize a tensor, float32[rows, columns] or float32[size]."""
    tensor = file.tensors[name]
    assert tensor.type.dequantize is not None
    return tensor.type.dequantize(file.read(tensor)).reshape(tensor.shape[::-1])


def permuted(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of queries or keys as `LlamaModel.permute` in llama.cpp's converter does."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("zero", [8, None])
def test_converted_weights_are_exact(form: str, method: str, zero: int | None, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(form, method, zero=zero)
    with converted(checkpoint, tmp_path) as file:
        names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"}
        names |= {f"{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
        assert len(checkpoint.weights) == 2 * len(names)
        for module, expected in checkpoint.weights.items():
            _, _, layer, _, part = module.split(".")
            found = weights(file, f"blk.{layer}.{names[part]}.weight")
            heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(part, 0)
            if heads and form in ("LlamaForCausalLM", "MistralForCausalLM"):
                expected = permuted(expected, heads)
            assert (found.view(np.uint32) == expected.view(np.uint32)).all(), module
            assert file.tensors[f"blk.{layer}.{names[part]}.weight"].type.name == ("Q5_0" if zero is None else "Q4_0")


@pytest.mark.parametrize("name", VARIANTS)
def test_converted_models_compute_what_transformers_does(name: str, tmp_path: Path) -> None:
    """Sums in other orders, and llama.cpp's table of SiLU, account for the tolerance."""
    expected = np.array(LOGITS[name], np.float32)
    converted(VARIANTS[name](), tmp_path).close()
    path = tmp_path / "converted.gguf"
    dequantized = requantize(path, tmp_path / "dequantized.gguf", "F32")
    with LlamaCppModel.oracle(dequantized) as oracle:
        theirs = oracle.logits(PROMPT)[-1]
    ours = exact_twin(plan_of(path))(PROMPT)[-1]
    assert np.abs(ours - expected).max() <= 2e-5 * np.ptp(expected)
    assert np.abs(theirs - expected).max() <= 2e-5 * np.ptp(expected)


@pytest.mark.parametrize("stored", ["F32", "F16", "BF16"])
def test_other_tensors_keep_their_values(stored: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("Qwen2ForCausalLM", "awq", stored=stored)
    names = {
        "model.embed_tokens.weight": ("token_embd.weight", stored),
        "lm_head.weight": ("output.weight", stored),
        "model.norm.weight": ("output_norm.weight", "F32"),
        "model.layers.1.self_attn.k_proj.bias": ("blk.1.attn_k.bias", "F32"),
    }
    with converted(checkpoint, tmp_path) as file:
        for hf_name, (name, type_name) in names.items():
            dequantize = BY_NAME[stored].dequantize
            assert dequantize is not None
            values = checkpoint.tensors[hf_name][1]
            expected = dequantize(np.ascontiguousarray(values).view(np.uint8)).reshape(values.shape)
            assert file.tensors[name].type.name == type_name
            assert (weights(file, name).view(np.uint32) == expected.view(np.uint32)).all()


def test_tied_models_have_no_output_matrix(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tied=True)
    checkpoint.tensors["lm_head.weight"] = checkpoint.tensors["model.embed_tokens.weight"]
    with converted(checkpoint, tmp_path) as file:
        assert "output.weight" not in file.tensors


def test_quantized_output_matrices_are_converted(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    vocabulary = checkpoint.config["vocab_size"] + 7  # a multiple of 8, with IDs that no token has
    checkpoint.config["vocab_size"] = vocabulary
    assert vocabulary % 8 == 0
    del checkpoint.tensors["lm_head.weight"]
    quantized = Quantized.random(np.random.default_rng(0), vocabulary, 64, 32)
    checkpoint.tensors |= quantized.awq("lm_head")
    checkpoint.tensors["model.embed_tokens.weight"] = ("F16", np.zeros((vocabulary, 64), np.float16))
    with converted(checkpoint, tmp_path) as file:
        assert (weights(file, "output.weight") == quantized.weights()).all()
        assert file.strings("tokenizer.ggml.tokens")[vocabulary - 1] == f"[PAD{vocabulary - 1}]"


def test_sharded_checkpoints_give_the_same_file(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(method="gptq")
    folder = checkpoint.write(tmp_path / "model")
    convert(folder, tmp_path / "one.gguf")
    save_shards(folder, checkpoint.tensors, lambda name: f"model-0000{1 + len(name) % 3}-of-00003.safetensors")
    convert(folder, tmp_path / "three.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "three.gguf").read_bytes()


def test_the_metadata_is_that_of_a_llama(tmp_path: Path) -> None:
    with converted(tiny_checkpoint(), tmp_path) as file:
        assert {key: file.metadata[key] for key in file.metadata if not key.startswith("tokenizer.")} == {
            "general.architecture": "llama",
            "general.name": "checkpoint",
            "general.file_type": 2,
            "general.quantization_version": 2,
            "llama.vocab_size": len(tiny_vocabulary().tokens),
            "llama.context_length": 512,
            "llama.embedding_length": 64,
            "llama.block_count": 2,
            "llama.feed_forward_length": 96,
            "llama.attention.head_count": 4,
            "llama.attention.head_count_kv": 2,
            "llama.attention.key_length": 16,
            "llama.attention.value_length": 16,
            "llama.attention.layer_norm_rms_epsilon": pytest.approx(1e-5),
            "llama.rope.dimension_count": 16,
            "llama.rope.freq_base": 10000.0,
        }


@pytest.mark.push
def test_a_big_model_is_never_in_memory(tmp_path: Path) -> None:
    """The largest matrix has 2 MB, and the whole model 40 MB."""
    width, vocabulary = 512, 4096
    checkpoint = tiny_checkpoint(method="", stored="F32")
    checkpoint.config |= {"hidden_size": width, "vocab_size": vocabulary, "num_hidden_layers": 16, "head_dim": 128}
    checkpoint.config |= {"intermediate_size": width}
    layer = {
        **{f"self_attn.{name}_proj.weight": (width, width) for name in "qo"},
        **{f"self_attn.{name}_proj.weight": (width // 2, width) for name in "kv"},
        **{f"mlp.{name}_proj.weight": (width, width) for name in ("gate", "up", "down")},
        **{f"{name}_layernorm.weight": (width,) for name in ("input", "post_attention")},
    }
    shapes = {f"model.layers.{index}.{name}": shape for index in range(16) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (vocabulary, width), "lm_head.weight": (vocabulary, width)}
    shapes |= {"model.norm.weight": (width,)}
    checkpoint.tensors = {name: ("F16", np.zeros(shape, np.float16)) for name, shape in shapes.items()}
    folder = checkpoint.write(tmp_path / "model")
    del checkpoint
    tracemalloc.start()
    convert(folder, tmp_path / "out.gguf")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "out.gguf").stat().st_size > 40e6
    assert peak < 15e6


def test_files_that_change_meanwhile_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint().write(tmp_path / "model")
    weights_file = folder / "model.safetensors"
    from llmrun.jobs.converting import convert as module

    def write_and_touch(*arguments: object) -> None:
        os.utime(weights_file, (1, 1))

    monkeypatch.setattr(module, "write_gguf", write_and_touch)
    with pytest.raises(ModelFileError, match="changed while it was being read"):
        convert(folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_the_general_name_is_that_of_the_folder(tmp_path: Path) -> None:
    folder = tiny_checkpoint().write(tmp_path / "Some-Model-AWQ")
    convert(folder, tmp_path / "out.gguf")
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.string("general.name") == "Some-Model-AWQ"
