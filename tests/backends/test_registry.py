"""Tests of the backend registry: one line per backend, and everything that follows from it."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends import registry
from llmrun.backends.base import Backend, OpenOptions
from llmrun.backends.cpu import backend as cpu
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.llama import probe as llama_probe
from llmrun.backends.llama import rpc_devices
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.registry import (
    BACKENDS,
    CHOICES,
    HIDDEN_CHOICES,
    STAND_INS,
    Entry,
    Gpus,
    Probe,
    backend_named,
    check_options,
    choices_in_words,
    is_stand_in,
    open_backend,
    stand_in_named,
)
from llmrun.backends.scripted import ScriptedBackend
from llmrun.backends.sizing import LARGEST_DEFAULT, Footprint
from llmrun.base.errors import BadGGUF, DoesNotFit, ModelFileError, ModelNotFound, UnsupportedModel, UsageError
from llmrun.base.types import Pooling
from llmrun.formats.gguf.reader import GGUFFile, open_gguf
from llmrun.formats.layouts.kv import KV_CHOICES
from tests.support.backends.fake_gpus import GIB, pretend_answers, pretend_gpus
from tests.support.gguf.gguf_files import tiny_llama, tiny_vocabulary, write_gguf
from tests.support.models.tiny_encoders import TINY_ENCODERS, tiny_encoder
from tests.support.models.tiny_models import changed_copy
from tests.support.vision.opened import encoded
from tests.support.vision.projectors import tiny_projector, tiny_text_model
from tests.support.vision.prompts import prompt_batch

HEAVY = {"llama_cpp", "llvmlite", "numba", "numpy", "regex"}
each_backend = pytest.mark.parametrize("entry", BACKENDS, ids=[entry.name for entry in BACKENDS])


@pytest.mark.push
@pytest.mark.parametrize("entry", [*BACKENDS, *STAND_INS], ids=lambda entry: entry.name)
def test_a_model_says_the_name_of_its_backend(tmp_path: Path, entry: Entry) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    opened = open_backend(path, OpenOptions(entry.name, context_size=64, threads=1, gpu_layers=0))
    opened.close()
    assert opened.info.backend == entry.name


@pytest.mark.push
@each_backend
def test_a_context_of_0_is_the_trained_one(tmp_path: Path, entry: Entry) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf", context=192)
    opened = open_backend(path, OpenOptions(entry.name, context_size=0, threads=1, gpu_layers=0))
    opened.close()
    assert opened.info.context_size == 192


def test_headers_can_be_refused_before_weights_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: GGUFFile) -> None:
        raise UsageError(f"refused: {file.path.name}")

    monkeypatch.setattr(cpu, "CpuBackend", None)
    with pytest.raises(UsageError, match=r"refused: tiny\.gguf"):
        open_backend(tiny_llama(tmp_path / "tiny.gguf"), OpenOptions("cpu", on_header=refuse))


@pytest.mark.push
@each_backend
def test_a_footprint_comes_from_the_header_and_counts_the_cache(tmp_path: Path, entry: Entry) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    options = OpenOptions(entry.name, context_size=256, max_sequences=2, threads=1, gpu_layers=0)
    with open_gguf(path) as file:
        footprint = entry.kind().footprint(file, options)
        opened = entry.kind().open(file, options)
    opened.close()
    assert isinstance(footprint, Footprint)
    assert footprint.weights > 0
    assert footprint.cache.of(256) == opened.info.kv_bytes


@each_backend
def test_probing_a_backend_imports_nothing_heavy(entry: Entry) -> None:
    code = (
        "import sys\nfrom llmrun.backends.registry import backend_named\n"
        f"kind = backend_named({entry.name!r}).kind()\nkind.probe()\nkind.gpus\nprint(' '.join(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(ran.stdout.split())


def test_the_names_are_told_in_order() -> None:
    assert CHOICES == ("auto", "cpu", "llama")
    assert choices_in_words() == "auto, cpu, or llama (llama.cpp)"


def test_stand_ins_are_accepted_but_not_told() -> None:
    assert HIDDEN_CHOICES == ("scripted",)
    assert is_stand_in("scripted")
    assert not is_stand_in("cpu")
    assert stand_in_named("cpu") is None
    assert backend_named("scripted") is None


NO_GPU = Gpus((), "no GPU here")


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_probe, "gpus", lambda progress=None: NO_GPU)


def opened(path: Path, **options: Any) -> tuple[type[Backend], list[str]]:
    """Return the type of the backend that opened the file, and the reasons it gave."""
    reasons: list[str] = []
    backend = open_backend(path, OpenOptions(threads=1, explain=reasons.append, **options))
    backend.close()
    return type(backend), reasons


@pytest.mark.push
def test_a_backend_that_was_named_is_taken_without_a_word(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    assert opened(path, backend="cpu") == (CpuBackend, [])
    assert opened(path, backend="llama", gpu_layers=0) == (LlamaBackend, [])


@pytest.mark.push
@pytest.mark.parametrize(
    ("free", "gpu_layers", "runs_on_cpu", "expected"),
    [
        (None, "auto", True, "auto chose cpu: no GPU here"),
        (None, "all", True, "auto chose cpu: no GPU here"),
        (None, "auto", False, "auto chose llama: architecture not supported"),
        ([9 * GIB], "auto", True, "auto chose llama: it can use GPU 0"),
        ([9 * GIB, 3 * GIB], "auto", False, "auto chose llama: it can use GPU 0 and GPU 1"),
        ([9 * GIB], "all", True, "auto chose llama: it can use GPU 0"),
        ([9 * GIB], 1, True, "auto chose llama: it can use GPU 0"),
        ([9 * GIB], 0, True, "auto chose cpu: no GPU layers were requested"),
        ([9 * GIB], 0, False, "auto chose llama: architecture not supported"),
        ([GIB], "auto", True, "auto chose cpu: no layer fits in the free GPU memory: GPU 0: 1,024 MiB"),
        ([GIB], "auto", False, "auto chose llama: architecture not supported"),
        ([GIB], "all", True, "auto chose llama: it can use GPU 0"),
    ],
)
def test_what_auto_takes_and_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    free: list[int] | None,
    gpu_layers: int | str,
    runs_on_cpu: bool,
    expected: str,
) -> None:
    if free is not None:
        pretend_gpus(monkeypatch, *free)
    path = tiny_llama(tmp_path / "tiny.gguf")
    if not runs_on_cpu:
        path = changed_copy(path, tmp_path / "other.gguf", as_another)
    backend, [reason] = opened(path, gpu_layers=gpu_layers)
    assert reason.startswith(expected)
    assert backend is (LlamaBackend if "chose llama" in expected else CpuBackend)


@pytest.mark.push
@pytest.mark.parametrize(("gpu_layers", "expected"), [("auto", CpuBackend), ("all", LlamaBackend), (1, LlamaBackend)])
def test_auto_uses_software_drivers_only_on_request(
    gpu_layers: int | str, expected: type[Backend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 9 * GIB, name="llvmpipe")
    backend, [reason] = opened(tiny_llama(tmp_path / "tiny.gguf"), gpu_layers=gpu_layers)
    assert backend is expected
    if expected is CpuBackend:
        assert reason == "auto chose cpu: llvmpipe 0 is not a GPU but a software driver"


@pytest.mark.push
def test_a_software_driver_beside_a_gpu_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 9 * GIB, 9 * GIB)
    monkeypatch.setattr(llama_probe, "gpus", lambda progress=None: Gpus(("llvmpipe", "Radeon")))
    assert opened(tiny_llama(tmp_path / "tiny.gguf"))[0] is LlamaBackend


@pytest.mark.push
def test_backend_llama_uses_software_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 9 * GIB, name="llvmpipe")
    assert opened(tiny_llama(tmp_path / "tiny.gguf"), backend="llama") == (LlamaBackend, [])


@dataclass
class MadeUp:
    """A fake backend that is its own registry entry and kind."""

    name: str
    missing: str = ""
    refuses: bool = False
    gpus: None = None

    def kind(self) -> MadeUp:
        return self

    @property
    def title(self) -> str:
        return self.name

    def probe(self) -> Probe:
        return Probe(self.missing, f"get {self.name}")

    def open(self, file: GGUFFile, options: OpenOptions) -> Backend:
        if self.refuses:
            raise UnsupportedModel(f"{self.name} does not run it")
        return ScriptedBackend(path=Path(self.name))


@pytest.mark.parametrize(
    ("backends", "expected"),
    [
        ([MadeUp("a"), MadeUp("b")], ("a", "auto chose a: no GPU layers were requested")),
        ([MadeUp("a", refuses=True), MadeUp("b"), MadeUp("c")], ("b", "auto chose b: a does not run it")),
        ([MadeUp("a", missing="no a"), MadeUp("b")], ("b", "auto chose b: no GPU layers were requested")),
    ],
)
def test_auto_asks_every_backend_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backends: list[MadeUp], expected: tuple[str, str]
) -> None:
    monkeypatch.setattr(registry, "BACKENDS", backends)
    reasons: list[str] = []
    opened = open_backend(tiny_llama(tmp_path / "tiny.gguf"), OpenOptions(explain=reasons.append))
    assert (opened.info.name, *reasons) == expected


def test_auto_names_what_could_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "BACKENDS", [MadeUp("a", refuses=True), MadeUp("b", missing="no b")])
    with pytest.raises(UnsupportedModel, match="a does not run it") as refusal:
        open_backend(tiny_llama(tmp_path / "tiny.gguf"), OpenOptions())
    assert refusal.value.hint == "b may support this model; get b"


@pytest.mark.push
def test_a_gpu_that_does_not_say_what_it_has_free_gets_no_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 9 * GIB, 0, total=0)
    assert opened(tiny_llama(tmp_path / "tiny.gguf"))[0] is CpuBackend


@pytest.mark.push
def test_llama_that_was_named_runs_without_a_gpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    assert opened(path, backend="llama") == (LlamaBackend, ["not using GPUs: no GPU here"])
    assert opened(path, backend="llama", gpu_layers=2) == (LlamaBackend, [])
    pretend_gpus(monkeypatch, GIB // 2)
    full = "not using GPUs: no layer fits in the free GPU memory: GPU 0: 512 MiB"
    assert opened(path, backend="llama") == (LlamaBackend, [full])
    pretend_gpus(monkeypatch, 9 * GIB)
    assert opened(path, backend="llama") == (LlamaBackend, [])


@pytest.mark.push
def test_a_gpu_that_is_gone_since_it_was_seen_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_probe, "gpus", lambda progress=None: Gpus(("NVIDIA H200",)))
    backend, reasons = opened(tiny_llama(tmp_path / "tiny.gguf"))
    assert (backend, reasons) == (CpuBackend, ["auto chose cpu: llama.cpp found no GPU"])


@pytest.mark.push
def test_what_llama_cpp_refuses_the_cpu_engine_may_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 9 * GIB)
    pretend_answers(monkeypatch, failed="llama_model_load: unknown model architecture: 'llama'")
    backend, [reason] = opened(tiny_llama(tmp_path / "tiny.gguf"))
    assert backend is CpuBackend
    assert "unknown model architecture" in reason


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [("model", "plamo2", "tokenizer not supported"), ("pre", "abacus", "pre-tokenizer not supported")],
)
def test_a_tokenizer_the_cpu_engine_lacks_is_known_before_anything_heavy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str, words: str
) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("something heavy began")

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata[f"tokenizer.ggml.{key}"] = value

    path = changed_copy(tiny_llama(tmp_path / "tiny.gguf"), tmp_path / "other.gguf", change)
    monkeypatch.setattr(cpu, "allocate", never)
    monkeypatch.setattr(cpu, "load_kernels", never)
    with pytest.raises(UnsupportedModel, match=words):
        open_backend(path, OpenOptions(backend="cpu"))


def as_another(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
    """Relabel a llama as an equivalent architecture that llmrun does not know."""
    metadata["general.architecture"] = "minicpm"
    for key in [key for key in metadata if key.startswith("llama.")]:
        metadata["minicpm." + key.removeprefix("llama.")] = metadata.pop(key)


def test_without_the_extra_the_command_that_installs_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_probe, "is_installed", lambda: False)
    path = tiny_llama(tmp_path / "tiny.gguf")
    with pytest.raises(UsageError, match=r"llama\.cpp is not installed: --backend llama") as error:
        open_backend(path, OpenOptions(backend="llama"))
    assert error.value.hint.startswith(f"install it: {sys.executable} -m pip install ")
    other = changed_copy(path, tmp_path / "other.gguf", as_another)
    with pytest.raises(UnsupportedModel, match="minicpm") as refusal:
        open_backend(other, OpenOptions())
    assert f"{sys.executable} -m pip install " in refusal.value.hint


@pytest.mark.push
@pytest.mark.parametrize(
    ("train", "asked", "expected"), [(500, None, 500), (1 << 20, None, LARGEST_DEFAULT), (512, 99, 99)]
)
def test_the_context_is_the_models_own_up_to_a_limit(
    tmp_path: Path, train: int, asked: int | None, expected: int
) -> None:
    backend = open_backend(
        tiny_llama(tmp_path / "tiny.gguf", context=train), OpenOptions(context_size=asked, threads=1)
    )
    backend.close()
    assert backend.info.context_size == expected
    assert backend.info.train_context == train


def test_a_type_of_cache_that_nobody_knows_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="invalid value for --kv-type: 'q3_0', choose from f16, q8_0, q4_0, or a pair"):
        open_backend(tmp_path / "none.gguf", OpenOptions(kv_type="q3_0"))


@pytest.mark.cover(1)
@pytest.mark.push
@pytest.mark.parametrize("backend", ["cpu", "llama"])
@pytest.mark.parametrize("kv_type", KV_CHOICES)
def test_the_type_of_the_cache_is_the_one_that_was_asked_for(tmp_path: Path, backend: str, kv_type: str) -> None:
    """Two layers have 2 KV heads of 32 features each. Every 32 numbers of 8 or 4 bits have a scale of 2 bytes."""
    path = tiny_llama(tmp_path / "tiny.gguf", head_size=32)
    opened = open_backend(
        path, OpenOptions(backend=backend, kv_type=kv_type, context_size=256, gpu_layers=0, threads=1)
    )
    opened.close()
    of_32_numbers = {"f16": 64, "q8_0": 34, "q4_0": 18}
    keys, _, values = kv_type.partition(":")
    assert opened.info.kv_type == kv_type
    assert opened.info.kv_bytes == 256 * 2 * 2 * (of_32_numbers[keys] + of_32_numbers[values or keys])


@pytest.mark.parametrize(
    ("weight_type", "expected"),
    [("Q4_1", "q8_0"), ("Q8_0", "q8_0"), ("Q4_0", "q8_0"), ("F16", "f16"), ("BF16", "f16"), ("F32", "f16")],
)
def test_quantized_weights_choose_a_q8_0_cache(tmp_path: Path, weight_type: str, expected: str) -> None:
    """Only our engine's default depends on the weights. llama.cpp's default is always f16."""
    with open_gguf(tiny_llama(tmp_path / "tiny.gguf", weight_type=weight_type)) as file:
        chosen, asked = (
            [entry.kind().footprint(file, options).kv_type for entry in BACKENDS]
            for options in (OpenOptions(), OpenOptions(kv_type="q4_0"))
        )
    assert chosen == [expected, "f16"]
    assert asked == ["q4_0", "q4_0"]


def test_embedding_models_keep_an_f16_cache(tmp_path: Path) -> None:
    causal = tiny_llama(tmp_path / "causal.gguf", extra={"llama.pooling_type": int(Pooling.LAST)})
    for path in (causal, tiny_encoder(tmp_path, TINY_ENCODERS["bert"], "Q8_0", without="pooling_type")):
        with open_gguf(path) as file:
            assert backend_named("cpu").kind().footprint(file, OpenOptions()).kv_type == "f16"  # type: ignore[union-attr]


@pytest.mark.push
@each_backend
def test_the_default_cache_is_open_as_it_was_forecast(tmp_path: Path, entry: Entry) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    with open_gguf(path) as file:
        forecast = entry.kind().footprint(file, OpenOptions(context_size=256))
    opened = open_backend(path, OpenOptions(entry.name, context_size=256, gpu_layers=0, threads=1))
    opened.close()
    assert opened.info.kv_type == forecast.kv_type == {"cpu": "q8_0", "llama": "f16"}[entry.name]
    assert opened.info.kv_bytes == forecast.cache.of(256)


def test_the_scripted_backend_needs_no_model(tmp_path: Path) -> None:
    assert isinstance(open_backend(tmp_path / "none.gguf", OpenOptions(backend="scripted")), ScriptedBackend)


def test_an_unknown_backend_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="invalid value for --backend: 'abacus', choose from auto, cpu, llama"):
        open_backend(tmp_path / "none.gguf", OpenOptions(backend="abacus"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"none\.gguf"):
        open_backend(tmp_path / "none.gguf", OpenOptions())


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("not a model")
    with pytest.raises(BadGGUF):
        open_backend(path, OpenOptions())


def test_an_unsupported_architecture_says_which_ones_are(tmp_path: Path) -> None:
    metadata = {"general.architecture": "minicpm", **tiny_vocabulary().metadata()}
    path = write_gguf(tmp_path / "minicpm.gguf", metadata, {})
    with pytest.raises(UnsupportedModel, match=r"'minicpm'; the CPU engine supports .* such as llama") as error:
        open_backend(path, OpenOptions(backend="cpu"))
    assert error.value.exit_code == 3
    assert error.value.hint


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that the RPC server at 127.0.0.1:1 has 8 GiB. Its layers run on the CPU of this machine."""
    asked: list[str] = []

    def use(process: object, text: str, *, anyway: bool) -> list[dict[str, Any]]:
        asked.append(text)
        return [{"description": text, "free": 8 * GIB, "total": 8 * GIB}]

    monkeypatch.setattr(rpc_devices, "use_servers", use)
    return asked


