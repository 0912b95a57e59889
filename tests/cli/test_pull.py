"""Tests of `llmrun pull` as users type it, with the real client and a local Hub."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pexpect
import pytest

from tests.support.cli.commands import LLMRUN, ROOT, TIMEOUT_S, llmrun, module_on_terminal
from tests.support.cli.terminals import Terminal
from tests.support.hub.fake_hub import MODEL, SHA256, FakeHub, Fault, fake_hub
from tests.support.hub.hub_client import settled
from tests.support.hub.model_stores import Stores

pytestmark = pytest.mark.push

SMALL = b"GGUF of four bits"
SHARDS = {f"s-Q8_0-0000{number}-of-00003.gguf": b"GGUF %d" % number for number in (1, 2, 3)}
CATALOGUE = f"""
[models."tiny:1b"]
description = "a model made for a test"
license = "MIT"
parameters = 1
repository = "o/n"
default = "Q8_0"
quants.Q8_0 = {{ file = "m-Q8_0.gguf", size = {len(MODEL)}, sha256 = "{SHA256}" }}
"""


@dataclass
class Machine:
    """A user's machine inside one folder; commands run in `project`."""

    root: Path
    hub: FakeHub

    @property
    def project(self) -> Path:
        return self.root / "project"

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LLMRUN_", "PIP_"))}
        return kept | {
            "HOME": str(self.root),
            "LLMRUN_CONFIG": str(self.root / "config.toml"),
            "LLMRUN_DATA_DIR": str(self.root / "data"),
            "HF_HOME": str(self.root / "hf"),
            "HF_ENDPOINT": self.hub.url,
            "NO_PROXY": "*",
            "PYTHONPATH": str(ROOT),
        }

    def pull(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        done = llmrun("pull", *arguments, cwd=self.project, env=self.environment | environment)
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    def snapshot(self, repository: str, file: str) -> Path:
        folder = self.root / "hf" / "hub" / ("models--" + repository.replace("/", "--")) / "snapshots"
        return folder / self.hub.repositories[repository].commit / file

    def files(self) -> set[Path]:
        return set(self.root.rglob("*"))


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    (tmp_path / "project").mkdir()
    (tmp_path / "config.toml").touch()
    (tmp_path / "models.toml").write_text(CATALOGUE)
    with fake_hub() as hub:
        hub.add("o/n", {"m-Q4_K_M.gguf": SMALL, "m-Q8_0.gguf": MODEL})
        hub.add("o/shards", SHARDS)
        yield Machine(tmp_path, hub)


def test_an_address_that_cannot_be_reached_is_trouble_with_the_network(machine: Machine) -> None:
    done = machine.pull("http://127.0.0.1:1/m.gguf")
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        "error: http://127.0.0.1:1/m.gguf: unreachable (Connection refused)\n"
        "hint: check the connection and run the command again; the download will resume\n"
    )


@pytest.mark.parametrize(
    ("endpoint", "trouble"),
    [("nonsense", "network settings: Request URL is missing an 'http"), ("http://127.0.0.1:1", "unreachable (")],
)
def test_a_wrong_hub_is_laid_to_the_variable_that_names_it(machine: Machine, endpoint: str, trouble: str) -> None:
    done = machine.pull("hf:o/n:Q8_0", HF_ENDPOINT=endpoint)
    assert done.returncode == 5
    assert done.stderr.startswith(f"error: hf:o/n:Q8_0: {trouble}")
    assert done.stderr.endswith("\nhint: check HF_ENDPOINT and the proxy settings\n")


@pytest.mark.parametrize("content", [b"PK" + MODEL, b"PK", b"<html>" * 2_000_000])
def test_a_file_of_the_hub_that_is_no_gguf_is_refused_and_nothing_of_it_is_kept(
    machine: Machine, content: bytes
) -> None:
    machine.hub.add("o/wrong", {"m-Q8_0.gguf": content})
    machine.hub.bytes_per_second = 20e6
    done = machine.pull("hf:o/wrong")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines()[-2:] == [
        "error: hf:o/wrong: m-Q8_0.gguf: not a GGUF file; nothing was kept",
        "hint: choose another file or repository",
    ]
    assert not [
        path for path in machine.files() if path.is_file() and "wrong" in str(path) and ".locks" not in path.parts
    ]
    if len(content) > 10_000_000:
        assert sum(asked.sent for asked in machine.hub.asked) < len(content)  # the download was not completed


