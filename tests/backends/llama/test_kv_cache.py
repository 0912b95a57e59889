"""Tests of saved sequences of the llama.cpp backend. The contract of all backends has more (seam_contract.py)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmrun.backends.base import BLOCK_PART, SEQUENCE_PART, OpenOptions, SavedPart
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.base.errors import BackendCrashed, Cancelled, KVFull, LlmrunError
from llmrun.formats.gguf.reader import open_gguf
from tests.support.backends.recurrent import tiny_recurrent
from tests.support.backends.seam_contract import Comparison, as_loaded, batch_of, rows
from tests.support.backends.sliding_window import WINDOW, tiny_sliding_window
from tests.support.models.tiny_architectures import tiny_architecture
from tests.support.models.tiny_models import changed_copy, tiny_model

pytestmark = pytest.mark.push

OPTIONS = OpenOptions(context_size=256, max_sequences=3, threads=1, gpu_layers=0, saves_state=True)
PROMPT = np.random.default_rng(0).integers(5, 200, 60).tolist()
MORE = [7, 8, 9]
MODELS: dict[str, Callable[[Path], Path]] = {
    "plain": lambda folder: tiny_model(folder, "F32"),
    "recurrent": lambda folder: tiny_recurrent(folder / "recurrent.gguf"),
    "window": lambda folder: tiny_sliding_window(folder / "window.gguf"),
    "recurrent and attention, positions of several dimensions": lambda folder: tiny_architecture(folder, "qwen35"),
}


def opened(path: Path, **options: Any) -> LlamaBackend:
    with open_gguf(path) as file:
        return LlamaBackend(file, replace(OPTIONS, **options))


@pytest.fixture(scope="module", params=list(MODELS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MODELS[request.param](tmp_path_factory.mktemp("model"))


@pytest.fixture
def backend(path: Path) -> Iterator[LlamaBackend]:
    backend = opened(path)
    backend.forward(batch_of(rows(0, 0, PROMPT)))
    yield backend
    backend.close()


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[LlamaBackend]:
    backend = opened(tiny_model(tmp_path, "F32"))
    backend.forward(batch_of(rows(0, 0, PROMPT)))
    yield backend
    backend.close()


def saved(backend: LlamaBackend, seq: int = 0) -> SavedPart:
    (part,) = as_loaded(backend.kv.save(seq, backend.kv.lengths[seq]))
    return part


def changed(part: SavedPart, data: bytes | bytearray, **fields: Any) -> SavedPart:
    return replace(part, n_bytes=len(data), read=partial(bytes, data), **fields)


def assert_same(actual: Any, expected: Any) -> None:
    comparison = Comparison()
    comparison.exact = False
    comparison.assert_same(actual, expected)


def assert_continues(backend: LlamaBackend, seq: int, history: list[int]) -> None:
    """Assert that a sequence continues from its length like a fresh run of the same tokens."""
    start = backend.kv.lengths[seq]
    actual = backend.forward(batch_of(rows(seq, start, history[start:] + MORE))).logits[-len(MORE) :]
    backend.kv.free(seq)
    assert_same(actual, backend.forward(batch_of(rows(seq, 0, history + MORE))).logits[-len(MORE) :])


def test_a_sequence_is_saved_whole(backend: LlamaBackend) -> None:
    for n in (1, 33, 60, 100):
        (part,) = backend.kv.save(0, n)
        assert (part.kind, part.start, part.end) == (SEQUENCE_PART, 0, 60)
        assert len(part.read()) == part.n_bytes
    assert backend.kv.save(0, 0) == []
    assert backend.kv.save(1, 60) == []


def test_a_loaded_sequence_is_kept_whole(backend: LlamaBackend) -> None:
    part = saved(backend)
    assert backend.kv.load(2, [part]) == 60
    assert backend.kv.lengths == [60, 0, 60]
    assert backend.kv.load(0, [part]) == 60
    for seq in (0, 2):
        assert_continues(backend, seq, PROMPT)


def test_a_loaded_window_goes_back_as_far_as_it_reaches(tmp_path: Path) -> None:
    backend = opened(tiny_sliding_window(tmp_path / "window.gguf"), context_size=2048)
    tokens = np.random.default_rng(1).integers(5, 200, 1500).tolist()
    for at in range(0, 1500, 100):
        backend.forward(batch_of(rows(0, at, tokens[at : at + 100])))
    part = saved(backend)
    kept = []
    for n in range(1500, 1500 - 2 * WINDOW, -1):
        assert backend.kv.load(1, [part]) == 1500
        kept.append(backend.kv.truncate(1, n))
    assert kept == [1500, 1499] + [0] * (2 * WINDOW - 2)  # llama.cpp saves one position more than the next row sees
    assert backend.kv.load(1, [part]) == 1500
    assert_same(
        backend.forward(batch_of(rows(1, 1500, MORE))).logits,
        backend.forward(batch_of(rows(0, 1500, MORE))).logits,
    )
    backend.close()


def test_parts_of_other_kinds_are_not_loaded(plain: LlamaBackend) -> None:
    part = saved(plain)
    for parts in ([], [replace(part, kind=BLOCK_PART)], [replace(part, start=16)], [replace(part, end=0)]):
        plain.kv.load(1, [part])
        assert plain.kv.load(1, parts) == 0
        assert plain.kv.lengths == [60, 0, 0]
    assert plain.kv.load(1, [replace(part, kind=BLOCK_PART), part]) == 60


def test_a_sequence_longer_than_the_context_is_not_loaded(tmp_path: Path) -> None:
    path = tiny_model(tmp_path, "F32")
    larger = opened(path)
    larger.forward(batch_of(rows(0, 0, PROMPT * 4)))
    part = saved(larger)
    larger.close()
    backend = opened(path, context_size=239)
    assert backend.kv.capacity >= 256
    assert backend.kv.load(0, [part]) == 0
    backend.close()


@pytest.mark.parametrize("cut", [1, 4, 1000])
def test_data_that_is_too_short_or_too_long_is_refused(backend: LlamaBackend, cut: int) -> None:
    part = saved(backend)
    data = bytes(part.read())
    for bad in (data[:-cut], data + bytes(cut), data[:cut], data + data):
        backend.kv.load(1, [part])
        assert backend.kv.load(1, [changed(part, bad)]) == 0
        assert backend.kv.lengths == [60, 0, 0]
        assert not backend.kv.save(1, 60)
    assert_continues(backend, 1, PROMPT)
    assert_continues(backend, 0, PROMPT)


def test_a_length_that_does_not_match_the_data_is_refused(backend: LlamaBackend) -> None:
    part = saved(backend)
    for end in (1, 59, 61, 255):
        assert backend.kv.load(1, [replace(part, end=end)]) == 0
    assert_continues(backend, 1, PROMPT)


def test_no_change_of_the_data_damages_other_sequences(backend: LlamaBackend) -> None:
    """The numbers before and between the tensors are changed. Some changes make the process give up, as it should."""
    part, chance = saved(backend), random.Random(0)
    words = np.frombuffer(part.read(), np.int32)
    small = [at for at, word in enumerate(words.tolist()) if -1 <= word <= 5000]
    backend.kv.truncate(2, 0)
    outcomes = set()
    for _ in range(150):
        bad = words.copy()
        bad[chance.choice(small)] = chance.choice([-(1 << 31), -5, -1, 0, 1, 2, 59, 60, 61, 1000, (1 << 31) - 1])
        try:
            kept = backend.kv.load(1, [changed(part, bad.tobytes())])
        except BackendCrashed:
            return
        outcomes.add(kept)
        assert backend.kv.lengths == [60, kept, 0]
        backend.kv.free(1)
    assert outcomes == {0, 60}
    assert_continues(backend, 1, PROMPT)
    assert_continues(backend, 0, PROMPT)


def test_data_that_cannot_be_removed_again_ends_the_process(tmp_path: Path) -> None:
    """The last position in the window's own cache becomes negative, which llama.cpp accepts."""
    backend = opened(tiny_sliding_window(tmp_path / "window.gguf"))
    backend.forward(batch_of(rows(0, 0, PROMPT)))
    part = saved(backend)
    last = np.array([59, 1, 0], np.int32).tobytes()
    for negative in (-1, -5):
        head, _, tail = bytes(part.read()).rpartition(last)
        assert last in head  # the cache of the other layers
        bad = head + np.array([negative, 1, 0], np.int32).tobytes() + tail
        with pytest.raises(BackendCrashed, match=r"died while loading a saved state of .*: SIGABRT") as caught:
            backend.kv.load(1, [changed(part, bad)])
        assert caught.value.hint == "the saved state may be damaged: use --no-save-state or another --prompt-cache"
        backend.close()
        backend = opened(tmp_path / "window.gguf")
    backend.close()


