"""Tests that engines continue from files exactly as if they had computed everything themselves."""

from __future__ import annotations

import os
import random
import tracemalloc
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from llmrun.backends.base import OpenOptions, SavedPart
from llmrun.backends.cpu.backend import CpuBackend
from llmrun.backends.cpu.paged_kv import PagedKV
from llmrun.backends.llama.backend import LlamaBackend
from llmrun.backends.scripted import ScriptedBackend
from llmrun.base.errors import BackendCrashed
from llmrun.engine.engine import Engine
from llmrun.engine.requests import Request, StatePlace, TokenPrompt
from llmrun.engine.saved_state.budget import Budget, SavedPrefixes
from llmrun.engine.saved_state.chunks import CHUNK, SavedChunks
from llmrun.engine.saved_state.one_file import SavedFile
from llmrun.engine.slots import SequenceSlots
from llmrun.formats.gguf.reader import open_gguf
from llmrun.formats.layouts.kv import BLOCK
from tests.support.engine.answers import Gathered, answer_all
from tests.support.engine.saving import grow, saved_file
from tests.support.engine.scripted_models import DRAWN, endless
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.models.tiny_architectures import tiny_architecture

pytestmark = pytest.mark.push

# Plain attention, sliding windows, short convolutions, a recurrent state and both.
ARCHITECTURES = pytest.mark.parametrize("name", ["qwen3", "gemma3", "lfm2", "qwen35", "falcon-h1"])
CONTEXT = 2048
PROMPT = random.Random(0).choices(range(3, 290), k=1700)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def opened(path: Path, kv_type: str | None = "f16", max_sequences: int = 1, kv_tokens: int | None = None) -> Engine:
    options = OpenOptions(
        context_size=CONTEXT,
        max_sequences=max_sequences,
        threads=1,
        kv_type=kv_type,
        saves_state=True,
        kv_tokens=kv_tokens,
    )
    with open_gguf(path) as file:
        return Engine(CpuBackend(file, options))


def answer(engine: Engine, prompt: Sequence[int], *, tenant: str = "") -> Gathered:
    [gathered] = answer_all(engine, [endless(Request(TokenPrompt(list(prompt)), 8, sampling=DRAWN, tenant=tenant))])
    return gathered


@ARCHITECTURES
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_a_resumed_chat_gives_the_same_answer(folder: Path, tmp_path: Path, name: str, kv_type: str) -> None:
    path = tiny_architecture(folder, name)
    file = tmp_path / "chat.kv"
    with closing(opened(path, kv_type)) as engine:
        expected = answer(engine, PROMPT[:1650])
    turns = [PROMPT[:700], PROMPT[:1100], PROMPT[:1650]]
    for turn in turns:
        with closing(opened(path, kv_type)) as engine:
            engine.use_saved(saved_file(file, engine._backend))
            last = answer(engine, turn)
            engine.save_prefix()
    assert last.tokens == expected.tokens
    assert last.finished.timings.cached_tokens >= 1100 - 32


def test_a_backend_that_saves_whole_sequences(folder: Path, tmp_path: Path) -> None:
    """llama.cpp saves the answer too, although only the prompt is asked for."""
    path = tiny_architecture(folder, "qwen3")
    found = []
    for _ in range(3):
        options = OpenOptions(context_size=CONTEXT, threads=1, gpu_layers=0, saves_state=True)
        with open_gguf(path) as file, closing(Engine(LlamaBackend(file, options))) as engine:
            engine.use_saved(saved_file(tmp_path / "x.kv", engine._backend))
            found.append(answer(engine, PROMPT[:600]))
            engine.save_prefix(600)
    assert [each.finished.timings.cached_tokens for each in found] == [0, 599, 599]
    assert found[1].tokens == found[2].tokens


