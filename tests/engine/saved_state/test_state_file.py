"""Tests of files with the state of a sequence: any history of saves, damage, and writers that are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmrun.backends.base import BLOCK_PART, SavedPart
from llmrun.backends.scripted import SAVED_BLOCK, ScriptedBackend
from llmrun.engine.saved_state.state_file import StateFile
from llmrun.engine.slots import common_prefix
from tests.support.engine.saving import grow, loaded, saved_file
from tests.support.growth import TIMES, growth
from tests.support.hub.small_disks import mounted_disk
from tests.support.tiers import examples

KEY = ScriptedBackend().kv.key


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


def save(path: Path, tokens: Sequence[int]) -> None:
    """Load what is saved of a sequence with these tokens, compute the others and save all."""
    backend = ScriptedBackend(context_size=4096)
    saved = saved_file(path, backend, [])
    kept = saved.load(backend.kv, 0, list(tokens[:-1]), "")
    grow(backend, 0, kept, tokens)
    saved.save(backend.kv, 0, tokens, len(tokens), "")


@pytest.mark.night
@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 200), st.integers(0, 3)), min_size=1, max_size=12))
def test_the_file_has_the_last_saved_sequence(
    tmp_path_factory: pytest.TempPathFactory, turns: list[tuple[int, ...]]
) -> None:
    """Each turn keeps some tokens of the one before and adds others. If it adds none, the longer sequence may stay."""
    path = tmp_path_factory.mktemp("states") / "a.kv"
    tokens: list[int] = []
    for kept, added, seed in turns:
        tokens = tokens[:kept] + tokens_of(added, seed)
        save(path, tokens)
        assert StateFile(path, KEY).tokens[: len(tokens)] == tokens
        assert loaded(path, [*tokens, 7])[: len(tokens)] == tokens
        useful = 100 * (len(tokens) // SAVED_BLOCK + 1) + 8 * len(tokens)
        assert path.stat().st_size < 2 * useful + (1 << 20) + 2000


def test_only_new_blocks_are_written(tmp_path: Path) -> None:
    path, tokens = tmp_path / "a.kv", tokens_of(1000)
    save(path, tokens[:800])
    before = path.read_bytes()
    save(path, tokens)
    after = path.read_bytes()
    assert after.startswith(before)
    assert len(after) - len(before) < len(before) / 3
    save(path, tokens[:900])
    assert path.read_bytes() == after


def test_long_files_are_read_in_linear_time(tmp_path: Path) -> None:
    """A sequence of 131,072 tokens has 4,096 blocks."""

    def saved(n_blocks: int) -> Path:
        path = tmp_path / f"{n_blocks}.kv"
        parts = [SavedPart(BLOCK_PART, at, at + 1, 1, 0, bytes) for at in range(n_blocks)]
        StateFile(path, KEY).save(range(n_blocks), parts, lambda added: True)
        return path

    files = {n_blocks: saved(n_blocks) for n_blocks in (4096 // TIMES, 4096)}
    assert growth(lambda n_blocks: StateFile(files[n_blocks], KEY), 4096) < 2 * TIMES


def test_a_file_does_not_grow_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmrun.engine.saved_state.state_file._SLACK", 1000)
    path, tokens = tmp_path / "a.kv", tokens_of(300)
    save(path, tokens)
    size = path.stat().st_size
    for seed in range(30):
        save(path, tokens[:100] + tokens_of(200, seed))
        assert path.stat().st_size <= 2 * size + 1000
    assert os.listdir(tmp_path) == ["a.kv"]  # noqa: PTH208  the names


@pytest.mark.night
def test_each_flipped_bit_is_refused(tmp_path: Path) -> None:
    """Only tokens before the damage are loaded, and saving again repairs the file."""
    path, tokens = tmp_path / "a.kv", tokens_of(150)
    save(path, tokens)
    whole = path.read_bytes()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        found = loaded(path, tokens)
        assert found == tokens[: len(found)]
        assert len(found) < len(tokens)
        assert len(found) >= SAVED_BLOCK * (len(tokens) * place // len(whole) // SAVED_BLOCK - 1)
    save(path, tokens)
    assert loaded(path, tokens) == tokens


@pytest.mark.night
@settings(deadline=None, max_examples=examples(300))
@given(st.data())
def test_damaged_files_never_yield_other_tokens(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Bytes are changed, removed, repeated or appended in a file of several saves."""
    path, tokens = tmp_path_factory.mktemp("states") / "a.kv", tokens_of(120)
    save(path, tokens[:70])
    save(path, tokens[:90] + tokens_of(20, 5))
    save(path, tokens)
    whole = path.read_bytes()
    first, end = sorted(data.draw(st.tuples(st.integers(0, len(whole)), st.integers(0, len(whole)))))
    path.write_bytes(
        whole[:first] + data.draw(st.one_of(st.binary(max_size=200), st.just(whole[first:end] * 2))) + whole[end:]
    )
    found = loaded(path, tokens)
    common = common_prefix(found, tokens)
    assert found == tokens[:common]
    save(path, tokens)
    assert loaded(path, tokens) == tokens


