"""Tests that flags win over the environment, config.toml and defaults, in that order, and that wrong values fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmrun.base.errors import UsageError
from llmrun.base.folders import cache_folder, config_file, data_folder
from llmrun.options import presets, settings
from llmrun.options.settings import Settings, is_set, load_settings, load_sound_settings


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set up an empty config.toml for this process, without any other settings from outside."""
    import os

    for name in [name for name in os.environ if name.startswith("LLMRUN_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "config.toml"
    path.write_text("")
    monkeypatch.setenv("LLMRUN_CONFIG", str(path))
    return path


def test_nothing_said_gives_the_defaults() -> None:
    assert load_settings() == Settings()
    assert Settings().model == "smollm2:135m"
    assert Settings().threads is None


def test_precedence_is_flag_environment_config_default(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("threads = 1\nctx_size = 100\ntemperature = 0.1\n")
    monkeypatch.setenv("LLMRUN_CTX_SIZE", "200")
    monkeypatch.setenv("LLMRUN_TEMPERATURE", "0.2")
    got = load_settings({"temperature": 0.3, "top_k": None})
    assert (got.threads, got.ctx_size, got.sampling) == (1, 200, {"temperature": 0.3})


def test_what_is_set_is_told_apart_from_a_default(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_set("model")
    config.write_text(f'model = "{Settings().model}"\n')
    assert is_set("model")
    config.write_text("")
    monkeypatch.setenv("LLMRUN_MODEL", Settings().model)
    assert is_set("model")


def test_config_may_have_a_byte_order_mark_but_not_be_utf_16(config: Path) -> None:
    config.write_text("threads = 3\n", "utf-8-sig")
    assert load_settings().threads == 3
    config.write_text("threads = 3\n", "utf-16")
    with pytest.raises(UsageError, match=r"config\.toml: not UTF-8, but UTF-16"):
        load_settings()


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_MODEL", "")
    assert load_settings().model == "smollm2:135m"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("threads = -2", "threads: -2 is not an integer from 1 to 1024, or 0 for one thread per core"),
        ("threads = 2.0", "threads: 2.0 is not an integer"),
        ("threads = true", "threads: True is not an integer"),
        ("threads = '4'", "threads: '4' is not an integer"),
        ("temperature = nan", "temperature: nan is not a number from 0 to 100"),
        ("temperature = inf", "temperature: inf is not a number"),
        ("top_p = 1.5", "top_p: 1.5 is not a number from 0 to 1"),
        ("model = ''", "model: '' is not text"),
        ("model = ['a']", "model: ['a'] is not text"),
        ("backend = 'abacus'", "backend: 'abacus' is not one of auto, cpu, llama"),
        ("kv_type = 'q5_0'", "kv_type: 'q5_0' is not f16, q8_0, q4_0, or a pair for keys and values, as in q8_0:q4_0"),
        ("gpu_layers = 'half'", "gpu_layers: 'half' is not auto, all or an integer from 0 to 65536"),
        ("gpu_layers = -2", "gpu_layers: -2 is not auto, all or an integer from 0 to 65536"),
        ("gpu_layers = 2.0", "gpu_layers: 2.0 is not auto, all or an integer"),
        ("gpu_layers = true", "gpu_layers: True is not auto, all or an integer"),
        ("gpu_layers = '70000'", "gpu_layers: '70000' is not auto"),
        ("mmproj = ''", "mmproj: '' is not text"),
        ("image_max_tokens = 0", "image_max_tokens: 0 is not an integer of at least 1"),
        ("image_min_tokens = 1.5", "image_min_tokens: 1.5 is not an integer of at least 1"),
        ("color = 'mauve'", "color: 'mauve' is not one of auto, always, never"),
        ("speculate = false", "speculate: False is not text"),
        ("offline = 1", "offline: 1 is not true or false"),
        ("thread = 4", "thread: no such setting"),
        ("[sampling]\ntop_k = 4", "sampling: no such setting"),
        ("threads = ", "not valid TOML"),
        ("a = " + "[" * 3000, "not valid TOML"),
    ],
)
def test_a_wrong_line_is_refused_with_file_key_and_value(config: Path, line: str, said: str) -> None:
    config.write_text(line)
    with pytest.raises(UsageError) as caught:
        load_settings()
    assert str(config) in str(caught.value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("LLMRUN_THREADS", "many", "LLMRUN_THREADS: 'many' is not an integer from 1 to 1024"),
        ("LLMRUN_THREADS", "-2", "LLMRUN_THREADS: -2 is not an integer from 1 to 1024, or 0 for one thread per core"),
        (
            "LLMRUN_SEED",
            "-2",
            "LLMRUN_SEED: -2 is not an integer from 0 to 18446744073709551615, or -1 for a random seed",
        ),
        ("LLMRUN_OFFLINE", "maybe", "LLMRUN_OFFLINE: 'maybe' is not true or false"),
        ("LLMRUN_GPU_LAYERS", "-2", "LLMRUN_GPU_LAYERS: '-2' is not auto, all or an integer from 0 to 65536"),
        ("LLMRUN_BACKEND", "gpu", "LLMRUN_BACKEND: 'gpu' is not one of auto, cpu, llama"),
        ("LLMRUN_MIN_P", "nan", "LLMRUN_MIN_P: nan is not a number from 0 to 1"),
        ("LLMRUN_THREDS", "4", "LLMRUN_THREDS: no such setting"),
    ],
)
def test_a_wrong_variable_is_refused_with_its_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, said: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(UsageError) as caught:
        load_settings()
    assert said in str(caught.value)


def test_a_misspelt_setting_gets_a_suggestion(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("thread = 4")
    with pytest.raises(UsageError) as caught:
        load_settings()
    assert caught.value.hint == "did you mean threads?"
    config.write_text("")
    monkeypatch.setenv("LLMRUN_THREDS", "4")
    with pytest.raises(UsageError) as caught:
        load_settings()
    assert caught.value.hint == "did you mean LLMRUN_THREADS?"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temp", "temperature"),
        ("temprature", "temperature"),
        ("num_ctx", "ctx_size"),
        ("n_ctx", "ctx_size"),
        ("ctx-size", "ctx_size"),
        ("CTX_SIZE", "ctx_size"),
        ("n_predict", "max_tokens"),
        ("num_predict", "max_tokens"),
        ("repetition_penalty", "repeat_penalty"),
        ("n_gpu_layers", "gpu_layers"),
        ("num_thread", "threads"),
    ],
)
def test_the_name_of_a_flag_or_of_another_program_gets_ours(
    config: Path, monkeypatch: pytest.MonkeyPatch, name: str, meant: str
) -> None:
    config.write_text(f"{name} = 1")
    with pytest.raises(UsageError) as caught:
        load_settings()
    assert caught.value.hint == f"did you mean {meant}?"
    if name == name.lower() and "-" not in name:
        config.write_text("")
        monkeypatch.setenv("LLMRUN_" + name.upper(), "1")
        with pytest.raises(UsageError) as caught:
            load_settings()
        assert caught.value.hint == f"did you mean LLMRUN_{meant.upper()}?"


