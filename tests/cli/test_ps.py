"""Tests of `llmrun ps` and `llmrun stop`, with real processes."""

from __future__ import annotations

import json
import select
import subprocess
import time
from pathlib import Path

import pytest

from llmrun.base.amounts import format_until
from llmrun.cli.arguments.options import models_running
from tests.support.cli.commands import LLMRUN, ROOT, llmrun, run
from tests.support.models.downloads import smollm2
from tests.support.serving.fake_engine import started

pytestmark = pytest.mark.push


def listed() -> list[dict[str, object]]:
    return json.loads(run("ps", "--json")[0])["engines"]  # type: ignore[no-any-return]


def test_both_commands_work_without_engines(engines: Path) -> None:
    assert run("ps")[0].startswith("No model is loaded. ")
    assert run("ps", "--json")[0] == '{"engines": []}\n'
    assert run("stop", "--all")[0] == "No model is loaded.\n"
    assert run("stop", code=1)[1] == "error: no model is loaded\n"
    assert run("stop", "x", code=1)[1] == "error: x: not loaded; no model is loaded\n"
    assert not engines.exists()


@pytest.mark.night
def test_a_kept_model_is_listed_and_unloaded(engines: Path) -> None:
    model = str(smollm2())
    command = ("generate", "-m", model, "--keep-alive", "1h", "-n", "1", "--json", "hi")
    first, second = (json.loads(run(*command)[0]) for _ in range(2))
    assert (first["run"]["warm"], second["run"]["warm"]) == (False, True)
    assert (first["timings"]["load_s"] > 0, second["timings"]["load_s"]) == (True, 0)
    (engine,) = listed()
    assert (engine["state"], engine["path"], engine["answers"]) == ("idle", model, 0)
    assert str(engine["pid"]) in run("ps")[0].splitlines()[1].split()
    assert "in 59 minutes" in run("ps")[0]
    assert run("stop", model)[0] == f"{engine['model']}: unloaded\n"
    assert listed() == []


@pytest.mark.night
def test_a_forced_stop_changes_no_answer(engines: Path) -> None:
    command = ["generate", "-m", str(smollm2()), "--keep-alive", "1h", "--seed", "1"]
    story = [*command, "-n", "600", "Tell a long story"]
    right, _ = run(*story, "--no-warm")
    run(*command, "-n", "1", "hi")
    with subprocess.Popen([*LLMRUN, *story], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as client:
        assert client.stdout is not None
        select.select([client.stdout], [], [])
        run("stop", "--force")
        output, errors = client.communicate()
    assert output.decode() == right
    assert errors.count(b"note: the background engine ended") == 1
    assert listed() == []


def test_ps_shows_one_line_per_engine(engines: Path) -> None:
    idle = started("idle", used=time.time(), until=time.time() + 290)
    busy = started("busy", name="large\x1b", answers=1, memory_bytes=2_500_000_000)
    header, *lines = [line.split() for line in run("ps")[0].splitlines()]
    assert header == ["MODEL", "STATE", "MEMORY", "UNTIL", "PID", "VERSION"]
    assert sorted(lines) == [
        ["large␛", "generating", "2.50", "GB", str(busy.pid), "9.9.9"],
        ["tiny", "idle", "123", "MB", "in", "4", "minutes", str(idle.pid), "9.9.9"],
    ]
    assert sorted(models_running()) == [("large\x1b", "generating"), ("tiny", "idle")]


def test_stop_needs_a_name_for_several_models(engines: Path) -> None:
    first, second = started("one"), started("two", name="other", model="other:1b")
    assert run("stop", code=2)[1] == (
        "error: several models are loaded: other, tiny\nhint: name one of them, or use --all\n"
    )
    assert run("stop", "big", code=1)[1] == "error: big: not loaded; loaded: other, tiny\n"
    assert run("stop", "--all", "tiny", code=2)[1] == "error: --all: cannot be combined with MODEL\n"
    assert run("stop", "OTHER:1b")[0] == "other: unloaded\n"
    assert (first.poll(), second.poll()) == (None, 0)
    assert run("stop")[0] == "tiny: unloaded\n"
    assert first.poll() == 0


def test_stop_knows_presets_and_relative_paths(engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "models.toml").write_text('[presets.mine]\nmodel = "other:1b"\n')
    started("one", path=str(tmp_path / "one.gguf"))
    started("two", name="other", model="other:1b")
    assert run("stop", "mine")[0] == "other: unloaded\n"
    assert llmrun("stop", "../one.gguf", cwd=tmp_path / "engines").stdout == b"tiny: unloaded\n"


def test_one_busy_engine_does_not_protect_the_others(engines: Path) -> None:
    idle, busy = started("idle"), started("busy", name="busy", answers=1)
    done = llmrun("stop", "--all", "--json")
    assert done.returncode == 1
    assert done.stderr.decode() == (
        "error: cannot stop busy: the engine is generating 1 answer\nhint: `--force` ends the process\n"
    )
    stopped = {each["model"]: each["stopped"] for each in json.loads(done.stdout)["engines"]}
    assert stopped == {"busy": False, "tiny": True}
    assert (idle.poll(), busy.poll()) == (0, None)
    assert run("stop", "--all", "--force")[0] == "busy: unloaded\n"
    assert busy.poll() == 0


@pytest.mark.parametrize(
    ("seconds", "words"), [(-1, "in 0 seconds"), (59.9, "in 59 seconds"), (60, "in 1 minute"), (7300, "in 2 hours")]
)
def test_the_time_that_is_left_is_rounded_down(seconds: float, words: str) -> None:
    assert format_until(1000 + seconds, 1000) == words
