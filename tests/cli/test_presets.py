"""Tests of presets as users type their names, with the real process on the scripted backend."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from llmrun.base.errors import UsageError
from llmrun.cli.answers.answering import local_options, resolved_draft
from llmrun.cli.answers.thinking import wanted_thinking
from llmrun.cli.arguments.options import models
from llmrun.cli.chatting.actions import model_choices
from llmrun.cli.chatting.store import read_conversation
from llmrun.cli.commands.eval import EvalFlags
from llmrun.options.presets import Preset
from llmrun.options.settings import Settings
from tests.support.cli.chats import journals, session
from tests.support.cli.commands import llmrun, script_file
from tests.support.hub.model_stores import Stores, gguf
from tests.support.servers.hostile_server import HELLO, response, serving

if TYPE_CHECKING:
    from llmrun.engine.base import Answering

pytestmark = pytest.mark.push

PRESETS = """
[presets.Pirate]
model = "hello"
system = "You are a pirate."
temperature = 0.9
seed = 5
max_tokens = 7
variables = { style = "short", mood = "merry" }

[presets.plain]
model = "other"
"""
TEMPLATE = "{{ messages[-1].content }}|{{ messages[0].content }}|{{ style }}|{{ mood }}|"


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    made = Stores(tmp_path)
    made.enter(monkeypatch)
    (tmp_path / "models.toml").write_text(PRESETS)
    return made


def run(*arguments: str, stdin: str = "", code: int = 0) -> tuple[str, str]:
    done = llmrun(*arguments, stdin=stdin.encode())
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == code, out + err
    return out, err


def logged() -> dict[str, object]:
    out, _ = run("logs", "--json", "-n", "1")
    (entry,) = json.loads(out)
    assert isinstance(entry, dict)
    return entry


def test_generate_uses_everything_in_a_preset(stores: Stores) -> None:
    out, err = run("generate", "--backend", "scripted", "-m", "pirate", "-v", "--log", "hi there")
    assert out == "You sai\n"
    assert "preset     Pirate\n" in err
    assert "sampling   temperature 0.9, " in err
    entry = logged()
    assert (entry["preset"], entry["model"], entry["system"]) == ("Pirate", "hello", "You are a pirate.")
    assert (entry["seed"], entry["max_tokens"]) == (5, 7)


def test_flags_win_over_a_preset(stores: Stores) -> None:
    flags = ("--temp", "0.5", "-n", "3", "--seed", "1", "-s", "Be brief.")
    out, _ = run("generate", "--backend", "scripted", "-m", "pirate", "--log", *flags, "hi")
    assert out == "You\n"
    entry = logged()
    assert (entry["system"], entry["seed"]) == ("Be brief.", 1)


def test_variables_reach_the_chat_template(stores: Stores, tmp_path: Path) -> None:
    (tmp_path / "template").write_text(TEMPLATE)
    script = script_file(
        tmp_path, [("|You are a pirate.|short|grim|", "both"), ("|You are a pirate.|short|merry|", "preset")]
    )
    (tmp_path / "models.toml").write_text(PRESETS.replace('"hello"', json.dumps(script)))
    given = ("generate", "--backend", "scripted", "--chat-template", str(tmp_path / "template"), "-m", "pirate")
    assert run(*given, "-n", "20", "hi")[0] == "preset\n"
    assert run(*given, "-n", "20", "--chat-template-kwargs", '{"mood": "grim"}', "hi")[0] == "both\n"


def test_raw_prompts_refuse_presets_for_chats(stores: Stores) -> None:
    _, err = run("generate", "--backend", "scripted", "-m", "pirate", "--raw", "hi", code=2)
    assert "error: --raw: preset Pirate has a system prompt, template variables or thinking options\n" in err
    assert "hint: name its model: -m hello\n" in err
    assert run("generate", "--backend", "scripted", "-m", "plain", "--raw", "-n", "3", "hi")[1]


def test_adapters_of_presets_are_applied(stores: Stores, tmp_path: Path) -> None:
    """The flag replaces them. A chat that switches models leaves those of the flag behind."""
    (tmp_path / "models.toml").write_text(PRESETS + 'lora = "mine.gguf"\n')
    generate = ("generate", "--backend", "scripted", "-m", "plain", "hi")
    _, err = run(*generate, code=4)
    assert f"no such adapter: {tmp_path / 'mine.gguf'}" in err
    (tmp_path / "other.gguf").touch()
    flag = ("--lora", str(tmp_path / "other.gguf"))
    run(*generate, *flag)
    _, err = run("chat", "--backend", "scripted", "pirate", *flag, stdin="/model plain\n", code=4)
    assert "--lora applies only to the first model" in err
    assert f"no such adapter: {tmp_path / 'mine.gguf'}" in err
    (tmp_path / "mine.gguf").touch()
    out, err = run("chat", "--backend", "scripted", "pirate", *flag, stdin="/model plain\none\n")
    assert out == "You said: one\n"


def test_a_misspelled_preset_gets_a_suggestion(stores: Stores) -> None:
    _, err = run("generate", "-m", "pirat", "hi", code=4)
    assert "did you mean Pirate?" in err


def test_chat_continues_with_the_preset(stores: Stores, tmp_path: Path) -> None:
    chat = ("chat", "--backend", "scripted")
    out, err = run(*chat, "PIRATE", stdin="one\n/model\n")
    assert out == "You sai\n"
    assert "the model is Pirate (hello); " in err
    (path,) = journals(tmp_path / "data")
    saved = read_conversation(path).conversation
    assert (saved.model, saved.system) == ("Pirate", "You are a pirate.")
    out, err = run(*chat, "--continue", stdin="two\n/system\n")
    assert out == "You sai\n"
    assert "system      You are a pirate." in err


def test_model_switches_to_a_preset_and_back(stores: Stores, tmp_path: Path) -> None:
    out, err = run("chat", "--backend", "scripted", "plain", stdin="one\n/model pirate\ntwo\n/model plain\nthree\n")
    assert out == "You said: one\nYou sai\nYou said: three\n"
    assert "Pirate (hello) answers from here on" in err
    (path,) = journals(tmp_path / "data")
    events = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [event["text"] for event in events if event["event"] == "system"] == ["You are a pirate.", None]
    assert read_conversation(path).conversation.model == "plain"


def test_the_users_own_system_prompt_stays(stores: Stores, tmp_path: Path) -> None:
    turns = "/system Be brief.\n/model pirate\ntwo\n/system default\nthree\n"
    _, err = run("chat", "--backend", "scripted", "plain", stdin=turns)
    assert "the conversation keeps its own system prompt; /system default sets that of Pirate" in err
    (path,) = journals(tmp_path / "data")
    assert read_conversation(path).conversation.system == "You are a pirate."


def test_continuing_with_another_preset_takes_its_system_prompt(stores: Stores, tmp_path: Path) -> None:
    run("chat", "--backend", "scripted", "plain", stdin="one\n")
    run("chat", "--backend", "scripted", "pirate", "--continue", stdin="two\n")
    (path,) = journals(tmp_path / "data")
    saved = read_conversation(path).conversation
    assert (saved.model, saved.system, len(saved.exchanges)) == ("Pirate", "You are a pirate.", 2)


@pytest.mark.night
def test_a_batch_uses_the_settings_of_a_preset(stores: Stores, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi"}\n')
    run("batch", "--backend", "scripted", "-m", "pirate", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    assert "You sai" in (tmp_path / "out.jsonl").read_text()


def test_a_preset_may_be_for_a_model_on_a_server(stores: Stores, tmp_path: Path) -> None:
    with serving(response(HELLO)) as server:
        (tmp_path / "models.toml").write_text(
            f'[presets.far]\nmodel = "{server.url}"\nsystem = "S"\nthink = false\nvariables = {{ style = "short" }}\n'
        )
        assert run("generate", "-m", "far", "hi")[0] == "Hello\n"
        body = server.asked[-1].body
    assert body["messages"][0] == {"role": "system", "content": "S"}
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False, "style": "short"}


# --- Prompts with variables -------------------------------------------------------------------------------------------


@pytest.fixture
def own(stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's models.toml, next to a config.toml that selects a scripted model."""
    (tmp_path / "config.toml").write_text('backend = "scripted"\nmodel = "m"\n')
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "templates").mkdir()
    return tmp_path / "models.toml"