def test_a_model_is_fetched_and_its_path_is_the_answer(machine: Machine) -> None:
    done = machine.pull("tiny:1b")
    path = machine.snapshot("o/n", "m-Q8_0.gguf")
    assert (done.returncode, done.stdout) == (0, f"{path}\n")
    assert path.read_bytes() == MODEL
    plan, result = done.stderr.splitlines()
    assert plan == "tiny:1b  2.50 MB  hf:o/n/m-Q8_0.gguf  MIT"
    assert re.fullmatch(r"tiny:1b  2\.50 MB in [\d.]+ m?s  [\d.]+ [kMG]B/s", result)
    asked = len(settled(machine.hub))
    again = machine.pull("tiny:1b", "-q")
    assert (again.returncode, again.stdout, again.stderr) == (0, f"{path}\n", "")
    assert machine.pull("tiny:1b", "--offline").stderr == "tiny:1b  already here\n"
    assert len(settled(machine.hub)) == asked


def test_pull_names_the_program_that_has_the_model(machine: Machine) -> None:
    blob = Stores(machine.root).ollama(MODEL, "m", "1b")
    done = machine.pull("tiny:1b")
    assert done.stdout == f"{blob}\n"
    assert done.stderr == (
        f"note: tiny:1b: used from Ollama's folder, not downloaded: {blob}\ntiny:1b  already here, in Ollama's folder\n"
    )
    assert machine.pull("tiny:1b").stderr == "tiny:1b  already here, in Ollama's folder\n"


def test_a_dry_run_says_everything_and_writes_nothing(machine: Machine) -> None:
    before = machine.files()
    done = machine.pull("--dry-run", "tiny:1b", "hf:o/shards", "hf:o/n:q4_k_m")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "tiny:1b  2.50 MB  hf:o/n/m-Q8_0.gguf  MIT",
        "hf:o/shards  18 B  3 files  hf:o/shards/s-Q8_0-00001-of-00003.gguf",
        "hf:o/n:Q4_K_M  17 B  hf:o/n/m-Q4_K_M.gguf  MIT",
    ]
    assert done.stderr == "total 2.50 MB in 3 models\n"
    assert machine.files() == before
    settled(machine.hub)
    assert machine.hub.downloads() == 0


@pytest.mark.night
def test_json_is_an_object_a_model(machine: Machine) -> None:
    planned = json.loads(machine.pull("--dry-run", "--json", "hf:o/shards").stdout)
    made = machine.hub.repositories["o/shards"]
    files = [{"file": name, "size": 6, "sha256": made.file(name).sha256} for name in SHARDS]
    described: dict[str, Any] = {"name": "hf:o/shards", "source": f"hf:o/shards/{next(iter(SHARDS))}"}
    described |= {"commit": made.commit, "size": 18, "files": files}
    assert planned == described | {"status": "planned", "path": None}
    done = machine.pull("--json", "hf:o/shards", "hf:o/none", "tiny:1b")
    bodies: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    failed, fetched, _ = bodies
    path = machine.snapshot("o/shards", "s-Q8_0-00001-of-00003.gguf")
    assert fetched.pop("seconds") > 0
    assert fetched == described | {"status": "fetched", "path": str(path)}
    assert (failed["name"], failed["status"], failed["error"]["exit_code"]) == ("hf:o/none", "failed", 4)
    assert "no such repository" in failed["error"]["message"]
    assert done.returncode == 4
    present = json.loads(machine.pull("--json", "hf:o/shards").stdout)
    assert present == {"name": "hf:o/shards", "status": "present", "path": str(path)}


def test_one_that_fails_does_not_keep_the_others(machine: Machine) -> None:
    machine.hub.add("o/gated", {"g-Q4_0.gguf": SMALL}, gated=True)
    done = machine.pull("hf:o/gated", "hf:o/n:Q5_K", "hf:o/n:Q4_K_M", "tiny:9b")
    assert done.returncode == 5
    assert done.stdout == f"{machine.snapshot('o/n', 'm-Q4_K_M.gguf')}\n"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors[:2] == [
        "error: hf:o/gated: the repository is gated (HTTP 403)",
        "error: hf:o/n:Q5_K: the repository has no Q5_K",
    ]
    assert "tiny:9b" in errors[2]
    assert f"{machine.hub.url}/o/gated" in done.stderr
    assert "hint: available: Q4_K_M, Q8_0" in done.stderr
    assert done.stderr.endswith("note: 3 of 4 models failed; the others are on this machine\n")


