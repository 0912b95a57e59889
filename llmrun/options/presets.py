"""Reads presets: a model, prompts, template variables and settings saved under a name.

    [presets.pirate]
    model = "qwen3:4b"
    system = "You are a pirate."
    temperature = 0.9
    variables = { style = "short" }
    lora = "pirate.gguf"

    [presets.translate]
    prompt = "Translate into $language: $input"
    defaults = { language = "English" }

Presets are tables in the user's models.toml. These tables are read separately from the catalogue because the settings
of every run depend on presets (see settings.py), but few runs need the catalogue. Each file NAME.toml in the folder
`templates` next to models.toml is a preset, too, because earlier versions stored prompt templates with nearly the same
keys in that folder. `read_toml` also reads config.toml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct, field
from msgspec.structs import replace

from llmrun.base.errors import UsageError, nearest
from llmrun.base.folders import decoded_text, read_user_file
from llmrun.options.sampling_params import SAMPLING


def read_toml(path: Path, role: str) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises FileNotFoundError or NotADirectoryError for a missing file, and UsageError for an unreadable or invalid file.

    role  the purpose of the file in error messages: "config" or "catalogue"
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise UsageError(f"{role}: {path}: cannot be read: {error.strerror}") from error
    return parse_toml(data, path, role)


def parse_toml(data: bytes, path: Path, role: str) -> dict[str, Any]:
    """Return the tables of a TOML file's data. Raises UsageError for invalid TOML and for data that is not UTF-8."""
    import tomllib  # importing tomllib takes 5 ms, and most runs do not need it

    text = decoded_text(data, f"{role}: {path}")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError means invalid TOML or too many digits
        raise UsageError(f"{role}: {path}: not valid TOML: {error}") from error


TABLE = "presets"  # the name of the table in models.toml
THINKING = ("think", "think_budget")
SETTINGS = ("system", *SAMPLING, "seed", "max_tokens", *THINKING, "hide_thinking")  # the settings of a preset
_MODEL, _PROMPT, _DEFAULTS, _VARIABLES, _LORA = "model", "prompt", "defaults", "variables", "lora"
_OWN = (_MODEL, _PROMPT, _DEFAULTS, _VARIABLES, _LORA)  # the keys that are not settings
KEYS = (_MODEL, _PROMPT, _DEFAULTS, _VARIABLES, *SETTINGS, _LORA)
INPUT = "input"  # the variable for the user's prompt
ONLY_INPUT = f"${INPUT}"  # a template that consists only of the user's prompt

# URLs and .gguf files are never presets, so they always keep their own meaning.
_NAME = re.compile(r"(?!.*://)(?!.*\.gguf\Z)[a-z0-9][a-z0-9._:/-]*", re.IGNORECASE)
_TEMPLATE_NAME = re.compile(r"(?!.*\.gguf\Z)\w[\w .-]{0,63}", re.IGNORECASE)  # matches template files
_NAME_RULE = "a name of letters, digits, . _ - : and /, which is neither a URL nor a .gguf file"

Refuse = Callable[[UsageError], None]  # called with the error for an invalid setting or entry; may raise this error

# Checks a setting. The arguments are the place for error messages, the name and the value. Raises UsageError.
Check = Callable[[str, str, object], object]