@pytest.mark.push
def test_a_truncated_file_has_the_records_before(tmp_path: Path) -> None:
    """This is what a killed writer leaves behind."""
    path, tokens = tmp_path / "a.kv", tokens_of(200)
    save(path, tokens[:100])
    earlier = path.stat().st_size
    save(path, tokens)
    whole = path.read_bytes()
    for size in range(earlier, len(whole), 7):
        path.write_bytes(whole[:size])
        assert len(loaded(path, tokens)) >= 96  # the last block of the first save is incomplete, and is written again
        save(path, tokens)
        assert loaded(path, tokens) == tokens


def test_another_key_sees_nothing_and_replaces_the_file(tmp_path: Path) -> None:
    path, tokens = tmp_path / "a.kv", tokens_of(100)
    save(path, tokens)
    assert StateFile(path, "00" * 32).tokens == []
    backend = ScriptedBackend()
    backend.kv.key = "00" * 32
    grow(backend, 0, 0, tokens[:50])
    saved_file(path, backend).save(backend.kv, 0, tokens[:50], len(tokens[:50]), "")
    assert StateFile(path, "00" * 32).tokens == tokens[:50]
    assert StateFile(path, KEY).tokens == []


def test_files_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        save(tmp_path / "a.kv", tokens_of(100))
    finally:
        os.umask(old)
    assert (tmp_path / "a.kv").stat().st_mode & 0o777 == 0o600


def test_writers_do_not_disturb_each_other(tmp_path: Path) -> None:
    """A file that another process is still writing, or that only has a similar name, stays as it is."""
    others = [tmp_path / ".a.kv.new", tmp_path / ".other.kv.new"]
    for other in others:
        other.write_text("precious")
    tokens = tokens_of(100)
    save(tmp_path / "a.kv", tokens)
    assert loaded(tmp_path / "a.kv", tokens) == tokens
    assert sorted(tmp_path.iterdir()) == [*others, tmp_path / "a.kv"]
    assert [other.read_text() for other in others] == ["precious", "precious"]


_SAVER = """
import sys
from pathlib import Path
from tests.engine.saved_state.test_state_file import save, tokens_of
tokens = tokens_of(4000)
for end in range(100, 4001, 100):
    save(Path(sys.argv[1]), tokens[:end])
    print(end, flush=True)
"""


@pytest.mark.night
def test_a_killed_writer_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")
    tokens = tokens_of(4000)
    for delay in (0.0, 0.003, 0.011, 0.017):
        path = tmp_path / f"{delay}.kv"
        command = [sys.executable, "-c", _SAVER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as saver:
            assert saver.stdout is not None
            saver.stdout.readline()
            time.sleep(delay)
            saver.send_signal(signal.SIGKILL)
            told = saver.stdout.read().split()
        saved = int(told[-1]) if told else 100
        assert len(loaded(path, tokens)) >= saved
        save(path, tokens)
        assert loaded(path, tokens) == tokens


def test_a_full_disk_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    """A note is given once. What has been saved stays, and nothing else is left behind."""
    tokens = tokens_of(4000)
    with mounted_disk(tmp_path / "disk", 64 << 10, room=32 << 10) as disk:
        path = disk.folder / "a.kv"
        save(path, tokens[:1000])
        before = path.read_bytes()
        backend, notes = ScriptedBackend(context_size=4096), list[str]()
        saved = saved_file(path, backend, notes)
        grow(backend, 0, saved.load(backend.kv, 0, tokens, ""), tokens)
        saved.save(backend.kv, 0, tokens, len(tokens), "")
        saved.save(backend.kv, 0, tokens, len(tokens), "")
        assert [note.partition(path.name)[2] for note in notes] == [": No space left on device"]
        assert path.read_bytes() == before
        backend.kv.key = "00" * 32  # replaces the whole file
        saved_file(path, backend, []).save(backend.kv, 0, tokens, len(tokens), "")
        assert path.read_bytes() == before
        assert {entry.name for entry in disk.folder.iterdir()} == {"a.kv", "ballast"}