def test_a_name_like_none_gets_all_and_a_table_gets_told_that_there_are_none(config: Path) -> None:
    config.write_text("zzzz = 1")
    with pytest.raises(UsageError) as caught:
        load_settings()
    assert caught.value.hint.startswith("known: model, backend, threads")
    config.write_text("[sampling]\ntop_k = 4")
    with pytest.raises(UsageError) as caught:
        load_settings()
    assert caught.value.hint == "settings have no tables: write the keys without the heading [sampling]"


def test_names_of_other_programs_mean_settings_that_exist() -> None:
    known = {*settings.RULES, *presets.KEYS}
    assert set(settings.NAMES_ELSEWHERE.values()) <= known
    assert not set(settings.NAMES_ELSEWHERE) & known


def test_sound_settings_remain_beside_wrong_ones(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text("temp = 1\nthreads = -2\nctx_size = 100")
    monkeypatch.setenv("LLMRUN_SEED", "-2")
    monkeypatch.setenv("LLMRUN_TOP_K", "5")
    found, wrong = load_sound_settings({"quiet": True})
    assert (found.threads, found.ctx_size, found.seed, found.quiet) == (None, 100, None, True)
    assert found.sampling == {"top_k": 5}
    assert [str(error).rsplit(": ", 2)[-2] for error in wrong] == ["temp", "threads", "LLMRUN_SEED"]
    with pytest.raises(UsageError, match="flag: --threads: -2"):
        load_sound_settings({"threads": -2})
    config.write_text("[[[")
    found, wrong = load_sound_settings()
    assert found.ctx_size is None
    assert "not valid TOML" in str(wrong[0])


@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("off", False), ("FALSE", False)])
def test_a_switch_reads_the_usual_words(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("LLMRUN_OFFLINE", text)
    assert load_settings().offline is value


def test_a_whole_number_may_stand_for_a_fraction(config: Path) -> None:
    config.write_text("temperature = 1")
    assert load_settings().sampling["temperature"] == 1.0
    assert isinstance(load_settings().sampling["temperature"], float)


@pytest.mark.parametrize(
    ("written", "value"), [("20", 20), ("'20'", 20), ("0", 0), ("65536", 65536), ("'auto'", "auto"), ("'all'", "all")]
)
def test_layers_for_a_gpu_are_a_number_or_a_word(
    config: Path, monkeypatch: pytest.MonkeyPatch, written: str, value: int | str
) -> None:
    config.write_text(f"gpu_layers = {written}")
    assert load_settings().gpu_layers == value
    config.write_text("")
    monkeypatch.setenv("LLMRUN_GPU_LAYERS", written.strip("'"))
    assert load_settings().gpu_layers == value
    assert load_settings({"gpu_layers": "7"}).gpu_layers == 7


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seed", "-1", -1),
        ("threads", "-1", None),
        ("threads", "0", None),
        ("gpu_layers", "-1", "auto"),
        ("gpu_layers", "all", "all"),
        ("ctx_size", "0", 0),
        ("max_tokens", "-1", -1),
        ("temperature", "-1", 0.0),
        ("top_k", "-1", 0),
        ("repeat_last_n", "-1", -1),
        ("dry_penalty_last_n", "-1", -1),
        ("top_n_sigma", "-1", -1.0),
    ],
)
def test_the_numbers_of_llama_cpp_mean_the_same(
    config: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, value: object
) -> None:
    """The flag is stronger than the file, even if its value stands for the default."""
    number = text if name == "gpu_layers" else float(text) if name in ("temperature", "top_n_sigma") else int(text)
    weaker = {"gpu_layers": "20", "top_n_sigma": "1.5", "temperature": "0.5"}.get(name, "7")

    def found(flags: dict[str, object]) -> object:
        loaded = load_settings(flags)
        return loaded.sampling[name] if name in loaded.sampling else getattr(loaded, name)

    config.write_text(f"{name} = {repr(text) if text == 'all' else text}")
    assert found({}) == value
    config.write_text(f"{name} = {weaker}")
    assert found({name: number}) == value
    monkeypatch.setenv(f"LLMRUN_{name.upper()}", text)
    assert found({}) == value


