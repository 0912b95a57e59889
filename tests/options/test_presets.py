"""Tests that presets are read strictly and that their settings rank between the environment and config.toml."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import BrokenEntry, UsageError
from llmrun.cli.answers.answering import local_options
from llmrun.options import settings
from llmrun.options.presets import KEYS, SETTINGS, read_presets
from llmrun.options.sampling_params import SAMPLING
from llmrun.options.settings import RULES, Settings, load_presets, load_settings, load_sound_settings, preset_named

PIRATE = """
[presets.Pirate]
model = "qwen3:4b"
system = "You are a pirate."
temperature = 1
top_k = 7
think = false
variables = { style = "short", depth = [1, 2.5, { deep = true }] }
"""


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up an empty config.toml for this process, and return the path of a models.toml that does not exist yet."""
    for name in [name for name in os.environ if name.startswith("LLMRUN_")]:
        monkeypatch.delenv(name)
    config = tmp_path / "config.toml"
    config.write_text("")
    monkeypatch.setenv("LLMRUN_CONFIG", str(config))
    return config.with_name("models.toml")


def test_presets_have_a_model_settings_and_variables(own: Path) -> None:
    assert load_presets() == {}
    own.write_text(PIRATE)
    preset = load_presets()["pirate"]
    assert (preset.name, preset.model, preset.system) == ("Pirate", "qwen3:4b", "You are a pirate.")
    assert preset.values == {"system": "You are a pirate.", "temperature": 1.0, "top_k": 7, "think": False}
    assert type(preset.values["temperature"]) is float
    assert preset.sampling == {"temperature": 1.0, "top_k": 7}
    assert preset.variables == {"style": "short", "depth": [1, 2.5, {"deep": True}]}
    assert preset_named("PIRATE") == preset
    assert preset_named("pirate2") is None


