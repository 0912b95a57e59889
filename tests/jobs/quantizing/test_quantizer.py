"""Tests that quantizing writes the bytes that llama.cpp writes, and that no failure leaves a file behind."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from llmrun.backends.llama.imatrix_file import Entry, Imatrix, write_imatrix
from llmrun.base.errors import BackendCrashed, DoesNotFit, LlmrunError, ModelFileError, UnsupportedModel, UsageError
from llmrun.formats.gguf.reader import open_gguf
from llmrun.hub.local import safe_writes
from llmrun.jobs.file_types import file_type_named
from llmrun.jobs.quantizing import Job, Plan, plan_of, quantize, without_data
from tests.support.backends.fake_llama import DIES, fake_llama
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.gguf.gguf_shards import split_by_gguf_py
from tests.support.models.llama_cpp_oracle import requantize
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_models import changed_copy

pytestmark = pytest.mark.push

QUANTIZE = "def llama_model_quantize(*arguments):\n    {}\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose rows are whole blocks of K-quants."""
    path = tmp_path_factory.mktemp("models") / "wide.gguf"
    return tiny_llama(path, weight_type="F32", width=256, heads=8, feed_forward=512, tied=False)


def job_for(name: str, **fields: Any) -> Job:
    return Job(file_type_named(name), 2, only_copy=name == "COPY", **fields)


def written(model: Path, out: Path, job: Job) -> tuple[Path, Plan]:
    with open_gguf(model) as file:
        plan = plan_of(file, job)
        assert quantize(file, out, job, plan, lambda share: None) == out.stat().st_size
    assert list(out.parent.glob(".*")) == []
    return out, plan


def imatrix_of(model: Path, folder: Path) -> tuple[Imatrix, Path]:
    """Write an importance matrix with random numbers for all layers."""
    random = np.random.default_rng(0)
    with open_gguf(model) as file:
        layers = [tensor for tensor in file.tensors.values() if tensor.name.startswith("blk.") and tensor.n_rows > 1]
        entries = {
            tensor.name: Entry(random.random(tensor.shape[0], np.float32), np.array([8], np.float32))
            for tensor in layers
        }
    measured = Imatrix(entries, ("book.txt",), 3, 512)
    path = folder / "imatrix.gguf"
    with path.open("wb") as file_:
        write_imatrix(file_, measured)
    return measured, path


@pytest.mark.parametrize("name", ["Q4_K_M", "Q8_0", "IQ4_XS", "Q2_K", "F16", "BF16", "TQ2_0", "Q5_1"])
def test_files_are_those_of_llama_cpp(model: Path, tmp_path: Path, name: str) -> None:
    ours, plan = written(model, tmp_path / "ours.gguf", job_for(name))
    assert ours.read_bytes() == requantize(model, tmp_path / "theirs.gguf", name).read_bytes()
    with open_gguf(ours) as file:
        assert {one.old.name: one.type.name for one in plan.tensors} == {
            tensor.name: tensor.type.name for tensor in file.tensors.values()
        }
    assert abs(plan.n_bytes - ours.stat().st_size) < 1024


def test_options_are_those_of_llama_cpp(model: Path, tmp_path: Path) -> None:
    job = job_for("Q4_K_M", pure=True, output_type="Q6_K", embedding_type="Q5_0")
    ours, _ = written(model, tmp_path / "ours.gguf", job)
    fields = {"pure": True, "output_tensor_type": 14, "token_embedding_type": 6}
    assert ours.read_bytes() == requantize(model, tmp_path / "theirs.gguf", "Q4_K_M", **fields).read_bytes()


