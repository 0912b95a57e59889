"""Tests of prompt caches and conversations whose state a background engine loads and saves, with a real model."""

from __future__ import annotations

import json
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.background import BackgroundHome, background_home
from tests.support.cli.chats import events_in, journals, words
from tests.support.cli.commands import LLMRUN, ROOT
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.push

LONG = "the quick brown fox jumps over the lazy dog. " * 8


@pytest.fixture(scope="module")
def shared_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundHome]:
    """A home whose engine serves all tests that do not end it."""
    with background_home(tmp_path_factory.mktemp("home")) as home:
        yield home


def generated(home: BackgroundHome, *arguments: str, **options: Any) -> subprocess.CompletedProcess[bytes]:
    done = home.llmrun("generate", "-m", str(smollm2()), "--seed", "3", "-n", "8", *arguments, **options)
    assert done.returncode == 0, done.stderr
    return done


def cached(done: subprocess.CompletedProcess[bytes]) -> int:
    tokens: int = json.loads(done.stdout)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def chatted(home: BackgroundHome, data: Path, turns: list[str], *arguments: str) -> subprocess.CompletedProcess[bytes]:
    done = home.llmrun(
        *("chat", "-q", "-m", str(smollm2()), "--seed", "3", "-n", "24", *arguments),
        stdin=words(turns).encode(),
        env={"LLMRUN_DATA_DIR": str(data)},
    )
    assert done.returncode == 0, done.stderr
    return done


def answers(data: Path) -> list[dict[str, Any]]:
    (path,) = journals(data)
    return [event for event in events_in(path) if event["event"] == "answered"]


def test_a_prompt_cache_fits_both_kinds_of_engines(shared_home: BackgroundHome, tmp_path: Path) -> None:
    generated(shared_home, "-q", "--prompt-cache", "book.kv", LONG + "one", cwd=tmp_path)
    [engine] = shared_home.engines()
    assert stat.S_IMODE((tmp_path / "book.kv").stat().st_mode) == 0o600
    warm = generated(shared_home, "--json", "--prompt-cache", "book.kv", LONG + "two", cwd=tmp_path)
    cold = generated(shared_home, "--json", "--no-warm", "--prompt-cache", "book.kv", LONG + "two", cwd=tmp_path)
    assert shared_home.engines() == [engine]
    assert cached(warm) > 64
    assert cached(cold) > 64
    assert json.loads(cold.stdout)["choices"] == json.loads(warm.stdout)["choices"]
    generated(shared_home, "-q", "--no-warm", "--prompt-cache", "animals.kv", f"Cats! {LONG} one", cwd=tmp_path)
    loaded = generated(shared_home, "--json", "--prompt-cache", "animals.kv", f"Cats! {LONG} two", cwd=tmp_path)
    assert cached(loaded) > 64


def test_notes_about_a_file_reach_the_client(shared_home: BackgroundHome, tmp_path: Path) -> None:
    file = tmp_path / "x.kv"
    prompt = f"Dogs! {LONG}"
    generated(shared_home, "-q", "--no-warm", "--prompt-cache", str(file), prompt)
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    done = generated(shared_home, "--prompt-cache", str(file), prompt)
    assert f"note: saved state is damaged: {file}: wrong sha256" in done.stderr.decode()
    done = generated(shared_home, "--prompt-cache", str(file), prompt)
    assert "note" not in done.stderr.decode()


def test_another_file_is_never_overwritten(shared_home: BackgroundHome, tmp_path: Path) -> None:
    """The file changes while the model answers, as it does with `llmrun generate --prompt-cache FILE > FILE`."""
    file = tmp_path / "x"
    with file.open("wb") as stream:
        subprocess.run(
            [*LLMRUN, "generate", "-m", str(smollm2()), "-n", "8", "--prompt-cache", str(file), LONG],
            stdout=stream,
            stderr=subprocess.PIPE,
            check=True,
            env=shared_home.env,
            cwd=ROOT,
        )
    assert not file.read_bytes().startswith(b"llmrun state")
    assert shared_home.engines()


@pytest.mark.night
def test_prompt_caches_of_clients_stay_apart(shared_home: BackgroundHome, tmp_path: Path) -> None:
    prompts = {tmp_path / f"{number}.kv": f"Number {number}. {LONG}" for number in range(6)}
    for file, prompt in prompts.items():
        generated(shared_home, "-q", "--prompt-cache", str(file), prompt)
    for file, prompt in prompts.items():
        done = generated(shared_home, "--no-warm", "--json", "--prompt-cache", str(file), prompt)
        assert cached(done) == json.loads(done.stdout)["usage"]["prompt_tokens"] - 1


@pytest.mark.night
def test_a_continued_chat_needs_no_file(shared_home: BackgroundHome, tmp_path: Path) -> None:
    chatted(shared_home, tmp_path, [f"Summarize this: {LONG}"], "--no-save-state")
    chatted(shared_home, tmp_path, ["Name an animal in it."], "--continue", "--no-save-state")
    first, second = answers(tmp_path)
    assert second["cached_tokens"] >= first["prompt_tokens"]
    assert list((tmp_path / "conversations").glob("*.kv")) == []


@pytest.mark.night
def test_a_chat_continues_after_its_engine_was_killed(tmp_path: Path) -> None:
    """Each turn is saved, so the next engine loads it from the file."""
    turns = [f"Summarize this: {LONG}", "Name an animal in it."]
    with background_home(tmp_path / "home") as home:
        chatted(home, tmp_path / "parts", turns[:1])
        home.kill()
        chatted(home, tmp_path / "parts", turns[1:], "--continue")
        whole = chatted(home, tmp_path / "whole", turns, "--no-warm")
    first, second = answers(tmp_path / "parts")
    assert second["cached_tokens"] >= first["prompt_tokens"]
    assert [answer["text"] for answer in (first, second)] == whole.stdout.decode().splitlines()


@pytest.mark.night
def test_a_budget_limits_the_states_of_chats(shared_home: BackgroundHome, tmp_path: Path) -> None:
    done = shared_home.llmrun(
        *("chat", "-v", "-m", str(smollm2()), "-n", "8"),
        stdin=words([LONG, LONG]).encode(),
        env={"LLMRUN_DATA_DIR": str(tmp_path), "LLMRUN_STATE_GB": "0.000001"},
    )
    assert done.stderr.decode().count("state is not saved: it needs") == 1
    assert list((tmp_path / "conversations").glob("*.kv")) == []