@pytest.mark.push
@pytest.mark.parametrize("backend", ["auto", "llama"])
def test_rpc_servers_select_llama_cpp(tmp_path: Path, served: list[str], backend: str) -> None:
    path = tiny_llama(tmp_path / "tiny.gguf")
    assert opened(path, backend=backend, rpc="127.0.0.1:1") == (LlamaBackend, [])
    assert served == ["127.0.0.1:1"]


def test_rpc_servers_without_room_are_not_replaced_by_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = [{"description": "box:1", "free": GIB // 2, "total": GIB}]
    monkeypatch.setattr(rpc_devices, "use_servers", lambda process, text, *, anyway: full)
    with pytest.raises(DoesNotFit, match="no layer fits in the free GPU memory: box:1: 512 MiB") as caught:
        opened(tiny_llama(tmp_path / "tiny.gguf"), rpc="box:1")
    assert caught.value.exit_code == 7


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rpc": "box:1", "backend": "cpu"}, "--rpc: works only with --backend llama, not with cpu"),
        (
            {"rpc": "box:1", "gpu_layers": 0},
            "--rpc: cannot be combined with --gpu-layers 0, which leaves no layers for the servers",
        ),
        ({"main_gpu": 0}, "--main-gpu: works only with --split-mode none"),
        (
            {"tensor_split": "1,1", "split_mode": "none"},
            "--tensor-split: cannot be combined with --split-mode none, which uses a single device",
        ),
    ],
)
def test_options_for_devices_that_contradict_each_other_are_refused(
    tmp_path: Path, served: list[str], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError) as caught:
        check_options(OpenOptions(**options))
    assert str(caught.value) == sentence
    with pytest.raises(UsageError, match=sentence):
        opened(tiny_llama(tmp_path / "tiny.gguf"), **options)
    assert served == []


