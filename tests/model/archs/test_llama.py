"""Tests that the llama architecture reads its metadata strictly and writes the right plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from llmrun.base.errors import BadGGUF, LlmrunError, UnsupportedModel
from llmrun.formats.gguf.reader import GGUFFile, open_gguf
from llmrun.formats.quants.registry import BY_NAME
from llmrun.formats.quants.weight_type import WeightType
from llmrun.model.archs import llama
from llmrun.model.archs.parts.architecture import architecture_of, architectures
from llmrun.model.archs.parts.tensors import common_type, is_quantized, matrix, parameter_count, vector
from llmrun.model.plan.matrix import SUPPORTED
from llmrun.model.plan.ops.attention import Attention
from llmrun.model.plan.ops.linear import Linear
from llmrun.model.plan.ops.norms import RmsNorm
from llmrun.model.plan.plan import Plan
from llmrun.model.plan.twin import Rows
from tests.support.gguf.gguf_files import Tensor, llama3_rope_factors, tiny_llama, write_gguf
from tests.support.models.tiny_models import Change, changed_copy


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    return open_gguf(tiny_llama(tmp_path_factory.mktemp("archs") / "tiny.gguf", weight_type="F32", tied=False))


def changed(tiny: GGUFFile, folder: Path, change: Change) -> GGUFFile:
    """Open the tiny model again with a change applied."""
    return open_gguf(changed_copy(tiny.path, folder / "changed.gguf", change))


def with_metadata(**values: Any) -> Change:
    """Change keys below `llama.`, with `__` for a dot; a value of None removes the key."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name, value in values.items():
            key = f"llama.{name.replace('__', '.')}"
            metadata.pop(key, None)
            if value is not None:
                metadata[key] = value

    return change


def read_config(file: GGUFFile) -> llama.Config:
    config = architecture_of(file).read_config(file)
    assert isinstance(config, llama.Config)
    return config


def planned(file: GGUFFile) -> Plan:
    return llama.plan(file, read_config(file))


# --- reading ---------------------------------------------------------------------------------------------------------


def test_the_config_is_the_metadata(tiny: GGUFFile) -> None:
    config = read_config(tiny)
    assert (config.layers, config.width, config.feed_forward) == (2, 64, 96)
    assert (config.heads, config.kv_heads, config.head_size, config.rope.dimensions) == (4, 2, 16, 16)
    assert (config.train_context, config.rope.base, config.rope.factor) == (512, 10_000.0, 1.0)
    assert config.norm_epsilon == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("values", "field", "expected"),
    [
        ({"attention__head_count_kv": None}, "kv_heads", 4),
        ({"rope__freq_base": None}, "rope.base", 10_000.0),
        ({"rope__dimension_count": None}, "rope.dimensions", 16),
        ({"rope__dimension_count": 8}, "rope.dimensions", 8),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, "rope.factor", 4.0),
        ({"rope__scaling__factor": 4.0}, "rope.factor", 4.0),
        ({"rope__scale_linear": 2.0}, "rope.factor", 2.0),
        ({"rope__scale_linear": 2.0, "rope__scaling__factor": 4.0}, "rope.factor", 4.0),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, "rope.factor", 1.0),
        ({"expert_count": 0}, "heads", 4),
        ({"rope__scaling__attn_factor": 1.3}, "rope.magnitude", pytest.approx(1.3)),
        ({"attention__head_count_kv": [2, 2]}, "kv_heads", 2),
        ({"feed_forward_length": [96, 96]}, "feed_forward", 96),
    ],
)
def test_keys_that_may_be_absent_have_llama_cpps_defaults(
    tiny: GGUFFile, tmp_path: Path, values: Mapping[str, Any], field: str, expected: object
) -> None:
    file = changed(tiny, tmp_path, with_metadata(**values))
    assert attrgetter(field)(read_config(file)) == expected


