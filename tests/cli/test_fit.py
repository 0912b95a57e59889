"""Tests of `llmrun fit` as users type it, with files and a local Hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llmrun.backends.cpu.speeds.forecast import Forecast
from llmrun.backends.fitting import Fit
from llmrun.backends.sizing import Footprint, KVBytes
from llmrun.cli.commands.fit import _cells, _Named
from tests.support.cli.commands import ROOT, llmrun
from tests.support.gguf.gguf_files import tiny_llama
from tests.support.hub.fake_hub import FakeHub, Fault, fake_hub
from tests.support.hub.hub_client import settled
from tests.support.models.tiny_encoders import TINY_ENCODERS, tiny_encoder

pytestmark = pytest.mark.push

CATALOGUE = """
[models."toy:1b"]
description = "A toy"
license = "MIT"
repository = "o/n"
default = "Q8_0"
quants.Q8_0 = { file = "m-Q8_0.gguf" }
quants.Q4_0 = { file = "m-Q4_0.gguf" }
seen = "here"
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub() as running:
        running.add(
            "o/n",
            {
                f"m-{kind}.gguf": tiny_llama(tmp_path / kind, weight_type=kind, layers=2).read_bytes()
                for kind in ("Q8_0", "Q4_0")
            },
        )
        yield running


@pytest.fixture
def environment(tmp_path: Path, hub: FakeHub) -> dict[str, str]:
    (tmp_path / "config.toml").touch()
    (tmp_path / "models.toml").write_text(CATALOGUE)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return kept | {
        "LLMRUN_CONFIG": str(tmp_path / "config.toml"),
        "LLMRUN_DATA_DIR": str(tmp_path / "data"),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": hub.url,
        "NO_PROXY": "*",
        "PYTHONPATH": str(ROOT),
    }


def asked(*arguments: str, env: dict[str, str]) -> dict[str, Any]:
    done = llmrun("fit", "--json", *arguments, env=env)
    assert done.returncode in (0, 7), done.stderr
    assert done.stderr == b""
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def without_mark(stdout: bytes) -> list[str]:
    """Return the lines without what a busy machine and the runs of other tests add."""
    text = stdout.decode().replace(", speed corrected by your runs", "")
    return [line for line in text.splitlines() if not line.lstrip().startswith("? ")]


@pytest.mark.night
def test_a_name_is_told_for_all_its_quantizations_the_best_one_marked(environment: dict[str, str]) -> None:
    done = llmrun("fit", "toy:1b", env=environment)
    assert done.returncode == 0, done.stderr
    lines = without_mark(done.stdout)
    assert lines[0].startswith("here  ")
    assert lines[1].startswith("for   512 tokens of context (-c), a prompt of 512 (-p), a KV cache of q8_0")
    assert lines[2].split() == ["MODEL", "QUANT", "FILE", "MEMORY", "WEIGHTS", "KV", "SCRATCH", "TTFT", "TOK/S"]
    assert [line.split()[:2] for line in lines[3:]] == [["toy:1b-q4_0", "Q4_0"], ["*", "toy:1b"]]
    assert lines[3].endswith("fits")
    assert lines[4].endswith("fits: the best choice")


def test_long_waits_for_the_first_token_are_in_minutes() -> None:
    one = Fit("a", "Q8_0", 1, 1, 8.0, "cpu", 1, 1, Footprint(1, KVBytes(0)), None, forecast=Forecast(9.0, 100.0, 724.0))
    assert _cells(_Named("m", "Q8_0", one), is_best=False)["TTFT"] == "12 min 04 s"