@ARCHITECTURES
def test_a_turn_that_goes_back_gives_the_same_answer(folder: Path, tmp_path: Path, name: str) -> None:
    """Templates drop past thinking, so the next prompt differs from what was saved near its end."""
    path = tiny_architecture(folder, name)
    file = tmp_path / "chat.kv"
    other = [*PROMPT[:1180], *reversed(PROMPT[1200:1300])]
    with closing(opened(path)) as engine:
        expected = answer(engine, other)
    for prompt in (PROMPT[:1200], other, other):
        with closing(opened(path)) as engine:
            engine.use_saved(saved_file(file, engine._backend))
            last = answer(engine, prompt)
            engine.save_prefix()
    assert last.tokens == expected.tokens
    assert last.finished.timings.cached_tokens >= 1180


@pytest.mark.night
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen35"])
def test_flipped_bytes_change_no_answer(folder: Path, tmp_path: Path, name: str) -> None:
    path = tiny_architecture(folder, name)
    file, draw = tmp_path / "chat.kv", random.Random(1)
    prompt = PROMPT[:600]
    with closing(opened(path)) as engine:
        engine.use_saved(saved_file(file, engine._backend))
        expected = answer(engine, prompt).tokens
        engine.save_prefix()
        whole = file.read_bytes()
        for _ in range(60):
            damaged = bytearray(whole)
            damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            engine.forget()
            notes: list[str] = []
            engine.use_saved(saved_file(file, engine._backend, notes))
            assert answer(engine, prompt).tokens == expected


def test_the_key_depends_on_everything_that_changes_the_cache(folder: Path) -> None:
    model, other = tiny_architecture(folder, "qwen3"), tiny_architecture(folder, "qwen2")
    keys = []
    for path, kv_type in ((model, "f16"), (model, "q8_0"), (other, "f16"), (model, "f16")):
        with closing(opened(path, kv_type)) as engine:
            keys.append(engine.state_key)
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3
    changed = folder / "changed.gguf"
    data = bytearray(model.read_bytes())
    data[-5] ^= 1
    changed.write_bytes(data)
    with closing(opened(changed)) as engine:
        assert engine.state_key != keys[0]
    os.utime(model, (1, 1))
    with closing(opened(model)) as engine:
        assert engine.state_key != keys[0]
    with open_gguf(model) as file, closing(CpuBackend(file, OpenOptions(context_size=64, threads=1))) as backend:
        assert backend.kv.key == ""


def test_a_state_with_another_cache_type_is_replaced(tmp_path: Path) -> None:
    """Before the default depended on the weights, chats with quantized models saved states with an f16 cache."""
    path, file = tiny_llama(tmp_path / "tiny.gguf", context=CONTEXT), tmp_path / "chat.kv"
    notes: list[str] = []
    cached, tokens = [], []
    for kv_type in ("f16", None, None):
        with closing(opened(path, kv_type)) as engine:
            engine.use_saved(saved_file(file, engine._backend, notes))
            answered = answer(engine, PROMPT[:600])
            engine.save_prefix()
        cached.append(answered.finished.timings.cached_tokens)
        tokens.append(answered.tokens)
    assert cached == [0, 0, 599]
    assert tokens[1] == tokens[2]
    assert notes == []


def chunks(folder: Path, engine: Engine, limit: int = 1 << 40, notes: list[str] | None = None) -> SavedChunks:
    told: list[str] = [] if notes is None else notes
    return SavedChunks(folder, engine.state_key, Budget([folder], limit), told.append)


def save_all(engine: Engine) -> None:
    while engine.save_prefix():
        pass