def test_a_full_cache_has_no_room_for_a_saved_sequence(tmp_path: Path) -> None:
    backend = opened(tiny_model(tmp_path, "F32"), kv_tokens=256)
    backend.forward(batch_of(rows(0, 0, PROMPT)))
    part = saved(backend)
    backend.forward(batch_of(rows(1, 0, PROMPT * 3)))
    assert backend.kv.free_blocks == 16
    with pytest.raises(KVFull, match="no room for 60 saved tokens"):
        backend.kv.load(2, [part])
    assert backend.kv.lengths == [60, 180, 0]
    assert backend.kv.load(0, [part]) == 60  # it replaces as many
    backend.kv.free(1)
    assert backend.kv.load(2, [part]) == 60
    assert_continues(backend, 2, PROMPT)
    backend.close()


def test_a_shared_prefix_leaves_more_room_than_is_promised(tmp_path: Path) -> None:
    backend = opened(tiny_model(tmp_path, "F32"), kv_tokens=256)
    backend.forward(batch_of(rows(0, 0, PROMPT)))
    part = saved(backend)
    backend.forward(batch_of(rows(0, 60, PROMPT * 2)))
    backend.kv.copy(0, 1, 180)
    assert backend.kv.free_blocks < 0
    assert backend.kv.load(2, [part]) == 60
    backend.close()


