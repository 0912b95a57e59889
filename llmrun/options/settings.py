"""Loads the user's settings from flags, the environment, config.toml and the defaults.

A flag takes precedence over the environment (`LLMRUN_THREADS`), which takes precedence over the preset that the user
names as the model, over `config.toml` (`threads = 4`) and over the default. Unknown names and invalid values are
errors, because a typo must not silently select the default. Commands that do not run a model only warn about such
mistakes. The defaults of the sampling parameters come from the model's file and from the catalogue.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from llmrun.backends.base import (
    AUTO,
    MOST_DEVICES,
    RPC_OFF,
    RPC_SERVERS,
    SPLIT_MODES,
    TENSOR_SPLIT,
    TRAINED_CONTEXT,
)
from llmrun.backends.registry import CHOICES, HIDDEN_CHOICES
from llmrun.base.errors import BadGGUF, UsageError, shown, warn_of_broken_entry
from llmrun.base.folders import config_file, own_models_file, templates_folder
from llmrun.base.sampling_texts import ListOfTexts
from llmrun.formats.layouts.kv import KV_TYPE
from llmrun.options.presets import KEYS as PRESET_KEYS
from llmrun.options.presets import SETTINGS as PRESET_SETTINGS
from llmrun.options.presets import (
    THINKING,
    Preset,
    Presets,
    Refuse,
    is_preset_name,
    read_presets,
    read_template,
    read_toml,
    template_files,
)
from llmrun.options.sampling_params import SAMPLING, SamplingParameter, SamplingParams

PREFIX = "LLMRUN_"

# These values of `speculate` are not names of draft models.
SPECULATE_AUTO, SPECULATE_OFF = "auto", "off"

MMPROJ_OFF = "off"  # this value of `mmproj` is not a file

# Environment variables that are not settings: folders, an API key and switches for a single run.
NOT_SETTINGS = frozenset(
    {
        "LLMRUN_API_KEY",
        "LLMRUN_CACHE_DIR",
        "LLMRUN_CONFIG",
        "LLMRUN_CPU_LEVEL",
        "LLMRUN_DATA_DIR",
        "LLMRUN_DEBUG",
        "LLMRUN_TEST_CACHE",
    }
)

# Other names for our settings, used by our flags, Ollama, llama.cpp, vLLM or Transformers.
NAMES_ELSEWHERE = {
    **dict.fromkeys(("c", "ctx", "context", "context_size", "context_length", "n_ctx", "num_ctx"), "ctx_size"),
    **dict.fromkeys(("max_model_len", "max_context"), "ctx_size"),
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_length", "max_output_tokens"), "max_tokens"),
    **dict.fromkeys(("n_threads", "num_thread", "num_threads", "cpu_threads"), "threads"),
    **dict.fromkeys(("ngl", "n_gpu_layers", "num_gpu", "gpu", "offload_layers"), "gpu_layers"),
    **dict.fromkeys(("rpc_server", "rpc_servers"), "rpc"),
    "sm": "split_mode",
    "mg": "main_gpu",
    "ts": "tensor_split",
    **dict.fromkeys(("cache_type", "cache_type_k", "cache_type_v", "kv_cache_type", "kv_cache_dtype"), "kv_type"),
    **dict.fromkeys(("repetition_penalty", "penalty_repeat"), "repeat_penalty"),
    **dict.fromkeys(("sampler_seq", "sampling_seq", "sampler_order"), "samplers"),
    **dict.fromkeys(("system_prompt", "system_message"), "system"),
    **dict.fromkeys(("thinking", "enable_thinking", "reasoning"), "think"),
    **dict.fromkeys(("reasoning_budget", "thinking_budget"), "think_budget"),
    **dict.fromkeys(("model_name", "default_model", "base_model", "from"), "model"),
    **dict.fromkeys(("chat_template_kwargs", "template_variables", "template_kwargs"), "variables"),
    **dict.fromkeys(("speculation", "draft", "draft_model", "model_draft", "assistant_model"), "speculate"),
    **dict.fromkeys(("hide_think", "hidethinking"), "hide_thinking"),
    **dict.fromkeys(("mm", "mmproj_file", "projector", "vision"), "mmproj"),
    **dict.fromkeys(("keepalive", "ttl", "idle_timeout"), "keep_alive"),
    **dict.fromkeys(("colour", "colors"), "color"),
}


def _parse_keep_alive(text: str) -> tuple[str]:
    from llmrun.base.amounts import parse_duration  # most commands check no duration

    parse_duration(text)
    return (text,)


KEEP_ALIVE = ListOfTexts(
    _parse_keep_alive,
    "a duration such as 5m or 1h, 0 to keep nothing loaded, or -1 for no limit",
    lambda text: "write for example 5m, 90s or 1h30m",
)

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def _number(bound: float) -> str:
    """Format a bound. Integers are written in full because the largest seed, 2**64 - 1, would lose digits otherwise."""
    return f"{bound}" if isinstance(bound, int) else f"{bound:g}"


@dataclass(frozen=True, slots=True)
class Rule:
    """The valid values of a setting.

    kind        int, float, bool or str
    minimum     the smallest valid number
    maximum     the largest valid number
    choices     the valid strings; () if any string is valid
    texts       the texts that a valid string lists; None if the string is not a list
    or_integer  whether integers within the bounds are valid in addition to the choices
    hidden      valid choices that help texts and messages do not mention
    also        other valid numbers, as in llama.cpp, such as -1, and the values that they stand for
    meaning     a description of the numbers in `also` for error messages; "" leaves them out
    hint        advice for a user who entered an invalid value
    """

    kind: type
    minimum: float = -math.inf
    maximum: float = math.inf
    choices: tuple[str, ...] = ()
    or_integer: bool = False
    hidden: tuple[str, ...] = ()
    also: Mapping[float, object] = field(default_factory=dict)
    meaning: str = ""
    hint: str = ""
    texts: ListOfTexts | None = None

    @property
    def words(self) -> str:
        """A description of the valid values for error messages: "an integer of at least 1"."""
        if self.texts is not None:
            return self.texts.words
        if self.or_integer:
            return f"{', '.join(self.choices)} or an integer from {_number(self.minimum)} to {_number(self.maximum)}"
        if self.choices:
            return "one of " + ", ".join(self.choices)
        name = {int: "an integer", float: "a number", bool: "true or false", str: "text"}[self.kind]
        if self.minimum > -math.inf and self.maximum < math.inf:
            name = f"{name} from {_number(self.minimum)} to {_number(self.maximum)}"
        elif self.minimum > -math.inf:
            name = f"{name} of at least {_number(self.minimum)}"
        return f"{name}, or {self.meaning}" if self.meaning else name

    def parse(self, text: str) -> object:
        """Parse the text of an environment variable. Raises ValueError for invalid text."""
        if self.kind is bool:
            word = text.strip().lower()
            if word not in _TRUE | _FALSE:
                raise ValueError(text)
            return word in _TRUE
        return self.kind(text)

    def check(self, value: object) -> object:
        """Check a value and return it in llmrun's notation and the exact type. Raises ValueError for invalid values."""
        if self.or_integer and isinstance(value, str) and value.removeprefix("-").isdecimal():
            value = int(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and value in self.also:
            return self.also[value]
        if self.or_integer and type(value) is int and self.minimum <= value <= self.maximum:
            return value
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            raise ValueError(value)
        if isinstance(value, int | float) and not self.minimum <= value <= self.maximum:
            raise ValueError(value)  # NaN is also rejected here, because it is outside any bounds
        if self.choices and value not in self.choices + self.hidden:
            raise ValueError(value)
        if value == "":
            raise ValueError(value)
        if self.texts is not None and isinstance(value, str):
            self.texts.parse(value)
        return value

    def advice(self, value: object) -> str:
        """Return advice for a user who entered this invalid value, or an empty string."""
        return self.texts.advice(value) if self.texts is not None and isinstance(value, str) else self.hint


_UNLIMITED = -1  # llama.cpp and Ollama use the same value
_RANDOM = -1  # a random seed, as in llama.cpp
_ALL_CORES = "0 for one thread per core"
_TRAINED = f"{TRAINED_CONTEXT} for the model's trained context"
_SPECULATE = "use auto, off or the name of a draft model"
_NO_LIMIT = f"{_UNLIMITED} lets the model write until it stops, which is the default"


def _setting(default: object, kind: type, **rule: Any) -> Any:
    return field(default=default, metadata={"rule": Rule(kind, **rule)})


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run. None selects a default that depends on the model or the machine.

    If the user names a preset, `model` is the preset's model.
    """

    model: str = _setting("smollm2:135m", str)
    backend: str = _setting(AUTO, str, choices=CHOICES, hidden=HIDDEN_CHOICES)
    threads: int | None = _setting(None, int, minimum=1, maximum=1024, also={0: None, -1: None}, meaning=_ALL_CORES)
    gpu_layers: int | str = _setting(
        "auto", str, choices=("auto", "all"), or_integer=True, minimum=0, maximum=65536, also={-1: "auto"}
    )
    tensor_split: str | None = _setting(None, str, texts=TENSOR_SPLIT)  # the proportion of the layers on each device
    split_mode: str = _setting("layer", str, choices=SPLIT_MODES)
    main_gpu: int | None = _setting(None, int, minimum=0, maximum=MOST_DEVICES - 1)  # effective if split_mode is "none"
    rpc: str | None = _setting(None, str, texts=RPC_SERVERS)  # llama.cpp's RPC servers, or off
    rpc_anyway: bool = _setting(False, bool)  # whether RPC servers may have public addresses
    ctx_size: int | None = _setting(None, int, minimum=1, also={TRAINED_CONTEXT: TRAINED_CONTEXT}, meaning=_TRAINED)
    kv_type: str | None = _setting(None, str, texts=KV_TYPE)  # precision of the KV cache
    speculate: str | None = _setting(None, str, hint=_SPECULATE)  # auto, off or the name of a draft model
    mmproj: str | None = _setting(None, str)  # the file of the projector, or off; None looks for it next to the model
    image_min_tokens: int | None = _setting(None, int, minimum=1)
    image_max_tokens: int | None = _setting(None, int, minimum=1)
    max_tokens: int | None = _setting(
        None, int, minimum=1, also={_UNLIMITED: _UNLIMITED}, meaning=f"{_UNLIMITED} for no limit", hint=_NO_LIMIT
    )
    system: str | None = _setting(None, str)  # the system prompt
    sampling: Mapping[str, Any] = field(default_factory=dict)  # keyed by the names in SAMPLING
    seed: int | None = _setting(
        None, int, minimum=0, maximum=2**64 - 1, also={_RANDOM: _RANDOM}, meaning=f"{_RANDOM} for a random seed"
    )
    think: bool | None = _setting(None, bool)  # None selects the model's default
    think_budget: int | None = _setting(None, int, minimum=0)  # tokens
    hide_thinking: bool = _setting(False, bool)
    tool_text: str = _setting("auto", str, choices=("auto", "off"))  # "off" does not treat plain JSON as tool calls
    save_state: bool = _setting(True, bool)  # whether chats save their state
    state_gb: float = _setting(4.0, float, minimum=0, maximum=1e6)  # the maximum size of all saved states
    on_full: str = _setting("stop", str, choices=("stop", "forget"))  # the action when the context is full
    stream: bool = _setting(True, bool)  # whether to show an answer while it is being generated
    stats: bool = _setting(False, bool)  # whether `generate` and `chat` show detailed statistics after an answer
    color: str = _setting("auto", str, choices=("auto", "always", "never"))
    offline: bool = _setting(False, bool)
    warm: bool = _setting(True, bool)  # whether `generate` and `chat` may use background engines
    keep_alive: str | None = _setting(None, str, texts=KEEP_ALIVE)  # how long a background engine stays
    log: bool = _setting(False, bool)  # whether `generate` logs its answers
    prefix_log: bool = _setting(True, bool)  # whether `serve` records why prompts were not reused
    quiet: bool = _setting(False, bool)
    preset: Preset | None = None  # the preset whose settings are included; this is not a setting of its own
    loras: tuple[str, ...] = ()  # the adapters of --lora, which replace the preset's adapters

    @property
    def variables(self) -> Mapping[str, Any]:
        """The preset's variables for the chat template."""
        return {} if self.preset is None else self.preset.variables

    @property
    def text_calls(self) -> bool:
        """True if an answer that consists only of tool calls in plain JSON is treated as calls."""
        return self.tool_text != "off"

    @property
    def token_limit(self) -> int | None:
        """The maximum length of an answer in tokens, or None for no limit."""
        return None if self.max_tokens == _UNLIMITED else self.max_tokens

    @property
    def fixed_seed(self) -> int | None:
        """The seed of the answers, or None for a random seed."""
        return None if self.seed == _RANDOM else self.seed

    @property
    def adapters(self) -> tuple[str, ...]:
        """The LoRA adapters, each in the notation of --lora: those of --lora, or else the preset's."""
        return self.loras or (() if self.preset is None else tuple(self.preset.loras))

    @property
    def keep_alive_s(self) -> float | None:
        """Seconds for which a background engine stays after an answer, infinite for no limit, or None if not set."""
        from llmrun.base.amounts import parse_duration

        return None if self.keep_alive is None else parse_duration(self.keep_alive)

    @property
    def state_bytes(self) -> int:
        """The maximum size of all saved states in bytes."""
        return int(self.state_gb * 1e9)

    @property
    def rpc_servers(self) -> str:
        """The list of RPC servers, or "" if there are none."""
        return "" if self.rpc in (None, RPC_OFF) else str(self.rpc)

    @property
    def wants_speculation(self) -> bool | None:
        """True to speculate, False not to, or None to leave the choice to the backend."""
        return None if self.speculate is None else self.speculate != SPECULATE_OFF

    @property
    def draft_model(self) -> str | None:
        """The name of the draft model, or None."""
        return None if self.speculate in (None, SPECULATE_AUTO, SPECULATE_OFF) else self.speculate


def _rules() -> Iterator[tuple[str, Rule]]:
    for setting in fields(Settings):
        if setting.name == "sampling":
            for name, parameter in SAMPLING.items():
                also = {} if parameter.as_minimum is None else {parameter.as_minimum: parameter.kind(parameter.minimum)}
                yield (
                    name,
                    Rule(parameter.kind, parameter.minimum, parameter.maximum, also=also, texts=parameter.texts),
                )
        elif setting.name not in ("preset", "loras"):
            yield setting.name, setting.metadata["rule"]


RULES: Mapping[str, Rule] = dict(_rules())


def with_values(settings: Settings, values: Mapping[str, Any]) -> Settings:
    """Return a copy of the settings with some values replaced. `values` maps names in RULES to validated values."""
    sampling = {name: value for name, value in values.items() if name in SAMPLING}
    others = {name: value for name, value in values.items() if name not in SAMPLING}
    return replace(settings, **others, sampling={**settings.sampling, **sampling})


def load_settings(flags: Mapping[str, object] | None = None) -> Settings:
    """Return the settings of this run: from flags, the environment, a preset, config.toml and defaults.

    Earlier sources take precedence. A preset applies if the resulting `model` names that preset.

    Raises UsageError, which names the file or variable, the key, the invalid value and the valid values.

    flags  maps each setting to the value of its flag, or to None if the flag was not given
    """
    config, stronger = _configured(_raise), _overriding(flags, _raise)
    settings = with_values(Settings(), config | stronger)
    preset = preset_named(settings.model)
    if preset is None:
        return settings
    own = dict(preset.values)
    if stronger.keys() & set(THINKING):  # the two thinking settings depend on each other
        own = {key: value for key, value in own.items() if key not in THINKING}
    return replace(with_values(Settings(), config | own | stronger | {"model": preset.model}), preset=preset)


def load_sound_settings(flags: Mapping[str, object] | None = None) -> tuple[Settings, list[UsageError]]:
    """Return the valid settings, and an error for each invalid setting in the environment or config.toml.

    Commands that do not run a model use this function, so presets do not apply. Raises UsageError for an invalid flag.
    """
    wrong: list[UsageError] = []
    values = _configured(wrong.append) | _overriding(flags, wrong.append)
    return with_values(Settings(), values), wrong


def load_presets(refuse: Refuse = warn_of_broken_entry) -> Mapping[str, Preset]:
    """Return the user's valid presets, keyed by their names in lower case.

    A preset in models.toml takes precedence over a template file with the same name.

    refuse  called with the error for each invalid preset
    Raises UsageError if models.toml cannot be read or is not valid TOML.
    """
    own = own_presets()
    for error in own.broken.values():
        refuse(error)
    found = dict(own.valid)
    for name, path in template_files(templates_folder()).items():
        if name not in own.valid and name not in own.broken:
            try:
                found[name] = read_template(path, checked_in_preset, own.valid)
            except UsageError as error:
                refuse(error)
    return {name: _completed(preset) for name, preset in found.items()}


def preset_named(name: str) -> Preset | None:
    """Return the preset with this name, or None. Raises UsageError if the preset is invalid.

    Raises UsageError, too, if models.toml cannot be read or is not valid TOML.
    """
    preset = _preset_named(name)
    return None if preset is None else _completed(preset)


def own_presets() -> Presets:
    """Return the presets in the user's models.toml. Raises UsageError for an unreadable file and for invalid TOML."""
    return read_presets(own_models_file(), checked_in_preset)


def _preset_named(name: str) -> Preset | None:
    own = own_presets()
    if (preset := own.valid.get(name.lower())) is not None:
        return preset
    # A URL or a .gguf file is never a preset, even if a preset has this invalid name.
    if (error := own.broken.get(name.lower())) is not None and is_preset_name(name):
        raise error
    file = template_files(templates_folder()).get(name.lower())
    return None if file is None else read_template(file, checked_in_preset, own.valid)


def _completed(preset: Preset) -> Preset:
    """Return the preset with a model: its own, or else the model in the environment, config.toml or the defaults."""
    if preset.model:
        return preset
    model = load_sound_settings()[0].model
    other = _preset_named(model)
    return structs.replace(preset, model=model if other is None else other.model or Settings().model)


def model_named(name: str) -> str:
    """Return the name of the model of the preset `name`, or `name` if there is no such preset. Raises UsageError."""
    preset = preset_named(name)
    return name if preset is None else preset.model


def with_model(settings: Settings, name: str) -> Settings:
    """Return the settings for opening another model or a preset's model. The settings for answers do not change.

    Raises the errors of `preset_named`.
    """
    preset = preset_named(name)
    return replace(settings, model=name if preset is None else preset.model, preset=preset)


def _configured(refuse: Refuse) -> dict[str, Any]:
    return dict(_from_config(config_file(), refuse))


def _overriding(flags: Mapping[str, object] | None, refuse: Refuse) -> dict[str, Any]:
    values = dict(_from_environment(os.environ, refuse))
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = _checked(RULES[name], value, "flag", _flag(name))
    return values


def _raise(error: UsageError) -> None:
    raise error


def is_set(name: str) -> bool:
    """Return whether the environment or config.toml contains a setting. Raises the same errors as `load_settings`."""
    return name in dict(_from_config(config_file(), _raise)) | dict(_from_environment(os.environ, _raise))


def _flag(name: str) -> str:
    return SAMPLING[name].flags[0] if name in SAMPLING else "--" + name.replace("_", "-")


def _from_config(path: Path, refuse: Refuse) -> Iterator[tuple[str, Any]]:
    try:
        table = _table_in(path)
    except UsageError as error:
        refuse(error)
        return
    for name, value in table.items():
        try:
            if name not in RULES:
                raise _unknown(f"config: {path}", name, value)
            yield name, _checked(RULES[name], value, f"config: {path}", name)
        except UsageError as error:
            refuse(error)


def _table_in(path: Path) -> dict[str, Any]:
    try:
        return read_toml(path, "config")
    except (FileNotFoundError, NotADirectoryError):
        if os.environ.get("LLMRUN_CONFIG"):
            raise UsageError(f"config: {path}: no such file", hint="unset LLMRUN_CONFIG") from None
        return {}


def _from_environment(environment: Mapping[str, str], refuse: Refuse) -> Iterator[tuple[str, Any]]:
    for variable in sorted(environment):
        text = environment[variable]
        if not variable.startswith(PREFIX) or variable in NOT_SETTINGS or not text:
            continue
        name = variable.removeprefix(PREFIX).lower()
        try:
            if name not in RULES:
                raise _unknown("environment", variable)
            yield name, _checked(RULES[name], _parsed(RULES[name], text), "environment", variable)
        except UsageError as error:
            refuse(error)


def _parsed(rule: Rule, text: str) -> object:
    """Parse the text of a variable. Returns invalid text unchanged so that `_checked` can report it."""
    try:
        return rule.parse(text)
    except ValueError:
        return text


def _checked(rule: Rule, value: object, where: str, name: str) -> object:
    try:
        return rule.check(value)
    except ValueError:
        raise UsageError(f"{where}: {name}: {value!r} is not {rule.words}", hint=rule.advice(value)) from None


def checked_in_preset(where: str, name: str, value: object) -> object:
    """Return the checked value of a setting in a preset. Raises UsageError."""
    if name in PRESET_SETTINGS:
        return _checked(RULES[name], value, where, name)
    if (meant := NAMES_ELSEWHERE.get(name, name)) in RULES.keys() - set(PRESET_SETTINGS):
        raise UsageError(f"{where}: {name}: presets cannot set {meant}", hint="use a flag or config.toml")
    raise _unknown(where, name, value, known=PRESET_KEYS)


def _unknown(where: str, name: str, value: object = None, known: Collection[str] = tuple(RULES)) -> UsageError:
    """Return the error for an unknown setting. `name` is an environment variable or a key in a TOML file."""
    if isinstance(value, dict):
        hint = f"settings have no tables: write the keys without the heading [{name}]"
    else:
        prefix = PREFIX if name.startswith(PREFIX) else ""
        meant = _meant(name.removeprefix(prefix).lower().replace("-", "_"), known)
        spelled = f"{prefix}{meant.upper()}" if prefix else meant
        hint = f"did you mean {spelled}?" if meant else "known: " + ", ".join(known)
    return UsageError(f"{where}: {name}: no such setting", hint=hint)


def _meant(name: str, known: Collection[str]) -> str:
    """Return the key that a misspelled name, a flag or another program's name refers to, or "" if no key is similar."""
    import difflib

    flags = {flag.lstrip("-").replace("-", "_"): key for key, declared in SAMPLING.items() for flag in declared.flags}
    meanings = {key: key for key in known} | flags | NAMES_ELSEWHERE
    near = difflib.get_close_matches(name, [word for word, key in meanings.items() if key in known], n=1)
    return meanings[near[0]] if near else ""


def default_sampling(metadata: Mapping[str, Any], catalogue: Mapping[str, float | str] | None = None) -> SamplingParams:
    """Return a model's default sampling parameters.

    metadata   the GGUF file's metadata; its `general.sampling.*` values take precedence
    catalogue  maps fields of SamplingParams to values from models.toml

    The seed is always 0. Raises BadGGUF if a `general.sampling.*` value has the wrong type or is out of range.
    """
    chosen: dict[str, Any] = dict(catalogue or {})
    for name, parameter in SAMPLING.items():
        key = parameter.gguf_key
        if key is None or key not in metadata:
            continue
        try:
            chosen[name] = RULES[name].check(_converted(metadata[key], key, parameter))
        except (ValueError, OverflowError) as error:
            raise BadGGUF(f"sampling default out of range: {key}: {shown(str(metadata[key]))}") from error
    return SamplingParams(**chosen)


def _converted(value: object, key: str, parameter: SamplingParameter) -> object:
    """Convert a value in a file to the parameter's type. Raises BadGGUF for a value of the wrong type."""
    if parameter.kind is str:
        if not isinstance(value, str):
            raise BadGGUF(f"sampling default is not text: {key}: {value!r:.40}")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadGGUF(f"sampling default is not a number: {key}: {value!r:.40}")
    # Clamp integers to the minimum, because vLLM disables top-k with -1, whereas llmrun uses 0.
    return max(int(value), int(parameter.minimum)) if parameter.kind is int else float(value)