# --- refusing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"block_count": None}, BadGGUF, "llama.block_count"),
        ({"block_count": 0}, BadGGUF, "llama.block_count"),
        ({"block_count": 1 << 30}, BadGGUF, "llama.block_count"),
        ({"embedding_length": 0}, BadGGUF, "llama.embedding_length"),
        ({"attention__head_count": 0}, BadGGUF, "llama.attention.head_count"),
        ({"attention__head_count_kv": 3}, BadGGUF, "must be a divisor of 4, the number of heads, not 3"),
        ({"attention__head_count_kv": 8}, BadGGUF, "llama.attention.head_count_kv"),
        ({"attention__layer_norm_rms_epsilon": None}, BadGGUF, "layer_norm_rms_epsilon"),
        ({"attention__layer_norm_rms_epsilon": 0.0}, BadGGUF, "must be above 0, not 0.0"),
        ({"attention__layer_norm_rms_epsilon": float("nan")}, BadGGUF, "layer_norm_rms_epsilon"),
        ({"rope__freq_base": -1.0}, BadGGUF, "must be above 0, not -1.0"),
        ({"rope__freq_base": float("inf")}, BadGGUF, "freq_base"),
        ({"rope__scaling__factor": 0.0}, BadGGUF, "must be above 0, not 0.0"),
        ({"rope__dimension_count": 7}, BadGGUF, "must be even, not 7"),
        ({"rope__dimension_count": 18}, BadGGUF, "llama.rope.dimension_count"),
        ({"context_length": 0}, BadGGUF, "llama.context_length"),
        ({"context_length": "many"}, BadGGUF, "llama.context_length"),
        ({"attention__key_length": 32}, UnsupportedModel, "keys and values of different sizes, 32 and 16 features"),
        ({"attention__head_count": 8}, UnsupportedModel, "the head size must be a multiple of 16, not 8"),
        (
            {"feed_forward_length": [96, 32]},
            UnsupportedModel,
            "different values of llama.feed_forward_length in different layers",
        ),
        (
            {"attention__head_count_kv": [2, 1]},
            UnsupportedModel,
            "different values of llama.attention.head_count_kv in different layers",
        ),
        ({"attention__head_count_kv": [8, 8]}, BadGGUF, "must be 1 to 4, not 8"),
        ({"attention__key_length_swa": 32}, UnsupportedModel, "llama.attention.key_length_swa differs from"),
        ({"attention__causal": False}, UnsupportedModel, "the model does not generate text"),
        ({"nextn_predict_layers": 1}, UnsupportedModel, "layers for multi-token prediction"),
        ({"rope__scaling__type": "yarn", "rope__freq_base": 1.0}, BadGGUF, "must be above 1 for YaRN, not 1.0"),
        ({"rope__scaling__original_context_length": 0}, BadGGUF, "original_context_length"),
        ({"rope__scaling__attn_factor": 0.0}, BadGGUF, "attn_factor"),
    ],
)
def test_metadata_that_cannot_be_run_is_refused(
    tiny: GGUFFile, tmp_path: Path, values: Mapping[str, Any], error: type[LlmrunError], words: str
) -> None:
    with pytest.raises(error) as refused:
        read_config(changed(tiny, tmp_path, with_metadata(**values)))
    assert type(refused.value) is error
    assert words in str(refused.value)
    assert "changed.gguf" in str(refused.value)
    assert refused.value.exit_code == 3
    assert "\n" not in str(refused.value)


def without(name: str) -> Change:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def with_tensor(name: str, kind: str, shape: tuple[int, ...]) -> Change:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors[name] = (kind, np.ones(shape, np.float32)) if kind == "F32" else (kind, bytes(shape[0] * 144), shape)

    return change


@pytest.mark.parametrize(
    "name",
    [
        "token_embd.weight",
        "output_norm.weight",
        "blk.0.attn_q.weight",
        "blk.1.ffn_down.weight",
        "blk.1.ffn_norm.weight",
    ],
)
def test_a_missing_tensor_is_named(tiny: GGUFFile, tmp_path: Path, name: str) -> None:
    with pytest.raises(BadGGUF, match=f"tensor missing: .*: {name}$"):
        planned(changed(tiny, tmp_path, without(name)))