def test_the_prompt_comes_from_arguments_a_file_or_a_pipe(own: Path) -> None:
    own.write_text('[presets.sum]\nprompt = "In $language: $input"\ndefaults.language = "English"')
    text = own.with_name("text.txt")
    text.write_text("a text\n")
    generate = ("generate", "-q", "-m", "sum")
    assert run(*generate, "hello", "world")[0] == "You said: In English: hello world\n"
    assert run(*generate, stdin="piped\n")[0] == "You said: In English: piped\n"
    assert run(*generate, "-f", str(text), "-P", "language=$input")[0] == "You said: In $input: a text\n"


def test_piped_text_follows_a_whole_prompt(own: Path) -> None:
    own.write_text('[presets.joke]\nprompt = "Tell a joke."')
    assert run("generate", "-m", "joke", stdin="about cats\n")[0] == "You said: Tell a joke.\n\nabout cats\n"
    assert run("generate", "-m", "joke", stdin="")[0] == "You said: Tell a joke.\n"


def test_a_whole_prompt_need_not_wait_for_input(own: Path) -> None:
    """Standard input may be a pipe that is never closed, as under a supervisor."""
    own.write_text('[presets.joke]\nprompt = "Tell a joke."')
    read, write = os.pipe()
    try:
        line = f"exec {shlex.quote(sys.executable)} -m llmrun generate -q -m joke --no-stdin <&{read}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60, pass_fds=(read,), check=False)
    finally:
        os.close(read)
        os.close(write)
    assert done.stdout == b"You said: Tell a joke.\n"