def test_options_are_checked_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[str, bool]] = []
    monkeypatch.setattr(rpc_devices, "check_servers", lambda text, *, anyway: checked.append((text, anyway)))
    for options in (OpenOptions(), OpenOptions("cpu"), OpenOptions("scripted", rpc="box:1")):
        check_options(options)
    assert checked == []
    check_options(OpenOptions(rpc="box:1", rpc_anyway=True))
    assert checked == [("box:1", True)]
    with pytest.raises(UsageError, match="invalid value for --backend: 'gpu'"):
        check_options(OpenOptions("gpu"))


def test_a_draft_model_uses_no_servers() -> None:
    """A server has only one client at a time, which is the process of the large model."""
    options = OpenOptions(rpc="box:1", tensor_split="1,1", split_mode="row", gpu_layers="all")
    assert options.without_rpc() == OpenOptions(gpu_layers="all")
    local = OpenOptions(tensor_split="1,1")
    assert local.without_rpc() is local


@pytest.mark.push
@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_images_need_no_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(llama_probe, "is_installed", lambda: False)
    path, mmproj = tiny_text_model(tmp_path, "gemma3"), str(tiny_projector(tmp_path, "gemma3", image_size=112))
    options = OpenOptions(backend, threads=1, context_size=256, mmproj=mmproj)
    check_options(options)
    with closing(open_backend(path, options)) as opened:
        assert opened.vision is not None
        encoded(opened, opened.vision.projector.layout(112, 112))
    with pytest.raises(UsageError, match=r"llama\.cpp is not installed: --backend llama"):
        check_options(OpenOptions("llama", mmproj=mmproj))


