"""The LoRA adapters of a request, and the list of a model's adapters, in the form of llama-server's API."""

from __future__ import annotations

from typing import Any

from llmrun.base.types import LARGEST_SCALE
from llmrun.engine.facts import ModelFacts
from llmrun.serving.protocol.errors import InvalidField
from llmrun.serving.protocol.fields import Fields, missing


def read_adapters(fields: Fields, facts: ModelFacts) -> dict[str, float] | None:
    """Return the scales of adapters by name, or None if the request does not choose adapters. Raises InvalidField.

    An item has the number of an adapter (`id`, as in llama-server) or its name. Adapters without an item are not used.
    """
    items = fields.item_fields("lora")
    if items is None:
        return None
    adapters, scales = facts.info.adapters, dict[str, float]()
    for item in items:
        number, name = item.integer("id", 0), item.text("name")
        if (number is None) == (name is None):
            raise InvalidField(item.path("id"), "expected either the id or the name of an adapter")
        known = [adapter.name for adapter in adapters]
        if number is not None:
            name = known[number] if number < len(known) else None
        if name not in known:
            words = f"the model has no such adapter; it has {len(known)}: {', '.join(known) or 'none'}"
            raise InvalidField(item.path("id" if number is not None else "name"), words)
        scale = item.number("scale", -LARGEST_SCALE, LARGEST_SCALE)
        if scale is None:
            raise missing(item.path("scale"))
        if name in scales:
            raise InvalidField(item.place, f"{name} is listed twice")
        scales[name] = scale
    return scales


def adapters_body(facts: ModelFacts) -> list[dict[str, Any]]:
    """Return the body of GET /lora-adapters. The paths are left out, because clients must not learn them."""
    return [
        {
            "id": number,
            "name": adapter.name,
            "scale": adapter.scale,
            **({"alora_invocation_tokens": [*adapter.invocation]} if adapter.invocation else {}),
        }
        for number, adapter in enumerate(facts.info.adapters)
    ]