def test_presets_have_adapters(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths are relative to models.toml, and the flag replaces them."""
    monkeypatch.setenv("HOME", "/home/me")
    own.write_text('[presets.a]\nmodel = "m"\nlora = "x.gguf"\n[presets.b]\nmodel = "m"\n')
    assert local_options(load_settings({"model": "a"})).adapters == (f"{own.parent}/x.gguf:1.0",)
    assert local_options(load_settings({"model": "b"})).adapters == ()
    own.write_text('[presets.a]\nmodel = "m"\nlora = ["y=sub/x.gguf:0.5", "~/x.gguf", "/x.gguf:2"]\n')
    loaded = load_settings({"model": "a"})
    assert local_options(loaded).adapters == (f"y={own.parent}/sub/x.gguf:0.5", "/home/me/x.gguf:1.0", "/x.gguf:2.0")
    assert local_options(replace(loaded, loras=("z.gguf",))).adapters == ("z.gguf",)


def test_every_setting_of_a_preset_is_a_setting() -> None:
    assert set(SETTINGS) <= set(RULES)
    assert set(SAMPLING) < set(SETTINGS)
    assert "model" not in SETTINGS


def test_precedence_is_flag_environment_preset_config(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.write_text(
        '[presets.p]\nmodel = "m"\nsystem = "p"\ntemperature = 0.3\ntop_k = 3\ntop_p = 0.3\nmax_tokens = 3\n'
    )
    config = own.with_name("config.toml")
    config.write_text(
        'model = "p"\nsystem = "c"\ntemperature = 0.4\ntop_k = 4\ntop_p = 0.4\nmin_p = 0.4\nthreads = 4\n'
    )
    monkeypatch.setenv("LLMRUN_TOP_K", "2")
    monkeypatch.setenv("LLMRUN_TOP_P", "0.2")
    got = load_settings({"top_p": 0.1})
    assert got.sampling == {"temperature": 0.3, "top_k": 2, "top_p": 0.1, "min_p": 0.4}
    assert (got.model, got.system, got.max_tokens, got.threads) == ("m", "p", 3, 4)
    assert got.preset == load_presets()["p"]
    other = load_settings({"model": "m"})
    assert (other.model, other.system, other.preset, other.sampling["temperature"]) == ("m", "c", None, 0.4)


@pytest.mark.parametrize("flags", [{"think": True}, {"think_budget": 5}])
def test_a_thinking_option_replaces_both_of_a_preset(own: Path, flags: dict[str, object]) -> None:
    own.write_text('[presets.p]\nmodel = "m"\nthink = false\nthink_budget = 0\n')
    plain, wished = load_settings({"model": "p"}), load_settings({"model": "p", **flags})
    assert (plain.think, plain.think_budget) == (False, 0)
    assert (wished.think, wished.think_budget) == (flags.get("think"), flags.get("think_budget"))


@pytest.mark.parametrize("source", ["flag", "environment", "config"])
def test_any_source_of_the_model_may_name_a_preset(own: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    own.write_text(PIRATE)
    if source == "environment":
        monkeypatch.setenv("LLMRUN_MODEL", "pirate")
    if source == "config":
        own.with_name("config.toml").write_text('model = "pirate"')
    got = load_settings({"model": "pirate"} if source == "flag" else None)
    assert (got.model, got.sampling) == ("qwen3:4b", {"temperature": 1.0, "top_k": 7})
    assert got.variables == {"style": "short", "depth": [1, 2.5, {"deep": True}]}


def test_an_empty_system_prompt_replaces_that_of_the_configuration(own: Path) -> None:
    own.write_text('[presets.bare]\nmodel = "m"\nsystem = ""\n')
    own.with_name("config.toml").write_text('system = "Be brief."\n')
    assert load_settings({"model": "bare"}).system == ""
    assert load_settings().system == "Be brief."


def test_a_preset_may_have_the_name_of_its_own_model(own: Path) -> None:
    own.write_text('[presets."Qwen3:4b"]\nmodel = "qwen3:4b"\nseed = 7\n')
    got = load_settings({"model": "qwen3:4b"})
    assert (got.model, got.seed) == ("qwen3:4b", 7)


@pytest.mark.parametrize("name", ["gpt-4o", "claude-sonnet-4-5", "owner/name", "qwen3:4b-q8_0", "a.b_c", "1"])
def test_names_that_clients_have_built_in_are_allowed(own: Path, name: str) -> None:
    own.write_text(f'[presets."{name}"]\nmodel = "m"\n')
    assert load_settings({"model": name.upper()}).model == "m"


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("presets = 3", "presets: 3 is not a table", None),
        ("[presets]\npirate = 'x'", "presets.pirate: 'x' is not a table", "[presets.pirate]"),
        ("[presets.pirate]", "presets.pirate: model: missing", 'model = "qwen3:4b"'),
        ("[presets.pirate]\nvariables = {a = 1}", "presets.pirate: model: missing", 'model = "qwen3:4b"'),
        ("[presets.pirate]\ntemprature = 1", "presets.pirate: temprature: no such setting", "mean temperature?"),
        ("[presets.gpt-4.1]\nmodel = 'm'", "presets.gpt-4: model: missing", '[presets."gpt-4.1"]'),
        ("[presets.p]\nmodel = 3", "presets.p: model: 3 is not the name of a model", None),
        ("[presets.p]\nmodel = ' '", "presets.p: model: ' ' is not the name of a model", None),
        ("[presets.p]\nmodel = 'm'\ntemperature = 'x'", "p: temperature: 'x' is not a number", None),
        ("[presets.p]\nmodel = 'm'\ntemprature = 1", "presets.p: temprature: no such setting", "mean temperature?"),
        ("[presets.p]\nmodle = 'm'\nmodel = 'm'", "presets.p: modle: no such setting", "mean model?"),
        ("[presets.p]\nmodel = 'm'\npromt = 'm'", "presets.p: promt: no such setting", "mean prompt?"),
        ("[presets.p]\nmodel = 'm'\nsystem_prompt = ''", "system_prompt: no such setting", "mean system?"),
        ("[presets.p]\nmodel = 'm'\nchat_template_kwargs = 1", "no such setting", "mean variables?"),
        ("[presets.p]\nmodel = 'm'\nctx_size = 5", "ctx_size: presets cannot set ctx_size", "config.toml"),
        ("[presets.p]\nmodel = 'm'\nnum_ctx = 5", "num_ctx: presets cannot set ctx_size", "config.toml"),
        (
            "[presets.p]\nmodel = 'm'\nzzz = 5",
            "zzz: no such setting",
            "known: model, prompt, defaults, variables, system, ",
        ),
        ("[presets.p]\nmodel = 'm'\n[presets.p.sampling]\ntop_k = 1", "sampling: no such setting", "without"),
        ("[presets.p]\nmodel = 'm'\nthink = true\nthink_budget = 0", "think: contradicts think_budget", None),
        ("[presets.p]\nmodel = 'm'\nvariables = 3", "variables: 3 is not a table", None),
        ("[presets.p]\nmodel = 'm'\nvariables = { d = 1979-05-27 }", "variables.d: datetime.date", "use texts"),
        ("[presets.p]\nmodel = 'm'\nvariables = { d = [inf] }", "variables.d: [inf] has no JSON form", "finite"),
        ("[presets.p]\nmodel = 'm'\nlora = 3", "lora: 3 is not a file", None),
        ("[presets.p]\nmodel = 'm'\nlora = ['a', 3]", "lora: ['a', 3] is not a file", None),
        ("[presets.p]\nmodel = 'm'\nlora = 'a:inf'", "lora: invalid value for --lora: 'a:inf'", None),
        ("[presets.p]\ntop_k = 1\nlora = 'a'", "presets.p: lora: needs a model", None),
        ("[presets.p]\nmodel = ''\ntop_k = 1", "presets.p: model: '' is not the name of a model", None),
        ("[presets.p]\nprompt = 3", "presets.p: prompt: 3 is not text", None),
        ("[presets.p]\nprompt = ' '", "presets.p: prompt: empty", "$input stands for the user's prompt"),
        ('[presets.p]\nprompt = "a\\nfor $5\\nb"', "p: prompt: line 2: '$5' is not a variable", "write $$ for"),
        ("[presets.p]\nprompt = '100$'", "presets.p: prompt: line 1: '$' is not a variable", "write $$ for"),
        ("[presets.p]\nprompt = 'x'\nsystem = '${a b}'", "p: system: line 1: '${a b}' is not a variable", "$$"),
        ("[presets.p]\nmodel = 'm'\ndefaults = { a = 1 }", "presets.p: defaults: needs a prompt", "$input"),
        ("[presets.p]\nprompt = 'x'\ndefaults = 3", "presets.p: defaults: 3 is not a table", None),
        ("[presets.p]\nprompt = 'x'\ndefaults.a = 3", "defaults: $a is not used in the prompts", "known: none"),
        ("[presets.p]\nprompt = '$language'\ndefaults.langage = 3", "defaults: $langage is not used", "mean language?"),
        ("[presets.p]\nprompt = '$input'\ndefaults.input = 3", "defaults: $input is the user's prompt", None),
        ("[presets.p]\nprompt = '$a'\ndefaults.a = [1]", "defaults: a: [1] is not text or a number", None),
        ("[presets.p]\nmodel = 'http://x'\nlora = 'a'", "lora: not supported for models on a server", None),
        ("[presets.a]\nmodel = 'B'\n[presets.b]\nmodel = 'm'", "presets.a: model: 'B' is another preset", "model: m"),
        ("[presets.a]\nmodel = 'B'\n[presets.b]\nseed = 1", "presets.a: model: 'B' is another preset", "leave out"),
        ("[presets.A]\nmodel = 'm'\n[presets.a]\nmodel = 'm'", "presets.a: differs from presets.A only in", None),
        ("[presets.'x.gguf']\nmodel = 'm'", "presets: 'x.gguf' is not a name of letters", None),
        ("[presets.'http://x']\nmodel = 'm'", "presets: 'http://x' is not a name of letters", None),
        ("[presets.'a b']\nmodel = 'm'", "presets: 'a b' is not a name of letters", None),
        ("[presets.'']\nmodel = 'm'", "presets: '' is not a name of letters", None),
        ("[presets.p]\nmodel = ", "not valid TOML", None),
    ],
)
def test_a_mistake_names_the_file_the_preset_and_the_key(own: Path, text: str, words: str, hint: str | None) -> None:
    own.write_text(text)
    with pytest.raises(UsageError) as caught:
        load_presets(raised)
    assert str(caught.value).startswith(f"catalogue: {own}: ")
    assert "not valid TOML" in words or ": line " in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert (hint or "") in (caught.value.hint or "")


def raised(error: UsageError) -> None:
    raise error


def test_a_broken_preset_leaves_the_others_usable(own: Path) -> None:
    own.write_text(
        '# mine\n[presets.good]\nmodel = "m"\n[presets.bad]\nmodel = 3\n[presets."x.gguf"]\nmodel = "m"\n'
        '[presets.A]\nseed = 1\n[presets.a]\nseed = 1\n[presets.both]\nmodel = "good"\n'
    )
    assert load_settings({"model": "good"}).model == "m"
    assert load_settings({"model": "x.gguf"}).model == "x.gguf"
    broken: list[UsageError] = []
    assert load_presets(broken.append).keys() == {"good"}
    assert [str(error).split(": ")[2] for error in broken] == ["line 4", "line 6", "line 10", "line 12"]
    for name in ("bad", "a", "BOTH"):
        with pytest.raises(UsageError, match=r"models\.toml: line \d+: presets\."):
            load_settings({"model": name})
    with pytest.warns(BrokenEntry, match=r"line 4: presets\.bad: .*; ignored"):
        load_presets()


def test_presets_that_are_not_a_table_are_refused_with_their_line(own: Path) -> None:
    own.write_text("# mine\npresets = 3\n")
    assert load_settings({"model": "m"}).model == "m"
    with pytest.raises(UsageError, match="line 2: presets: 3 is not a table"):
        load_presets(raised)


# --- Prompts, and presets without a model


def test_a_preset_may_have_a_prompt_with_variables(own: Path) -> None:
    own.write_text(
        '[presets.t]\nprompt = "In $language: $input$$"\nsystem = "As $who"\n[presets.t.defaults]\nlanguage = 3\n'
    )
    preset = load_presets()["t"]
    assert (preset.prompt, preset.params) == ("In $language: $input$$", ["language", "who"])
    assert preset.defaults == {"language": "3"}


def test_a_preset_without_a_prompt_has_no_variables(own: Path) -> None:
    own.write_text('[presets.t]\nmodel = "m"\nsystem = "$5 $a"\n')
    assert load_presets()["t"].params == []


def test_a_preset_without_a_model_uses_the_configured_one(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.write_text('[presets.t]\nprompt = "x"\nseed = 1\n[presets.m]\nmodel = "base"\nseed = 2\n')
    assert load_settings({"model": "t"}).model == Settings().model
    config = own.with_name("config.toml")
    config.write_text('model = "configured"\n')
    assert (load_settings({"model": "t"}).model, load_settings({"model": "t"}).seed) == ("configured", 1)
    assert load_presets()["t"].model == "configured"
    monkeypatch.setenv("LLMRUN_MODEL", "exported")
    assert load_settings({"model": "t"}).model == "exported"
    monkeypatch.setenv("LLMRUN_MODEL", "m")
    assert (load_settings({"model": "t"}).model, load_settings({"model": "t"}).seed) == ("base", 1)
    monkeypatch.setenv("LLMRUN_MODEL", "t")
    assert (load_settings().model, load_settings().seed) == (Settings().model, 1)


# --- The prompt templates of earlier versions


@pytest.fixture
def templates(own: Path) -> Path:
    folder = own.with_name("templates")
    folder.mkdir()
    return folder


def test_templates_of_earlier_versions_are_presets(own: Path, templates: Path) -> None:
    own.write_text('[presets.both]\nmodel = "own"\n')
    (templates / "my Commit.toml").write_text('\ufeffprompt = "$a $input"\nhide_thinking = true\n[defaults]\na = "b"\n')
    (templates / "pirate.toml").write_text('model = "m"\nsystem = "As $who"\ntop_k = 3\n')
    (templates / "both.toml").write_text('model = "old"\n')
    for name in ("c.txt", ".hidden.toml", "x.gguf.toml"):
        (templates / name).touch()
    found = load_presets()
    assert found.keys() == {"both", "my commit", "pirate"}
    assert found["both"].model == "own"
    commit = load_settings({"model": "MY commit"})
    assert commit.preset == found["my commit"]
    assert (found["my commit"].name, found["my commit"].defaults, commit.hide_thinking) == (
        "my Commit",
        {"a": "b"},
        True,
    )
    pirate = found["pirate"]
    assert (pirate.model, pirate.prompt, pirate.params, pirate.sampling) == ("m", "$input", ["who"], {"top_k": 3})


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("", "model: missing", "or add a prompt"),
        ("prompt = ", "not valid TOML: Invalid value", ""),
        ("a = " + "[" * 5000, "not valid TOML: ", ""),
        ("seed = " + "9" * 5000, "not valid TOML: Exceeds the limit", ""),
        ('promt = "x"', "promt: no such setting", "did you mean prompt?"),
        ('system = "$"', "system: line 1: '$' is not a variable", "write $$"),
        ('model = "Own"', "model: 'Own' is another preset", "name its model: m"),
        ("threads = 3", "threads: presets cannot set threads", "use a flag or config.toml"),
    ],
)
def test_a_mistake_in_a_template_concerns_only_its_own_name(
    own: Path, templates: Path, text: str, words: str, hint: str
) -> None:
    own.write_text('[presets.own]\nmodel = "m"\n')
    (templates / "t.toml").write_text(text)
    assert load_settings({"model": "own"}).model == "m"
    for load in (lambda: load_settings({"model": "t"}), lambda: load_presets(raised)):
        with pytest.raises(UsageError) as caught:
            load()
        assert str(caught.value).startswith(f"preset: {templates / 't.toml'}: ")
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
        assert hint in (caught.value.hint or "")


def test_files_that_are_not_templates_are_refused(templates: Path) -> None:
    (templates / "folder.toml").mkdir()
    with pytest.raises(UsageError, match=r"folder\.toml: not a file"):
        preset_named("folder")
    (templates / "zero.toml").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match=r"zero\.toml: not a file"):
        preset_named("zero")
    (templates / "large.toml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(UsageError, match=r"large\.toml: more than 1 MiB"):
        preset_named("large")
    (templates / "gone.toml").symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"gone\.toml: No such file"):
        preset_named("gone")


# --- Any file


def test_a_file_that_cannot_be_read_is_refused(own: Path) -> None:
    own.mkdir()
    with pytest.raises(UsageError, match=r"models\.toml: cannot be read: "):
        load_settings()


def test_commands_that_run_no_model_ignore_presets(own: Path) -> None:
    own.write_text("[presets.p]\nmodel = 3\n")
    assert load_sound_settings() == (Settings(), [])


_VALUES = st.one_of(st.booleans(), st.integers(), st.floats(), st.text(max_size=9))


@given(st.dictionaries(st.sampled_from(KEYS), _VALUES))
def test_any_values_are_a_preset_or_a_usage_error(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, object]
) -> None:
    def toml(value: object) -> str:
        text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
        return text.replace("\x7f", "\\u007f")  # TOML allows no DEL

    path = tmp_path_factory.mktemp("presets") / "models.toml"
    lines = [f"{key} = {toml(value)}\n" for key, value in table.items()]
    path.write_bytes("".join(["[presets.p]\n", *lines]).encode("utf-8"))
    found = read_presets(path, settings.checked_in_preset)
    assert len(found.valid) + len(found.broken) == 1
    if not found.valid:
        return
    preset = found.valid["p"]
    assert preset.model == table.get("model", "")
    assert preset.values.keys() == table.keys() & set(SETTINGS)