def test_encoders_have_the_speed_of_reading(tmp_path: Path, environment: dict[str, str]) -> None:
    path = tiny_encoder(tmp_path, TINY_ENCODERS["bert"])
    done = llmrun("fit", str(path), env=environment)
    assert done.returncode == 0, done.stderr
    _, assumed, heads, row = without_mark(done.stdout)
    assert assumed == "for   512 tokens of context (-c), a text of 512 (-p)"
    assert heads.split() == ["MODEL", "QUANT", "FILE", "MEMORY", "WEIGHTS", "TEXT", "SCRATCH", "PER", "TEXT", "TOK/S"]
    assert row.endswith("fits")
    (model,) = asked(str(path), env=environment)["models"]
    (found,) = model["quantizations"]
    assert found["decode_per_second"] is None
    assert found["prefill_per_second"] > 0


def test_json_has_the_sum_and_the_forecast(environment: dict[str, str], hub: FakeHub) -> None:
    answer = asked("hf:o/n", "-c", "300", "-p", "100", env=environment)
    (model,) = answer["models"]
    assert [row["name"] for row in model["quantizations"]] == ["hf:o/n:Q4_0", "hf:o/n:Q8_0"]
    for row in model["quantizations"]:
        parts = [row[f"memory_of_{part}"] for part in ("weights", "kv_cache", "scratch")]
        assert row["memory_needed"] == sum(parts) < row["peak_memory"]
        assert (row["context_size"], row["kv_type"]) == (300, "q8_0")
        assert row["fits"] is True
        assert min(row["decode_per_second"], row["prefill_per_second"], row["ttft_s"]) > 0
    assert [row["best"] for row in model["quantizations"]] == [False, True]
    assert answer["machine"]["memory_free"] > 0
    assert not any(asked.path.startswith("/o/n") and not asked.range for asked in hub.asked if asked.method == "GET")


def test_the_heading_names_all_default_cache_types(environment: dict[str, str], tmp_path: Path, hub: FakeHub) -> None:
    files = {f"m-{kind}.gguf": tiny_llama(tmp_path / kind, weight_type=kind).read_bytes() for kind in ("F16", "Q4_0")}
    hub.add("o/mixed", files)
    assert b", a KV cache of q8_0 or f16\n" in llmrun("fit", "hf:o/mixed", env=environment).stdout
    assert b", a KV cache of q4_0\n" in llmrun("fit", "hf:o/mixed", "--kv-type", "q4_0", env=environment).stdout


@pytest.mark.night
def test_a_file_and_a_name_that_is_here_need_no_network(
    environment: dict[str, str], tmp_path: Path, hub: FakeHub
) -> None:
    path = tiny_llama(tmp_path / "here.gguf")
    (model,) = asked(str(path), env=environment | {"HF_ENDPOINT": "http://127.0.0.1:1"})["models"]
    assert model["quantizations"][0]["name"] == "here.gguf"
    pulled = llmrun("pull", "hf:o/n:Q4_0", env=environment)
    assert pulled.returncode == 0, pulled.stderr
    (model,) = asked("hf:o/n:Q4_0", "--offline", env=environment)["models"]
    assert [row["quantization"] for row in model["quantizations"]] == ["Q4_0"]
    open_name = llmrun("fit", "hf:o/n", "--offline", env=environment)
    assert open_name.stderr == b"note: hf:o/n: offline: showing local models only\n"
    assert open_name.stdout.count(b"hf:o/n") == 1