@ARCHITECTURES
def test_a_server_continues_from_saved_chunks(folder: Path, tmp_path: Path, name: str) -> None:
    path = tiny_architecture(folder, name)
    with closing(opened(path)) as engine:
        expected = answer(engine, PROMPT).tokens
    with closing(opened(path)) as engine:
        engine.use_saved(chunks(tmp_path, engine))
        answer(engine, PROMPT[:1600], tenant="a")
        save_all(engine)
        assert len(list(tmp_path.iterdir())) == 4
    with closing(opened(path)) as engine:
        engine.use_saved(chunks(tmp_path, engine))
        again = answer(engine, PROMPT, tenant="a")
        assert again.tokens == expected
        assert again.finished.timings.cached_tokens > 1600 - BLOCK
        assert engine._saved is not None
        assert engine._saved.longest(PROMPT, "a") == again.finished.timings.cached_tokens  # what can be used
    with closing(opened(path)) as engine:
        engine.use_saved(chunks(tmp_path, engine))
        assert answer(engine, PROMPT, tenant="b").finished.timings.cached_tokens == 0


def test_sequences_share_chunks(folder: Path, tmp_path: Path) -> None:
    with closing(opened(tiny_architecture(folder, "qwen3"), max_sequences=3)) as engine:
        engine.use_saved(chunks(tmp_path, engine))
        for end in ([4] * 100, [5] * 100):
            answer(engine, [*PROMPT[:CHUNK], *end * 6])
        save_all(engine)
        assert len(list(tmp_path.iterdir())) == 5  # the first one, and two of each sequence


@ARCHITECTURES
def test_a_prompt_loads_what_the_cache_would_have_kept(folder: Path, tmp_path: Path, name: str) -> None:
    """An agent's second session repeats the system prompt and the tools, and then asks something else."""
    path, shared = tiny_architecture(folder, name), 1200
    other = [*PROMPT[:shared], *reversed(PROMPT[:700])]
    with closing(opened(path, max_sequences=2)) as engine:
        expected = answer(engine, other).tokens
        engine.forget()
        answer(engine, PROMPT)
        kept = answer(engine, other).finished.timings.cached_tokens
    for prompt in (PROMPT, [*PROMPT[:shared], 7, 8, 9]):
        with closing(opened(path)) as engine:
            engine.use_saved(chunks(tmp_path, engine))
            answer(engine, prompt)
            save_all(engine)
    with closing(opened(path)) as engine:
        engine.use_saved(chunks(tmp_path, engine))
        again = answer(engine, other)
    assert again.tokens == expected
    assert again.finished.timings.cached_tokens >= kept > shared - CHUNK
    assert kept == shared or name in ("qwen35", "falcon-h1")  # recurrent states exist at few positions


@pytest.mark.parametrize("name", ["qwen35", "falcon-h1"])
def test_states_at_the_end_of_chunks_are_loaded(folder: Path, tmp_path: Path, name: str) -> None:
    path, n = tiny_architecture(folder, name), 0
    with closing(opened(path)) as engine:
        kv, saved = engine._backend.kv, chunks(tmp_path, engine)
        for end in (480, *range(481, 600)):  # while an answer is generated, states are saved at multiples of 512
            grow(engine._backend, 0, n, PROMPT[:end])
            n = end
        while saved.save(kv, 0, PROMPT[:n], n, ""):
            pass
    with closing(opened(path)) as engine:
        assert chunks(tmp_path, engine).load(engine._backend.kv, 0, [*PROMPT[:540], *PROMPT[:50]], "") == CHUNK


def test_a_longer_chunk_replaces_the_shorter_one(folder: Path, tmp_path: Path) -> None:
    with closing(opened(tiny_architecture(folder, "qwen3"))) as engine:
        engine.use_saved(chunks(tmp_path, engine))
        conversation, sizes = PROMPT[:600], []
        for _ in range(4):
            conversation += [*answer(engine, conversation).tokens, *PROMPT[:150]]
            save_all(engine)
            sizes.append(len(list(tmp_path.iterdir())))
        assert sizes == [2, 2, 2, 3]
        engine.forget()
        answer(engine, conversation[:900])
        assert engine.save_prefix() is False
        assert len(list(tmp_path.iterdir())) == 3 + 1  # the answer differs from the conversation