def test_the_system_prompt_has_variables_too(own: Path) -> None:
    own.write_text('[presets.cold]\nprompt = "$input"\nsystem = "Be $how."\ntemperature = 0.25\nmax_tokens = 3')
    out, err = run("generate", "-v", "--log", "-m", "cold", "-P", "how=brief", "hi")
    assert out == "You\n"
    assert "temperature 0.25" in err
    assert (logged()["preset"], logged()["system"], logged()["max_tokens"]) == ("cold", "Be brief.", 3)
    run("generate", "-m", "cold", "-s", "mine $5", "--log", "-n", "5", "hi")
    assert (logged()["system"], logged()["max_tokens"]) == ("mine $5", 5)


def test_missing_and_unknown_variables_are_usage_errors(own: Path) -> None:
    own.write_text('[presets.mine]\nprompt = "$a $b"')
    _, err = run("generate", "-m", "mine", "-P", "a=1", code=2)
    assert err == "error: preset mine: no value for $b\nhint: -P b=...\n"
    _, err = run("generate", "-m", "mine", "-P", "c=1", code=2)
    assert err.startswith("error: --param: c: preset mine has no such variable\n")


def test_raw_prompts_take_a_preset_with_a_prompt(own: Path) -> None:
    own.write_text('[presets.story]\nprompt = "Once upon a $input"')
    assert run("generate", "-q", "--raw", "-m", "story", "time")[0]


