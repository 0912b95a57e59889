"""Reads presets: models saved under a name with a system prompt, template variables and settings.

    [presets.pirate]
    model = "qwen3:4b"
    system = "You are a pirate."
    temperature = 0.9
    variables = { style = "short" }
    lora = "pirate.gguf"

Presets are tables in the user's models.toml. They are read apart from the catalogue, because the settings of every run
depend on presets (see settings.py), and most runs do not need the catalogue. `read_toml` also reads config.toml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llmrun.base.errors import UsageError
from llmrun.options.sampling_params import SAMPLING


def read_toml(path: Path, role: str) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises FileNotFoundError or NotADirectoryError if there is no such file, and UsageError if it cannot be read or is
    invalid.

    role  what the file is, for error messages: "config" or "catalogue"
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise UsageError(f"{role}: {path}: cannot be read: {error.strerror}") from error
    import tomllib  # importing this takes 5 ms, and most runs do not need it

    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{role}: {path}: not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from error
    except (ValueError, RecursionError) as error:  # ValueError means invalid TOML or too many digits
        raise UsageError(f"{role}: {path}: not valid TOML: {error}") from error


TABLE = "presets"  # the name of the table in models.toml
THINKING = ("think", "think_budget")
SETTINGS = ("system", *SAMPLING, "seed", "max_tokens", *THINKING)  # the settings that a preset may have
_MODEL, _VARIABLES, _LORA = "model", "variables", "lora"
_OWN = (_MODEL, _VARIABLES, _LORA)  # the keys that are not settings
KEYS = (_MODEL, _VARIABLES, *SETTINGS, _LORA)

# URLs and .gguf files are never presets, so they always keep their own meaning.
_NAME = re.compile(r"(?!.*://)(?!.*\.gguf\Z)[a-z0-9][a-z0-9._:/-]*", re.IGNORECASE)
_NAME_RULE = "a name of letters, digits, . _ - : and /, which is neither a URL nor a .gguf file"

# Checks the value of a setting. Arguments: the place for error messages, the name and the value. Raises UsageError.
Check = Callable[[str, str, object], object]


@dataclass(frozen=True, slots=True)
class Preset:
    """A model under another name, with settings for its answers.

    name       as written in models.toml; case does not matter
    model      the name of the model, which is not another preset
    values     validated settings, by their names in SETTINGS
    variables  variables for the chat template, like --chat-template-kwargs
    loras      LoRA adapters, in the notation of --lora, with absolute paths
    """

    name: str
    model: str
    values: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, Any] = field(default_factory=dict)
    loras: tuple[str, ...] = ()

    @property
    def system(self) -> str | None:
        """The system prompt, or None if the preset does not set it. An empty one replaces that of config.toml."""
        return self.values.get("system")

    @property
    def is_for_chats(self) -> bool:
        """Whether the preset has anything that applies only to prompts with a chat template."""
        return bool(self.variables) or any(name in self.values for name in ("system", *THINKING))

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters, by their names in SAMPLING."""
        return {name: value for name, value in self.values.items() if name in SAMPLING}


def read_presets(path: Path, check: Check) -> dict[str, Preset]:
    """Return the presets in a models.toml file, by their names in lower case. A missing file has none.

    Raises UsageError with the file, the preset and the key.
    """
    try:
        tables = read_toml(path, "catalogue").get(TABLE, {})
    except (FileNotFoundError, NotADirectoryError):
        return {}
    if not isinstance(tables, dict):
        raise UsageError(f"catalogue: {path}: {TABLE}: {tables!r:.60} is not a table, as in [presets.pirate]")
    presets: dict[str, Preset] = {}
    for name, table in tables.items():
        preset = _preset(path, name, table, check)
        if (other := presets.get(name.lower())) is not None:
            raise UsageError(f"catalogue: {path}: {TABLE}.{name}: differs from {TABLE}.{other.name} only in case")
        presets[name.lower()] = preset
    for preset in presets.values():
        if preset.model.lower() in presets.keys() - {preset.name.lower()}:
            raise UsageError(
                f"catalogue: {path}: {TABLE}.{preset.name}: model: {preset.model!r} is another preset",
                hint=f"name its model: {presets[preset.model.lower()].model}",
            )
    return presets


def _preset(path: Path, name: str, table: object, check: Check) -> Preset:
    where = f"catalogue: {path}: {TABLE}.{name}"
    if not _NAME.fullmatch(name):
        raise UsageError(f"catalogue: {path}: {TABLE}: {name!r:.60} is not {_NAME_RULE}")
    if not isinstance(table, dict):
        raise UsageError(f"{where}: {table!r:.60} is not a table", hint=f"write [{TABLE}.{name}] and its keys below it")
    if _MODEL not in table:
        # TOML reads [presets.gpt-4.1] as a table 1 in [presets.gpt-4].
        inner = next((key for key, value in table.items() if isinstance(value, dict) and key != _VARIABLES), None)
        hint = 'name a model, as in model = "qwen3:4b"'
        quoted = f'if the name has a dot, write it in quotes: [{TABLE}."{name}.{inner}"]'
        raise UsageError(f"{where}: {_MODEL}: missing", hint=hint if inner is None else quoted)
    model = table[_MODEL]
    if not isinstance(model, str) or not model.strip() or not model.isprintable():
        raise UsageError(f"{where}: {_MODEL}: {model!r:.60} is not the name of a model")
    values = dict(_values(where, table, check))
    if values.get("think") and values.get("think_budget") == 0:
        raise UsageError(f"{where}: think: contradicts think_budget = 0, which turns thinking off")
    loras = tuple(_loras(where, table.get(_LORA, []), path.parent))
    if loras and "://" in model:
        raise UsageError(f"{where}: {_LORA}: not supported for models on a server, which controls it")
    return Preset(name, model, values, _variables(where, table.get(_VARIABLES, {})), loras)


def _values(where: str, table: Mapping[str, object], check: Check) -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if key == "system" and value == "":
            yield key, value
        elif key not in _OWN:
            yield key, check(where, key, value)


def _loras(where: str, value: object, folder: Path) -> Iterator[str]:
    """Yield the adapters of a preset. Relative paths are relative to `folder`, and `~` is the home folder."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) and text.isprintable() for text in texts):
        raise UsageError(f"{where}: {_LORA}: {value!r:.60} is not a file, as in {_LORA} = 'pirate.gguf', nor a list")
    from llmrun.backends.lora_files import LoraOption

    for text in texts:
        try:
            option = LoraOption.parse(text)
            yield replace(option, path=folder.absolute() / option.path.expanduser()).text
        except (UsageError, RuntimeError) as error:  # expanduser raises the latter for a user without a home folder
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
