"""Short runs of the profiles that no other test runs. `scripts/soak` runs any profile for as long as you like."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from tests.soak.driver import Broken, run_profile
from tests.soak.image_chats import NAMES as SEEING_NAMES
from tests.soak.speculation import NAMES
from tests.soak.store import Damage
from tests.support.models.downloads import smollm2

pytestmark = [
    pytest.mark.push,
    pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals and connection resets"),
]

# The first case, the number of cases, and outcomes that must occur in them.
SHORT: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "background": (0, 22, ("expire", "kill starter")),
    "batch": (0, 2, ("runs",)),
    "chat": (20, 12, ("kills with -9 and --continue", "interrupt")),
    "downloads": (0, 20, ("cut", "killed")),
    "models": (0, 250, ("0 answered", "3 BadGGUF", "3 ModelFileError")),
    "projectors": (0, 400, ("0 answered", "3 BadGGUF", "3 UnsupportedModel")),
    "serve-cancel": (0, 8, ()),
    "serve-hostile": (0, 1, ("hostile body", "status 200")),
    "serve-kill": (0, 2, ("requests that saw 1 kills",)),
    "serve-same": (0, 1, ("preemptions with --overcommit",)),
    "serve-swap": (0, 2, ("swaps",)),
    "serve-upstreams": (0, 2, ("requests moved", "requests resumed")),
    "store": (0, 4, ("flip bit", "kill first run", "start at once")),
}


@pytest.mark.night
@pytest.mark.parametrize("name", SHORT)
def test_a_short_run_breaks_no_promise(name: str) -> None:
    first, count, outcomes = SHORT[name]
    result = run_profile(name, first=first, count=count)
    assert result.broken == []
    assert result.cases == count
    assert [outcome for outcome in outcomes if not result.counts[outcome]] == []


def test_broken_projectors_end_in_rows_or_errors() -> None:
    result = run_profile("projectors", count=50)
    assert result.broken == []
    assert 0 < result.counts["0 answered"] < 50


def test_answers_about_images_are_the_same_everywhere() -> None:
    result = run_profile("image-chats", first=SEEING_NAMES.index("gemma4v"), count=1)
    assert result.broken == []
    assert all(result.counts[f"answers {way}"] for way in ("in company", "after prefix hits", "after kills"))
    assert result.counts["replays"] == 1


@pytest.mark.night
@pytest.mark.parametrize("name", SEEING_NAMES)
def test_answers_about_images_are_the_same_for_every_family(name: str) -> None:
    result = run_profile("image-chats", seed=2, first=SEEING_NAMES.index(name), count=1)
    assert result.broken == []
    assert result.counts["cached tokens after prefix hits"] > 0


# In this order, the models have windows, keys shared by layers, sinks, latent attention, a recurrent state, experts.
@pytest.mark.night
@pytest.mark.parametrize("name", ["gemma3 pattern", "gemma4 E2B", "gpt-oss", "deepseek2", "lfm2", "qwen3moe"])
def test_drafts_change_no_answer_of_an_architecture(name: str) -> None:
    result = run_profile("speculation", first=NAMES.index(name), count=1)
    assert result.broken == []
    assert 0 < result.counts["accepted"] < result.counts["drafted"]


@pytest.mark.night
def test_drafts_change_no_answer_of_the_real_model() -> None:
    assert run_profile("speculation", model=str(smollm2()), count=1).broken == []


@pytest.mark.night
def test_a_wrong_answer_and_a_wrong_entry_are_found(tmp_path: Path) -> None:
    damage = Damage(tmp_path)
    right, damage.right = damage.right, "another"
    with pytest.raises(Broken, match="another answer"):
        damage.flip_bit(random.Random(1))
    damage.right, damage.entries = right, dict.fromkeys(damage.entries, b"another")
    with pytest.raises(Broken, match="the cache differs in"):
        damage.flip_bit(random.Random(1))


@pytest.mark.soak
@pytest.mark.parametrize("name", ["constraints", "samplers", "tool-calls"])
def test_a_long_run_breaks_no_promise(name: str) -> None:
    assert run_profile(name, seconds=900).broken == []
