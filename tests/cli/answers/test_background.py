"""Tests of when `generate` and `chat` join or start a background engine, without any process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

if sys.platform == "win32":
    pytest.skip("Python has no Unix sockets on Windows", allow_module_level=True)

from llmrun.base.errors import ModelNotFound
from llmrun.base.machine import memory_pressure
from llmrun.cli.answers import background
from llmrun.cli.answers.background import BackgroundRun
from llmrun.cli.console.output import out
from llmrun.engine.child.messages import Loading, Note, Open
from llmrun.options.settings import Settings
from llmrun.serving.background import control, joining
from llmrun.serving.background.eligibility import RunsAlone
from llmrun.serving.background.handshake import Birth
from llmrun.serving.background.place import Folder, PlaceError
from tests.support.cli.commands import llmrun

Capture = pytest.CaptureFixture[str]


class Line:
    """A progress line that records what it shows."""

    def __init__(self) -> None:
        self.shown: list[Any] = []

    def __call__(self, work: str, fraction: float) -> None:
        self.shown.append((work, fraction))

    def end(self) -> None:
        self.shown.append("end")


@dataclass
class Machine:
    """The machine on which a run decides, and a record of what the run does."""

    model: Path
    runs: bool = False  # an engine for the model
    sockets: set[str] | None = None  # the engines that run, or None if `runs` decides
    starts: bool = True
    gpus: tuple[str, ...] = ()
    fits: bool = True
    may_join: str = ""
    may_start: str = ""
    news: tuple[Loading | Note, ...] = ()
    births: list[Birth] = field(default_factory=list)
    opened: list[Open] = field(default_factory=list)
    joins: list[float | None] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    rooms: list[str] = field(default_factory=list)
    mmproj: str = ""
    line: Line = field(default_factory=Line)
    to_open_error: Exception | None = None
    join_error: Exception | None = None

    def run(self, template: str | None = None, *, images: bool = False, **settings: Any) -> Any:
        return self._run_of(template, images, settings)._found()

    def names_of(self, **settings: Any) -> tuple[str, str]:
        """Return the names of the engines without and with the projector."""
        return self._run_of(None, False, settings)._sockets()

    def _run_of(self, template: str | None, images: bool, settings: dict[str, Any]) -> BackgroundRun:
        made = Settings(**{"model": str(self.model), **settings})
        return BackgroundRun(made, template, self._to_open, lambda: pytest.fail("opened here"), images)

    def has_socket(self, file: str) -> bool:
        return file.endswith(".sock") and (self.sockets is None or file.removesuffix(".sock") in self.sockets)

    def make_room(self, only: str = "", **options: Any) -> bool:
        self.rooms.append(only)
        return False

    @contextmanager
    def _to_open(self) -> Iterator[tuple[Open, Any]]:
        if self.to_open_error is not None:
            raise self.to_open_error
        yield Open(str(self.model), "a-model", {"adapters": [], "mmproj": self.mmproj}), self.line

    def join(self, folder: Any, name: str, keep_alive_s: float | None) -> Any:
        self.names.append(name)
        self.joins.append(keep_alive_s)
        if self.join_error is not None:
            raise self.join_error
        return Joined() if self.runs or name in (self.sockets or ()) else None

    def join_or_start(self, folder: Any, name: str, asked: Any, *, keep_alive_s: float, tell: Any, waiting: Any) -> Any:
        with asked() as (birth, message):
            self.births.append(birth)
            self.opened.append(message)
            for each in self.news:
                tell(each)
        if not self.starts:
            raise RunsAlone("the background engine ended")
        return Joined(), True


class Joined:
    pid = 4242


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LLMRUN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setattr(out, "verbose", True)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x" * 1000)
    made = Machine(model)
    status = Folder.status
    monkeypatch.setattr(Folder, "status", lambda folder, file: made.has_socket(file) or status(folder, file))
    monkeypatch.setattr(joining, "join", made.join)
    monkeypatch.setattr(joining, "join_or_start", made.join_or_start)
    monkeypatch.setattr(background, "usable_gpus", lambda: made.gpus)
    monkeypatch.setattr(memory_pressure, "fits_beside", lambda size: made.fits)
    monkeypatch.setattr(control, "make_room", made.make_room)
    monkeypatch.setattr(background, "reason_not_to_join", lambda: made.may_join)
    monkeypatch.setattr(background, "reason_not_to_start_unasked", lambda: made.may_start)
    return made


def test_the_second_run_starts_an_engine(machine: Machine, capsys: Capture) -> None:
    assert machine.run() is None
    assert "the second run within 10 minutes starts a background engine" in capsys.readouterr().err
    assert machine.run()[1] is True
    assert machine.births[0].keep_alive_s == 300.0
    assert "warm       started the background engine 4242\n" in capsys.readouterr().err


def test_a_run_of_another_model_is_no_second_run(machine: Machine, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.touch()
    assert machine.run() is None
    assert machine.run(model=str(other)) is None
    assert machine.births == []


def test_a_run_eleven_minutes_later_is_no_second_run(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.run() is None
    monkeypatch.setattr(background, "_SECOND_CALL_S", -1.0)
    assert machine.run() is None


def test_a_running_engine_is_joined_at_once(machine: Machine, capsys: Capture) -> None:
    machine.runs = True
    assert machine.run()[1] is False
    assert machine.joins == [None]
    assert "warm       joined the background engine 4242\n" in capsys.readouterr().err


@pytest.mark.parametrize(("keep_alive", "seconds"), [("90s", 90.0), ("1h", 3600.0), ("-1", -1.0)])
def test_keep_alive_starts_an_engine_at_once(keep_alive: str, seconds: float, machine: Machine) -> None:
    machine.may_start = "the process is in a container"  # the user asks for the engine
    assert machine.run(keep_alive=keep_alive)[1] is True
    assert machine.births[0].keep_alive_s == seconds
    assert {*machine.joins} == {seconds}


def test_keep_alive_zero_starts_nothing(machine: Machine) -> None:
    for _ in range(3):
        assert machine.run(keep_alive="0") is None
    assert machine.births == []


def test_keep_alive_zero_joins_and_ends_an_engine(machine: Machine) -> None:
    machine.runs = True
    assert machine.run(keep_alive="0")[1] is False
    assert machine.joins == [0.0]


@pytest.mark.push
@pytest.mark.parametrize("text", ["soon", "5 parsecs", ""])
def test_an_invalid_keep_alive_is_a_usage_error(text: str) -> None:
    done = llmrun("generate", "--keep-alive", text, "Hello")
    assert done.returncode == 2
    assert b"--keep-alive" in done.stderr


def test_containers_and_ci_start_nothing_unasked(machine: Machine, capsys: Capture) -> None:
    machine.may_start = "the environment variable CI is set"
    for _ in range(3):
        assert machine.run() is None
    assert "warm       no: the environment variable CI is set\n" in capsys.readouterr().err
    assert machine.births == []


def test_those_who_may_not_join_do_not_even_look(machine: Machine, capsys: Capture) -> None:
    machine.runs, machine.may_join = True, "another user became root"
    assert machine.run(keep_alive="5m") is None
    assert machine.joins == []
    assert "warm       no: another user became root\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    "settings", [{"backend": "llama"}, {"gpu_layers": 3}, {"rpc": "host:50052"}], ids=["backend", "layers", "rpc"]
)
def test_other_backends_run_alone(settings: dict[str, Any], machine: Machine, capsys: Capture) -> None:
    machine.runs = True
    assert machine.run(**settings) is None
    assert "only the CPU engine runs in the background" in capsys.readouterr().err


def test_a_gpu_that_may_run_the_model_starts_nothing(machine: Machine, capsys: Capture) -> None:
    machine.gpus = ("An RTX",)
    assert machine.run(keep_alive="5m") is None
    assert "An RTX may run the model" in capsys.readouterr().err
    assert machine.run(keep_alive="5m", backend="cpu")[1] is True
    assert machine.run(keep_alive="5m", gpu_layers=0)[1] is True


def test_a_model_that_takes_half_of_the_memory_runs_alone(machine: Machine, capsys: Capture) -> None:
    machine.fits = False
    assert machine.run(keep_alive="5m") is None
    assert "the model is too large to stay in memory between runs" in capsys.readouterr().err
    assert machine.births == []


def test_the_size_of_a_model_is_that_of_all_shards(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(memory_pressure, "fits_beside", lambda size: not sizes.append(size))  # type: ignore[func-returns-value]
    machine.model = machine.model.with_name("model-00001-of-00002.gguf")
    for number in (1, 2):
        machine.model.with_name(f"model-0000{number}-of-00002.gguf").write_bytes(b"x" * 1000 * number)
    machine.run(keep_alive="5m")
    assert sizes == [3000]


@pytest.mark.parametrize("error", [RunsAlone("it did not answer"), PlaceError("not a socket", hint="remove it")])
def test_engines_that_cannot_be_used_are_one_line(error: Exception, machine: Machine, capsys: Capture) -> None:
    machine.join_error = error
    assert machine.run() is None
    assert capsys.readouterr().err.count("\n") == 1


def test_an_engine_that_cannot_start_is_one_line(machine: Machine, capsys: Capture) -> None:
    machine.starts = False
    assert machine.run(keep_alive="5m") is None
    assert capsys.readouterr().err == "warm       no: the background engine ended\n"


def test_errors_of_the_hub_are_not_hidden(machine: Machine) -> None:
    machine.to_open_error = ModelNotFound("no such model")
    with pytest.raises(ModelNotFound):
        machine.run(keep_alive="5m")


def test_the_progress_of_the_engine_is_shown(machine: Machine, capsys: Capture) -> None:
    machine.news = (Loading("loading", 0.5), Note("a note"), Note("a detail", is_detail=True))
    machine.run(keep_alive="5m")
    assert machine.line.shown == [("loading", 0.5), "end"]
    assert capsys.readouterr().err.splitlines()[:2] == ["note: a note", "backend    a detail"]


def test_an_engine_gets_absolute_paths(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(machine.model.parent)
    absolute, machine.model = machine.model, Path(machine.model.name)
    machine.run(keep_alive="5m")
    assert machine.births[0].model == machine.opened[0].path == str(absolute)
    assert machine.opened[0].options["backend"] == "cpu"
    assert str(absolute) in machine.births[0].files


# The name of an engine.


def name_of(machine: Machine, **settings: Any) -> str:
    machine.runs = True
    machine.run(**settings)
    return machine.names[-1]


@pytest.mark.parametrize(
    "settings",
    [
        {"threads": 3},
        {"ctx_size": 1000},
        {"kv_type": "f16"},
        {"loras": ("/some/adapter.gguf",)},
        {"template": "{{ messages }}"},
        {"speculate": "off"},
        {"model": "smollm2"},
    ],
    ids=str,
)
def test_settings_that_change_answers_have_engines_of_their_own(settings: dict[str, Any], machine: Machine) -> None:
    assert name_of(machine, **settings) != name_of(machine)


@pytest.mark.parametrize(
    "settings", [{"seed": "7"}, {"max_tokens": 9}, {"stream": False}, {"keep_alive": "1h"}], ids=str
)
def test_settings_of_requests_share_an_engine(settings: dict[str, Any], machine: Machine) -> None:
    assert name_of(machine, **settings) == name_of(machine)


def test_a_path_is_the_same_model_from_any_folder(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    absolute = name_of(machine)
    monkeypatch.chdir(machine.model.parent)
    assert name_of(machine, model=machine.model.name) == absolute


@pytest.mark.parametrize("variable", ["LLMRUN_CPU_LEVEL", "HF_HOME", "OLLAMA_MODELS", "LLMRUN_DATA_DIR", "HOME"])
def test_variables_that_change_answers_have_engines_of_their_own(
    variable: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = name_of(machine)
    monkeypatch.setenv(variable, str(tmp_path / "other"))
    assert name_of(machine) != before


def test_secrets_do_not_change_the_name(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    before = name_of(machine)
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert name_of(machine) == before


# Images.


def test_runs_with_images_start_engines_with_projectors(machine: Machine, tmp_path: Path) -> None:
    mmproj = tmp_path / "mmproj.gguf"
    mmproj.write_bytes(b"x" * 500)
    machine.mmproj, machine.sockets = str(mmproj), set()
    assert machine.run(images=True) is None
    assert machine.run(images=True)[1] is True
    assert machine.births[0].socket == machine.names_of()[1]
    assert str(mmproj) in machine.births[0].files  # the engine leaves when the projector changes
    assert machine.rooms == [""]


def test_projectors_count_towards_the_memory(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(memory_pressure, "fits_beside", lambda size: not sizes.append(size))  # type: ignore[func-returns-value]
    mmproj = tmp_path / "mmproj.gguf"
    mmproj.write_bytes(b"x" * 500)
    machine.mmproj = str(mmproj)
    machine.run(images=True, keep_alive="5m")
    assert sizes == [1500]


def test_texts_use_an_engine_with_a_projector(machine: Machine) -> None:
    plain, seeing = machine.names_of()
    machine.sockets = {seeing}
    assert machine.run()[1] is False
    assert machine.names == [seeing]
    machine.sockets = {plain, seeing}
    machine.run()
    assert machine.names[-1] == plain


def test_an_image_replaces_the_engine_that_reads_only_text(machine: Machine) -> None:
    """The model is in memory once, and the user who runs it in the background need not ask twice."""
    plain, seeing = machine.names_of()
    machine.sockets = {plain}
    assert machine.run(images=True)[1] is True
    assert machine.names == []  # the engine without a projector is not joined
    assert machine.births[0].socket == seeing
    assert machine.rooms == [plain, ""]


def test_without_the_projector_images_never_run_in_the_background(machine: Machine, capsys: Capture) -> None:
    assert machine.run(images=True, mmproj="off") is None
    assert "images need the projector" in capsys.readouterr().err
    machine.sockets = {machine.names_of()[1]}
    assert machine.run(mmproj="off") is None
    assert machine.names == []


@pytest.mark.parametrize(
    "settings", [{"mmproj": "other.gguf"}, {"image_max_tokens": 300}, {"image_min_tokens": 300}], ids=str
)
def test_settings_of_images_have_engines_of_their_own(settings: dict[str, Any], machine: Machine) -> None:
    plain, seeing = machine.names_of()
    names = machine.names_of(**settings)
    assert names[0] == plain
    assert names[1] not in (plain, seeing)


# The note.


@pytest.fixture
def note(machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> Callable[[float], str]:
    monkeypatch.setattr(background, "is_terminal", lambda stream: True)

    def tell(keep_alive_s: float) -> str:
        background._tell_of_engine(keep_alive_s)
        return capsys.readouterr().err

    return tell


def test_the_note_appears_once(note: Callable[[float], str]) -> None:
    assert note(300.0) == ("note: the model stays loaded for 5 minutes for the next run; `llmrun stop` unloads it\n")
    assert note(300.0) == ""


def test_the_note_says_when_there_is_no_limit(note: Callable[[float], str]) -> None:
    assert note(float("inf")) == "note: the model stays loaded until `llmrun stop` unloads it\n"


def test_there_is_no_note_in_pipes_and_quiet_mode(
    note: Callable[[float], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as quiet:
        quiet.setattr(out, "quiet", True)
        assert note(300.0) == ""
    with monkeypatch.context() as pipe:
        pipe.setattr(background, "is_terminal", lambda stream: False)
        assert note(300.0) == ""
    assert note(300.0) != ""