@pytest.mark.push
@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("blk.0.attn_q.weight", (64, 32), "must be 64 x 64 according to the metadata, not 32 x 64"),
        ("blk.0.attn_k.weight", (64, 64), "must be 64 x 32 according to the metadata, not 64 x 64"),
        ("blk.1.ffn_down.weight", (96, 64), "must be 96 x 64 according to the metadata, not 64 x 96"),
        ("blk.1.attn_norm.weight", (63,), "must be 64 according to the metadata, not 63"),
        ("output_norm.weight", (2, 64), "must be 64 according to the metadata, not 64 x 2"),
        ("token_embd.weight", (100, 64), "must be 64 x .* according to the metadata, not 64 x 100"),
        ("output.weight", (100, 64), "must be 64 x .* according to the metadata, not 64 x 100"),
        ("rope_freqs.weight", (16,), "must be 8 according to the metadata, not 16"),
    ],
)
def test_a_tensor_of_a_wrong_shape_is_named(
    tiny: GGUFFile, tmp_path: Path, name: str, shape: tuple[int, ...], words: str
) -> None:
    """Kernels read as many elements as the metadata says."""
    with pytest.raises(BadGGUF, match=f"tensor has the wrong shape: .*: {name}: {words}"):
        planned(changed(tiny, tmp_path, with_tensor(name, "F32", shape)))


def test_ones_at_the_end_of_a_shape_are_no_difference(tiny: GGUFFile, tmp_path: Path) -> None:
    planned(changed(tiny, tmp_path, with_tensor("blk.0.attn_norm.weight", "F32", (1, 64))))


@pytest.mark.parametrize("name", ["blk.0.attn_norm.bias", "blk.2.attn_norm.weight", "blk.0.ffn_gate_exps.weight", "x"])
def test_a_tensor_nobody_asked_for_is_not_ignored(tiny: GGUFFile, tmp_path: Path, name: str) -> None:
    """Leaving out a bias would change the model."""
    with pytest.raises(
        UnsupportedModel, match=f"tensor not supported: .*: {name}: not part of this architecture"
    ) as error:
        planned(changed(tiny, tmp_path, with_tensor(name, "F32", (64,))))
    assert error.value.hint


def only_tensor(type_: WeightType, shape: tuple[int, ...]) -> Change:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata |= {"llama.embedding_length": 256, "llama.attention.head_count": 16}
        tensors.clear()
        tensors["w"] = (type_.name, bytes(prod(shape[:-1]) * type_.row_bytes(shape[-1])), shape)

    return change


# All types that gguf-py can write, except Q8_1, for which its size differs.
TYPES = [BY_NAME[kind.name] for kind in GGMLQuantizationType if kind.name != "Q8_1"]
WITHOUT_KERNELS = [type_ for type_ in TYPES if type_.name.lower() not in SUPPORTED]


@pytest.mark.parametrize("type_", WITHOUT_KERNELS, ids=lambda type_: type_.name)
def test_a_weight_type_without_kernels_is_named_whether_or_not_it_can_be_read(
    tiny: GGUFFile, tmp_path: Path, type_: WeightType
) -> None:
    file = changed(tiny, tmp_path, only_tensor(type_, (4, 256)))
    with pytest.raises(UnsupportedModel, match=f"w: the CPU engine has no kernels for {type_.name}"):
        matrix(file, "w")


@pytest.mark.parametrize("type_", TYPES, ids=lambda type_: type_.name)
def test_a_vector_is_of_floats(tiny: GGUFFile, tmp_path: Path, type_: WeightType) -> None:
    file = changed(tiny, tmp_path, only_tensor(type_, (256,)))
    if type_.name in ("BF16", "F16", "F32"):
        np.testing.assert_array_equal(vector(file, "w"), np.zeros(256, np.float32))
    else:
        with pytest.raises(UnsupportedModel, match=f"w: must be a float type, not {type_.name}"):
            vector(file, "w")


def test_the_kernels_only_claim_types_with_a_reference() -> None:
    assert all(BY_NAME[kind.upper()].dequantize is not None for kind in SUPPORTED)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_rope_factors_must_be_positive_and_finite(tiny: GGUFFile, tmp_path: Path, bad: float) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        factors = np.ones(8, np.float32)
        factors[3] = bad
        tensors["rope_freqs.weight"] = ("F32", factors)

    file = changed(tiny, tmp_path, change)
    with pytest.raises(BadGGUF, match=r"rope_freqs\.weight"):
        planned(file)


