"""`llmrun chat` with the real model, on the CPU engine: what a turn computes, and that the conversation is heard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli.chats import environment, events_in, journals, words
from tests.support.cli.commands import llmrun
from tests.support.models.downloads import smollm2

pytestmark = pytest.mark.slow

END_OF_ANSWER = 1  # drawn, but not run


def test_a_turn_computes_only_what_is_new(tmp_path: Path) -> None:
    """An answer may be cut into other tokens when it comes back as text, so up to one answer is computed again;
    never what was there before it."""
    turns = ["Tell me about Paris.", "Name a colour.", "/undo", "Name an animal.", "/regen", "Thank you."]
    done = llmrun(
        *("chat", "-q", str(smollm2()), "--temp", "0", "-n", "24", "-c", "1024"),
        stdin=words(turns).encode(),
        env=environment(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    about_an_animal = done.stdout.decode().splitlines()[2]
    assert "Paris" in about_an_animal
    assert done.stderr == b""
    (path,) = journals(tmp_path)
    first, color, animal, again, thanks = [event for event in events_in(path) if event["event"] == "answered"]
    assert first["cached_tokens"] == 0
    for earlier, later in ((first, color), (again, thanks)):
        assert earlier["prompt_tokens"] <= later["cached_tokens"] <= earlier["context_used"] - END_OF_ANSWER
    assert animal["cached_tokens"] >= color["cached_tokens"]
    assert again["cached_tokens"] == again["prompt_tokens"] - 1
    assert again["generated_tokens"] == animal["generated_tokens"]