def test_beginnings_outlast_the_rest_of_conversations(folder: Path, tmp_path: Path) -> None:
    """Chunks of the conversation in use are removed last, and its first chunks after the later ones."""
    path, beginning = tiny_architecture(folder, "qwen3"), PROMPT[: 2 * CHUNK]
    limit = 1 << 40
    for place in (tmp_path / "all", tmp_path / "some"):
        with closing(opened(path, max_sequences=8)) as engine:
            engine.use_saved(chunks(place, engine, limit))
            for end in (3, 4, 5):
                answer(engine, [*beginning, *[end] * 500])
                save_all(engine)
        size = max(file.stat().st_size for file in place.iterdir())
        limit = 4 * size + size // 2
    assert [len(list(place.iterdir())) for place in (tmp_path / "all", tmp_path / "some")] == [5, 4]
    with closing(opened(path)) as engine:
        engine.use_saved(chunks(tmp_path / "some", engine))
        for end, cached in ((5, 2 * CHUNK + 499), (4, 2 * CHUNK + 499), (3, 2 * CHUNK)):
            assert answer(engine, [*beginning, *[end] * 500]).finished.timings.cached_tokens == cached
            engine.forget()


def test_a_sequence_never_replaces_its_own_beginning(folder: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    with closing(opened(tiny_architecture(folder, "qwen3"))) as engine:
        engine.use_saved(chunks(tmp_path, engine))
        answer(engine, PROMPT[:600])
        save_all(engine)
        size = max(file.stat().st_size for file in tmp_path.iterdir())
        engine.use_saved(chunks(tmp_path, engine, 2 * size + 100, notes))
        for _ in range(2):
            answer(engine, PROMPT)
            save_all(engine)
        engine.forget()
        assert answer(engine, PROMPT).finished.timings.cached_tokens == 2 * CHUNK
    assert len(notes) == 1
    assert "exceeds state_gb" in notes[0]


def test_damaged_chunks_are_removed_and_saved_again(folder: Path, tmp_path: Path) -> None:
    path = tiny_architecture(folder, "qwen3")
    with closing(opened(path)) as engine:
        engine.use_saved(chunks(tmp_path, engine))
        expected = answer(engine, PROMPT).tokens
        save_all(engine)
        files = sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime_ns, reverse=True)
        whole = [file.read_bytes() for file in files]
        for index in (1, 2, 0):
            for place in (3, len(whole[index]) - 10):
                damaged = bytearray(whole[index])
                damaged[place] ^= 4
                files[index].write_bytes(damaged)
                engine.forget()
                notes: list[str] = []
                engine.use_saved(chunks(tmp_path, engine, notes=notes))
                again = answer(engine, PROMPT)
                assert again.tokens == expected
                assert again.finished.timings.cached_tokens < (index + 1) * CHUNK
                assert "damaged" in notes[0]
                save_all(engine)
                assert [file.read_bytes() for file in files] == whole