def test_a_sequence_that_has_changed_is_not_read(plain: LlamaBackend) -> None:
    (part,) = plain.kv.save(0, 60)
    plain.forward(batch_of(rows(0, 60, MORE)))
    with pytest.raises(LlmrunError, match=r"cannot save the state of .*: it wrote 0 of [\d,]+ bytes"):
        part.read()
    assert_continues(plain, 0, PROMPT + MORE)


def test_memory_of_saved_data_is_freed_with_it(plain: LlamaBackend) -> None:
    def mapped() -> list[int]:
        pids = ("self", str(plain._process.pid))
        return [Path(f"/proc/{pid}/maps").read_text().count("memfd:llmrun") for pid in pids]

    before = mapped()
    (part,) = plain.kv.save(0, 60)
    data = part.read()
    assert isinstance(data, memoryview)
    assert mapped() == [before[0] + 1, before[1]]
    assert plain.kv.load(1, [replace(part, read=data.toreadonly)]) == 60
    assert mapped() == [before[0] + 1, before[1]]
    del data
    assert mapped() == before


def test_a_stop_before_a_load_cancels_the_next_pass(plain: LlamaBackend) -> None:
    part = saved(plain)
    plain.cancel()
    assert plain.kv.load(1, [part]) == 60
    with pytest.raises(Cancelled):
        plain.forward(batch_of(rows(1, 60, MORE)))
    assert_continues(plain, 1, PROMPT)


def test_the_key_is_empty_unless_states_are_saved(path: Path, tmp_path: Path) -> None:
    def key(**options: Any) -> str:
        backend = opened(path, **options)
        backend.close()
        return backend.kv.key

    assert key(saves_state=False) == ""
    assert len(key()) == 64
    assert key() == key(threads=2, max_sequences=2, context_size=512)


def test_the_key_differs_for_other_models_and_precisions(tmp_path: Path) -> None:
    path = tiny_architecture(tmp_path, "qwen3")  # its heads have 32 features, as an 8-bit cache needs
    keys = set()
    for model, kv_type in [(path, "f16"), (path, "q8_0"), (tiny_architecture(tmp_path, "qwen2"), "f16")]:
        backend = opened(model, kv_type=kv_type)
        keys.add(backend.kv.key)
        backend.close()
    assert len(keys) == 3


def test_the_key_differs_where_a_longer_context_has_other_rotations(tmp_path: Path) -> None:
    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata["phi3.rope.scaling.original_context_length"] = 512

    path = changed_copy(tiny_architecture(tmp_path, "phi3 longrope, long"), tmp_path / "changed.gguf", change)
    keys = []
    for context_size in (256, 512, 768):
        backend = opened(path, context_size=context_size, max_sequences=1)
        keys.append(backend.kv.key)
        backend.close()
    assert keys[0] == keys[1] != keys[2]