def test_an_imatrix_is_used_and_recorded(model: Path, tmp_path: Path) -> None:
    measured, path = imatrix_of(model, tmp_path)
    fields: dict[str, Any] = {"imatrix": measured, "imatrix_path": str(path)}
    ours, _ = written(model, tmp_path / "ours.gguf", job_for("Q4_K_S", **fields))
    arrays = [(name.encode(), one.sums / np.float32(8)) for name, one in measured.entries.items()]
    pointer = ctypes.POINTER(ctypes.c_float)
    data = (llama_cpp.llama_model_imatrix_data * (len(arrays) + 1))(
        *((name, values.ctypes.data_as(pointer), values.size) for name, values in arrays)
    )
    theirs = requantize(model, tmp_path / "theirs.gguf", "Q4_K_S", imatrix=data)
    with open_gguf(ours) as one, open_gguf(theirs) as other, open_gguf(model) as file:
        assert one.tensors.keys() == other.tensors.keys()
        assert not plan_of(file, job_for("IQ3_XXS", **fields)).needs_imatrix
        for name in one.tensors:
            assert (one.read(one.tensors[name]) == other.read(other.tensors[name])).all(), name
        recorded = {key: value for key, value in one.metadata.items() if key.startswith("quantize.")}
    assert recorded == {
        "quantize.imatrix.file": str(path),
        "quantize.imatrix.dataset": "book.txt",
        "quantize.imatrix.entries_count": len(measured.entries),
        "quantize.imatrix.chunks_count": 3,
    }


def test_shards_are_joined(model: Path, tmp_path: Path) -> None:
    first = split_by_gguf_py(model, tmp_path, tensors_each=5)
    joined, _ = written(first, tmp_path / "joined.gguf", job_for("COPY"))
    with open_gguf(joined) as one, open_gguf(model) as other:
        assert one.file_bytes > sum(tensor.nbytes for tensor in other.tensors.values())
        for name, tensor in other.tensors.items():
            assert (one.read(one.tensors[name]) == other.read(tensor)).all()


def test_progress_only_grows(model: Path, tmp_path: Path) -> None:
    shares: list[float] = []
    with open_gguf(model) as file:
        job = job_for("Q8_0")
        quantize(file, tmp_path / "out.gguf", job, plan_of(file, job), shares.append)
        assert len(shares) == len(file.tensors)
    assert shares == sorted(shares)
    assert 0 <= shares[0] < shares[-1] < 1


def test_missing_imatrices_are_reported_before_the_work(model: Path) -> None:
    with open_gguf(model) as file, pytest.raises(UsageError, match="IQ2_XS: needs an importance matrix") as raised:
        plan_of(file, job_for("IQ2_XS"))
    assert "llmrun imatrix" in raised.value.hint


def test_quantizing_twice_needs_permission(model: Path, tmp_path: Path) -> None:
    small = requantize(model, tmp_path / "small.gguf", "Q8_0")
    with open_gguf(small) as file, pytest.raises(UsageError, match=r"\d+ tensors are quantized already, such as"):
        plan_of(file, job_for("Q4_0"))
    ours, _ = written(small, tmp_path / "ours.gguf", job_for("Q4_0", allow_requantize=True))
    assert ours.read_bytes() == requantize(small, tmp_path / "theirs.gguf", "Q4_0").read_bytes()


def test_the_imatrix_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    _, path = imatrix_of(model, tmp_path)
    wrong = Imatrix({"blk.0.attn_q.weight": Entry(np.ones(64, np.float32), np.ones(1, np.float32))}, (), 1, 8)
    unknown = Imatrix({"blk.99.attn_q.weight": Entry(np.ones(64, np.float32), np.ones(1, np.float32))}, (), 1, 8)
    with open_gguf(model) as file:
        for measured, words in (
            (wrong, r"blk\.0\.attn_q\.weight: 64 sums, but the tensor has 256 inputs"),
            (unknown, "no entries for this model"),
        ):
            with pytest.raises(ModelFileError, match=words):
                plan_of(file, job_for("Q4_0", imatrix=measured, imatrix_path=str(path)))