@pytest.mark.parametrize("bits", [0x7FA00000, 0xFFC00000])
def test_a_factor_that_signals_is_refused_without_a_warning(tiny: GGUFFile, tmp_path: Path, bits: int) -> None:
    """NumPy warns when a signalling NaN is converted to another width."""

    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        tensors["rope_freqs.weight"] = ("F32", np.full(8, bits, np.uint32).tobytes(), (8,))

    file = changed(tiny, tmp_path, change)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BadGGUF, match=r"rope_freqs\.weight"):
            planned(file)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"rope__freq_base": 1e-20}, r"must give at most 1e\+09 radians per position, not"),
        ({"rope__scaling__factor": 1e-10}, r"must give at most 1e\+09 radians per position, not"),
        ({"rope__freq_base": 1e-45}, "must be at least 1e-30, not "),
        ({"rope__freq_base": np.float64(5e-324)}, "must be at least 1e-30, not "),
    ],
)
def test_absurd_frequencies_are_refused(tiny: GGUFFile, tmp_path: Path, values: Mapping[str, Any], words: str) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        metadata |= {f"llama.{key.replace('__', '.')}": value for key, value in values.items()}

    file = changed(tiny, tmp_path, change)
    with pytest.raises(BadGGUF, match=words):
        planned(file)


# --- the plan --------------------------------------------------------------------------------------------------------


def test_the_plan_reads_like_the_model(tiny: GGUFFile) -> None:
    plan = planned(tiny)
    layer = ["RmsNorm", "Linear", "Linear", "Linear", "RopeStore", "Attention", "Linear"]
    layer += ["RmsNorm", "Linear", "Linear", "Gated", "Linear"]
    assert [type(op).__name__ for op in plan.ops] == ["Embed", "PlaceImages", *layer, *layer, "RmsNorm", "Linear"]
    assert [op.kv.layer for op in plan.ops if isinstance(op, Attention)] == [0, 1]
    last = plan.ops[-1]
    assert isinstance(last, Linear)
    assert last.weight.name == "output.weight"
    assert plan.logits is last.out


def test_only_the_wanted_rows_reach_the_output(tiny: GGUFFile) -> None:
    plan = planned(tiny)
    norms = [op for op in plan.ops if isinstance(op, RmsNorm)]
    assert [op.out.rows for op in norms] == [Rows.ALL] * 4 + [Rows.WANTED]
    assert plan.logits is not None
    assert plan.logits.rows is Rows.SCORED


def test_a_tied_output_is_the_embedding(tmp_path: Path) -> None:
    with open_gguf(tiny_llama(tmp_path / "tied.gguf")) as file:
        plan = planned(file)
        last = plan.ops[-1]
        assert isinstance(last, Linear)
        assert last.weight.name == "token_embd.weight"
        assert [weight.name for weight in plan.matrices].count("token_embd.weight") == 1


def test_frequencies_fall_from_one_by_the_base(tiny: GGUFFile) -> None:
    frequencies = planned(tiny).ropes[0].frequencies
    np.testing.assert_allclose(frequencies, 10_000.0 ** (-np.arange(8) / 8))


def test_llama_3s_factors_and_the_linear_one_both_divide(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "both.gguf", rope_scaling="llama3", extra={"llama.rope.scaling.factor": 2.0})
    with open_gguf(path) as file:
        frequencies = planned(file).ropes[0].frequencies
    factors = llama3_rope_factors(16, 10_000.0).astype(np.float64)
    np.testing.assert_allclose(frequencies, 10_000.0 ** (-np.arange(8) / 8) / 2 / factors)


# --- the registry and the helpers for reading keys -------------------------------------------------------------------


def test_every_architecture_has_a_file_of_its_name() -> None:
    for name, architecture in architectures().items():
        assert architecture.plan.__module__ == f"llmrun.model.archs.{name.replace('-', '_')}"


def test_the_common_type_is_the_one_of_most_bytes(tmp_path: Path) -> None:
    with open_gguf(tiny_llama(tmp_path / "tiny.gguf", weight_type="Q4_1")) as file:
        assert common_type(file) == "Q4_1"
        assert parameter_count(file) == sum(int(np.prod(tensor.shape)) for tensor in file.tensors.values())


@pytest.mark.parametrize(("rows", "expected"), [(8, True), (12, False)])
def test_files_are_quantized_if_most_bytes_are(tmp_path: Path, rows: int, expected: bool) -> None:
    """A row of 320 weights takes 340 bytes in Q8_0 and 640 bytes in F16."""
    ones = np.ones((20, 320), np.float32)
    tensors = {"a.weight": ("Q8_0", ones), "b.weight": ("F16", ones[:rows])}
    with open_gguf(write_gguf(tmp_path / "mixed.gguf", {"general.architecture": "llama"}, tensors)) as file:
        assert is_quantized(file) is expected