def test_a_chat_takes_the_system_prompt_and_settings(own: Path, tmp_path: Path) -> None:
    own.write_text('[presets.who]\nprompt = "x $y"\nsystem = "You are a $who."\ntemperature = 0.25')
    _, err = run("chat", "-m", "who", "-P", "who=pirate", stdin="one\n/show\n")
    assert "note: preset who: a chat uses the preset's system prompt and settings, but not its prompt" in err
    assert "system      You are a pirate." in err
    assert "temperature 0.25" in err
    _, err = run("chat", "who", code=2)
    assert err.splitlines()[1] == "error: preset who: no value for $who"
    _, err = run("chat", "-q", "who", "-s", "Be brief.", stdin="/show system\n")
    assert err == "system      Be brief.\n"
    _, err = run("chat", "--continue", stdin="two\n/show system\n")
    assert "system      You are a pirate." in err


def test_switching_to_a_preset_needs_values_for_its_system_prompt(own: Path) -> None:
    own.write_text('[presets.who]\nprompt = "$input"\nsystem = "You are a $who."\n[presets.a]\nmodel = "other"\n')
    _, err = run("chat", "a", stdin="one\n/model who\ntwo\n", code=2)
    assert "error: preset who: no value for $who" in err
    own.write_text(own.read_text().replace("[presets.a]", 'defaults.who = "cook"\n[presets.a]'))
    _, err = run("chat", "a", stdin="one\n/model who\n/show system\n")
    assert "system      You are a cook." in err


def test_templates_of_earlier_versions_still_work(own: Path) -> None:
    (own.with_name("templates") / "my sum.toml").write_text('prompt = "In $language: $input"\nmax_tokens = 9\n')
    assert run("generate", "-q", "-m", "my sum", "-P", "language=French", "hello")[0] == "You said:\n"
    assert "my sum  m      prompt In $language: $input, -P language, max_tokens 9" in run("list")[0]


def test_the_old_flag_names_its_successor(own: Path) -> None:
    _, err = run("generate", "-T", "my sum", "hello", code=2)
    assert err == "error: --template: no longer exists\nhint: prompt templates are presets now: -m 'my sum'\n"
    _, err = run("chat", "--template", "./x/sum.toml", code=2)
    moved = f"move ./x/sum.toml to {own.with_name('templates')}, and use -m sum"
    assert err == f"error: --template: no longer exists\nhint: prompt templates are presets now: {moved}\n"


# --- Commands that need only the model ------------------------------------------------------------------------------


@pytest.fixture
def stored(stores: Stores, tmp_path: Path) -> Stores:
    """Return stores with a model of the Hub and a preset for it."""
    stores.shared("org/name", {"m-Q4_K_M.gguf": gguf(salt=1)})
    text = '[presets.p]\nmodel = "hf:org/name:Q4_K_M"\nsystem = "S"\ntop_k = 3\nvariables = { x = [1] }\n'
    (tmp_path / "models.toml").write_text(text)
    return stores


def test_list_shows_presets(stored: Stores) -> None:
    out, _ = run("list")
    assert out.splitlines()[-2:] == [
        "PRESET  MODEL               SETTINGS",
        "p       hf:org/name:Q4_K_M  system S, top_k 3, x [1]",
    ]
    (preset,) = json.loads(run("list", "--json")[0])["presets"]
    assert preset == {
        "name": "p",
        "model": "hf:org/name:Q4_K_M",
        "prompt": None,
        "defaults": {},
        "settings": {"system": "S", "top_k": 3},
        "variables": {"x": [1]},
        "lora": [],
    }