class Preset(Struct, frozen=True):
    """A named model, or prompts for any model, with settings for answers.

    name       as written in models.toml; case does not matter
    model      the name of the model, which is not another preset; "" if the preset has none, until it is loaded
    values     validated settings, keyed by the names in SETTINGS
    variables  variables for the chat template, like --chat-template-kwargs
    loras      LoRA adapters, in the notation of --lora, with absolute paths
    prompt     a `string.Template`, or None. The system prompt is a template only if there is a prompt
    defaults   default values of the variables in both templates
    """

    name: str
    model: str
    values: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    loras: tuple[str, ...] = ()
    prompt: str | None = None
    defaults: Mapping[str, str] = field(default_factory=dict)

    @property
    def system(self) -> str | None:
        """The system prompt, or None if the preset does not set it. An empty text overrides config.toml's prompt."""
        return self.values.get("system")

    @property
    def is_for_chats(self) -> bool:
        """True if the preset contains anything that applies only to prompts with a chat template."""
        return bool(self.variables) or any(name in self.values for name in ("system", *THINKING))

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters, keyed by the names in SAMPLING."""
        return {name: value for name, value in self.values.items() if name in SAMPLING}

    @property
    def params(self) -> list[str]:
        """The variables that -P sets, in order of appearance."""
        texts = () if self.prompt is None else (self.prompt, self.system)
        return [name for name in variables_in(*texts) if name != INPUT]


def variables_in(*templates: str | None) -> list[str]:
    """Return the distinct variables in valid templates, in order of appearance."""
    matches = [match for text in templates if text for match in _parts(text)]
    return list(dict.fromkeys(match["named"] or match["braced"] for match in matches if not match["escaped"]))


def _parts(template: str) -> Iterator[re.Match[str]]:
    from string import Template  # imported here because most runs do not need it

    return Template.pattern.finditer(template)


class Presets(NamedTuple):
    """The presets in a models.toml file.

    valid   the valid presets, keyed by their names in lower case
    broken  the errors for all other presets, whose messages name the file, the line, the preset and the key; keyed
            likewise. The key is TABLE if `presets` is not a table, so that there are no presets
    """

    valid: dict[str, Preset]
    broken: dict[str, UsageError]


def read_presets(path: Path, check: Check) -> Presets:
    """Return the presets in a models.toml file. A missing file contains no presets.

    Raises UsageError for an unreadable file and for invalid TOML.
    """
    found = Presets({}, {})
    try:
        tables = read_toml(path, "catalogue").get(TABLE, {})
    except (FileNotFoundError, NotADirectoryError):
        return found
    if not isinstance(tables, dict):
        error = UsageError(f"catalogue: {path}: {TABLE}: {tables!r:.60} is not a table, as in [presets.pirate]")
        return Presets({}, {TABLE: with_line(error, path, TABLE)})
    names: dict[str, str] = {}
    for name, table in tables.items():
        key = name.lower()
        try:
            if key in names:
                raise UsageError(f"catalogue: {path}: {TABLE}.{name}: differs from {TABLE}.{names[key]} only in case")
            names[key] = name
            found.valid[key] = _table(path, name, table, check)
        except UsageError as error:
            found.valid.pop(key, None)
            found.broken[key] = with_line(error, path, TABLE, name)
    for key, preset in [*found.valid.items()]:
        try:
            _check_model(f"catalogue: {path}: {TABLE}.{preset.name}", preset, found.valid)
        except UsageError as error:
            del found.valid[key]
            found.broken[key] = with_line(error, path, TABLE, preset.name)
    return found


def with_line(error: UsageError, path: Path, *keys: str) -> UsageError:
    """Return the error for an entry of the user's models.toml with the number of the entry's line.

    keys  the keys of the entry, from the top of the file
    """
    from llmrun.options.toml_text import line_of

    where = f"catalogue: {path}"
    line = line_of(decoded_text(path.read_bytes(), where), keys)
    return UsageError(str(error).replace(where, f"{where}: line {line}", 1) if line else str(error), hint=error.hint)


def _table(path: Path, name: str, table: object, check: Check) -> Preset:
    where = f"catalogue: {path}: {TABLE}.{name}"
    if not is_preset_name(name):
        raise UsageError(f"catalogue: {path}: {TABLE}: {name!r:.60} is not {_NAME_RULE}")
    if not isinstance(table, dict):
        hint = f"write [{TABLE}.{name}] and its keys below it"
        raise UsageError(f"{where}: {table!r:.60} is not a table", hint=hint)
    return _preset(where, path.parent, name, table, check)


def read_table(path: Path, name: str, table: object, check: Check, others: Mapping[str, Preset]) -> Preset:
    """Return the preset in a table of models.toml, beside the other presets. Raises UsageError."""
    preset = _table(path, name, table, check)
    _check_model(f"catalogue: {path}: {TABLE}.{name}", preset, others)
    return preset


def is_preset_name(name: str) -> bool:
    """Return whether a preset in models.toml may have this name."""
    return bool(_NAME.fullmatch(name))


def template_files(folder: Path) -> dict[str, Path]:
    """Return the files of prompt templates, keyed by their names in lower case. A missing folder contains no files."""
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix == ".toml")
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UsageError(f"preset: {folder}: {error.strerror or error}") from error
    return {path.stem.lower(): path for path in reversed(found) if _TEMPLATE_NAME.fullmatch(path.stem)}


def read_template(path: Path, check: Check, others: Mapping[str, Preset]) -> Preset:
    """Return the preset in a prompt template's file. Raises UsageError, which names the file and the key.

    others  the presets in models.toml
    """
    return parse_template(path, read_user_file(path, "preset"), check, others)


def parse_template(path: Path, data: bytes, check: Check, others: Mapping[str, Preset]) -> Preset:
    """Return the preset in the data of a prompt template's file. Raises UsageError."""
    where = f"preset: {path}"
    table = parse_toml(data, path, "preset")
    preset = _preset(where, path.parent, path.stem, {_PROMPT: ONLY_INPUT, **table} if table else {}, check)
    _check_model(where, preset, others)
    return preset


def _check_model(where: str, preset: Preset, others: Mapping[str, Preset]) -> None:
    other = others.get(preset.model.lower())
    if other is not None and other.name.lower() != preset.name.lower():
        raise UsageError(
            f"{where}: model: {preset.model!r} is another preset",
            hint=f"name its model: {other.model}" if other.model else "leave out the model",
        )


