"""Shows presets, for `llmrun show` and `llmrun list`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from llmrun.cli.console.terminal import visible_line
from llmrun.options.presets import Preset
from llmrun.options.sampling_params import value_text


def preset_fields(preset: Preset) -> Iterator[tuple[str, str]]:
    """Yield the label and the value of every part of a preset except its name."""
    yield "model", visible_line(preset.model)
    if preset.prompt is not None:
        yield "prompt", _shown_value(preset.prompt)
    for name, value in preset.values.items():
        yield name, _shown_value(value)
    for name, value in preset.defaults.items():
        yield f"default of ${name}", _shown_value(value)
    for name, value in preset.variables.items():
        yield f"variable {visible_line(name)}", _shown_value(value)
    for lora in preset.loras:
        yield "adapter", visible_line(lora)


def preset_summary(preset: Preset) -> str:
    """Return one line with every part of a preset except its model. Variables of the prompt are shown as for -P."""
    params = [f"{name}={preset.defaults[name]}" if name in preset.defaults else name for name in preset.params]
    values = [
        *([] if preset.prompt is None else [("prompt", preset.prompt)]),
        *(("-P", param) for param in params),
        *preset.values.items(),
        *preset.variables.items(),
        *(("adapter", lora) for lora in preset.loras),
    ]
    return ", ".join(f"{visible_line(name)} {_shown_value(value)}" for name, value in values)


def preset_as_json(preset: Preset) -> dict[str, Any]:
    return {
        "name": preset.name,
        "model": preset.model,
        "prompt": preset.prompt,
        "defaults": dict(preset.defaults),
        "settings": dict(preset.values),
        "variables": dict(preset.variables),
        "lora": [*preset.loras],
    }


def _shown_value(value: object) -> str:
    if isinstance(value, str):
        return visible_line(value) or '""'
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value_text(value)
    return json.dumps(value, ensure_ascii=False)