@pytest.mark.push
@pytest.mark.parametrize(
    ("backend", "free", "expected"),
    [
        ("auto", None, "auto chose cpu: no GPU here"),
        ("auto", 9 * GIB, "auto chose llama: it can use GPU 0"),
        ("cpu", 9 * GIB, ""),
        ("llama", 9 * GIB, ""),
    ],
)
def test_images_change_no_choice_of_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, free: int | None, expected: str
) -> None:
    if free is not None:
        pretend_gpus(monkeypatch, free)
    path, mmproj = tiny_text_model(tmp_path, "gemma3"), str(tiny_projector(tmp_path, "gemma3", image_size=112))
    reasons: list[str] = []
    options = OpenOptions(backend, threads=1, context_size=256, explain=reasons.append, mmproj=mmproj)
    with closing(open_backend(path, options)) as opened:
        assert opened.info.backend == ("llama" if "llama" in (backend, expected[11:16]) else "cpu")
        assert reasons == [expected] * bool(expected)
        assert opened.vision is not None
        projector = opened.vision.projector
        image = encoded(opened, projector.layout(112, 112))
        logits = opened.forward(prompt_batch(projector, [[5, 6], image, [7]])).logits
        assert np.isfinite(logits).all()


def test_models_that_generate_no_text_read_no_images(tmp_path: Path) -> None:
    path = tiny_encoder(tmp_path, TINY_ENCODERS["bert"], "Q8_0")
    for backend in CHOICES:
        with pytest.raises(ModelFileError, match="does not fit the model"):
            open_backend(path, OpenOptions(backend, mmproj=str(tiny_projector(tmp_path, "gemma3"))))


def test_the_limits_of_image_tokens_must_agree() -> None:
    check_options(OpenOptions(image_min_tokens=70, image_max_tokens=70))
    with pytest.raises(UsageError, match="--image-min-tokens: 300 is larger than --image-max-tokens 280"):
        check_options(OpenOptions(image_min_tokens=300, image_max_tokens=280))