def test_a_model_that_is_named_twice_is_fetched_once(machine: Machine) -> None:
    done = machine.pull("tiny", "tiny:1b", "TINY:1b")
    assert done.stdout.count("\n") == 1
    settled(machine.hub)
    assert machine.hub.downloads() == 1


def test_a_token_reaches_a_private_repository(machine: Machine) -> None:
    machine.hub.add("o/private", {"p-Q4_0.gguf": SMALL}, token="hf_right")
    assert machine.pull("hf:o/private").returncode == 4
    done = machine.pull("hf:o/private", HF_TOKEN="hf_right")
    assert done.returncode == 0
    assert "hf_right" not in done.stdout + done.stderr
    assert {asked.authorization for asked in settled(machine.hub) if asked.at == "storage"} == {""}


@pytest.mark.night
def test_a_revision_is_fetched_beside_main(machine: Machine) -> None:
    first = machine.hub.repositories["o/n"].commit
    machine.hub.add("o/n", {"m-Q8_0.gguf": SMALL})
    done = machine.pull("hf:o/n:Q8_0", "--revision", first)
    assert done.returncode == 0
    assert Path(done.stdout.strip()).read_bytes() == MODEL
    assert Path(machine.pull("hf:o/n:Q8_0").stdout.strip()).read_bytes() == SMALL
    note = machine.pull("tiny:1b", "--revision", "main", "-v")
    assert "--revision ignores the catalogue's sha256" in note.stderr
    assert f"m-Q8_0.gguf  {len(SMALL)} bytes  sha256 " in note.stderr


def test_a_project_is_locked_and_fetched_exactly(machine: Machine, tmp_path: Path) -> None:
    assert machine.pull("--lock", "tiny:1b").returncode == 0
    assert machine.pull("--lock", "hf:o/n:Q4_K_M").returncode == 0
    lock = machine.project / "llmrun.lock"
    text = lock.read_text()
    table = tomllib.loads(text)["models"]
    assert list(table) == ["hf:o/n:Q4_K_M", "tiny:1b"]
    assert table["tiny:1b"]["files"] == [{"file": "m-Q8_0.gguf", "size": len(MODEL), "sha256": SHA256}]
    first = machine.hub.repositories["o/n"].commit
    assert {entry["revision"] for entry in table.values()} == {first}
    machine.hub.add("o/n", {"m-Q4_K_M.gguf": b"GGUF newer", "m-Q8_0.gguf": MODEL})
    elsewhere = Machine(tmp_path / "other", machine.hub)
    elsewhere.project.mkdir(parents=True)
    for name in ("config.toml", "models.toml"):
        (elsewhere.root / name).write_text((machine.root / name).read_text())
    (elsewhere.project / "llmrun.lock").write_text(text)
    done = elsewhere.pull()
    assert done.returncode == 0
    small, big = map(Path, done.stdout.splitlines())
    assert small.read_bytes() == SMALL
    assert big.read_bytes() == MODEL
    asked = len(settled(machine.hub))
    assert elsewhere.pull("--locked", "--offline").stdout == done.stdout
    assert len(settled(machine.hub)) == asked
    assert (elsewhere.project / "llmrun.lock").read_text() == text


@pytest.mark.night
def test_drift_is_exit_code_6(machine: Machine) -> None:
    assert machine.pull("--lock", "hf:o/n").returncode == 0
    lock = machine.project / "llmrun.lock"
    missing = machine.pull("--locked", "tiny:1b")
    assert (missing.returncode, missing.stdout) == (6, "")
    assert missing.stderr == "error: tiny:1b: not in the lock file\nhint: llmrun pull --lock tiny:1b\n"
    machine.hub.add("o/n", {"m-Q4_K_M.gguf": b"GGUF newer"})
    machine.pull("hf:o/n", "--revision", "main")
    drift = machine.pull("--locked")
    assert drift.returncode == 6
    assert "the local file differs from the lock file" in drift.stderr
    assert machine.pull("--lock").returncode == 0
    assert machine.pull("--locked").returncode == 0
    lock.write_text(lock.read_text().replace("size = 10", "size = 11"))
    assert machine.pull("--locked").returncode == 6