def test_list_works_without_an_invalid_preset(stored: Stores, tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text("[presets.p]\nmodel = 3\n[presets.good]\nmodel = 'm'\n")
    out, err = run("list")
    assert out.splitlines()[-1].startswith("good    m")
    assert "hf:org/name:Q4_K_M" in out
    assert f"note: catalogue: {tmp_path}/models.toml: line 1: presets.p: model: 3 is not the name of a model; " in err
    assert err.count("note: ") == 1
    assert [each["name"] for each in json.loads(run("list", "--json")[0])["presets"]] == ["good"]


def test_show_has_the_preset_and_its_model(stored: Stores) -> None:
    out, _ = run("show", "P")
    lines = [line.split(maxsplit=1) for line in out.splitlines() if line]
    assert lines[:5] == [
        ["Preset", "p"],
        ["model", "hf:org/name:Q4_K_M"],
        ["system", "S"],
        ["top_k", "3"],
        ["variable", "x  [1]"],
    ]
    assert ["architecture", "llama"] in lines
    body = json.loads(run("show", "p", "--json")[0])
    assert (body["preset"]["name"], body["name"]) == ("p", "hf:org/name:Q4_K_M")
    assert json.loads(run("show", "hf:org/name:Q4_K_M", "--json")[0])["preset"] is None


def test_pull_and_verify_act_on_the_model(stored: Stores) -> None:
    assert run("pull", "--offline", "p")[0].endswith("m-Q4_K_M.gguf\n")
    assert json.loads(run("verify", "p", "--json")[0])["models"][0]["name"] == "hf:org/name:Q4_K_M"


def test_rm_refuses_a_preset(stored: Stores) -> None:
    _, err = run("rm", "p", code=2)
    assert "error: model: 'p': a preset of hf:org/name:Q4_K_M, not a model\n" in err
    assert "hint: `llmrun preset rm p` removes the preset; " in err
    assert "hf:org/name:Q4_K_M" in run("list")[0]


@pytest.mark.night
def test_bench_measures_the_model_of_a_preset(stores: Stores) -> None:
    out, _ = run("bench", "--backend", "scripted", "-m", "pirate", "--json", "-p", "8", "-n", "4", "--seconds", "1")
    assert '"hello"' in out


def test_eval_compares_the_models_of_presets(stores: Stores, tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(PRESETS + 'lora = "mine.gguf"\n')
    flags = EvalFlags(against="PLAIN")
    settings = flags.settings("pirate")
    base = flags.base_settings(settings)
    assert base is not None
    assert (settings.model, base.model) == ("hello", "other")
    assert local_options(settings).adapters == local_options(base).adapters == ()


def test_eval_refuses_a_preset_of_a_server(stores: Stores, tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text('[presets.far]\nmodel = "http://127.0.0.1:1"\n')
    for flags, model in ((EvalFlags(), "far"), (EvalFlags(against="far"), "hello")):
        with pytest.raises(UsageError, match=r"http://127\.0\.0\.1:1: a server does not return all logits"):
            flags.settings(model)


def test_a_preset_may_name_a_draft_model(stores: Stores) -> None:
    assert resolved_draft("plain", str.upper) == "OTHER"


def test_presets_are_completed(stores: Stores) -> None:
    assert ("Pirate", "preset of hello") in models()
    with session(stores.root) as found:
        assert ("Pirate", "preset of hello") in model_choices(found.chat)


# --- Thinking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "typed", "wish"),
    [("", (), (False, 9)), ("", ("think",), (False, 9)), ("true", (), (None, 9)), ("true", ("think",), (True, 9))],
)
def test_a_server_is_sent_the_thinking_options_of_its_preset(
    variable: str, typed: tuple[str, ...], wish: tuple[object, object]
) -> None:
    """Options from the environment are not sent, because they are not meant for this server."""
    settings = Settings(
        think=variable == "true",
        think_budget=9,
        preset=Preset("far", "http://127.0.0.1:1", {"think": False, "think_budget": 9}),
    )
    assert wanted_thinking(cast("Answering", SimpleNamespace(thinking=None)), settings, typed) == wish


def test_a_preset_cannot_make_a_model_think(stores: Stores, tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text('[presets.deep]\nmodel = "m"\nthink = true\n')
    out, err = run("generate", "--backend", "scripted", "-m", "deep", "hi")
    assert out == "You said: hi\n"
    assert "note: preset deep: think: no effect, because this model does not think\n" in err