def test_a_random_seed_replaces_a_fixed_one(config: Path) -> None:
    config.write_text("seed = 5")
    assert load_settings().fixed_seed == 5
    assert load_settings({"seed": -1}).fixed_seed is None


@pytest.mark.parametrize("name", ["auto", "cpu", "llama", "scripted"])
def test_a_backend_is_known_by_name(config: Path, name: str) -> None:
    config.write_text(f"backend = '{name}'")
    assert load_settings().backend == name


def test_a_named_config_file_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_CONFIG", str(tmp_path / "elsewhere.toml"))
    with pytest.raises(UsageError, match=r"elsewhere\.toml: no such file"):
        load_settings()


def test_the_usual_config_file_need_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMRUN_CONFIG")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert load_settings() == Settings()


def test_a_folder_in_place_of_the_config_file_is_one_sentence(config: Path, tmp_path: Path) -> None:
    config.unlink()
    config.mkdir()
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        load_settings()


def test_bytes_that_are_not_text_are_one_sentence(config: Path) -> None:
    config.write_bytes(b"model = '\xff'")
    with pytest.raises(UsageError, match=r"not UTF-8: byte 0xff at offset 9$"):
        load_settings()


@given(st.dictionaries(st.sampled_from(["threads", "model", "top_p", "offline"]), st.text(max_size=6)))
def test_any_text_in_a_flag_is_a_value_or_a_usage_error(flags: dict[str, object]) -> None:
    if set(flags) <= {"model"} and flags.get("model") != "":
        assert load_settings(flags).model == flags.get("model", "smollm2:135m")
    else:
        with pytest.raises(UsageError, match=r"^flag: --"):
            load_settings(flags)


def test_folders_follow_their_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_CACHE_DIR", str(tmp_path / "c"))
    monkeypatch.setenv("LLMRUN_DATA_DIR", "~/d")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("kernels") == tmp_path / "c" / "kernels"
    assert data_folder("models") == tmp_path / "d" / "models"
    assert not cache_folder("kernels").parent.exists()


def test_without_variables_the_folders_are_the_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMRUN_CONFIG")
    for folder in (cache_folder("kernels"), data_folder("models"), config_file()):
        assert folder.is_absolute()
        assert "llmrun" in folder.parts
    assert cache_folder("kernels").parent != data_folder("models").parent


def test_a_home_that_does_not_exist_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMRUN_DATA_DIR", "~no-such-user-here/x")
    with pytest.raises(UsageError, match="LLMRUN_DATA_DIR: the home directory in '~no-such-user-here/x'"):
        data_folder("models")


@pytest.mark.parametrize(
    ("value", "wanted", "draft"),
    [(None, None, None), ("off", False, None), ("auto", True, None), ("smollm2:135m", True, "smollm2:135m")],
)
def test_speculate_names_a_draft_model_unless_it_is_a_word(
    value: str | None, wanted: bool | None, draft: str | None
) -> None:
    settings = Settings(speculate=value)
    assert (settings.wants_speculation, settings.draft_model) == (wanted, draft)