def test_a_model_that_is_here_is_locked_without_downloading_it(machine: Machine) -> None:
    assert machine.pull("--lock", "tiny:1b").returncode == 0
    lock = machine.project / "llmrun.lock"
    written = lock.read_text()
    lock.unlink()
    done = machine.pull("--lock", "tiny:1b-q8_0")
    assert (done.returncode, done.stderr) == (0, "tiny:1b  already here\nllmrun.lock: tiny:1b\n")
    assert lock.read_text() == written


@pytest.mark.night
@pytest.mark.parametrize("away", [{"HF_ENDPOINT": "http://127.0.0.1:1"}, {"HF_HUB_OFFLINE": "1"}])
def test_nothing_is_locked_while_its_source_cannot_be_asked(machine: Machine, away: dict[str, str]) -> None:
    assert machine.pull("hf:o/n:Q4_K_M").returncode == 0
    done = machine.pull("--lock", "hf:o/n:Q4_K_M", **away)
    assert done.returncode == 5
    assert done.stderr.count("\n") == 2
    assert not (machine.project / "llmrun.lock").exists()


def test_a_failure_leaves_the_lock_of_the_others(machine: Machine) -> None:
    done = machine.pull("--lock", "hf:o/none", "hf:o/n")
    assert done.returncode == 4
    assert list(tomllib.loads((machine.project / "llmrun.lock").read_text())["models"]) == ["hf:o/n"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no model given, and there is no llmrun.lock here"),
        (("--revision", "main"), "--revision: no model given"),
        (("--locked", "--lock", "tiny:1b"), "--locked: cannot be combined"),
        (("--locked", "--revision", "x", "tiny:1b"), "--locked: cannot be combined"),
        (("--locked",), "llmrun.lock: no such file"),
        (("hf:o/n/../../x.gguf",), "not a valid repository, file or revision"),
        (("",), "the name is empty"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(machine: Machine, arguments: tuple[str, ...], said: str) -> None:
    before = machine.files()
    done = machine.pull(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert machine.files() == before


def test_a_broken_lock_is_one_line(machine: Machine) -> None:
    (machine.project / "llmrun.lock").write_text('version = 1\n[models."../x"]\nrepository = "../../etc"\n')
    done = machine.pull("--locked")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_an_empty_lock_locks_nothing(machine: Machine) -> None:
    (machine.project / "llmrun.lock").write_text("version = 1\n")
    assert machine.pull("--locked", "tiny:1b").returncode == 6
    done = machine.pull()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_offline_is_obeyed(machine: Machine) -> None:
    for arguments, environment in (((), {"HF_HUB_OFFLINE": "1"}), (("--offline",), {}), ((), {"LLMRUN_OFFLINE": "1"})):
        done = machine.pull("tiny:1b", *arguments, **environment)
        assert (done.returncode, done.stdout) == (5, "")
        assert "offline mode is on" in done.stderr
    assert settled(machine.hub) == []


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("HTTP_PROXY", "gopher://127.0.0.1:1", "network settings: Unknown scheme for proxy URL"),
        ("HTTP_PROXY", "http://127.0.0.1:1", "unreachable (Connection refused)"),
        ("SSL_CERT_FILE", "/no/such.pem", "network settings: No such file or directory"),
        ("HF_ENDPOINT", "nonsense", "Request URL is missing"),
        ("HF_ENDPOINT", "http://[::1", "network settings: Invalid IPv6 URL"),
        ("HF_ENDPOINT", "http://hub.invalid", "unreachable ("),
    ],
)
def test_a_network_setting_of_no_use_is_one_line(machine: Machine, variable: str, value: str, said: str) -> None:
    done = machine.pull("hf:o/n", "tiny:1b", **({"NO_PROXY": "", "HF_ENDPOINT": machine.hub.url} | {variable: value}))
    assert (done.returncode, done.stdout) == (5, "")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2
    assert all(said in line for line in errors)
    assert "Traceback" not in done.stderr


def test_a_damaged_download_is_not_kept(machine: Machine) -> None:
    machine.hub.faults.append(Fault(times=99, alter=lambda body: body[:-1] + bytes([body[-1] ^ 1])))
    done = machine.pull("tiny:1b")
    assert (done.returncode, done.stdout) == (6, "")
    assert "sha256" in done.stderr
    assert not machine.snapshot("o/n", "m-Q8_0.gguf").exists()


def test_a_log_has_a_line_now_and_then_and_no_control_characters(machine: Machine) -> None:
    done = machine.pull("hf:o/shards", "tiny:1b")
    assert "\r" not in done.stderr
    assert "\x1b" not in done.stderr
    assert "█" not in done.stderr  # it took less than ten seconds


# --- on a terminal ----------------------------------------------------------------------------------------------------


def on_terminal(machine: Machine, *arguments: str, columns: int = 80, **environment: str) -> pexpect.spawn[str]:
    env = machine.environment | environment
    words = ("pull", *arguments)
    return module_on_terminal("llmrun", *words, columns=columns, env=env, cwd=machine.project, encoding="utf-8")


@pytest.mark.night
def test_a_bar_shows_speed_and_time_left_and_is_gone_at_the_end(machine: Machine) -> None:
    machine.hub.total_per_second = 1.5e6
    process = on_terminal(machine, "tiny:1b")
    process.expect(r"downloading tiny:1b  █+░+  \d+%  [\d.]+/2\.5 MB  [\d.]+ [kM]B/s  0:0\d left")
    process.expect(pexpect.EOF)
    written = process.before
    assert written is not None
    terminal = Terminal(columns=300)
    terminal.write(written.replace("\r\n", "\n"))
    *_, result, path = terminal.rows()
    assert re.search(r"tiny:1b  2\.50 MB in 1\.\d\d s  1\.\d+ MB/s", result)
    assert path.endswith("m-Q8_0.gguf")
    process.close()
    assert process.exitstatus == 0


@pytest.mark.night
@pytest.mark.parametrize("columns", [40, 120])
def test_no_line_of_progress_is_wider_than_the_terminal(machine: Machine, columns: int) -> None:
    machine.hub.total_per_second = 1.5e6
    machine.hub.add("owner-of-a-long-name/Model-of-a-Long-Name-GGUF", {"m-Q8_0.gguf": MODEL})
    name = "hf:owner-of-a-long-name/Model-of-a-Long-Name-GGUF:Q8_0"
    process = on_terminal(machine, name, columns=columns, NO_COLOR="1")
    written = process.read()
    process.close()
    assert process.exitstatus == 0
    assert "\x1b" not in written
    lines = [line for line in re.split(r"[\r\n]+", written) if "%" in line]
    assert any(line.rstrip().endswith("left") for line in lines)
    assert max(len(line) for line in lines) < columns
    assert all("GGUF:Q8_0 " in line or columns < 60 for line in lines)


def test_ctrl_c_says_that_the_next_pull_goes_on_and_it_does(machine: Machine) -> None:
    machine.hub.total_per_second = 1e6
    process = on_terminal(machine, "tiny:1b")
    process.expect(r"\d+%")
    process.sendintr()
    process.expect(r"note:.* stopped; run the command again to resume the download")
    process.expect(pexpect.EOF)
    process.close()
    assert process.exitstatus == 130
    machine.hub.total_per_second = None
    assert not machine.snapshot("o/n", "m-Q8_0.gguf").exists()
    done = machine.pull("tiny:1b")
    assert done.returncode == 0
    assert "already downloaded" in done.stderr
    *_, asked = [asked for asked in settled(machine.hub) if asked.at == "storage"]
    assert 0 < asked.sent < len(MODEL)
    assert machine.snapshot("o/n", "m-Q8_0.gguf").read_bytes() == MODEL


def _largest(folder: Path) -> int:
    """Return the size of a folder's largest file. Files may disappear meanwhile."""
    sizes = [0]
    for path in folder.glob("*"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return max(sizes)


@pytest.mark.night
def test_killed_in_the_middle_the_next_pull_goes_on(machine: Machine) -> None:
    if sys.platform == "win32":
        pytest.skip("needs POSIX signals")
    machine.hub.faults.append(Fault(stall_after=len(MODEL) // 2))
    process = subprocess.Popen(
        [*LLMRUN, "pull", "tiny:1b"],
        cwd=machine.project,
        env=machine.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    partial = machine.root / "hf" / "hub" / "models--o--n" / "blobs"
    until = time.monotonic() + TIMEOUT_S
    while _largest(partial) < len(MODEL) // 2 and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert machine.pull("tiny:1b").returncode == 0
    assert machine.snapshot("o/n", "m-Q8_0.gguf").read_bytes() == MODEL