@pytest.mark.night
@pytest.mark.cover(1)
@pytest.mark.parametrize("away", [{"LLMRUN_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}])
@pytest.mark.parametrize(
    ("name", "rows"), [("hf:o/n", ["hf:o/n:Q4_0", "hf:o/n:Q8_0"]), ("toy:1b", ["toy:1b-q4_0", "toy:1b"])]
)
def test_without_the_hub_a_name_is_told_for_all_its_quantizations_that_are_here(
    environment: dict[str, str], away: dict[str, str], name: str, rows: list[str]
) -> None:
    pulled = llmrun("pull", "hf:o/n:Q4_0", "hf:o/n:Q8_0", env=environment)
    assert pulled.returncode == 0, pulled.stderr
    done = llmrun("fit", "--json", name, env=environment | away)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(b"\n") <= 1
    if done.stderr:
        assert done.stderr.endswith(b"showing local models only\n")
    (model,) = json.loads(done.stdout)["models"]
    assert [row["name"] for row in model["quantizations"]] == rows


@pytest.mark.night
def test_only_what_is_not_here_is_asked_for(environment: dict[str, str], hub: FakeHub) -> None:
    pulled = llmrun("pull", "toy:1b", env=environment)
    assert pulled.returncode == 0, pulled.stderr
    before = settled(hub)
    (model,) = asked("toy:1b-q8_0", env=environment)["models"]
    assert [row["name"] for row in model["quantizations"]] == ["toy:1b"]
    assert settled(hub) == before
    (model,) = asked("toy:1b", env=environment)["models"]
    assert [row["name"] for row in model["quantizations"]] == ["toy:1b-q4_0", "toy:1b"]
    assert not [one.path for one in settled(hub)[len(before) :] if "m-Q8_0" in one.path]
    assert llmrun("pull", "toy:1b-q4_0", env=environment).returncode == 0
    before = settled(hub)
    (model,) = asked("toy:1b", env=environment)["models"]
    assert len(model["quantizations"]) == 2
    assert settled(hub) == before


AWAY = [{"LLMRUN_OFFLINE": "1"}, {"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:1"}]


@pytest.mark.cover(1)
@pytest.mark.parametrize("away", AWAY)
@pytest.mark.parametrize(("name", "rows"), [("toy:1b", ["toy:1b-q4_0", "toy:1b"]), ("toy:1b-q4_0", ["toy:1b-q4_0"])])
def test_without_the_hub_estimates_come_from_the_catalogue(
    environment: dict[str, str], away: dict[str, str], name: str, rows: list[str]
) -> None:
    done = llmrun("fit", "--json", name, env=environment | away)
    assert done.returncode == 0
    [note] = done.stderr.decode().splitlines()
    assert note.startswith(f"note: {name}: ")
    assert note.endswith("estimated from the catalogue (~)")
    (model,) = json.loads(done.stdout)["models"]
    assert [row["name"] for row in model["quantizations"]] == rows
    for row in model["quantizations"]:
        assert (row["estimated"], row["decode_from"], row["memory_of_kv_cache"]) == (True, "catalogue", None)
        assert row["memory_needed"] > row["file_bytes"] > 0
        assert row["decode_per_second"] > 0


def test_estimates_are_marked_beside_local_models(environment: dict[str, str]) -> None:
    pulled = llmrun("pull", "hf:o/n:Q8_0", env=environment)
    assert pulled.returncode == 0, pulled.stderr
    done = llmrun("fit", "toy:1b", "--offline", env=environment)
    assert done.returncode == 0
    assert done.stderr == b"note: toy:1b: offline: estimated from the catalogue (~), except for local models\n"
    known, guess = (line.split() for line in done.stdout.decode().splitlines()[-2:])
    assert (known[0], guess[0]) == ("*", "toy:1b-q4_0") or (known[0], guess[0]) == ("toy:1b", "toy:1b-q4_0")
    assert "~" not in " ".join(known)
    assert sum(cell.startswith("~") for cell in guess) == 3


def test_an_estimate_that_does_not_fit_exits_with_7(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(CATALOGUE.replace("toy:1b", "toy:900000b"))
    done = llmrun("fit", "toy:900000b", "--offline", env=environment)
    assert done.returncode == 7
    assert done.stdout.count(b"too big by") == 2


@pytest.mark.parametrize("arguments", [("fit", "hf:o/n"), ("fit", "toy:new"), ("show", "hf:o/m:Q8_0")])
def test_without_the_hub_unknown_models_exit_with_5(
    environment: dict[str, str], tmp_path: Path, arguments: tuple[str, str]
) -> None:
    (tmp_path / "models.toml").write_text(CATALOGUE.replace("toy:1b", "toy:new"))
    done = llmrun(*arguments, env=environment | {"HF_ENDPOINT": "http://127.0.0.1:1"})
    error, hint = done.stderr.decode().splitlines()
    assert done.returncode == 5
    assert error.startswith(f"error: {arguments[1]}: ")
    assert error.endswith("unreachable (Connection refused)")
    assert hint.startswith("hint: ")


@pytest.mark.cover(1)
@pytest.mark.parametrize("away", AWAY)
def test_without_the_hub_show_prints_the_catalogues_entry(environment: dict[str, str], away: dict[str, str]) -> None:
    done = llmrun("show", "toy:1b", env=environment | away)
    assert done.returncode == 0
    [note] = done.stderr.decode().splitlines()
    assert note.startswith("note: toy:1b: ")
    assert note.endswith("; showing the catalogue's entry")
    shown = [line.split() for line in done.stdout.decode().splitlines()]
    assert ["catalogue", "A", "toy", "(MIT)"] in shown
    assert ["Q8_0", "~1.06", "GB"] in shown
    body = json.loads(llmrun("show", "toy:1b", "--json", env=environment | away).stdout)
    assert body["quantizations"]["Q4_0"] == {"bytes": 606250000, "exact": False}
    assert body["catalogue"]["description"] == "A toy"
    assert llmrun("show", "toy:1b", "--template", env=environment | away).returncode == 5


# --- without a name ---------------------------------------------------------------------------------------------------


def test_without_a_name_models_are_recommended_without_a_request(environment: dict[str, str], hub: FakeHub) -> None:
    done = llmrun("fit", env=environment)
    assert done.returncode == 0, done.stderr
    here, heads, *rows = without_mark(done.stdout)
    assert here.startswith("here  ")
    assert heads.split()[:4] == ["COMMAND", "DOWNLOAD", "MEMORY", "TOK/S"]
    assert 1 <= len(rows) <= 3
    for row in rows:
        assert re.search(r"^(fast|balanced|best).*  llmrun chat [a-z0-9.:-]+  .* ~?[\d.]+ GB  +~\d+\??$", row), row
    assert done.stderr == b"~ marks estimates from the catalogue  llmrun fit NAME  llmrun search\n"
    assert settled(hub) == []


def test_recommendations_as_json_have_commands(environment: dict[str, str]) -> None:
    answer = asked(env=environment | {"HF_HUB_OFFLINE": "1"})
    assert answer["machine"]["memory_free"] > 0
    purposes = [purpose for model in answer["recommended"] for purpose in model["for"]]
    assert purposes in (["fast", "balanced", "best"], ["fast", "best"])
    for model in answer["recommended"]:
        assert model["command"] == f"llmrun chat {model['name']}"
        assert model["download_bytes"] == model["file_bytes"] > 0
        assert model["memory_needed"] > model["file_bytes"]
        assert (model["here"], model["decode_from"]) == (False, "catalogue")


def test_a_machine_without_memory_gets_no_recommendation(environment: dict[str, str], tmp_path: Path) -> None:
    """Runs in a process that reports little memory."""
    (tmp_path / "site").mkdir()
    small = "from llmrun.base.machine import memory; memory.free_memory = lambda **_: 20_000\n"
    (tmp_path / "site" / "sitecustomize.py").write_text(small)
    environment["PYTHONPATH"] = f"{tmp_path / 'site'}{os.pathsep}{ROOT}"
    done = llmrun("fit", env=environment)
    assert (done.returncode, done.stdout) == (7, b"")
    assert done.stderr.startswith(b"error: no recommended model fits the free memory\nhint: ")


def test_flags_for_models_need_a_name(environment: dict[str, str]) -> None:
    for flag, value in (("--ctx-size", "512"), ("--prompt", "9"), ("--kv-type", "q8_0")):
        done = llmrun("fit", flag, value, env=environment)
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: {flag}: needs the name of a model".encode())


def test_speeds_come_from_real_runs(environment: dict[str, str], tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "real.gguf", weight_type="Q8_0", layers=2)
    environment["LLMRUN_CACHE_DIR"] = str(tmp_path / "cache")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "kernels").symlink_to(Path(os.environ["LLMRUN_CACHE_DIR"]) / "kernels")
    (before,) = asked(str(path), env=environment)["models"][0]["quantizations"]
    assert before["decode_from"] == before["prefill_from"] == "prediction"
    ran = llmrun(
        *("generate", "-m", str(path), "--raw", "-n", "60", "--json", "--temp", "0", "--logit-bias", "2=-100", "Hello"),
        *("--speculate", "off"),  # steps with accepted drafts count once
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    timings = json.loads(ran.stdout)["timings"]
    body = json.loads((tmp_path / "cache" / "speeds" / "runs.json").read_text())
    [run] = body["runs"]
    assert run["decode"] == pytest.approx(timings["decode_per_second"])
    run["decode"] *= 1000
    (tmp_path / "cache" / "speeds" / "runs.json").write_text(json.dumps(body))
    (after,) = asked(str(path), env=environment)["models"][0]["quantizations"]
    assert (after["decode_from"], after["decode_per_second"]) == ("runs", run["decode"])
    assert b"fits, speed from your runs" in llmrun("fit", str(path), env=environment).stdout


def test_what_does_not_fit_says_by_how_much_and_exits_with_7(environment: dict[str, str]) -> None:
    done = llmrun("fit", "toy:1b-q4_0", "-c", "99999999999", env=environment)
    assert done.returncode == 7
    assert re.search(r"too big by [\d.]+ [TG]B\n$", done.stdout.decode())
    assert b"the model was trained for 512 tokens of context" in done.stdout
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nonsense-model"], 4, "neither a model in the catalogue nor a file"),
        (["hf:o/gone"], 4, "no such repository"),
        (["./gone.gguf"], 4, "no such file"),
        (["toy:1b-q8_0", "--kv-type", "q3"], 2, "kv-type"),
        (["hf:o/n", "--offline"], 5, "offline"),
    ],
)
def test_what_cannot_be_told_is_one_line(
    environment: dict[str, str], arguments: list[str], code: int, words: str
) -> None:
    done = llmrun("fit", *arguments, env=environment)
    error, *hints = done.stderr.decode().splitlines()
    assert (done.returncode, done.stdout) == (code, b"")
    assert error.startswith("error: ")
    assert words in error
    assert len(hints) <= 1


@pytest.mark.night
def test_a_quantization_whose_header_is_broken_is_a_note(environment: dict[str, str], hub: FakeHub) -> None:
    files = {
        path: file.content for path, file in hub.repositories["o/n"].commits[hub.repositories["o/n"].commit].items()
    }
    hub.add("o/n", files | {"m-Q5_0.gguf": b"GGUF" + bytes(500)})
    done = llmrun("fit", "hf:o/n", env=environment)
    assert done.returncode == 0
    assert done.stderr.decode().startswith("note: hf:o/n:Q5_0: ")
    assert len(without_mark(done.stdout)) == 5


def test_a_storage_that_is_away_is_a_network_error(environment: dict[str, str], hub: FakeHub) -> None:
    hub.faults.append(Fault(status=404, times=99))
    done = llmrun("fit", "hf:o/n:Q4_0", env=environment)
    assert done.returncode in (4, 5)
    assert done.stderr.startswith(b"error: ")


@pytest.mark.night
def test_the_largest_model_is_refused_by_pull_and_fetched_anyway(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs in a process that reports little memory."""
    small = "from llmrun.base.machine import memory; memory.whole_memory = lambda: 20_000\n"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(small)
    environment["PYTHONPATH"] = f"{tmp_path / 'site'}{os.pathsep}{ROOT}"
    refused = llmrun("pull", "toy:1b", env=environment)
    assert refused.returncode == 7
    assert b"error: toy:1b: needs " in refused.stderr
    assert refused.stdout == b""
    assert llmrun("pull", "--anyway", "toy:1b", env=environment).returncode == 0
