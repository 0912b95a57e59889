"""Tests of `llmrun launch` with programs that stand in for agents, and a scripted model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from llmrun.base.folders import private_folder
from llmrun.cli.launching.agents import AGENTS
from llmrun.cli.launching.server import Wanted, tidy
from llmrun.options.settings import Settings
from llmrun.serving.background.place import socket_name
from llmrun.serving.leases import ServerPlace
from tests.support.cli.commands import LLMRUN, ROOT, TIMEOUT_S, llmrun, on_terminal, run
from tests.support.cli.fake_agents import FakeAgents, is_running, told, wait_for
from tests.support.cli.tool_chats import tool_script_file
from tests.support.gguf.gguf_files import tiny_llama

if sys.platform == "win32":
    pytest.skip("the agents are scripts with a shebang", allow_module_level=True)


class Launches:
    """Runs `llmrun launch` in the home of a new user."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agents = FakeAgents(folder, "aider", "pi", "codex", "gptme")
        self.model = tool_script_file(folder, ("Hello", "Hi there."))
        self.home = folder / "home"
        self.home.mkdir()
        self.data = folder / "data"
        monkeypatch.setenv("HOME", str(self.home))
        monkeypatch.setenv("LLMRUN_DATA_DIR", str(self.data))
        monkeypatch.setenv("PATH", f"{self.agents.path}:/usr/bin:/bin")
        monkeypatch.setenv("LLMRUN_BACKEND", "scripted")
        monkeypatch.setenv("LLMRUN_MODEL", self.model)

    def run(self, *arguments: str, exits: int = 0, **values: Any) -> str:
        """Run to the end, check the exit code, and return what was written to stderr."""
        done = llmrun("launch", *arguments, env={**os.environ, **told(**values)})
        assert done.returncode == exits, done.stderr.decode()
        return done.stderr.decode()

    def start(self, *arguments: str, name: str = "agent", **values: Any) -> subprocess.Popen[bytes]:
        """Start a run whose agent waits for `agents.end`."""
        return subprocess.Popen(
            [*LLMRUN, "launch", *arguments],
            cwd=ROOT,
            env={**os.environ, **told(name=name, waits=True, **values)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def on_terminal(self, *arguments: str, **values: Any) -> pexpect.spawn[bytes]:
        return on_terminal("launch", *arguments, FAKE_AGENT=told(**values)["FAKE_AGENT"])

    def places(self) -> list[ServerPlace]:
        return [ServerPlace(path) for path in (self.data / "launch" / "servers").glob("*")]

    def alive(self) -> int:
        """Return the number of servers."""
        return sum(place.is_alive() for place in self.places())


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    made = Launches(tmp_path, monkeypatch)
    yield made
    assert not [*made.home.iterdir()]  # no file of the user changes
    for name in ("agent", "other"):
        made.agents.end(name)
    wait_for(lambda: not made.alive())


@pytest.mark.push
def test_an_agent_talks_to_a_server_of_its_own(launches: Launches) -> None:
    errors = launches.run("aider", "--", "--yes", "-m", "x")
    assert errors.startswith("aider with script  context 8,192 tokens  first prompt about 600 tokens")
    report = launches.agents.report()
    assert report["answer"] == "Hi there."
    assert report["arguments"][-3:] == ["--yes", "-m", "x"]
    assert report["environment"]["HOME"] == str(launches.home)
    assert launches.alive() == 0
    (place,) = launches.places()
    assert sorted(path.name for path in place.path.iterdir()) == ["alive.lock", "join.lock", "log", "runs"]
    assert "Hi there" not in place.log.read_text()
    assert report["environment"]["OPENAI_API_KEY"] not in place.log.read_text()
    assert place.log.stat().st_mode & 0o777 == 0o600


@pytest.mark.push
@pytest.mark.parametrize(("values", "exits"), [({"code": 7}, 7), ({"signal": signal.SIGKILL}, 137)])
def test_exit_codes_of_agents_are_passed_on(launches: Launches, values: dict[str, int], exits: int) -> None:
    launches.run("pi", exits=exits, **values)


@pytest.mark.push
def test_two_launches_share_a_server(launches: Launches) -> None:
    first = launches.start("gptme")
    url = launches.agents.report()["environment"]["OPENAI_BASE_URL"]
    second = launches.start("aider", name="other")
    assert launches.agents.report("other")["environment"]["OPENAI_API_BASE"] == url
    assert launches.alive() == 1
    launches.agents.end()
    first.communicate(timeout=TIMEOUT_S)
    assert launches.alive() == 1
    launches.agents.end("other")
    _, errors = second.communicate(timeout=TIMEOUT_S)
    assert (second.returncode, launches.alive()) == (0, 0)
    assert b"on the server of another launch" in errors


@pytest.mark.night
def test_other_options_need_another_server(launches: Launches) -> None:
    first = launches.start("aider", "-c", "8192")
    launches.agents.report()
    for number, flags in enumerate((["-c", "9000"], ["-t", "1"])):
        launches.run("aider", *flags, name=f"other{number}")
    urls = {launches.agents.report(name)["environment"]["OPENAI_API_BASE"] for name in ("agent", "other0", "other1")}
    assert len(urls) == 3
    launches.agents.end()
    assert first.wait(TIMEOUT_S) == 0


@pytest.mark.push
def test_nothing_stays_after_a_kill(launches: Launches) -> None:
    process = launches.start("pi")
    agent = launches.agents.report()["pid"]
    process.kill()
    process.wait(TIMEOUT_S)
    wait_for(lambda: not launches.alive())
    launches.agents.end()
    wait_for(lambda: not is_running(agent))
    files = [path for path in launches.data.rglob("*") if path.is_file()]
    assert {path.suffix or path.name for path in files} == {".lock", "log"}


def test_folders_of_old_servers_are_removed(launches: Launches) -> None:
    servers = private_folder(private_folder(private_folder(launches.data) / "launch") / "servers")
    ended, old, others, old_others = places = [
        ServerPlace(servers / f"{name}-8192") for name in (socket_name("a"), socket_name("b"), "0" * 16, "1" * 16)
    ]
    for place in places:
        place.create()
        place.key.touch()
        if place in (old, old_others):
            os.utime(place.path, (0, 0))
    tidy()
    assert [place.path.exists() for place in places] == [True, False, True, False]
    assert (ended.key.exists(), others.key.exists()) == (False, True)


@pytest.mark.push
def test_a_server_that_dies_is_reported(launches: Launches) -> None:
    process = launches.start("aider")
    launches.agents.report()
    (place,) = launches.places()
    subprocess.run(["pkill", "-KILL", "-f", "--", f"--leases {place.path}"], check=True)
    launches.agents.end()
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert f"the server ended before the agent; its messages are in {place.log}\n" in errors.decode()


@pytest.mark.push
def test_errors_of_the_server_are_shown(launches: Launches, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LLMRUN_BACKEND")
    model = tiny_llama(tmp_path / "a.gguf", context=32768)
    errors = launches.run("aider", "-m", str(model), "-c", "2000000000", exits=7)
    assert f"error: not enough memory for {model}: " in errors
    assert "\nhint: " in errors
    assert launches.alive() == 0


@pytest.mark.push
def test_sigterm_reaches_the_agent(launches: Launches) -> None:
    process = launches.start("pi")
    agent = launches.agents.report()["pid"]
    process.terminate()
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert not is_running(agent)


@pytest.mark.push
def test_ctrl_c_belongs_to_the_agent(launches: Launches) -> None:
    screen = launches.on_terminal("pi", waits=True, on_interrupt=5)
    screen.expect("agent runs")
    screen.sendintr()
    screen.expect(pexpect.EOF)
    screen.close()
    assert screen.exitstatus == 5
    assert b"Traceback" not in screen.before
    assert launches.alive() == 0


@pytest.mark.night
@pytest.mark.parametrize("stops", [True, False])
def test_stopped_agents_give_the_terminal_back(launches: Launches, stops: bool) -> None:
    """The agent stops itself, or Ctrl-Z stops it together with llmrun."""
    values = {"stops": True} if stops else {"waits": True}
    with pexpect.spawn(
        "bash", ["--norc", "-i"], env={**os.environ, "PS1": "prompt> ", "HISTFILE": "", **told(**values)}
    ) as shell:
        shell.expect_exact("prompt> ")
        shell.sendline(f"cd {ROOT}; {' '.join(LLMRUN)} launch pi; echo code $?")
        shell.expect("agent runs")
        if not stops:
            shell.sendcontrol("z")
        shell.expect("Stopped.*prompt> ")
        shell.sendline("fg; echo code $?")
        if stops:
            shell.expect("agent continues")
        else:
            launches.agents.end()
        shell.expect("code 0")


@pytest.mark.push
def test_ctrl_c_ends_a_start(launches: Launches, tmp_path: Path) -> None:
    screen = launches.on_terminal("pi", "--no-save-prefixes")
    screen.expect("starting the server")
    screen.sendintr()
    screen.expect(pexpect.EOF)
    screen.close()
    assert screen.exitstatus == 130
    wait_for(lambda: not launches.alive())


@pytest.mark.push
def test_saving_is_offered_only_once(launches: Launches) -> None:
    screen = launches.on_terminal("codex")
    screen.expect_exact("can read them. [Y/n] ")
    screen.sendline("n")
    screen.expect(pexpect.EOF)
    assert b"llmrun will not ask again; --save-prefixes overrides your answer once" in screen.before
    assert (launches.data / "launch" / "save-prefixes").read_text() == "no"
    screen = launches.on_terminal("codex")
    screen.expect(pexpect.EOF)
    assert b"[Y/n]" not in screen.before


@pytest.mark.push
def test_saved_prefixes_keep_their_key(launches: Launches) -> None:
    """Saved prefixes belong to an API key, so the key must be the same after everything has ended."""
    keys = []
    for flag in ("--save-prefixes", "--save-prefixes", "--no-save-prefixes"):
        launches.run("aider", flag)
        keys.append(launches.agents.report()["environment"]["OPENAI_API_KEY"])
    assert keys[0] == keys[1] != keys[2]
    file = launches.data / "launch" / "key"
    assert (file.read_text(), file.stat().st_mode & 0o777) == (keys[0], 0o600)


def test_print_shows_commands_and_does_nothing(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # the agent need not be installed
    shown, _ = run("launch", "pi", "--print", "--", "say 'hi'")
    assert f"llmrun serve {launches.model} --ctx-size 32768 --parallel 4 " in shown
    assert "# Files for the agent\nmkdir -p " in shown
    assert shown.splitlines()[-1].endswith(""" --provider llmrun --model script 'say '"'"'hi'"'"''""")
    assert not launches.data.exists()


@pytest.mark.push
def test_printed_commands_run_in_a_shell(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_BASE", raising=False)
    shown, _ = run("launch", "codex", "--print", "--", "say 'hi'")
    agent = shown[shown.index("# Codex\n") :]
    subprocess.run(["bash", "-euc", agent], check=True, stdout=subprocess.DEVNULL)
    report = launches.agents.report()
    assert report["arguments"][-1] == "say 'hi'"
    assert report["environment"]["CODEX_LLMRUN_KEY"] == "unused"


def test_the_list_shows_what_is_installed(launches: Launches) -> None:
    lines = run("launch", "--list")[0].splitlines()
    assert lines[0].split() == ["AGENT", "NAME", "INSTALLED", "INSTALL", "IT", "WITH"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert [*rows] == [*AGENTS]
    assert rows["aider"].split() == ["aider", "aider", "yes"]
    assert rows["claude"].endswith(f"no         {AGENTS['claude'].install}")
    listed = json.loads(run("launch", "--list", "--json")[0])["agents"]
    assert [(each["name"], each["path"]) for each in listed if each["path"]] == [
        (name, str(launches.agents.path / name)) for name in ("codex", "aider", "pi", "gptme")
    ]


@pytest.mark.parametrize(
    ("arguments", "exits", "words"),
    [
        ([], 2, "error: AGENT is missing\nhint: one of codex, claude, "),
        (["piii"], 2, "error: no such agent: 'piii'\nhint: did you mean pi?\n"),
        (["qwen"], 2, "error: no such agent: 'qwen'\nhint: did you mean qwen-code?\n"),
        (
            ["claude"],
            1,
            "error: Claude Code is not installed: no program 'claude'\nhint: install it with npm ",
        ),
        (["pi", "-c", "4096"], 2, "error: --ctx-size: 4,096 tokens are too few for pi\nhint: use 32768 or more; "),
        (["pi", "-m", "http://127.0.0.1:1/v1"], 2, "error: model: http://127.0.0.1:1/v1: already runs on a server\n"),
        (["pi", "--json"], 2, "error: --json: only for --list\n"),
    ],
)
def test_mistakes_are_explained(launches: Launches, arguments: list[str], exits: int, words: str) -> None:
    assert launches.run(*arguments, exits=exits).startswith(words)
    assert not launches.data.exists()


@pytest.mark.push
def test_unsuitable_models_are_refused(launches: Launches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMRUN_BACKEND")
    tools = "{% for tool in tools %}{{ tool }}{% endfor %}"
    files = {
        "its chat template does not support tools": tiny_llama(tmp_path / "a.gguf", context=32768),
        "it has no chat template": tiny_llama(tmp_path / "b.gguf", chat_template=None, context=32768),
        "it was trained for 512 tokens of context, and pi needs 32,768": tiny_llama(
            tmp_path / "c.gguf", chat_template=tools
        ),
    }
    for problem, path in files.items():
        errors = launches.run("pi", "-m", str(path), exits=2)
        assert (
            f"error: {path} cannot be used with pi: {problem}\nhint: a model that fits: llmrun launch pi -m " in errors
        )
    assert not launches.places()


@pytest.mark.push
def test_unwritable_folders_are_named(launches: Launches) -> None:
    launches.data.write_text("not a folder")
    assert str(launches.data) in launches.run("aider", exits=1)


@pytest.mark.push
def test_agents_are_listed_without_an_environment() -> None:
    done = subprocess.run(
        [*LLMRUN, "launch", "--list"], env={"PYTHONPATH": str(ROOT)}, cwd="/", capture_output=True, check=True
    )
    assert done.stdout.startswith(b"AGENT")


def test_agents_get_images_only_on_request() -> None:
    """A projector takes memory that the long contexts of agents need."""

    def flags(mmproj: str | None) -> list[str]:
        return Wanted(Settings(mmproj=mmproj), "m", 4096, saves=False).arguments(4096)

    assert "--no-mmproj" in flags(None)
    assert "--no-mmproj" in flags("off")
    assert flags("vision.gguf")[-2:] == ["--mmproj", "vision.gguf"]