def _preset(where: str, folder: Path, name: str, table: Mapping[str, Any], check: Check) -> Preset:
    if not table.keys() & {_MODEL, _PROMPT, *SETTINGS}:
        for key, value in table.items():
            if key not in _OWN and not isinstance(value, dict):
                check(where, key, value)  # names the misspelled key
        # TOML parses [presets.gpt-4.1] as a table named 1 in [presets.gpt-4].
        tables = (key for key, value in table.items() if isinstance(value, dict) and key not in _OWN)
        if (inner := next(tables, None)) is not None:
            hint = f'if the name has a dot, write it in quotes: [{TABLE}."{name}.{inner}"]'
        else:
            hint = 'name a model, as in model = "qwen3:4b", or add a prompt or a setting'
        raise UsageError(f"{where}: {_MODEL}: missing", hint=hint)
    model = table.get(_MODEL, "")
    if not isinstance(model, str) or not model.isprintable() or (_MODEL in table and not model.strip()):
        raise UsageError(f"{where}: {_MODEL}: {model!r:.60} is not the name of a model")
    values = dict(_values(where, table, check))
    if values.get("think") and values.get("think_budget") == 0:
        raise UsageError(f"{where}: think: contradicts think_budget = 0, which turns thinking off")
    loras = tuple(_loras(where, table.get(_LORA, []), folder))
    if loras and (not model or "://" in model):
        why = "not supported for models on a server, which controls this setting" if model else "needs a model"
        raise UsageError(f"{where}: {_LORA}: {why}")
    prompt = table.get(_PROMPT)
    if prompt is not None:
        _check_template(where, _PROMPT, prompt)
        _check_template(where, "system", values.get("system", ""))
    elif _DEFAULTS in table:
        raise UsageError(f"{where}: {_DEFAULTS}: needs a prompt", hint=f'as in prompt = "{ONLY_INPUT}"')
    variables = _variables(where, table.get(_VARIABLES, {}))
    preset = Preset(name, model, values, variables, loras, prompt)
    return replace(preset, defaults=_defaults(where, table.get(_DEFAULTS, {}), preset.params))


def _check_template(where: str, key: str, text: object) -> None:
    if not isinstance(text, str):
        raise UsageError(f"{where}: {key}: {text!r:.60} is not text")
    if key == _PROMPT and not text.strip():
        raise UsageError(f"{where}: {key}: empty", hint=f"{ONLY_INPUT} stands for the user's prompt")
    for match in _parts(text):
        if match["invalid"] is not None:
            line = text.count("\n", 0, match.start()) + 1
            begun = text[match.start() : match.start() + 12].partition("\n")[0]
            raise UsageError(
                f"{where}: {key}: line {line}: {begun!r} is not a variable", hint="write $$ for a dollar sign"
            )


def _defaults(where: str, table: object, known: list[str]) -> dict[str, str]:
    if not isinstance(table, dict):
        raise UsageError(f'{where}: {_DEFAULTS}: {table!r:.60} is not a table, as in {{ language = "English" }}')
    for name, value in table.items():
        if name == INPUT:
            raise UsageError(f"{where}: {_DEFAULTS}: ${INPUT} is the user's prompt and cannot have a default")
        if name not in known:
            raise UsageError(f"{where}: {_DEFAULTS}: ${name} is not used in the prompts", hint=nearest(name, known))
        if type(value) not in (str, int, float):
            raise UsageError(f"{where}: {_DEFAULTS}: {name}: {value!r:.60} is not text or a number")
    return {name: str(value) for name, value in table.items()}


def _values(where: str, table: Mapping[str, object], check: Check) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if key == "system" and value == "":
            yield key, value
        elif key not in _OWN:
            yield key, check(where, key, value)


def _loras(where: str, value: object, folder: Path) -> Iterator[str]:
    """Yield the adapters of a preset. Relative paths are resolved against `folder`, and `~` is the home folder."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.isprintable() for text in texts):
        raise UsageError(f"{where}: {_LORA}: {value!r:.60} is not a file, as in {_LORA} = 'pirate.gguf', nor a list")
    from llmrun.backends.lora_files import LoraOption

    for text in texts:
        try:
            option = LoraOption.parse(text)
            yield replace(option, path=folder.absolute() / option.path.expanduser()).text
        except (UsageError, RuntimeError) as error:  # expanduser raises RuntimeError if there is no home folder
            raise UsageError(f"{where}: {_LORA}: {error}") from None


def _variables(where: str, variables: object) -> Mapping[str, Any]:
    if not isinstance(variables, dict):
        raise UsageError(f"{where}: {_VARIABLES}: {variables!r:.60} is not a table, as in {{ style = 'short' }}")
    for name, value in variables.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise UsageError(
                f"{where}: {_VARIABLES}.{name}: {value!r:.60} has no JSON form",
                hint="use texts, finite numbers, true, false, lists and tables",
            ) from None
    return variables