@pytest.mark.parametrize("kind", ["one file", "chunks"])
def test_a_long_sequence_is_saved_and_loaded_in_pieces(tmp_path: Path, kind: str) -> None:
    """Neither saving nor loading holds a second copy of the cache."""
    n_tokens, n_layers, block_bytes = 8192, 4, 16_384
    numbers = np.random.default_rng(0).integers(0, 256, n_layers * n_tokens // BLOCK * block_bytes, np.uint8)
    tokens, key = [*range(n_tokens)], "ab" * 32
    source, target = (
        numbers.reshape(n_layers, -1, block_bytes),
        np.zeros_like(numbers).reshape(n_layers, -1, block_bytes),
    )
    full, empty = (PagedKV({0: [memory]}, 1, n_tokens, key=key) for memory in (source, target))
    full.extend({0: n_tokens})
    saved: SavedPrefixes = SavedFile(StatePlace(str(tmp_path / "a.kv")), key, pytest.fail)
    if kind == "chunks":
        saved = SavedChunks(tmp_path, key, Budget([tmp_path], 1 << 40), pytest.fail)
    tracemalloc.start()
    while saved.save(full, 0, tokens, n_tokens, ""):
        pass
    assert saved.load(empty, 0, tokens, "") == n_tokens
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    np.testing.assert_array_equal(source, target)
    assert peak < source.nbytes / 4


@pytest.fixture
def saved_tokens(tmp_path: Path) -> list[int]:
    backend, tokens = ScriptedBackend(), [token % 256 for token in PROMPT[:300]]
    grow(backend, 0, 0, tokens)
    saved_file(tmp_path / "a.kv", backend).save(backend.kv, 0, tokens, len(tokens), "")
    return tokens


def test_a_longer_cached_prefix_is_not_replaced(tmp_path: Path, saved_tokens: list[int]) -> None:
    backend = ScriptedBackend()
    slots, saved = SequenceSlots(backend.kv, backend.info.max_sequences), saved_file(tmp_path / "a.kv", backend)
    longer = [*saved_tokens, *saved_tokens]
    slot = slots.acquire(longer, saved=saved)
    assert slot.tokens == saved_tokens
    grow(backend, 0, 300, longer)
    slot.tokens = longer
    slots.release(slot)
    assert slots.acquire([*longer, 1], saved=saved).tokens == longer
    assert slots.cached([*saved_tokens, 5, 5], "", saved) == 300


def test_idle_prefixes_make_room_for_a_saved_one(tmp_path: Path, saved_tokens: list[int]) -> None:
    backend = ScriptedBackend(max_sequences=3, capacity=700)
    slots, saved = SequenceSlots(backend.kv, backend.info.max_sequences), saved_file(tmp_path / "a.kv", backend)
    held = []
    for token in (1, 2):
        slot = slots.acquire([token] * 250, saved=saved)
        grow(backend, slot.index, 0, [token] * 249)
        slot.tokens = [token] * 249
        held.append(slot)
    for slot in held:
        slots.release(slot)
    assert slots.acquire([*saved_tokens, 9], saved=saved).tokens == saved_tokens
    assert slots.cached([2] * 250, "", saved) == 249
    assert slots.cached([1] * 250, "", saved) == 0


def test_running_requests_keep_their_room(tmp_path: Path, saved_tokens: list[int]) -> None:
    backend = ScriptedBackend(max_sequences=2, capacity=400)
    slots, saved = SequenceSlots(backend.kv, backend.info.max_sequences), saved_file(tmp_path / "a.kv", backend)
    slot = slots.acquire([1] * 250, saved=saved)
    grow(backend, slot.index, 0, [1] * 249)
    slot.tokens = [1] * 249
    assert slots.acquire([*saved_tokens, 9], saved=saved).tokens == []
    assert backend.kv.sequences[slot.index] == [1] * 249


def test_an_engine_that_died_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = ScriptedBackend(context_size=4096)
    notes: list[str] = []

    def died(seq: int, n: int) -> list[SavedPart]:
        raise BackendCrashed("llama.cpp died while running x.gguf: SIGKILL")

    with closing(Engine(backend)) as engine:
        engine.use_saved(saved_file(tmp_path / "x.kv", backend, notes))
        answer(engine, [65] * 100)
        monkeypatch.setattr(backend.kv, "save", died)
        assert not engine.save_prefix()
    assert notes == [f"state is not saved: {tmp_path / 'x.kv'}: llama.cpp died while running x.gguf: SIGKILL"]


def test_chunks_that_have_just_been_removed_are_computed(tmp_path: Path) -> None:
    """Several servers may have the same folder."""
    backend, tokens = ScriptedBackend(context_size=4096), [token % 256 for token in PROMPT]
    grow(backend, 0, 0, tokens)
    saved = SavedChunks(tmp_path, "ab" * 32, Budget([tmp_path], 1 << 40), pytest.fail)
    while saved.save(backend.kv, 0, tokens, len(tokens), ""):
        pass
    assert saved.longest(tokens, "") == len(tokens)
    for file in tmp_path.iterdir():
        file.unlink()
    assert saved.load(backend.kv, 0, tokens, "") == 0