def test_tensors_without_data_are_named(model: Path, tmp_path: Path) -> None:
    measured, path = imatrix_of(model, tmp_path)
    entries = {name: one for name, one in measured.entries.items() if name != "blk.1.ffn_up.weight"}
    less = Imatrix(entries, measured.datasets, measured.chunks, 512)
    with open_gguf(model) as file:
        plan = plan_of(file, job_for("Q4_0", imatrix=less, imatrix_path=str(path)))
    assert without_data(plan, less) == ["blk.1.ffn_up.weight"]


def test_experts_have_importances_of_their_own(tmp_path: Path) -> None:
    model = tiny_architecture(tmp_path, "qwen3moe")
    name = "blk.0.ffn_up_exps.weight"
    with open_gguf(model) as file:
        inputs, _, experts = file.tensors[name].shape
        ones = Imatrix({name: Entry(np.ones(inputs * experts, np.float32), np.ones(experts, np.float32))}, (), 1, 8)
        assert plan_of(file, job_for("Q4_0", imatrix=ones, imatrix_path=str(written_to(tmp_path, ones)))).tensors


def written_to(folder: Path, measured: Imatrix) -> Path:
    path = folder / "made.imatrix"
    with path.open("wb") as file:
        write_imatrix(file, measured)
    return path


def test_unknown_architectures_are_refused(model: Path, tmp_path: Path) -> None:
    def rename(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["general.architecture"] = "unheard"

    with (
        open_gguf(changed_copy(model, tmp_path / "unheard.gguf", rename)) as file,
        pytest.raises(UnsupportedModel, match="unknown model architecture"),
    ):
        plan_of(file, job_for("Q8_0"))


def test_existing_files_are_never_replaced(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    job = job_for("Q8_0")

    def appear(share: float) -> None:
        out.write_text("mine")

    with open_gguf(model) as file:
        plan = plan_of(file, job)
        with pytest.raises(UsageError, match="there is no folder"):
            quantize(file, tmp_path / "no" / "out.gguf", job, plan, lambda share: None)
        # A file that appears during the work is not replaced either.
        with pytest.raises(UsageError, match="already exists"):
            quantize(file, out, job, plan, appear)
    assert out.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.gguf"]


def test_small_disks_are_refused_before_the_work(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for("Q8_0")
    with open_gguf(model) as file:
        plan = plan_of(file, job)
        monkeypatch.setattr(safe_writes, "SPARE", 1 << 60)
        with pytest.raises(DoesNotFit, match=r"needs [\d,]+ bytes plus"):
            quantize(file, tmp_path / "out.gguf", job, plan, lambda share: None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("body", "kind", "words"),
    [
        (DIES.format("SIGSEGV").replace("\n", "\n    "), BackendCrashed, "llama.cpp died while quantizing .*: SIGSEGV"),
        ("import os; os.write(2, b'q.cpp:7: GGML_ASSERT(x) failed\\n'); os.abort()", BackendCrashed, "GGML_ASSERT"),
        ("raise RuntimeError('a symbol is missing')", LlmrunError, "llama-cpp-python does not work: .*symbol"),
        ("return 1", ModelFileError, "llama.cpp cannot load this model: .*: no reason given"),
    ],
    ids=["crash", "assertion", "broken", "unexplained"],
)
def test_failures_of_llama_cpp_are_one_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, kind: Any, words: str
) -> None:
    monkeypatch.syspath_prepend(str(fake_llama(tmp_path / "fake", more=QUANTIZE.format(body))))
    with open_gguf(model) as file, pytest.raises(kind, match=words) as raised:
        plan_of(file, job_for("Q8_0"))
    assert "\n" not in str(raised.value)


def test_a_crash_halfway_leaves_no_file(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    job = job_for("Q8_0")
    with open_gguf(model) as file:
        plan = plan_of(file, job)
        crash = QUANTIZE.format("open(arguments[1], 'wb').write(b'half'); import os; os.abort()")
        monkeypatch.syspath_prepend(str(fake_llama(tmp_path / "fake", more=crash)))
        with pytest.raises(BackendCrashed, match="SIGABRT"):
            quantize(file, folder / "out.gguf", job, plan, lambda share: None)
    assert list(folder.iterdir()) == []
